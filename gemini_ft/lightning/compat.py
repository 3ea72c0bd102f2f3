"""Every private part of Lightning and torchmetrics that is relied on, in one place.

Written for Lightning 2.6; :func:`check_lightning` refuses other versions, and says by name what is missing if a
release of 2.6 moves something. The loops are internal to Lightning, and without them no step can be resumed exactly.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.swa_utils import SWALR

from gemini_ft.errors import ConfigError
from gemini_ft.lightning.loader import bookmark_of, is_position
from gemini_ft.state.hyperparameters import Given, of_mapping, of_scheduler
from gemini_ft.state.modes import Modes, not_users

_SUPPORTED = ("2.6.",)
_FINDERS = {"BatchSizeFinder", "LearningRateFinder"}


def check_lightning(package: str) -> None:
    """Refuses a Lightning that this module was not written for.

    Args:
        package: "lightning.pytorch", "pytorch_lightning", "lightning.fabric" or "lightning_fabric".

    Raises:
        ConfigError: another version, or one without the private parts that are needed.
    """
    version = str(importlib.import_module(package).__version__)
    if not version.startswith(_SUPPORTED):
        raise ConfigError(f"{package} {version} is not supported; install {package.partition('.')[0]}>=2.6,<2.7")
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


# --- checkpoints


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """Lightning's checkpoint, as a dictionary; asks the strategy for the states of model and optimizers."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return checkpoint


def is_checkpoint_seen(trainer: Any) -> bool:
    """Whether a hook looks at checkpoints while they are made. A hook that was not overridden belongs to a base class."""
    hooks = [type(holder).on_save_checkpoint for holder in (trainer.lightning_module, trainer.precision_plugin, *trainer.callbacks)]
    return not all(hook.__qualname__.partition(".")[0] in ("CheckpointHooks", "Precision", "Callback") for hook in hooks)


def offer_checkpoint(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Lets the Trainer restore from ``checkpoint`` as if it had read it from a file."""
    trainer._checkpoint_connector._loaded_checkpoint = checkpoint


def withdraw_checkpoint(trainer: Any) -> None:
    """Undoes :func:`offer_checkpoint`."""
    trainer._checkpoint_connector._loaded_checkpoint = {}


def hyper_parameters(trainer: Any) -> dict[str, Any]:
    """The hyperparameters of module and datamodule, under the keys a checkpoint has them."""
    found = {}
    for holder in _with_hparams(trainer):
        if holder.hparams:
            found[holder.CHECKPOINT_HYPER_PARAMS_KEY] = dict(holder.hparams)
    return found


def given(trainer: Any) -> tuple[Given, Given]:
    """Hyperparameters that the script gives beside the optimizers': those that a resume puts back, and those that it leaves."""
    snapshots = of_mapping("the Trainer", {"accumulate_grad_batches": trainer.accumulate_grad_batches})
    for index, config in enumerate(trainer.lr_scheduler_configs):
        snapshots |= of_scheduler(f"scheduler {index} ({type(config.scheduler).__name__})", config.scheduler)
    scripts: Given = {}
    for holder in _with_hparams(trainer):
        scripts |= of_mapping(type(holder).__name__, holder.hparams)
    return snapshots, scripts


def without_hyper_parameters(trainer: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint without hyperparameters: they may hold whole modules, and the script makes them anew anyway."""
    keys: set[str] = set()
    for holder in _with_hparams(trainer):
        keys |= {holder.CHECKPOINT_HYPER_PARAMS_KEY, holder.CHECKPOINT_HYPER_PARAMS_NAME, holder.CHECKPOINT_HYPER_PARAMS_TYPE}
    return {key: value for key, value in checkpoint.items() if key not in keys}


def _with_hparams(trainer: Any) -> list[Any]:
    return [holder for holder in (trainer.lightning_module, trainer.datamodule) if holder is not None]


def pin_checkpoint_folders(trainer: Any, checkpoint: Mapping[str, Any]) -> None:
    """A ModelCheckpoint without a folder takes the logger's, whose version counts up with every start of the script;
    in another folder it forgets which checkpoints were the best. The folder of before the restart is meant."""
    for callback in trainer.checkpoint_callbacks:
        saved = checkpoint.get("callbacks", {}).get(callback.state_key)
        if isinstance(saved, dict) and saved.get("dirpath") and getattr(callback, "dirpath", "") is None:
            callback.dirpath = saved["dirpath"]


def drop_positions(checkpoint: Mapping[str, Any], loaders: Sequence[Any] = ()) -> None:
    """Removes positions of loaders that were made resumable from a checkpoint, and leaves those that loaders save themselves.

    Args:
        checkpoint: as Lightning made it, with a position for each of ``loaders``.
        loaders: those of the training, if they are at hand.
    """
    state = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    marks = [mark for mark in map(bookmark_of, loaders) if mark is not None]
    others = []
    for position in state.get("combined_loader", []):
        own = position.get("own") if is_position(position) else position
        if is_position(position) and marks:
            own = marks.pop(0).own_position
        if own is not None:
            others.append(own)
    if others:
        state["combined_loader"] = others
    else:
        state.pop("combined_loader", None)


def as_if_saved_by_callback(checkpoint: Mapping[str, Any]) -> None:
    """Shape the loops' state as a ModelCheckpoint saves it, just before a batch counts as completed.

    The Trainer's restart logic knows that moment. From ours, between two batches, it would take the step as the last
    one before a validation, and count it a second time.
    """
    loop = checkpoint["loops"]["fit_loop"]
    for counts in ("total", "current"):
        loop["epoch_loop.batch_progress"][counts]["completed"] -= 1
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def is_searching(trainer: Any) -> bool:
    """Whether this fit is a Tuner's search for a rate or a batch size, which ends before the training and leaves no trace in it."""
    return any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks if shipped_names(callback) & _FINDERS)


# --- strategies


def group_settings(strategy: Any) -> tuple[str, Any]:
    """Backend and timeout of the process group that ``strategy`` would create."""
    return strategy._get_process_group_backend(), strategy._timeout


def ddp_hook(strategy: Any) -> tuple[Any, Any] | None:
    """State and communication hook that a DDPStrategy was given, in its wrapper if it was given one."""
    hook, wrapper = strategy._ddp_comm_hook, strategy._ddp_comm_wrapper
    if hook is None:
        return None
    return strategy._ddp_comm_state, hook if wrapper is None else wrapper(hook)


def name_our_strategy(exception: BaseException) -> None:
    """Replaces, in the advice of Lightning's DDPStrategy, another DDP strategy by the one that protects the training."""
    advice = {"strategy='ddp_find_unused": "strategy='gemini_find_unused", "strategy=DDPStrategy(": "strategy=GeminiStrategy("}
    for theirs, ours in advice.items():
        exception.args = tuple(text.replace(theirs, ours) if isinstance(text, str) else text for text in exception.args)


def unwrapped(package: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with what Fabric's wrappers hold, as Fabric gives it to a strategy."""
    found: dict[str, Any] = importlib.import_module(f"{package}.wrappers")._unwrap_objects(dict(state))
    return found


def step_to_log(trainer: Any) -> int | None:
    """The number under which loggers are told of the step under way; None: ``log_every_n_steps`` leaves it out."""
    if not trainer._logger_connector.should_update_logs:
        return None
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def read_deepspeed_config(strategy: Any, config: Any) -> dict[str, Any] | None:
    """The configuration that a DeepSpeedStrategy would read: a mapping, a path, or None for the path in PL_DEEPSPEED_CONFIG_PATH."""
    found: dict[str, Any] | None = strategy._load_config(config)
    return found


def fill_mesh(strategy: Any) -> None:
    """Sizes of a ModelParallelStrategy that were left open: data parallel takes all ranks that tensor parallel leaves.

    Lightning's own choice is tensor parallel inside a host and data parallel across hosts.
    """
    world_size = strategy.num_nodes * strategy.num_processes
    if strategy._tensor_parallel_size == "auto":
        strategy._tensor_parallel_size = 1 if strategy._data_parallel_size == "auto" else world_size // strategy._data_parallel_size
    if strategy._data_parallel_size == "auto":
        strategy._data_parallel_size = world_size // strategy._tensor_parallel_size


def training_loaders(trainer: Any) -> list[Any]:
    """The loaders of the training, in the order of their positions in a checkpoint."""
    combined = trainer.fit_loop._combined_loader
    return list(combined.flattened) if combined is not None else []


# --- loops


def logged_steps(checkpoint: Mapping[str, Any]) -> int:
    """The number under which metrics of the next step would be logged."""
    return int(checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"])


def before_each_batch(trainer: Any, hook: Callable[[], None]) -> Callable[[], None]:
    """Calls ``hook`` whenever the training loop is about to ask for its next batch; returns a function that ends that.

    Everything of the step before has happened by then: all hooks, its validation, the schedulers, the counters.
    ``on_train_batch_end`` would be too early: the module's own hook, validation and the end of an epoch come after it.
    """
    loop = trainer.fit_loop.epoch_loop
    advance = loop.advance

    def hooked(data_fetcher: Any) -> None:
        hook()
        advance(data_fetcher)

    loop.advance = hooked

    def end() -> None:
        vars(loop).pop("advance", None)

    return end


def before_loading(trainer: Any, hook: Callable[[], None]) -> Callable[[], None]:
    """Calls ``hook`` whenever the fit is about to ask the user's ``train_dataloader()`` for loaders; returns what ends that."""
    source = trainer.fit_loop._data_source
    dataloader = source.dataloader

    def hooked() -> Any:
        hook()
        return dataloader()

    source.dataloader = hooked

    def end() -> None:
        vars(source).pop("dataloader", None)

    return end


def told_to_end(package: str) -> type[SystemExit]:
    """The exception that ends a fit after SIGTERM, on all ranks if rank 0 has had it."""
    kind: type[SystemExit] = importlib.import_module(f"{package}.utilities.exceptions").SIGTERMException
    return kind


def rerun_epoch_start(trainer: Any, package: str) -> None:
    """Calls the ``on_train_epoch_start`` hooks of a resumed epoch again, as soon as its loaders are there and before they are iterated."""
    fit_loop, call = trainer.fit_loop, importlib.import_module(f"{package}.trainer.call")
    load = fit_loop._load_combined_loader_states

    def run_then_load() -> None:
        del fit_loop._load_combined_loader_states
        if fit_loop.epoch_progress.current.started > fit_loop.epoch_progress.current.processed:
            call._call_callback_hooks(trainer, "on_train_epoch_start")
            call._call_lightning_module_hook(trainer, "on_train_epoch_start")
        load()

    fit_loop._load_combined_loader_states = run_then_load


def modes_of(trainer: Any, package: str, modules: Mapping[str, torch.nn.Module]) -> Modes:
    """Flags and plain attributes of the module, the datamodule, and callbacks that save no state of their own."""
    base = importlib.import_module(package)
    blank = {kind: frozenset(vars(kind())) - {"training"} for kind in (base.LightningModule, base.LightningDataModule)}

    def leave(item: Any) -> frozenset[str]:
        private = next((names for kind, names in blank.items() if isinstance(item, kind)), frozenset[str]())
        states = vars(item).get("_defaults")  # a torchmetrics.Metric's, which are captured as such
        return not_users(item) | private | (frozenset(states) if isinstance(states, dict) else frozenset())

    others = {
        f"callback.{index}": callback
        for index, callback in enumerate(trainer.callbacks)
        if type(callback).state_dict is base.Callback.state_dict and not type(callback).__module__.startswith((package, "gemini_ft."))
    }
    if trainer.datamodule is not None:
        others["datamodule"] = trainer.datamodule
    return Modes(modules, others, leave)


def is_accumulating(trainer: Any) -> bool:
    """Whether gradients of earlier batches are still needed. They are not captured.

    At the end of the epoch in which StochasticWeightAveraging computes the statistics of BatchNorm anew, Lightning makes a step
    with the gradients of the epoch before.
    """
    loop = trainer.fit_loop.epoch_loop
    return bool(trainer.fit_loop._skip_backward or (loop.batch_progress.current.ready > 0 and loop._should_accumulate()))


def batches_taken_in_advance(trainer: Any) -> int:
    """The number of batches that Lightning fetches ahead where a loader's length is unknown, to recognise the last one."""
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def epoch(trainer: Any) -> int:
    """The number of the epoch, as Lightning gives it to samplers."""
    return int(trainer.fit_loop.epoch_progress.current.processed)


def set_loops(trainer: Any, state: dict[str, Any]) -> None:
    """Puts the loops exactly where they were, and ends their own restart logic.

    That logic is made for checkpoints taken inside a step: it would skip a validation that is due or count a step
    twice. It also leaves out plateau schedulers, because checkpoints of files lack the metrics.
    """
    fit_loop = trainer.fit_loop
    fit_loop.load_state_dict(state)
    fit_loop._combined_loader_states_to_load = []  # they were loaded before the iterators were made
    for loop in (fit_loop, fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop):
        loop.on_iteration_done()


def loop_extras(trainer: Any) -> dict[str, Any]:
    """The state of the loops and the Trainer that is not in their checkpoint. Times are seconds until now."""
    fit_loop, combined = trainer.fit_loop, trainer.fit_loop._combined_loader._iterator
    now = time.monotonic()
    return {
        "should_stop": trainer.should_stop,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "last_reload": fit_loop._last_train_dl_reload_epoch,
        "since_start": now - getattr(trainer, "_train_start_time", now),
        "since_validation": now - getattr(trainer, "_last_val_time", now),
        "cycles": (combined._idx, list(getattr(combined, "_consumed", ()))),
        "validation_workers": [mark.resting_workers if (mark := bookmark_of(loader)) else None for loader in _validation_loaders(trainer)],
    }


def set_loop_extras(trainer: Any, extras: Mapping[str, Any]) -> None:
    fit_loop, combined = trainer.fit_loop, trainer.fit_loop._combined_loader._iterator
    now = time.monotonic()
    trainer.should_stop = extras["should_stop"]
    trainer.accumulate_grad_batches = extras["accumulate_grad_batches"]
    fit_loop._last_train_dl_reload_epoch = extras["last_reload"]
    trainer._train_start_time = now - extras["since_start"]
    trainer._last_val_time = now - extras["since_validation"]
    combined._idx, consumed = extras["cycles"]
    if consumed:
        combined._consumed = list(consumed)
    for loader, workers in zip(_validation_loaders(trainer), extras["validation_workers"], strict=False):
        if workers is not None and (bookmark := bookmark_of(loader)):
            bookmark.revive_workers(workers)


def _validation_loaders(trainer: Any) -> list[Any]:
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    return list(combined.flattened) if combined is not None else []


# --- logged values


def logging_state(trainer: Any, metrics: Mapping[int, str]) -> dict[str, Any]:
    """The values that ``self.log`` has gathered since the epoch began, and those that were logged last.

    Args:
        trainer: the Trainer.
        metrics: id -> name of the module's torchmetrics; logged ones are stored as names.
    """
    connector = trainer._logger_connector
    return {
        "results": {key: _result_state(item, metrics) for key, item in trainer.fit_loop.epoch_loop._results.items()},
        "first_iteration": connector._first_loop_iter,
        "current_hook": connector._current_fx,
        "callback_metrics": dict(connector._callback_metrics),
        "logged_metrics": dict(connector._logged_metrics),
        "progress_bar_metrics": dict(connector._progress_bar_metrics),
    }


def set_logging_state(trainer: Any, package: str, state: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
    """Puts back the result of :func:`logging_state`.

    Args:
        trainer: the Trainer.
        package: the Lightning package it belongs to.
        state: the state.
        metrics: name -> torchmetrics of the module.
    """
    connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
    module = importlib.import_module(f"{package}.trainer.connectors.logger_connector.result")
    results.clear()
    for key, saved in state["results"].items():
        results[key] = _make_result(module, trainer.strategy, saved, metrics)
    connector._first_loop_iter, connector._current_fx = state["first_iteration"], state["current_hook"]
    device = trainer.strategy.root_device
    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        getattr(connector, f"_{name}").update({key: _to(value, device) for key, value in state[name].items()})


_META = [
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
]


def _result_state(item: Any, metrics: Mapping[int, str]) -> dict[str, Any]:
    sync = item.meta.sync
    if sync._group is not None:
        raise ConfigError(
            f"self.log({item.meta.name!r}, sync_dist_group=...): values reduced over a group of their own cannot be resumed; "
            "leave the group out, or reduce the value yourself before logging it"
        )
    return {
        "meta": {name: getattr(item.meta, name) for name in _META},
        "reduce": (item.meta.reduce_fx.__name__, item.meta.reduce_fx in (sum, min, max)),
        "sync": (sync._should, sync.rank_zero_only, sync._op, sync.fn is not type(sync).no_op),
        "is_tensor": item.is_tensor,
        "value": item.value if item.is_tensor else metrics[id(item.value)],
        "batches": getattr(item, "cumulated_batch_size", None),
        "has_reset": item.has_reset,
        "cache": _metric_caches(item),
    }


def _make_result(module: Any, strategy: Any, saved: Mapping[str, Any], metrics: Mapping[str, Any]) -> Any:
    name, is_python = saved["reduce"]
    reduce_fx = {"sum": sum, "min": min, "max": max}[name] if is_python else getattr(torch, name)
    should, rank_zero_only, op, over_ranks = saved["sync"]
    meta = module._Metadata(**saved["meta"], reduce_fx=reduce_fx)
    fn = strategy.reduce if over_ranks else module._Sync.no_op
    meta.sync = module._Sync(fn=fn, _should=should, rank_zero_only=rank_zero_only, _op=op)
    item = module._ResultMetric(meta, saved["is_tensor"])
    item.value = saved["value"] if saved["is_tensor"] else metrics[saved["value"]]
    if saved["batches"] is not None:
        item.cumulated_batch_size = saved["batches"]
    item.has_reset = saved["has_reset"]
    _set_metric_caches(item, saved["cache"])
    return item.to(strategy.root_device)


# --- torchmetrics


def metric_state(metric: Any) -> dict[str, Any]:
    """All that one torchmetrics.Metric has accumulated. Its tensors are live."""
    return {"state": dict(metric.metric_state), "cache": _metric_caches(metric)}


def set_metric_state(metric: Any, state: Mapping[str, Any]) -> None:
    for name, value in state["state"].items():
        setattr(metric, name, _to(value, metric.device))
    _set_metric_caches(metric, {key: _to(value, metric.device) for key, value in state["cache"].items()})


def metrics_of(trainer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The torchmetrics and their collections among the submodules, and of callbacks and datamodule, by name."""
    from torchmetrics import Metric, MetricCollection  # Lightning depends on it

    modules = modules_beside(trainer) | dict(trainer.lightning_module.named_modules())
    metrics = {name: item for name, item in modules.items() if isinstance(item, Metric)}
    return metrics, {name: item for name, item in modules.items() if isinstance(item, MetricCollection)}


def has_state(callback: Any) -> bool:
    """Whether a callback saves a state of its own, or writes to checkpoints."""
    hooks = (type(callback).state_dict, type(callback).on_save_checkpoint)
    return any(hook.__qualname__.partition(".")[0] != "Callback" for hook in hooks)


def modules_beside(trainer: Any) -> dict[str, Any]:
    """Modules that callbacks and the datamodule hold in attributes, with their submodules, by name."""
    holders = {f"callback.{index}": callback for index, callback in enumerate(trainer.callbacks)} | {"datamodule": trainer.datamodule}
    ours = set(trainer.lightning_module.modules())
    return {
        f"{name}.{attribute}.{path}".rstrip("."): part
        for name, holder in holders.items()
        for attribute, value in getattr(holder, "__dict__", {}).items()
        if isinstance(value, torch.nn.Module) and value not in ours
        for path, part in value.named_modules()
    }


def tracked(trainer: Any) -> dict[str, int]:
    """The number of times that each MetricTracker has begun anew; each time it grew by a copy of its metric."""
    from torchmetrics import MetricTracker

    modules = modules_beside(trainer) | dict(trainer.lightning_module.named_modules())
    return {name: len(part) for name, part in modules.items() if isinstance(part, MetricTracker)}


def track(trainer: Any, times: Mapping[str, int]) -> None:
    """Makes MetricTrackers have as many metrics as they had at :func:`tracked`."""
    parts = modules_beside(trainer) | dict(trainer.lightning_module.named_modules())
    for name, wanted in times.items():
        while name in parts and len(parts[name]) < wanted:
            parts[name].increment()


def tickets(trainer: Any) -> dict[str, torch.Tensor | None]:
    """The first weights that ModelPruning callbacks return to; None for those that have come to share the memory of the weights.

    Returning to them does not copy them: on their own device, the weights are then trained in the memory of the first ones.
    """
    pairs = _tickets(trainer)
    return {name: None if first.data_ptr() == now.data_ptr() else first.detach() for name, (now, first) in pairs.items()}


def set_tickets(trainer: Any, saved: Mapping[str, torch.Tensor | None]) -> None:
    """Puts back the result of :func:`tickets`, after the weights themselves."""
    for name, (now, first) in _tickets(trainer).items():
        if name in saved:
            first.data = now.data if (value := saved[name]) is None else value.to(first.device)


def _tickets(trainer: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The trained weight and the first one, for every parameter that a ModelPruning callback may reset."""
    found = {}
    for index, callback in enumerate(trainer.callbacks):
        for layer in (callback._original_layers or {}).values() if "ModelPruning" in shipped_names(callback) else ():
            for number, name in layer["names"]:
                trained = callback._parameters_to_prune[number][0]._parameters
                now, first = trained.get(f"{name}_orig", trained.get(name)), getattr(layer["data"], name)
                if now is not None and first is not None:
                    found[f"callback.{index}.{number}"] = now, first
    return found


def shipped_names(callback: Any) -> set[str]:
    """Lightning's own classes among those of ``callback``."""
    return {kind.__name__ for kind in type(callback).__mro__ if kind.__module__.startswith(("lightning.", "pytorch_lightning."))}


# --- StochasticWeightAveraging, which sets itself up when an epoch begins, and leaves no hook for one that is resumed


def averaging_state(trainer: Any) -> dict[int, bool]:
    """Whether each such callback, by its index, has put its own scheduler into the Trainer; its state_dict has the rest."""
    return {index: callback._initialized for index, callback in _averaging(trainer)}


def drop_replaced_schedulers(trainer: Any, checkpoint: Mapping[str, Any]) -> None:
    """Take away the schedulers in whose place the callback had put its own, whose state would be loaded into them."""
    for _, callback in _averaging(trainer):
        if checkpoint.get("callbacks", {}).get(callback.state_key, {}).get("scheduler_state") is not None:
            trainer.lr_scheduler_configs.clear()


def set_averaging(trainer: Any, package: str, initialized: Mapping[int, bool]) -> None:
    """Do what the callback's ``on_train_epoch_start`` had done; its own state has been loaded, and so have the parameter groups."""
    for index, callback in _averaging(trainer):
        if not initialized.get(index):
            continue
        optimizer, module = trainer.optimizers[0], trainer.lightning_module
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        rates = callback._swa_lrs if isinstance(callback._swa_lrs, list) else [callback._swa_lrs] * len(groups)
        scheduler: Any = SWALR(optimizer, rates, callback._annealing_epochs, callback._annealing_strategy)  # type: ignore[arg-type]
        scheduler.load_state_dict(callback._scheduler_state)
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        callback._initialized, callback._swa_lrs, callback._swa_scheduler = True, rates, scheduler
        trainer.lr_scheduler_configs[:] = [importlib.import_module(f"{package}.utilities.types").LRSchedulerConfig(scheduler)]
        callback._average_model = callback._average_model.to(callback._device or module.device)
        callback.n_averaged = torch.tensor(callback._init_n_averaged, dtype=torch.long, device=module.device)


def _averaging(trainer: Any) -> list[tuple[int, Any]]:
    return [(i, callback) for i, callback in enumerate(trainer.callbacks) if "StochasticWeightAveraging" in shipped_names(callback)]


def metric_groups(collection: Any) -> dict[str, Any]:
    """The groups of metrics in a MetricCollection that share one state: only the first of each is updated."""
    return {"groups": dict(collection._groups), "checked": collection._groups_checked, "copied": collection._state_is_copy}


def set_metric_groups(collection: Any, state: Mapping[str, Any]) -> None:
    collection._groups, collection._groups_checked, collection._state_is_copy = dict(state["groups"]), state["checked"], state["copied"]


def _metric_caches(metric: Any) -> dict[str, Any]:
    return {"update_count": metric._update_count, "computed": metric._computed, "forward": metric._forward_cache}


def _set_metric_caches(metric: Any, caches: Mapping[str, Any]) -> None:
    metric._update_count, metric._computed, metric._forward_cache = caches["update_count"], caches["computed"], caches["forward"]


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_to(item, device) for item in value]
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    return value
