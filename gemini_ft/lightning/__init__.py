"""Lightning on top of :class:`gemini_ft.Checkpointer`: ``Trainer(strategy="gemini")`` and ``Fabric(strategy="gemini")``.

``import gemini_ft`` is enough to use the names ``gemini`` (DDP), ``gemini_fsdp2`` and, for the Trainer, ``gemini_deepspeed_stage_1``
to ``_3``. The classes here take options in code::

    trainer = lightning.Trainer(strategy=gemini_ft.lightning.GeminiStrategy(replicas=2, storage="file:///checkpoints"))

They belong to the package ``lightning``; :mod:`gemini_ft.pytorch_lightning` has the same for ``pytorch_lightning``.
Importing this module imports neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.fabric.strategies.ddp import DDPStrategy as _FabricDDP
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as _FabricModelParallel
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy

    from gemini_ft.lightning.deepspeed import GeminiDeepSpeedMixin
    from gemini_ft.lightning.fabric import GeminiFabricMixin, GeminiFabricShardedMixin
    from gemini_ft.lightning.strategy import GeminiDdpMixin, GeminiShardedMixin

    class GeminiStrategy(GeminiDdpMixin, DDPStrategy): ...

    class GeminiModelParallelStrategy(GeminiShardedMixin, ModelParallelStrategy): ...

    class GeminiDeepSpeedStrategy(GeminiDeepSpeedMixin, DeepSpeedStrategy): ...

    class GeminiFabricStrategy(GeminiFabricMixin, _FabricDDP): ...

    class GeminiFabricModelParallelStrategy(GeminiFabricShardedMixin, _FabricModelParallel): ...


__all__ = [
    "GeminiDeepSpeedStrategy",
    "GeminiFabricModelParallelStrategy",
    "GeminiFabricStrategy",
    "GeminiModelParallelStrategy",
    "GeminiStrategy",
]


def class_in(module: str, name: str, trainers: str, fabrics: str) -> Any:
    """The strategy class that a module shows by this name, over the classes of these packages of Lightning."""
    if name not in __all__:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if "Fabric" in name:
        from gemini_ft.lightning import fabric

        return fabric.by_class(name, fabrics)
    from gemini_ft.lightning import naming

    return naming.by_class(name, trainers)


def __getattr__(name: str) -> Any:
    return class_in(__name__, name, "lightning.pytorch", "lightning.fabric")
