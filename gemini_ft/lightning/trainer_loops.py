"""The Trainer's loops: how far they have come, the loaders they iterate, and hooks at places where Lightning has none."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from gemini_ft.errors import ConfigError, StateError, WorldSizeError
from gemini_ft.lightning.around import Around
from gemini_ft.loaders.bookmark import Bookmark
from gemini_ft.loaders.loader import bookmark_of
from gemini_ft.state.worlds import Resize

_log = logging.getLogger("gemini_ft")


def before_each_batch(trainer: Any, hook: Callable[[], None]) -> Callable[[], None]:
    """Calls ``hook`` whenever the training loop is about to ask for its next batch; returns a function that ends that.

    Everything of the step before has happened by then: all hooks, its validation, the schedulers, the counters.
    ``on_train_batch_end`` would be too early: the module's own hook, validation and the end of an epoch come after it.
    """

    def hooked(advance: Callable[[Any], None], data_fetcher: Any) -> None:
        hook()
        advance(data_fetcher)

    return around_each_batch(trainer, hooked)


def around_each_batch(trainer: Any, function: Callable[[Callable[[Any], None], Any], None]) -> Callable[[], None]:
    """Calls ``function`` in place of what fetches and trains a batch, which it is given; returns a function that ends that."""
    return Around(trainer.fit_loop.epoch_loop, "advance", function).end


def before_end(trainer: Any, hook: Callable[[], None]) -> Callable[[], None]:
    """Calls ``hook`` before the hooks ``on_train_end``; returns a function that ends that."""

    def hooked(end: Callable[[], None]) -> None:
        hook()
        end()

    return Around(trainer.fit_loop, "on_run_end", hooked).end


def is_last_batch(trainer: Any) -> bool:
    """Whether the batch that was fetched last is the epoch's last one."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def before_positions(trainer: Any, hook: Callable[[], None]) -> None:
    """Calls ``hook`` in a fit that goes on, once its loaders are there and before they are given their positions and iterated."""
    fit_loop = trainer.fit_loop

    def hook_then_load(load: Callable[[], None]) -> None:
        if not fit_loop.restarting:  # the script has asked for its loaders before the loops were restored
            return
        around.end()
        hook()
        load()

    around = Around(fit_loop, "_load_combined_loader_states", hook_then_load)


def in_mid_epoch(trainer: Any, resuming: Callable[[], bool]) -> Callable[[], None]:
    """Has loops that load their state go on in the middle of an epoch, as long as ``resuming``; returns a function that ends that.

    Lightning takes an epoch for a finished one by its counters, which are off by one for good where a fit has begun with a checkpoint of a
    file that was saved with an epoch's last batch.
    """
    fit_loop = trainer.fit_loop

    def hooked(load: Callable[..., None], *state: Any) -> None:
        load(*state)
        if resuming():
            super(type(fit_loop), type(fit_loop)).restarting.fset(fit_loop, True)

    return Around(fit_loop, "load_state_dict", hooked).end


def rerun_epoch_start(trainer: Any, package: str) -> None:
    """Calls the ``on_train_epoch_start`` hooks of a resumed epoch again."""
    progress, call = trainer.fit_loop.epoch_progress.current, importlib.import_module(f"{package}.trainer.call")
    if progress.started > progress.processed:
        call._call_callback_hooks(trainer, "on_train_epoch_start")
        call._call_lightning_module_hook(trainer, "on_train_epoch_start")


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


def takes_in_advance(trainer: Any) -> bool:
    """Whether Lightning takes a batch in advance from each of its loaders: it does if the length of any is unknown."""
    fetcher = trainer.fit_loop._data_fetcher
    return hasattr(fetcher, "batches") and fetcher.length is None


def epoch(trainer: Any) -> int:
    """The number of the epoch, as Lightning gives it to samplers."""
    return int(trainer.fit_loop.epoch_progress.current.processed)


def step_to_log(trainer: Any) -> int | None:
    """The number under which loggers are told of the step under way; None: ``log_every_n_steps`` leaves it out."""
    if not trainer._logger_connector.should_update_logs:
        return None
    return steps_logged(trainer)


def steps_logged(trainer: Any) -> int:
    """The number under which loggers are told of the step under way."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def set_loops(trainer: Any, state: dict[str, Any]) -> None:
    """Puts the loops exactly where they were, and ends their own restart logic.

    That logic is made for checkpoints taken inside a step: it would skip a validation that is due or count a step
    twice. It also leaves out plateau schedulers, because checkpoints of files lack the metrics.
    """
    fit_loop = trainer.fit_loop
    if fit_loop._combined_loader_states_to_load:  # Lightning empties it when it gives them to the loaders
        raise StateError("the positions in the training data were not put back: the loaders were made in a way that is not known here")
    fit_loop.load_state_dict(state)
    fit_loop._combined_loader_states_to_load = []
    for loop in (fit_loop, fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop):
        loop.on_iteration_done()


def loop_extras(trainer: Any) -> dict[str, Any]:
    """The state of the loops and the Trainer that is not in their checkpoint. Times are seconds until now."""
    fit_loop, combined = trainer.fit_loop, trainer.fit_loop._combined_loader._iterator
    now = time.monotonic()
    return {
        "should_stop": trainer.should_stop,
        "batches": (_limits(trainer), fit_loop.max_batches, getattr(trainer, "val_check_batch", None)),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "last_reload": fit_loop._last_train_dl_reload_epoch,
        "last_validation_reload": fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch,
        "since_start": now - getattr(trainer, "_train_start_time", now),
        "since_validation": now - getattr(trainer, "_last_val_time", now),
        "cycles": (combined._idx, list(getattr(combined, "_consumed", ()))),
        "taken": _taken_by_step(trainer),
        "validation": [mark.state_dict() if mark else None for mark in _validation_marks(trainer)],
    }


def set_loop_extras(trainer: Any, extras: Mapping[str, Any]) -> None:
    fit_loop, combined = trainer.fit_loop, trainer.fit_loop._combined_loader._iterator
    now = time.monotonic()
    trainer.should_stop = extras["should_stop"]
    limits, batches, check = extras.get("batches", (None, 0, None))  # snapshots in storage may be older
    if limits == _limits(trainer):
        fit_loop.max_batches, trainer.val_check_batch = batches, check
    trainer.accumulate_grad_batches = extras["accumulate_grad_batches"]
    fit_loop._last_train_dl_reload_epoch = extras["last_reload"]
    fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = extras.get("last_validation_reload", float("-inf"))
    trainer._train_start_time = now - extras["since_start"]
    trainer._last_val_time = now - extras["since_validation"]
    combined._idx, consumed = extras["cycles"]
    if consumed:
        combined._consumed = list(consumed)
    vars(fit_loop._data_fetcher).update(extras.get("taken", {}))  # snapshots in storage may be older
    for mark, state in zip(_validation_marks(trainer), extras["validation"], strict=False):
        if state is not None and mark is not None:
            mark.load_state_dict(state)


def _taken_by_step(trainer: Any) -> dict[str, Any]:
    """How many batches ``training_step(dataloader_iter)`` has taken, where Lightning would count steps; empty: Lightning takes them."""
    fetcher = trainer.fit_loop._data_fetcher
    names = ("fetched", "_batch_idx", "_dataloader_idx")
    return {name: getattr(fetcher, name) for name in names} if hasattr(fetcher, "_batch_idx") else {}


def _limits(trainer: Any) -> list[Any]:
    """The settings out of which Lightning counts the batches of an epoch, and those between validations, when it has made a loader.

    A batch size that hooks change later changes neither, and a process that makes the loader anew would count with the new one.
    """
    names = ("world_size", "limit_train_batches", "overfit_batches", "val_check_interval", "check_val_every_n_epoch")
    return [getattr(trainer, name, None) for name in names]


def carry_over(trainer: Any, extras: Mapping[str, Any], resize: Resize | None) -> int:
    """Gives the Trainer a snapshot's batches of a step, and makes its counts of batches those of the present ranks.

    Args:
        extras: of the snapshot.
        resize: None: it is of as many ranks.

    Returns:
        The batches of each rank in a step.

    Raises WorldSizeError: the batches cannot be shared out evenly among the present ranks.
    """
    loops, before = extras["loops"], int(extras["loops"]["accumulate_grad_batches"])
    accumulation = before if resize is None else resize.carried(before, "micro-batches of a step")
    trainer.accumulate_grad_batches = loops["accumulate_grad_batches"] = accumulation
    if resize is None:
        return accumulation
    progress = extras["checkpoint"]["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for name, count in progress["current"].items():
        if count % before:
            raise WorldSizeError(f"elastic='batch': the snapshot was taken after {count} batches of an epoch, and a step takes {before}")
        progress["current"][name] = count // before * accumulation
        progress["total"][name] = -(-progress["total"][name] * accumulation // before)
    at, consumed = loops["cycles"]
    loops["cycles"] = at // before * accumulation, consumed
    return accumulation


def refuse_end(trainer: Any, resize: Resize, before: float) -> None:
    """Refuses a position at which another number of ranks has no batches left in the epoch: Lightning would leave out its validation.

    Where an epoch has another number of steps, it says so: rates that the script makes of that number are others.

    Args:
        before: the batches that each of the former ranks had in an epoch; 0: the snapshot does not say that.

    Raises WorldSizeError: it is such a one.
    """
    now = -(-trainer.num_training_batches // trainer.accumulate_grad_batches)
    then = -(-before * resize.then // (trainer.accumulate_grad_batches * resize.now))
    if before and then != now and trainer.is_global_zero:
        _log.warning(
            "elastic='batch': an epoch had %d steps on %d ranks and has %d on %d, as each rank's loader leaves out its own last batch "
            "(drop_last=True): what the script makes of trainer.estimated_stepping_batches, such as rates, is other than before. Give "
            "drop_last=False in a new run",
            *(then, resize.then, now, resize.now),
        )
    used, batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready, trainer.num_training_batches
    if used >= batches:
        raise WorldSizeError(
            f"elastic='batch': {resize.now} ranks have {batches} batches each in an epoch, all of which {resize.then} ranks had used when "
            f"the snapshot was taken, with more to come: of loaders with drop_last=True each leaves out its own last batch. Start "
            f"{resize.then} ranks, or give drop_last=False"
        )


def refuse_batches(trainer: Any) -> None:
    """Refuses, for ``elastic``, what counts each rank's own batches, or steps at other times than after so many of them.

    Raises ConfigError: there is something of the kind.
    """
    callbacks = {kind.__name__ for callback in trainer.callbacks for kind in type(callback).__mro__}
    why = {
        "several training loaders": len(training_loaders(trainer)) != 1,
        "manual optimization": not trainer.lightning_module.automatic_optimization,
        "limit_train_batches": not _is_whole(trainer.limit_train_batches),
        "overfit_batches": trainer.overfit_batches != 0,
        "val_check_interval": not _is_whole(getattr(trainer, "val_check_interval", None)) or trainer.check_val_every_n_epoch is None,
        "a scheduler with interval 'step' and a frequency": any(
            config.interval == "step" and config.frequency != 1 for config in trainer.strategy.lr_scheduler_configs
        ),
        "reload_dataloaders_every_n_epochs": trainer.reload_dataloaders_every_n_epochs != 0,
        "GradientAccumulationScheduler": "GradientAccumulationScheduler" in callbacks,
        "StochasticWeightAveraging": "StochasticWeightAveraging" in callbacks,
        "training_step(dataloader_iter)": type(trainer.fit_loop._data_fetcher).__name__ != "_PrefetchDataFetcher",
    }
    if found := [name for name, is_there in why.items() if is_there]:
        raise ConfigError(
            f"elastic: each rank's number of batches changes with the number of ranks, which {', '.join(found)} cannot follow; "
            "leave that out, or elastic"
        )


def _is_whole(limit: Any) -> bool:
    """Whether a setting of the Trainer says "the whole epoch": 1.0; an int is a number of batches."""
    return isinstance(limit, float) and limit == 1.0


def loaders_at_hand(module: Any) -> list[Any]:
    """The loaders of the training of a module; of one that no Trainer fits, none: it may be saved nevertheless."""
    return training_loaders(module._trainer) if module._trainer is not None else []


def training_loaders(trainer: Any) -> list[Any]:
    """The loaders of the training, in the order of their positions in a checkpoint."""
    combined = trainer.fit_loop._combined_loader
    return list(combined.flattened) if combined is not None else []


def _validation_marks(trainer: Any) -> list[Bookmark | None]:
    """The bookmarks of the validation's loaders; None for those that have none, or that are the training's as well."""
    combined, training = trainer.fit_loop.epoch_loop.val_loop._combined_loader, list(map(id, training_loaders(trainer)))
    return [bookmark_of(loader) if id(loader) not in training else None for loader in (combined.flattened if combined is not None else ())]
