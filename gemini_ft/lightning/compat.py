"""The versions of Lightning that are supported, and the private parts of its strategies.

Private names of Lightning and torchmetrics are used here and in the ``trainer_*`` modules, nowhere else. They are those of
Lightning 2.5 and 2.6; :func:`check_lightning` refuses other versions, and says by name what is missing if a release moves
something. The loops are internal to Lightning, and without them no step can be resumed exactly.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from gemini_ft.errors import ConfigError

_SUPPORTED = ("2.5.", "2.6.")


def check_lightning(package: str) -> None:
    """Refuses a Lightning that this module was not written for.

    ``package``: "lightning.pytorch", "pytorch_lightning", "lightning.fabric" or "lightning_fabric".

    Raises ConfigError: another version, or one without the private parts that are needed.
    """
    version = str(importlib.import_module(package).__version__)
    if not version.startswith(_SUPPORTED):
        raise ConfigError(f"{package} {version} is not supported; install {package.partition('.')[0]}>=2.5,<2.7")
    missing = [name for name in _needed(package) if not _exists(f"{package}.{name}")]
    if missing:
        raise ConfigError(f"{package} {version} lacks {', '.join(missing)}; install {package.partition('.')[0]}==2.6.6")


def _needed(package: str) -> list[str]:
    if package.endswith("fabric"):
        return ["wrappers._FabricDataLoader", "wrappers._unwrap_objects"]
    return [
        "trainer.connectors.checkpoint_connector._CheckpointConnector.dump_checkpoint",
        "trainer.connectors.checkpoint_connector._CheckpointConnector.restore_model",
        "trainer.connectors.logger_connector.result._Metadata",
        "trainer.connectors.logger_connector.result._ResultCollection",
        "trainer.connectors.logger_connector.result._ResultMetric",
        "trainer.connectors.logger_connector.result._Sync",
        "loops.fit_loop._FitLoop.on_iteration_done",
        "loops.training_epoch_loop._TrainingEpochLoop.advance",
        "loops.training_epoch_loop._TrainingEpochLoop._should_accumulate",
        "loops.fetchers._PrefetchDataFetcher",
        "loops.fit_loop._FitLoop._load_combined_loader_states",
        "trainer.call._call_callback_hooks",
        "utilities.exceptions.SIGTERMException",
        "callbacks.StochasticWeightAveraging",
        "plugins.io.wrapper._WrappingCheckpointIO",
        "loggers.csv_logs.ExperimentWriter._check_log_dir_exists",
        "trainer.call._call_lightning_module_hook",
        "trainer.connectors.data_connector._DataLoaderSource.dataloader",
        "trainer.connectors.logger_connector.logger_connector._LoggerConnector.should_update_logs",
        "strategies.ddp.DDPStrategy._register_ddp_hooks",
        "strategies.deepspeed.DeepSpeedStrategy._initialize_deepspeed_inference",
        "strategies.deepspeed.DeepSpeedStrategy._load_config",
        "strategies.deepspeed.DeepSpeedStrategy._setup_model_and_optimizer",
    ]


def _exists(path: str) -> bool:
    """Whether ``path`` names a module, or something inside one."""
    parts = path.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for name in parts[split:]:
            found = getattr(found, name, None)
        return found is not None
    return False


def told_to_end(package: str) -> type[SystemExit]:
    """The exception that ends a fit after SIGTERM, on all ranks if rank 0 has had it."""
    kind: type[SystemExit] = importlib.import_module(f"{package}.utilities.exceptions").SIGTERMException
    return kind


def wrapping_io(package: str) -> Any:
    """The base class of a ``CheckpointIO`` that writes by another one."""
    return importlib.import_module(f"{package}.plugins.io.wrapper")._WrappingCheckpointIO


def unwrapped(package: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with what Fabric's wrappers hold, as Fabric gives it to a strategy."""
    found: dict[str, Any] = importlib.import_module(f"{package}.wrappers")._unwrap_objects(dict(state))
    return found


def if_given(weights_only: bool | None) -> dict[str, bool]:
    """The argument with which 2.6 asks how a checkpoint is to be read; 2.5 does not know it."""
    return {} if weights_only is None else {"weights_only": weights_only}


def group_settings(strategy: Any) -> tuple[str, Any]:
    """Backend and timeout of the process group that ``strategy`` would create."""
    return strategy._get_process_group_backend(), strategy._timeout


def ddp_hook(strategy: Any) -> tuple[Any, Any] | None:
    """State and communication hook that a DDPStrategy was given, in its wrapper if it was given one."""
    hook, wrapper = strategy._ddp_comm_hook, strategy._ddp_comm_wrapper
    if hook is None:
        return None
    return strategy._ddp_comm_state, hook if wrapper is None else wrapper(hook)


def ranks_begin_apart(strategy: Any) -> bool:
    """Whether a DDPStrategy was told (``init_sync=False``) to wrap models without sending rank 0's weights to all ranks."""
    return getattr(strategy, "_ddp_kwargs", {}).get("init_sync") is False


def sends_buffers(strategy: Any) -> bool:
    """Whether DDP, as a DDPStrategy makes it, sends rank 0's buffers with its weights when it wraps a model."""
    return strategy._ddp_kwargs.get("broadcast_buffers") is not False


@contextlib.contextmanager
def without_first_broadcast(strategy: Any) -> Iterator[None]:
    """Lets a DDPStrategy wrap the model without sending rank 0's weights to all ranks, unless the user has given ``init_sync``."""
    given = strategy._ddp_kwargs
    strategy._ddp_kwargs = {"init_sync": False} | given
    try:
        yield
    finally:
        strategy._ddp_kwargs = given


def name_our_strategy(exception: BaseException) -> None:
    """Replaces, in the advice of Lightning's DDPStrategy, another DDP strategy by the one that protects the training."""
    advice = {"strategy='ddp_find_unused": "strategy='gemini_find_unused", "strategy=DDPStrategy(": "strategy=GeminiStrategy("}
    for theirs, ours in advice.items():
        exception.args = tuple(text.replace(theirs, ours) if isinstance(text, str) else text for text in exception.args)


def read_deepspeed_config(strategy: Any, config: Any) -> dict[str, Any] | None:
    """The configuration that a DeepSpeedStrategy would read: a mapping, a path, or None for the path in PL_DEEPSPEED_CONFIG_PATH."""
    found: dict[str, Any] | None = strategy._load_config(config)
    return found


def fill_mesh(strategy: Any) -> None:
    """Sizes of a ModelParallelStrategy that were left open: data parallel takes all ranks that tensor parallel leaves.

    Lightning's own choice is tensor parallel inside a host and data parallel across hosts.
    """
    # The strategy says the same a moment later. An environment that knows better, as Ray does of uneven hosts, ignores it.
    strategy.cluster_environment.set_world_size(strategy.num_nodes * strategy.num_processes)
    world_size = strategy.world_size
    if strategy._tensor_parallel_size == "auto":
        strategy._tensor_parallel_size = 1 if strategy._data_parallel_size == "auto" else world_size // strategy._data_parallel_size
    if strategy._data_parallel_size == "auto":
        strategy._data_parallel_size = world_size // strategy._tensor_parallel_size
