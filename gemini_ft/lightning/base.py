"""The common part of the strategies for the Trainer and for Fabric.

They are subclasses of Lightning's, because Lightning chooses precision plugin, samplers and the synchronisation of
gradients by ``isinstance``. They are made per package, because ``lightning`` and ``pytorch_lightning`` have classes of
their own.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, ClassVar

import torch.distributed as dist

from gemini_ft.config import GeminiConfig
from gemini_ft.errors import ConfigError
from gemini_ft.lightning import compat
from gemini_ft.lightning.options import EpochHooks, of_command_line, refuse_platform, signature_of, sort_options
from gemini_ft.loaders.parts import DataResume
from gemini_ft.pipeline.rules import Rules
from gemini_ft.worker.rendezvous import init_process_group


class Gemini:
    """The first of a strategy's bases, before Lightning's own."""

    gemini_config: GeminiConfig  # options
    # what synchronises the gradients, where a ``gradient_pipeline`` was given, as soon as the model is wrapped: a
    # `gemini_ft.GradientSynchronizer`, or an engine's `gemini_ft.deepspeed.EngineGradients`
    gradients: Any = None
    _gemini_data_resume: DataResume
    _gemini_epoch_hooks: EpochHooks
    gemini_rules: Rules | None
    _gemini_shards: ClassVar[bool] = False  # fully_shard reduces the gradients
    _gemini_package: ClassVar[str]
    _gemini_base: ClassVar[Any]

    def __init__(self, **options: Any) -> None:
        given = sort_options(type(self).__name__, self._gemini_base, options)
        self.gemini_config, self._gemini_data_resume, self.gemini_rules = given.config, given.data_resume, given.rules
        self._gemini_epoch_hooks = given.epoch_hooks
        if self.gemini_rules is not None and self._gemini_shards:
            raise ConfigError(
                f"{type(self).__name__}: gradient_pipeline is not supported, because fully_shard reduces gradients itself; "
                "leave it out, or use a strategy over DDP (GeminiStrategy, GeminiFabricStrategy) or DeepSpeed (GeminiDeepSpeedStrategy)"
            )
        super().__init__(**given.base)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Shares the data out among all ranks; Lightning's DDP is wrong where hosts have different numbers of them, as under Ray."""
        strategy: Any = super()
        if self._gemini_shards:  # the mesh says which ranks have different data
            return dict(strategy.distributed_sampler_kwargs)
        return {"num_replicas": strategy.world_size, "rank": strategy.global_rank}

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Does nothing: inherited from DDPStrategy this would register "ddp" a second time."""


def join_group(strategy: Any) -> None:
    """Creates the process group before Lightning does, where a restart by torchrun would make it hang.

    Lightning uses a group that exists. Elsewhere (SLURM, Lightning's own launcher) it creates the group itself.
    """
    refuse_platform(strategy.root_device.type)
    if dist.is_initialized() or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    device = strategy.root_device
    backend, timeout = compat.group_settings(strategy)
    init_process_group(backend, timeout=timeout, device_id=None if device.type == "cpu" else device)


def heeding_signals(config: GeminiConfig, environment: Any) -> GeminiConfig:
    """The options, without the signal at which Lightning itself requeues a SLURM job: it takes none that has a handler."""
    theirs = getattr(environment, "requeue_signal", None)
    if getattr(environment, "auto_requeue", False) and theirs is not None and theirs.name == config.drain_signal:
        return config.model_copy(update={"drain_signal": "none"})
    return config


def make_class(name: str, mixin: Any, base: str, package: str, public: str, doc: str) -> Any:
    """Makes a strategy class.

    Args:
        package: the package of Lightning's class.
        public: the module where users find ours; pickle looks there too.
        doc: docstring.
    """
    compat.check_lightning(package)
    theirs = getattr(importlib.import_module(f"{package}.strategies"), base)

    signature = signature_of(theirs)

    def __init__(self: Any, **options: Any) -> None:
        mixin.__init__(self, **options)

    __init__.__qualname__ = f"{name}.__init__"
    __init__.__signature__ = of_command_line(signature)  # type: ignore[attr-defined]
    space = {
        "__module__": public,
        "__doc__": doc,
        "__init__": __init__,
        "__signature__": signature,
        "_gemini_package": package,
        "_gemini_base": theirs,
    }
    return type(name, (mixin, theirs), space)
