"""Extends functions of other packages right after those are imported, whatever imports them: so unchanged scripts are protected.

In workers of ``gemini run`` `install` extends

- ``deepspeed.initialize``: an engine whose configuration has a "gemini" section is protected, and a "gradient_pipeline" section takes
  effect, whoever calls it (the script, accelerate, transformers' Trainer). For an engine without either it does nothing but call the
  original.
- ``transformers.Trainer.train``: a Trainer without a `GeminiCallback` is given one, also where libraries subclass it. Under DeepSpeed it
  is the configuration that asks for protection.

``GEMINI_WRAP=0`` leaves all packages as they are. Standard library only: every worker runs this before its script, whatever the script is.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from gemini_ft.errors import ConfigError, GeminiError
from gemini_ft.launch.hooks import DEEPSPEED_SECTIONS, extend

_log = logging.getLogger("gemini_ft")


def install() -> None:
    """Protects what DeepSpeed and transformers train. May be called any number of times."""
    extend("deepspeed", "initialize", _initialize)
    extend("transformers.trainer", "Trainer.train", _train)


def _initialize(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    model = named.get("model", arguments[1] if len(arguments) > 1 else None)
    if any(kind.__name__ == "PipelineModule" for kind in type(model).__mro__):
        return importlib.import_module("gemini_ft.deepspeed.data").initialize_protected(original, _protect_engine, *arguments, **named)
    results = original(*arguments, **named)
    _protect_engine(results[0])
    return results


def _protect_engine(engine: Any) -> None:
    config: Any = getattr(engine, "config", None)
    # Engines without an optimizer only infer: ZeRO 3 evaluates with the configuration of the training.
    ours = isinstance(config, dict) and not config.keys().isdisjoint(DEEPSPEED_SECTIONS)
    if ours and getattr(engine, "basic_optimizer", None) is not None:
        if "gemini" in config and any(kind.__name__ == "LightningModule" for kind in type(getattr(engine, "module", None)).__mro__):
            raise ConfigError(
                'this strategy of Lightning does not know the "gemini" section of its DeepSpeed configuration, so its loops would '
                "start over; use strategy='gemini_deepspeed_stage_1', _2 or _3, or gemini_ft.lightning.GeminiDeepSpeedStrategy"
            )
        importlib.import_module("gemini_ft.deepspeed").attach(engine)


def _train(original: Callable[..., Any], trainer: Any, *arguments: Any, **named: Any) -> Any:
    try:
        integration = importlib.import_module("gemini_ft.huggingface")
    except ImportError as error:
        _log.warning("transformers' Trainer is not protected: %s", error)
    else:
        integration.protect(trainer)
    try:
        return original(trainer, *arguments, **named)
    except GeminiError as error:  # the script may never have heard of us
        error.add_note("`gemini run` protects every Trainer; GEMINI_WRAP=0 leaves them as they are")
        raise
