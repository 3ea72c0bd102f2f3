"""Protects, in workers of ``gemini run``, every engine whose DeepSpeed configuration has a "gemini" section.

A "gradient_pipeline" section takes effect as well. So an unchanged script is protected: whatever calls
``deepspeed.initialize`` (the script, accelerate, transformers' Trainer) finds the function that is put in its place as soon as
deepspeed has been imported. For an engine without either it does nothing but call the original. ``GEMINI_WRAP=0`` leaves deepspeed as
it is.

Standard library only: every worker runs this before its script, whatever the script is.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from gemini_ft.errors import ConfigError
from gemini_ft.launch.import_hook import once_imported

SECTIONS = ("gemini", "gradient_pipeline")  # our sections of DeepSpeed's configuration

protected = False  # whether this process has a protected engine; `gemini_ft.deepspeed.attach` says so


def install() -> None:
    """Replaces ``deepspeed.initialize``: now if deepspeed is loaded, else as soon as it is. May be called any number of times."""
    once_imported("deepspeed", _wrap)


def _wrap(module: ModuleType) -> None:
    original = getattr(module, "initialize", None)
    if original is not None and not hasattr(original, "_gemini_original"):
        module.initialize = _protecting(original)  # type: ignore[attr-defined]


def _protecting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize(*arguments: Any, **named: Any) -> Any:
        model = named.get("model", arguments[1] if len(arguments) > 1 else None)
        if any(kind.__name__ == "PipelineModule" for kind in type(model).__mro__):
            return importlib.import_module("gemini_ft.deepspeed.data").initialize_protected(original, _protect, *arguments, **named)
        results = original(*arguments, **named)
        _protect(results[0])
        return results

    initialize._gemini_original = original  # type: ignore[attr-defined]
    return initialize


def _protect(engine: Any) -> None:
    config: Any = getattr(engine, "config", None)
    # Engines without an optimizer only infer: ZeRO 3 evaluates with the configuration of the training.
    ours = isinstance(config, dict) and not config.keys().isdisjoint(SECTIONS)
    if ours and getattr(engine, "basic_optimizer", None) is not None:
        if "gemini" in config and any(kind.__name__ == "LightningModule" for kind in type(getattr(engine, "module", None)).__mro__):
            raise ConfigError(
                'this strategy of Lightning does not know the "gemini" section of its DeepSpeed configuration, so its loops would '
                "start over; use strategy='gemini_deepspeed_stage_1', _2 or _3, or gemini_ft.lightning.GeminiDeepSpeedStrategy"
            )
        importlib.import_module("gemini_ft.deepspeed").attach(engine)
