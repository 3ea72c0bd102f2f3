"""The Trainer's callbacks: whether they have a state of their own, and the state that Lightning's own ones do not save."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Set
from types import FunctionType
from typing import Any

import torch
from torch.optim.swa_utils import SWALR

from gemini_ft.state.methods import kept_by, set_by
from gemini_ft.state.modes import SETTABLE, Modes, Modules, hooks_beside, not_users
from gemini_ft.state.values import ATOMS, NotPlain, copy_for, copy_of

_log = logging.getLogger("gemini_ft")
# Attributes that ModelCheckpoint's state_dict or load_state_dict leaves out: a file would be saved twice, not at all, or without its score.
_NOT_SAVED = frozenset({"_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation", "current_score"})
# Attributes of a Trainer that other classes of Lightning set, or that are captured by themselves.
_OF_TRAINER = {"accumulate_grad_batches", "callbacks", "datamodule", "should_stop", "val_check_batch"}
_OF_TRAINER |= {"_default_root_dir", "_last_val_time", "_train_start_time", "_val_check_time_interval"}
_FINDERS = {"BatchSizeFinder", "LearningRateFinder"}


def is_searching(trainer: Any) -> bool:
    """Whether this fit is a Tuner's search for a rate or a batch size, which ends before the training and leaves no trace in it."""
    return any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks if shipped_names(callback) & _FINDERS)


def has_state(callback: Any) -> bool:
    """Whether a callback saves a state of its own, or writes to checkpoints."""
    hooks = (type(callback).state_dict, type(callback).on_save_checkpoint)
    return any(hook.__qualname__.partition(".")[0] != "Callback" for hook in hooks)


def _saved_by(callback: Any) -> frozenset[str]:
    """Names of the attributes that belong to the state that a callback saves.

    They are all that Lightning's class with the ``state_dict``, or a base of it, ever sets, and those that ``state_dict`` and
    ``load_state_dict`` of any class use.
    """
    kinds = type(callback).__mro__
    first = next(index for index, kind in enumerate(kinds) if "state_dict" in vars(kind))
    shipped = [set_by(kind) for kind in kinds[first:] if _is_shipped(kind)]
    return kept_by(type(callback)).union(*shipped) - _NOT_SAVED


def shipped_names(callback: Any) -> set[str]:
    """Lightning's own classes among those of ``callback``."""
    return {kind.__name__ for kind in type(callback).__mro__ if _is_shipped(kind)}


def _is_shipped(kind: type) -> bool:
    return kind.__module__.startswith(("lightning.", "pytorch_lightning."))


class _TrainersModes(Modes):
    """Modes that leave a setting of the Trainer alone which the restarted script gives another value than the script before it.

    Each snapshot has, beside the settings that the training has changed, the values that the script had given.
    """

    def __init__(self, modules: Modules, others: Mapping[str, Any], leave: Any) -> None:
        super().__init__(modules, others, leave)
        trainers = {path: vars(item) for path, item in others.items() if path.partition(".")[0] == "trainer"}
        self._given = {path: {name: value for name, value in own.items() if type(value) in ATOMS} for path, own in trainers.items()}

    def collect(self, modules: Modules) -> dict[str, Any]:
        state = super().collect(modules)
        changed = {path: state["attributes"].get(path, {}) for path in self._given}
        return state | {"given": {path: {name: self._given[path].get(name) for name in names} for path, names in changed.items()}}

    def restore(self, state: Mapping[str, Any], modules: Modules, *, but: Iterable[Any] = ()) -> None:
        attributes = dict(state["attributes"])
        for path, given in self._given.items():
            before = state.get("given", {}).get(path, {})
            others = {name for name in attributes.get(path, {}) if before.get(name) != given.get(name)}
            attributes[path] = {name: value for name, value in attributes.get(path, {}).items() if name not in others}
            for name in sorted(others):
                _log.warning(
                    "%s.%s stays at %r, which this script gives; the script before the restart gave %r, and its training had set it to %r",
                    *(path, name, given.get(name), before.get(name), state["attributes"][path][name]),
                )
        super().restore({**state, "attributes": attributes}, modules, but=but)


def modes_of(trainer: Any, package: str, modules: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> Modes:
    """Flags and plain attributes of the module, the datamodule, and callbacks, but for the state that these save themselves.

    They include those of the Trainer: its settings, how long it trains, and what the script keeps there.
    """
    settings = _settings(trainer)
    base = importlib.import_module(package)
    blank = {kind: frozenset(vars(kind())) - SETTABLE - {"training"} for kind in (base.LightningModule, base.LightningDataModule)}

    def leave(item: Any) -> frozenset[str]:
        private = next((names for kind, names in blank.items() if isinstance(item, kind)), frozenset[str]())
        own = getattr(item, "__dict__", {})
        states = own.get("_defaults")  # a torchmetrics.Metric's, which are captured as such
        metrics = frozenset(name for name, value in own.items() if _is_metric(value)) if is_holder(item) else frozenset[str]()
        saved = _saved_by(item) if isinstance(item, base.Callback) else settings.get(id(item), frozenset[str]())
        return not_users(item) | private | saved | metrics | (frozenset(states) if isinstance(states, dict) else frozenset())

    def is_holder(item: Any) -> bool:
        return item is trainer.datamodule or any(item is callback for callback in trainer.callbacks)

    others = {
        f"callback.{index}": callback
        for index, callback in enumerate(trainer.callbacks)
        if not type(callback).__module__.startswith((package, "gemini_ft.")) or "ModelCheckpoint" in shipped_names(callback)
    }
    others |= {
        f"callback.{index}.{name}": value  # the script's own function in one of Lightning's callbacks (LambdaCallback)
        for index, callback in enumerate(trainer.callbacks)
        for name, value in vars(callback).items()
        if isinstance(value, FunctionType) and f"callback.{index}" not in others
    }
    if trainer.datamodule is not None:
        others["datamodule"] = trainer.datamodule
    others |= hooks_beside(optimizers)
    others |= {"trainer": trainer, "trainer.fit_loop": trainer.fit_loop, "trainer.epoch_loop": trainer.fit_loop.epoch_loop}
    return _TrainersModes(modules, others, leave)


def state_beside(trainer: Any) -> dict[str, dict[str, Any]]:
    """The plain values that Lightning restores by itself: what callbacks save, and settings of schedulers and parameter groups."""
    found: dict[str, dict[str, Any]] = {}
    for path, (values, names) in _restored(trainer).items():
        kept = found[path] = {}
        for name in names & values.keys():
            with contextlib.suppress(NotPlain):
                kept[name] = copy_of(values[name])
    return found


@contextlib.contextmanager
def with_state_beside(trainer: Any, then: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Puts the result of `state_beside` in the place of the present values for a while."""
    present = {path: values for path, (values, _) in _restored(trainer).items() if path in then}
    before = [(values, {name: values[name] for name in then[path] if name in values}) for path, values in present.items()]
    for path, values in present.items():
        values.update({name: copy_for(value, values.get(name)) for name, value in then[path].items()})
    try:
        yield
    finally:
        for values, own in before:
            values.update(own)


def _restored(trainer: Any) -> dict[str, tuple[dict[str, Any], Set[str]]]:
    """Path -> attributes or settings, and the names of those that Lightning restores."""
    found: dict[str, tuple[dict[str, Any], Set[str]]] = {}
    for index, callback in enumerate(trainer.callbacks):
        if has_state(callback):
            found[f"callback.{index}"] = vars(callback), _saved_by(callback)
    schedules = [vars(config.scheduler) for config in trainer.lr_scheduler_configs]
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    for kind, holders in (("scheduler", schedules), ("group", groups)):
        found |= {f"{kind}.{index}": (own, own.keys()) for index, own in enumerate(holders)}
    return found


def _settings(trainer: Any) -> dict[int, frozenset[str]]:
    """Returns id -> names of the attributes that Lightning changes itself, for the Trainer and for each of its loops."""
    loop = trainer.fit_loop
    theirs = {name for kind in type(trainer).__mro__ if _is_shipped(kind) for name in set_by(kind) if name.startswith("_")}
    lengths = {"min_epochs"} if _averaging(trainer) else {"min_epochs", "max_epochs"}  # averaging adds an epoch when the fit starts
    return {
        id(trainer): frozenset(theirs | _OF_TRAINER),
        id(loop): frozenset(vars(loop).keys() - lengths),
        id(loop.epoch_loop): frozenset(vars(loop.epoch_loop).keys() - {"min_steps", "max_steps"}),
    }


def _is_metric(value: Any) -> bool:
    """Whether a value is a torchmetrics.Metric or a collection of them, which are captured as such."""
    return isinstance(value, torch.nn.Module) and any(kind.__module__.startswith("torchmetrics.") for kind in type(value).__mro__)


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


# StochasticWeightAveraging sets itself up when an epoch begins, and leaves no hook for an epoch that is resumed.


def averaging_state(trainer: Any) -> dict[int, bool]:
    """Whether each such callback, by its index, has put its own scheduler into the Trainer; its state_dict has the rest."""
    return {index: callback._initialized for index, callback in _averaging(trainer)}


def drop_replaced_schedulers(trainer: Any, checkpoint: Mapping[str, Any]) -> None:
    """Takes away the schedulers in whose place the callback had put its own, whose state would be loaded into them."""
    for _, callback in _averaging(trainer):
        if checkpoint.get("callbacks", {}).get(callback.state_key, {}).get("scheduler_state") is not None:
            trainer.lr_scheduler_configs.clear()


def set_averaging(trainer: Any, package: str, initialized: Mapping[int, bool]) -> None:
    """Does what the callback's ``on_train_epoch_start`` had done; its own state has been loaded, and so have the parameter groups."""
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
