"""The strategies by name, as ``Trainer(strategy="gemini")`` means them, and by class."""

from __future__ import annotations

import functools
from typing import Any

from gemini_ft.lightning.base import make_class
from gemini_ft.lightning.deepspeed import GeminiDeepSpeedMixin
from gemini_ft.lightning.strategy import GeminiDdpMixin, GeminiShardedMixin

_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemini": ("GeminiStrategy", {}),
    "gemini_find_unused_parameters_false": ("GeminiStrategy", {"find_unused_parameters": False}),
    "gemini_find_unused_parameters_true": ("GeminiStrategy", {"find_unused_parameters": True}),
    "gemini_fsdp2": ("GeminiModelParallelStrategy", {}),
    "gemini_deepspeed": ("GeminiDeepSpeedStrategy", {}),
    "gemini_deepspeed_stage_1": ("GeminiDeepSpeedStrategy", {"stage": 1}),
    "gemini_deepspeed_stage_2": ("GeminiDeepSpeedStrategy", {"stage": 2}),
    "gemini_deepspeed_stage_2_offload": ("GeminiDeepSpeedStrategy", {"stage": 2, "offload_optimizer": True}),
    "gemini_deepspeed_stage_3": ("GeminiDeepSpeedStrategy", {"stage": 3}),
    "gemini_deepspeed_stage_3_offload": ("GeminiDeepSpeedStrategy", {"stage": 3, "offload_optimizer": True, "offload_parameters": True}),
}
_CLASSES: dict[str, tuple[type, str]] = {
    "GeminiStrategy": (GeminiDdpMixin, "DDPStrategy"),
    "GeminiModelParallelStrategy": (GeminiShardedMixin, "ModelParallelStrategy"),
    "GeminiDeepSpeedStrategy": (GeminiDeepSpeedMixin, "DeepSpeedStrategy"),
}
_PUBLIC = {"lightning.pytorch": "gemini_ft.lightning", "pytorch_lightning": "gemini_ft.pytorch_lightning"}


def by_name(name: str, package: str) -> Any:
    """A callable that makes the strategy that ``Trainer(strategy=name)`` of ``package`` means."""
    kind, options = _NAMES[name]
    return functools.partial(by_class(kind, package), **options)


@functools.cache
def by_class(name: str, package: str) -> Any:
    """The strategy class called ``name`` for ``package``, "lightning.pytorch" or "pytorch_lightning"."""
    mixin, base = _CLASSES[name]
    doc = f"{base} whose training state survives failures. Keyword options: those of GeminiConfig, data_resume, "
    doc += f"gradient_pipeline, and {base}'s."
    return make_class(name, mixin, base, package, _PUBLIC[package], doc)
