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

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemini_ft.deepspeed.engine import Protection, attach, initialize
    from gemini_ft.deepspeed.gradients import EngineGradients

__all__ = ["EngineGradients", "Protection", "attach", "initialize"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gemini_ft.deepspeed import engine

    return getattr(engine, name)
