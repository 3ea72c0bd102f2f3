"""Makes one ``trainer.fit`` survive failures: the steps between Lightning's loop and the Checkpointer.

open    as soon as there is a process group: is there anything to resume?
bind    once model and optimizers stand
load    when Lightning restores: tensors straight into model and optimizers
hook    before each batch: the first time, put back the rest; later, take a snapshot
guard   before each update of the parameters: wait for the copy under way
close   finished, interrupted, or failed
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gemini_ft.checkpointer import Checkpointer
from gemini_ft.config import GeminiConfig
from gemini_ft.errors import ConfigError, UnsupportedStateError
from gemini_ft.launch import notes
from gemini_ft.lightning import trainer_callbacks, trainer_checkpoints, trainer_loops
from gemini_ft.lightning.callbacks import findings, fingerprint, refuse_callbacks, save_config_again, watch
from gemini_ft.lightning.capture import capture, checkpoint_of, complete, restore
from gemini_ft.lightning.logical import Turns
from gemini_ft.lightning.options import EpochHooks
from gemini_ft.lightning.trainer_data import Loading
from gemini_ft.lightning.trainer_loggers import Logs
from gemini_ft.loaders.bookmark import Bookmark
from gemini_ft.loaders.loader import bookmark_of
from gemini_ft.loaders.parts import refuse_gone, split
from gemini_ft.state import iterators
from gemini_ft.state.ddp import ddp_state, frozen_at_first, restore_buckets, restore_sync
from gemini_ft.state.modes import Modes
from gemini_ft.state.rebuilding import ModuleTree
from gemini_ft.state.tensors import every_optimizer
from gemini_ft.state.worlds import Resize
from gemini_ft.storage.checkpoints import state_folder
from gemini_ft.trackers import TimeFigures
from gemini_ft.worker import attempt

log = logging.getLogger("gemini_ft")
_PATIENCE = 10  # steps that Lightning does not count, after which the user is told


class Fit:
    """The snapshots of one call of ``trainer.fit``.

    Args:
        replicated: whether all ranks hold the same parameters.
        epoch_hooks: whether a resumed epoch is given what its hooks had set ("restore"), or calls them again before that ("rerun").
    """

    def __init__(self, trainer: Any, package: str, config: GeminiConfig, replicated: bool, epoch_hooks: EpochHooks) -> None:
        self.checkpointer = Checkpointer(config=config, name=attempt.next_name("fit"), hooks=False, replicated=replicated)
        is_exact = config.elastic == "exact" and trainer.strategy._gemini_deals
        self.checkpointer.makes_logical_ranks = is_exact
        self.turns = Turns(trainer, config.logical_ranks) if is_exact else None
        self.checkpointer.accumulation, self.checkpointer.asks_for_accumulation = trainer.accumulate_grad_batches, True
        self._given_accumulation: int = trainer.accumulate_grad_batches  # before a snapshot's is carried over
        # The module's state dict while Lightning makes a checkpoint for a snapshot; empty if no hook would see it.
        self.live: dict[str, torch.Tensor] | None = None
        self._trainer, self._package, self._epoch_hooks, self._config = trainer, package, epoch_hooks, config
        self._logs = Logs(trainer, package)
        self._time: TimeFigures | None = None  # None: loggers do not want them, or this rank has none
        self._modes: Modes | None = None
        self._tree = ModuleTree({})
        self._optimizers: Any = None  # bound optimizers, with the properties that replacements must share
        self._ddp: DistributedDataParallel | None = None
        self._found: dict[str, Any] | None = None  # extras of what is being resumed
        self._iteration = 0  # of what is being resumed
        self._new_rank: int | None = None  # as of `Snapshot`
        self._resize: Resize | None = None  # where what is being resumed is of another number of ranks
        self._newest = 0  # optimizer steps of the newest snapshot
        self._last_step: int | None = None  # optimizer steps at the last look
        self._looked_at = 0  # the epoch whose loaders were looked at last
        self._made: float = 0  # those that optimizers had made by then; infinite: the user was told
        self._pauses = contextlib.ExitStack()
        self._waiting: dict[torch.Tensor, torch.Tensor] = {}  # gradients that a resumed loop adds to
        self._to_be_drawn: dict[str, str] = {}  # what the data had lost, and a sampler repeats no earlier than with the next batch
        self._hooks: list[Callable[[], None]] = [trainer_loops.before_each_batch(trainer, self._before_batch)]  # what ends each
        self._hooks.append(trainer_loops.in_mid_epoch(trainer, lambda: self.resuming))
        loop = trainer.fit_loop
        loading = functools.partial(Loading, trainer, present=self._present_modes, restore=self._restore_modes)
        self.training_data, self._validation_data = loading(loop=loop), loading(loop=loop.epoch_loop.val_loop)
        io = trainer.strategy.checkpoint_io
        self._io: Any = io if hasattr(io, "before_update") else None  # a `gemini_ft.checkpoint_io.FromMemory`
        if self._io is not None:
            self._hooks.append(trainer_loops.before_end(trainer, lambda: self._write_files("no update comes after it")))
        self.files = trainer_checkpoints.Files(trainer, self._io)
        self._hooks += [self.training_data.end, self._validation_data.end, self.files.end]
        watch(trainer, package)

    @property
    def resuming(self) -> bool:
        """Whether there is a snapshot, and not all of it has been put back yet."""
        return self._found is not None

    @property
    def checkpoint(self) -> dict[str, Any]:
        """The checkpoint that Lightning is to restore from, while resuming."""
        assert self._found is not None
        return checkpoint_of(self._found)

    def open(self) -> None:
        """Joins the run; if something is found, makes Lightning restore from it. Collective."""
        refuse_callbacks(self._trainer.callbacks)
        if self._trainer.max_steps > 0:  # an option counts more: it is said later
            notes.say_total(self._trainer.max_steps)
        found = self.checkpointer.open()
        if self._config.log_time and self._trainer.is_global_zero:
            self._time = TimeFigures(self.checkpointer.run, self.checkpointer.name)
        if self.checkpointer.has_past:
            save_config_again(self._trainer.callbacks)
        if found is None:
            return
        self._found, self._iteration = found.extras, found.iteration
        self._newest, self._new_rank, self._resize = found.iteration, found.new_rank, iterators.resumption.resize
        with self.checkpointer.putting_back():
            if self._config.elastic:
                self._given_accumulation = self._trainer.accumulate_grad_batches
                strategy = self._trainer.strategy
                resize = Resize(then=found.world_size, now=strategy.world_size, rank=strategy.global_rank)
                carried = trainer_loops.carry_over(self._trainer, found.extras, resize if resize.then != resize.now else None)
                self.checkpointer.accumulation = carried
            self._make_loaders_as(training=found.extras.get("training_data"), validation=found.extras.get("validation_data"))
            trainer_checkpoints.offer_checkpoint(self._trainer, self.checkpoint)
            is_same_launch = found.extras.get("launch") == self.checkpointer.launch  # snapshots in storage may be older
            step = trainer_checkpoints.logged_steps(self.checkpoint)
            late = found.extras.get("late files")
            if self._io is not None:
                self._io.resume(self.checkpointer, late)
            elif late:
                text = "%s: not known to be written before the failure, and it cannot be without GeminiCheckpointIO"
                log.warning(text, ", ".join(late["paths"]))
            self._logs.go_on(found.extras["loggers"], step, is_same_launch=is_same_launch)
            trainer_checkpoints.pin_checkpoint_folders(self._trainer, self.checkpoint, is_same_launch=is_same_launch)

    def wrapped(self, model: Any) -> None:
        """Takes the module that Lightning has wrapped, before anything else is attached to the wrapper."""
        if isinstance(model, DistributedDataParallel):
            self._ddp = model
            frozen_at_first(model)
            self.checkpointer.wrapped_by({"module": model})
            if self._found is not None:
                with self.checkpointer.putting_back():
                    restore_buckets(model, self._found["ddp"])

    def bind(self) -> None:
        """Takes model and optimizers in their final form, and the object that synchronises gradients, if there is one."""
        if (gradients := getattr(self._trainer.strategy, "gradients", None)) is not None:
            self.checkpointer.attach_gradients(gradients)
        self._bind_state()
        if self._io is not None:
            self._io.begin(self.checkpointer)
        given = (self._trainer, *self._trainer.callbacks, *self._trainer.loggers, self._trainer.datamodule)
        attempt.watch(each for each in given if each is not None)
        self.checkpointer.script_gives(*trainer_checkpoints.given(self._trainer))
        self._optimizers = list(self._trainer.strategy.optimizers)
        self._tree = tree = ModuleTree({"module": self._trainer.lightning_module})
        self._modes = modes = trainer_callbacks.modes_of(self._trainer, self._package, tree.modules(), self._torch_optimizers())
        self.checkpointer.census.register(
            "the Trainer", lambda: [*findings(self._trainer), *modes.findings(tree.modules())], lambda: fingerprint(self._trainer)
        )
        if self._found is not None:
            trainer_callbacks.drop_replaced_schedulers(self._trainer, self.checkpoint)
            complete(self._trainer, self.checkpoint, self._trainer.lightning_module.state_dict())
            trainer_loops.before_positions(self._trainer, lambda: self.training_data.beside(self._before_positions))

    def load(self) -> None:
        """Fills model and optimizers. Collective. Gradients come once more with the first batch: Lightning zeroes all before its loop."""
        self.checkpointer.load_tensors()
        params = self._trainer.lightning_module.parameters()
        self._waiting = {param: param.grad.clone() for param in params if param.grad is not None}

    def newer_of(self, path: Any, load: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The checkpoint at the user's ``ckpt_path`` or the snapshot that was found, whichever has more steps.

        ``load``: reads it. Not called if the run began with this very path: then it has got further since.
        """
        assert self._found is not None
        if self._found["ckpt_path"] != str(path):
            checkpoint = load()
            if checkpoint.get("global_step", 0) > self.checkpoint["global_step"]:
                log.info("%s is at step %d: not resuming step %d of this run", path, checkpoint["global_step"], self._iteration)
                self._found, self._new_rank, self._resize = None, None, None
                iterators.resumption.resize = None
                if self._config.elastic and self._trainer.accumulate_grad_batches == self.checkpointer.accumulation:  # as carried over
                    self._trainer.accumulate_grad_batches = self._given_accumulation
                self.follow_accumulation()
                self._make_loaders_as(training=None, validation=None)
                trainer_checkpoints.withdraw_checkpoint(self._trainer)
                return checkpoint
        log.info("resuming step %d of this run, which is newer than %s", self._iteration, path)
        return self.checkpoint

    def follow_accumulation(self) -> None:
        """Is called when the Trainer has another number of batches in a step; does nothing here."""

    def before_update(self) -> None:
        """Waits, as parameters and optimizer state are about to be written."""
        self.checkpointer.wait_before_update()
        if self._io is not None:
            self._io.before_update()

    def pause(self) -> None:
        """Pauses for validation: steps stay out for a while, and callbacks may exchange the weights meanwhile."""
        self._write_files("validation begins")
        self.checkpointer.wait_before_update()
        self._pauses.enter_context(self.checkpointer.paused())
        if self.turns is not None:
            self.turns.rest()

    def go_on(self) -> None:
        """Goes on after validation."""
        self._pauses.close()
        if self.turns is not None:
            self.turns.go_on()

    def close(self, finished: bool = False, interrupted: bool = False) -> None:
        """Ends the fit. After a failure the agents keep what they hold."""
        try:
            self._write_files("no update comes after it")
        except Exception as error:
            if finished:
                raise
            log.error("%s", error)
        if self._io is not None:
            self._io.begin(None)
        for end in self._hooks:
            end()
        if finished:
            self.files.keep()
        if self.turns is not None:
            self.turns.end()
        self._logs.close()
        self._pauses.close()
        self.checkpointer.close(finished=finished, interrupted=interrupted)

    def _write_files(self, why: str) -> None:
        if self._io is not None:
            self._io.write_now(why)

    def _bind_state(self) -> None:
        strategy = self._trainer.strategy
        self.checkpointer.bind(strategy.lightning_module, strategy.optimizers, modes=False)

    def _torch_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return every_optimizer(self._trainer.strategy.optimizers)

    @property
    def _steps(self) -> int:
        """Updates of the parameters so far."""
        return int(self._trainer.global_step)

    @property
    def _is_accumulating(self) -> bool:
        """Whether there are gradients that the next update needs; no snapshot has them."""
        return trainer_loops.is_accumulating(self._trainer)

    def _make_loaders_as(self, *, training: dict[str, Any] | None, validation: dict[str, Any] | None) -> None:
        self.training_data.resume(training)
        self._validation_data.resume(validation)

    def _present_modes(self) -> dict[str, Any] | None:
        return self._modes.collect(self._tree.modules()) if self._modes is not None else None

    def _restore_modes(self, state: dict[str, Any], but: Iterable[Any] = ()) -> None:
        assert self._modes is not None
        resize = self._resize
        with self._modes.naming_replaced(self._tree.modules(), resize) if resize is not None else contextlib.nullcontext():
            self._modes.restore(state, self._tree.modules(), but=but)

    def _follow_optimizers(self) -> None:
        """Captures, from now on, optimizers that training has replaced, if a restart can do the same."""
        old, self._optimizers = self._optimizers, list(self._trainer.strategy.optimizers)
        if self._last_step is None or [_place_of(one) for one in old] != [_place_of(one) for one in self._optimizers]:
            raise UnsupportedStateError(
                "trainer.strategy.optimizers was replaced before the first batch, or by optimizers of another class or of other "
                "parameters; a restarted script loads the state into those of configure_optimizers. Return all that are used from "
                "configure_optimizers, or change the parameter groups of those that are there"
            )
        self._bind_state()

    def _begin_files(self, saved: dict[str, Any] | None) -> None:
        note = state_folder() / f"{self.checkpointer.run}-{self.checkpointer.name}.files"
        # A file of the user's that was followed may refer to others.
        self.files.begin(saved, note, "" if self._trainer.ckpt_path else self.checkpointer.launch)

    def _before_positions(self) -> None:
        self._validation_data.settle()
        if self._epoch_hooks == "rerun":
            trainer_loops.rerun_epoch_start(self._trainer, self._package)

    def _before_batch(self) -> None:
        optimizers = self._trainer.strategy.optimizers
        if len(optimizers) != len(self._optimizers) or any(a is not b for a, b in zip(optimizers, self._optimizers, strict=True)):
            self._follow_optimizers()
        made = self.checkpointer.steps_made()
        if self._found is not None:
            loaders = map(bookmark_of, trainer_loops.training_loaders(self._trainer))
            with self.checkpointer.putting_back():
                self._begin_files(self._found.get("files", {}))
                found, self._found = self._found, None
                restore(self._trainer, self._package, found, self._new_rank)
                iterators.resumption.resize = None  # positions that are loaded later are of the present ranks
                if self._resize is not None:
                    trainer_loops.refuse_end(self._trainer, self._resize, found["loops"].get("batches", (None, 0))[1])
                for param, gradient in self._waiting.items():
                    param.grad = gradient
                self._waiting = {}
                if self.turns is not None:
                    self._make_logical_ranks(has_begun=True)
                if self._ddp is not None:
                    restore_sync(self._ddp, found["ddp"])
                self._restore_modes(found["modes"], but=[item for mark in loaders if mark is not None for item in mark.own_objects])
                self._resize = None
                if self.turns is not None:
                    self.checkpointer.load_logical()
                of_data, self._to_be_drawn = split(found.get("lost", []))  # snapshots in storage may be older
                self._refuse_lost(of_data)
        elif self._last_step is None:
            self._begin_files(None)
            if self.turns is not None:
                self._make_logical_ranks(has_begun=False)
        else:
            self._refuse_lost(self._to_be_drawn, only_there=True)
            self._to_be_drawn = {}
        if self._config.elastic:
            self._refuse_batches()
        step = self._steps
        if self._time is not None and (figures := self._time.due()):
            for logger in self._trainer.loggers:
                logger.log_metrics(figures, trainer_loops.steps_logged(self._trainer))
        if self._last_step is None:
            self._last_step = step  # as it was loaded, or initialised: nothing new yet
        if self.checkpointer.stats.committed is not None:
            self.files.keep()
        if step == self._last_step:
            self._name_uncounted(made)
        if step == self._last_step or self._is_accumulating:
            return
        before, self._last_step, self._made = self._last_step, step, made
        if step > self._newest and self.checkpointer.due(before, step):  # they count from 0 where a module goes over to steps by hand
            self._newest = step
            self.checkpointer.save(step, self._extras())
        else:
            self.checkpointer.alive(step)

    def _make_logical_ranks(self, *, has_begun: bool) -> None:
        turns = self.turns
        assert turns is not None
        assert turns.dealt is not None
        turns.ranks = self.checkpointer.logical_ranks(turns.count, turns.dealt.of)
        self.checkpointer.compare_logical(has_begun=has_begun)

    def _refuse_batches(self) -> None:
        """Refuses, for ``elastic``, what another number of ranks could not follow: at the first batch, and of each later epoch."""
        given = self._trainer.accumulate_grad_batches
        if self._last_step is None:
            self.checkpointer.accumulation = given
        elif given != self.checkpointer.accumulation:
            raise ConfigError(
                f"elastic='batch': accumulate_grad_batches was {self.checkpointer.accumulation} and has become {given} while training, "
                "which another number of ranks cannot follow; set it before the training, or leave elastic out"
            )
        if self._last_step is None or self._looked_at != trainer_loops.epoch(self._trainer):
            self._looked_at = trainer_loops.epoch(self._trainer)
            trainer_loops.refuse_batches(self._trainer)
            if self.turns is not None:
                self.turns.refuse()
                return
            self.checkpointer.refuse_data({f"loader {at}": one for at, one in enumerate(trainer_loops.training_loaders(self._trainer))})

    def _name_uncounted(self, made: float) -> None:
        if self._trainer.is_global_zero and made - self._made >= _PATIENCE:
            self._made = math.inf
            log.warning(
                "optimizers have made %d steps that trainer.global_step has not counted, and there is no snapshot of these: step the "
                "optimizers that self.optimizers() gives, not those of self.optimizers(use_pl_optimizer=False) or optimizer.optimizer",
                _PATIENCE,
            )

    def _lost(self) -> dict[str, str]:
        """Digests of attributes of the training data that no snapshot can keep, unless batches do without or they come again."""
        return {path: digest for mark in self._losing for path, digest in mark.lost_here.items()}

    @property
    def _losing(self) -> list[Bookmark]:
        """The loaders of the training whose batches do not do without what no snapshot can keep."""
        if self._epoch_hooks == "rerun" or self._trainer.strategy._gemini_data_resume == "skip":
            return []
        marks = map(bookmark_of, trainer_loops.training_loaders(self._trainer))
        return [mark for mark in marks if mark is not None and mark.way != "own"]

    def _refuse_lost(self, then: dict[str, str], *, only_there: bool = False) -> None:
        """Refuses a snapshot whose data had changed in a way that loading the batches of the epoch again has not repeated."""
        now: dict[str, str] = {}
        for mark in self._losing if then else ():  # of several loaders with an attribute of one name any may have it as it was
            now |= {path: one for path, one in mark.lost_now(then).items() if path not in now or now[path] != then.get(path)}
        refuse_gone(then, now, only_there=only_there)

    def _extras(self) -> dict[str, Any]:
        self.live = self._trainer.lightning_module.state_dict() if trainer_checkpoints.is_checkpoint_seen(self._trainer) else {}
        try:
            ours = {
                "launch": self.checkpointer.launch,
                "ckpt_path": str(self._trainer.ckpt_path),
                "ddp": ddp_state(self._ddp) if self._ddp is not None else None,
                "modes": self._present_modes(),
                "lost": self._lost(),
                "training_data": self.training_data.made,
                "validation_data": self._validation_data.made,
                "loggers": self._logs.state(),
                "files": self.files.state(),
            }
            if self.turns is not None:
                ours["logical"] = self.turns.state_dict()
            if self._io is not None:
                ours["late files"] = self._io.state()
            return capture(self._trainer, self.live) | ours
        finally:
            self.live = None


def _place_of(optimizer: Any) -> tuple[Any, ...]:
    """Properties that two optimizers must share for one to take the other's state."""
    return type(optimizer), [[id(param) for param in group["params"]] for group in optimizer.param_groups]
