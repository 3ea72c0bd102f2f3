"""DeepSpeed: every optimizer step of an engine survives the loss of workers and hosts.

    import gemini_ft.deepspeed

    engine, optimizer, loader, scheduler = gemini_ft.deepspeed.initialize(model=model, model_parameters=..., config="ds_config.json")
    for step in range(engine.global_steps, steps):   # 0 at a first start
        ...

The options are the ``"gemini"`` section of the configuration. A ``"gradient_pipeline"`` section, a list of rules, says how gradients
are added up, compressed and grouped; either may be there alone. Without both this is ``deepspeed.initialize``.
Importing this module does not import DeepSpeed.
"""

from __future__ import annotations

from gemini_ft.public_names import show_names as _show_names

_show_names(__name__)
