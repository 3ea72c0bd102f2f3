"""Makes the strategy names known to Lightning: now where it is loaded, else right after it gets loaded.

Standard library only, because ``import gemini_ft`` runs this: neither torch nor Lightning is imported for it, and a
user of ``lightning`` does not get ``pytorch_lightning`` loaded as well. The two packages are always installed together
but share nothing: they have four registries, and classes that are no subclasses of each other's.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

from gemini_ft.errors import ConfigError
from gemini_ft.launch.hooks import after_import

# Module whose import creates a registry -> (the registry's name in it, the package its strategies belong to).
_REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "lightning.pytorch"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "pytorch_lightning"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "lightning.fabric"),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "lightning_fabric"),
}

# Module of LightningCLI, whose help lists the strategies that have been imported -> ours for its package.
COMMAND_LINES = {"lightning.pytorch.cli": "gemini_ft.lightning", "pytorch_lightning.cli": "gemini_ft.pytorch_lightning"}

# As Lightning has them for "deepspeed".
_DEEPSPEED = {
    "": "ZeRO stage 2, or what the configuration says",
    "_stage_1": "ZeRO stage 1",
    "_stage_2": "ZeRO stage 2",
    "_stage_2_offload": "ZeRO stage 2, optimizer on the CPU",
    "_stage_3": "ZeRO stage 3",
    "_stage_3_offload": "ZeRO stage 3, parameters and optimizer on the CPU",
}

_UNUSED = ("", "_find_unused_parameters_false", "_find_unused_parameters_true")  # Lightning's own ways to say it, for "ddp"
_STARTED = ("spawn", "fork", "notebook")  # "ddp_spawn" and the others, whose workers are no processes of their own script

_DESCRIPTIONS = {
    **{f"gemini{suffix}": "DDP whose training state survives failures in the hosts' memory" for suffix in _UNUSED},
    "gemini_fsdp2": "FSDP2 (ModelParallelStrategy) whose training state survives failures in the hosts' memory",
    **{
        f"gemini_deepspeed{suffix}": f"DeepSpeed ({what}) whose training state survives failures in the hosts' memory"
        for suffix, what in _DEEPSPEED.items()
    },
    **{f"gemini_{how}{suffix}": f"not supported: use gemini{suffix}" for how in _STARTED for suffix in _UNUSED},
    **dict.fromkeys(["gemini_fsdp", "gemini_fsdp_cpu_offload"], "not supported: use gemini_fsdp2"),
    "gemini_deepspeed_stage_3_offload_nvme": "not supported: use gemini_deepspeed_stage_3_offload",
}

_REFUSED = {
    **{
        f"gemini_{how}{suffix}": f"strategy='gemini_{how}{suffix}': workers that Lightning makes out of a process that runs already "
        "cannot be started again after a failure; put the training into a script, start it with `gemini run`, and use "
        f"strategy='gemini{suffix}'"
        for how in _STARTED
        for suffix in _UNUSED
    },
    **{
        f"gemini_fsdp{suffix}": f"strategy='gemini_fsdp{suffix}': FSDP1 is not supported, because torch has replaced it; "
        "use strategy='gemini_fsdp2' and shard the model with torch.distributed.fsdp.fully_shard in configure_model()"
        for suffix in ("", "_cpu_offload")
    },
    "gemini_deepspeed_stage_3_offload_nvme": "strategy='gemini_deepspeed_stage_3_offload_nvme': what is on disk is not captured; "
    "use strategy='gemini_deepspeed_stage_3_offload'",
}


def install() -> None:
    """Registers into the registries that exist, and into the others as soon as they do. May be called any number of times."""
    for name in _REGISTRIES:
        _register(name)
    after_import(_REGISTRIES, _register_loaded)
    for name in COMMAND_LINES.keys() & sys.modules.keys():
        import_strategies(sys.modules[name])
    after_import(COMMAND_LINES, import_strategies)


def _reminders(package: str) -> list[Any]:
    """Lightning's entry point for callbacks, called for every Trainer, when its strategy has been chosen.

    Returns:
        With ``GEMINI_REMIND=1`` a callback that says which fits nothing protects; else nothing.
    """
    if os.environ.get("GEMINI_REMIND") != "1":
        return []

    def setup(_: Any, trainer: Any, module: Any, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero and not hasattr(trainer.strategy, "checkpointer"):
            logging.getLogger("gemini_ft").warning(
                "gemini-ft is installed; this Trainer is not protected: its strategy is %s. With `import gemini_ft` and strategy='gemini' "
                "every step outlives failures (GEMINI_REMIND=1 asks for this line)",
                type(trainer.strategy).__name__,
            )

    return [type("Reminder", (importlib.import_module(f"{package}.callbacks").Callback,), {"setup": setup})()]


remind_lightning, remind_pytorch_lightning = partial(_reminders, "lightning.pytorch"), partial(_reminders, "pytorch_lightning")


def _register_loaded(module: ModuleType) -> None:
    _register(module.__name__)


def import_strategies(module: ModuleType) -> None:
    with suppress(Exception):  # of a version or a platform that is refused as soon as a script asks for a strategy
        ours = importlib.import_module(COMMAND_LINES[module.__name__])
        for name in ("GeminiStrategy", "GeminiModelParallelStrategy", "GeminiDeepSpeedStrategy"):
            getattr(ours, name)


def _register(module_name: str) -> None:
    attribute, package = _REGISTRIES[module_name]
    registry = getattr(sys.modules.get(module_name), attribute, None)
    if registry is None:
        return
    for name, description in _DESCRIPTIONS.items():
        if name not in registry:
            registry.register(name, _factory(name, package), description=description)


def _factory(name: str, package: str) -> Callable[..., Any]:
    """The function that Lightning calls for ``strategy=name``: it imports the class only then."""

    def create(**options: Any) -> Any:
        if name in _REFUSED:
            raise ConfigError(_REFUSED[name])
        if package.endswith("fabric"):
            return importlib.import_module("gemini_ft.lightning.fabric").by_name(name, package)(**options)
        return importlib.import_module("gemini_ft.lightning.naming").by_name(name, package)(**options)

    return create
