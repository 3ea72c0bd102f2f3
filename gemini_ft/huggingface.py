"""Resumes transformers' Trainer exactly where it was, in the middle of an epoch too: under DDP and DeepSpeed.

    trainer = Trainer(model, TrainingArguments(...), train_dataset=..., callbacks=[gemini_ft.huggingface.GeminiCallback()])
    trainer.train()

Under DeepSpeed the options are the "gemini" section of its configuration, which alone protects the engine: weights, optimizer,
counters. Elsewhere they are the callback's, and those of the environment. The callback adds what the Trainer keeps besides: its
step and epoch, the position in the data, the order of the rest of the epoch, schedulers of its own, logs, callbacks
with a state, and random numbers. A snapshot is taken when the next step begins: evaluation, logs and saving after a step
belong to it. Under plain torchrun too; in workers of ``gemini run`` a Trainer without the callback is given one (`protect`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import transformers.trainer
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback
from transformers.integrations.deepspeed import deepspeed_load_checkpoint
from transformers.trainer import _is_peft_model
from transformers.trainer_callback import ExportableState

from gemini_ft.checkpointer import Checkpointer, Snapshot
from gemini_ft.config import load_config
from gemini_ft.core.census import TRAINER, TRAINER_DATA, Finding
from gemini_ft.errors import ConfigError, CorruptDataError, StateError, WorldSizeError
from gemini_ft.state import codec, iterators
from gemini_ft.state.ddp import ddp_state, restore_buckets, restore_sync
from gemini_ft.state.hyperparameters import of_scheduler
from gemini_ft.state.rng import branch_randomness, rng_state, set_rng_state, take_rng_state
from gemini_ft.trackers import TimeFigures, continued, open_runs
from gemini_ft.transformers_state import EvaluationData, OwnAttributes, TrainingData, followers, ranks, why_weighed_by_ranks
from gemini_ft.transformers_versions import SEAMS, check_trainer, counts, told_of_epochs
from gemini_ft.worker import attempt

__all__ = ["GeminiCallback", "protect"]

_log = logging.getLogger("gemini_ft")

_KEY = "transformers"  # in the engine's client_state
# These belong to this process, not to the training.
_OWN = ("is_local_process_zero", "is_world_process_zero", "stateful_callbacks", "log_history")
_NO_FOLDER = "/dev/null/gemini"  # the Trainer skips batches only if it resumes from somewhere; nothing is found there


class GeminiCallback(TrainerCallback):  # type: ignore[misc]
    """A callback for the Trainer's ``callbacks``. Under DeepSpeed without a "gemini" section in its configuration it does nothing.

    Args:
        gradient_pipeline: rules by which gradients travel, or their file, for a Trainer on DDP (docs/pipelines.md).
        **options: fields of `gemini_ft.GeminiConfig`, for a Trainer without DeepSpeed.

    Raises:
        ConfigError: this version of transformers is not known, or an option is wrong; when training begins: the Trainer runs on
            something that is not known here.
    """

    def __init__(self, *, gradient_pipeline: Any = None, **options: Any) -> None:
        _extend_trainer()
        load_config(options)
        self._options, self._rules = options, gradient_pipeline
        self._gradients: Any = None
        self._protection: Any = None
        self._opened: _Protection | None = None  # that of a training which is about to count its steps
        self._found: dict[str, Any] | None = None  # what is resumed, until the training has come there
        self._trainer: Any = None
        self._epoch = self._steps_before = self._of_epoch = 0  # this epoch, the steps made before it, and its own
        self._epoch_rng: dict[str, Any] = {}  # at its beginning
        self._history: tuple[int, str | bytes | list[Any]] = (0, "[]")
        self._data: Any = None
        self._evaluations: Any = None
        self._attributes: Any = None
        self._evaluates_on_start = False
        self._paused = ExitStack()
        self._tracked = ExitStack()  # closed once other callbacks have begun, or gone on with, runs of trackers
        self._time: TimeFigures | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes copies and pickles callbacks of their own: they have no part in the training under way."""
        return functools.partial(type(self), gradient_pipeline=self._rules, **self._options), ()

    @property
    def fetches_again(self) -> bool:
        """Whether a training that goes on in the middle of an epoch fetches the batches of that epoch again."""
        return self._data is not None and bool(self._data.is_fetched_again)

    # -- called by the Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._found is not None and self._found["finished"]:
            self._restore_counts(self._found)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._tracked.close()
        if self._found is not None:  # no epoch was left, as the Trainer began at its last checkpoint
            self._arrive(self._found)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._paused.close()
        self._tracked.close()
        if self._protection is None:
            return
        if self._protection.checkpointer.config.elastic:
            self._refuse_fixed()
        if self._found is not None:
            self._arrive(self._found)
        else:
            self._save()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._time is not None and (figures := self._time.due()):
            is_due = control.should_log  # the Trainer's own figures, which this call would take for logged
            self._trainer.log(figures)
            control.should_log = is_due
        if control.should_evaluate or control.should_save:
            self._pause(validates=control.should_evaluate)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pause(validates=control.should_evaluate)

    # -- called by the extended Trainer

    def open(self, trainer: Any) -> None:
        """Finds out, for ``elastic``, what is to be resumed before the Trainer counts the steps of an epoch."""
        if trainer.is_in_train and not trainer.is_deepspeed_enabled and load_config(self._options).elastic:
            self._opened = _Protection(trainer, self._options)

    def prepare(self, trainer: Any, prepare: Callable[..., Any], max_steps: int, train_dataloader: Any, checkpoint: str | None) -> Any:
        """Makes the engine, and resumes it if there is something to resume; from a checkpoint only if that is newer."""
        self._protection, self._found, self._trainer = None, None, trainer
        opened, self._opened = self._opened, None
        prepared = prepare(max_steps, train_dataloader, None)
        if self._rules is not None:
            self._average(trainer)
        _refuse_skipping(trainer)
        if trainer.is_deepspeed_enabled:
            self._protection = _of_engine(trainer, self._options)
        else:
            self._protection = opened or _Protection(trainer, self._options)
            self._protection.bind()
        resumed = None
        if self._protection is not None:
            resumed = self._protection.resumed
            self._data = TrainingData(prepared[1], trainer.args.gradient_accumulation_steps)
            self._evaluations = EvaluationData(trainer)
            checkpointer = self._protection.checkpointer
            if checkpointer.config.log_time and trainer.is_world_process_zero():
                self._time = TimeFigures(checkpointer.run, checkpointer.name)
            self._attributes = OwnAttributes(trainer)
        found = self._protection.client_state.get(_KEY) if resumed is not None else None
        if found is not None and (checkpoint is None or not self._is_overtaken(found, checkpoint, max_steps)):
            with self._protection.checkpointer.putting_back():
                operator.itemgetter("data", "ranks", "attributes")(found)  # which are put back later
                self._restore_state(found)
            self._found = found
            self._tracked.enter_context(continued(found.get("trackers", {})))  # snapshots in storage may be older
            self._evaluates_on_start, trainer.args.eval_on_start = trainer.args.eval_on_start, False  # that evaluation belongs to the past
        elif checkpoint is not None:  # as the Trainer does where it was given none
            iterators.resumption.resize = None  # nothing comes from positions of other ranks
            if trainer.is_deepspeed_enabled:
                deepspeed_load_checkpoint(trainer.model_wrapped, checkpoint, load_module_strict=not _is_peft_model(trainer.model))
            elif trainer.is_fsdp_enabled:
                trainer._load_from_checkpoint(checkpoint, trainer.model_wrapped)
            elif resumed is not None:  # the Trainer has loaded the weights before, and the snapshot's are in their place
                trainer._load_from_checkpoint(checkpoint)
            trainer._load_optimizer_and_scheduler(checkpoint)
            trainer._load_scaler(checkpoint)
        elif resumed is not None:
            raise ConfigError(
                f"step {resumed} was recorded without a GeminiCallback, so the Trainer's position is not known; "
                "start afresh with another run_id or resume='never', or take the callback away"
            )
        return prepared

    def run_epoch(self, run: Callable[..., None], named: dict[str, Any]) -> None:
        """Runs one epoch, or the rest of it."""
        if self._protection is None:
            return run(**named)
        trainer, epoch, found = self._trainer, named["epoch"], self._found
        go_on: Callable[..., Any] | None = None
        accumulated = trainer.args.gradient_accumulation_steps
        is_resized = found is not None and self._protection.checkpointer.config.elastic is not None and found["ranks"] != ranks()
        if found is not None:
            if is_resized and not found["finished"]:
                self._refuse_other_steps(found, named["num_update_steps_per_epoch"])
            if epoch < found["epoch"]:
                return None
            for earlier in range(found["epoch"], epoch):  # the Trainer begins where a checkpoint is that was not followed
                self.run_epoch(run, {**named, "epoch": earlier})
                if trainer.control.should_training_stop:
                    return None
                trainer.control = trainer.callback_handler.on_epoch_begin(trainer.args, trainer.state, trainer.control)
                named["resume_from_checkpoint"] = None
            found = self._found
        if found is not None:
            self._restore_counts(found)
            trainer.args.eval_on_start = self._evaluates_on_start
            has_stopped = found["state"]["max_steps"] == trainer.state.max_steps  # or early: a job that goes on for longer does not stop
            if found["finished"] and (has_stopped or trainer.state.global_step >= trainer.state.max_steps):
                self._arrive(found)
                trainer.control.should_training_stop = True
                return None
            if is_resized:  # a job may go on for longer than was planned
                self._refuse_other_steps(found, named["num_update_steps_per_epoch"])
            if found["steps"] >= named["num_update_steps_per_epoch"]:
                self._arrive(found)
                return None
            set_rng_state(found["epoch_rng"])
            named |= {"epochs_trained": epoch, "steps_trained_in_current_epoch": found["steps"] * accumulated}
            named["resume_from_checkpoint"] = _NO_FOLDER if found["steps"] else None
            if is_resized:
                found["data"] = found["data"] and found["data"] | {"random": {}}  # of the batches of other ranks
                set_rng_state(found["rng"])
                branch_randomness(ranks())  # data draw other numbers than the steps after them
            fits = found["data"] is not None and (is_resized or found["ranks"] == ranks())
            if fits or self._data.is_fetched_again:
                go_on = functools.partial(self._data.rest_of, found=found["data"] if fits else None)
                if not found["steps"]:
                    named["train_dataloader"] = go_on(named["train_dataloader"], 0)
        in_the_middle = named["resume_from_checkpoint"] is not None and epoch == named["epochs_trained"]
        self._steps_before = trainer.state.global_step
        if in_the_middle:
            self._steps_before -= named["steps_trained_in_current_epoch"] // accumulated
        self._epoch, self._epoch_rng, self._of_epoch = epoch, rng_state(), named["num_update_steps_per_epoch"]
        with _resuming_in_the_loader(go_on) if in_the_middle else nullcontext():
            run(**named)
        if trainer.control.should_training_stop or epoch + 1 >= trainer.state.num_train_epochs:
            self._save(finished=True)
            self._protection.checkpointer.wait_before_update()  # the next lines may load the best model
            self._pause(validates=False)  # the next part may take long: evaluation, the export of the model
        return None

    # -- inside

    def _average(self, trainer: Any) -> None:
        """Has gradients travel by the rules, before anything is resumed: what they keep is part of that."""
        if trainer.is_deepspeed_enabled:
            raise ConfigError('under DeepSpeed the rules belong into the section "gradient_pipeline" of its configuration')
        from gemini_ft.pipeline.synchronizer import GradientSynchronizer, ddp_around

        model = trainer.model_wrapped
        if (ddp := ddp_around(model)) is None:
            raise ConfigError(
                "GeminiCallback(gradient_pipeline=) is for a Trainer on DistributedDataParallel, and this one trains a "
                f"{type(model).__name__} in {trainer.args.world_size} processes; start it by torchrun with several processes and without "
                "FSDP, or leave it out"
            )
        if self._gradients is not None:  # of a training before
            if self._gradients.ddp is ddp:  # which has one hook as long as it lives
                return
            self._gradients.close()
        self._gradients = GradientSynchronizer(model, self._rules, scaler=trainer.accelerator.scaler)

    def _is_overtaken(self, found: Mapping[str, Any], checkpoint: str, max_steps: int) -> bool:
        """Whether a checkpoint has more steps than the snapshot that was found, and is not one that this training has just written.

        What memory has of it is exact, also where the training failed between a checkpoint and the next step: then it is few steps behind,
        at most twice as many as lie between two snapshots. A last checkpoint leaves nothing to train.
        """
        trainer, then, done = self._trainer, found["state"]["global_step"], self._trainer.state.global_step
        is_own = os.path.realpath(checkpoint).startswith(os.path.join(os.path.realpath(trainer.args.output_dir), ""))
        is_exact = is_own and done < max_steps and not trainer.is_deepspeed_enabled and self._protection.source == "memory"
        interval = self._protection.checkpointer.config.fixed_interval or 2
        is_near = is_exact and done - then <= 2 * interval  # the last snapshot before it may not have been committed
        is_overtaken = bool(then < done and not is_near)
        if trainer.is_world_process_zero():
            names = [f"the snapshot of step {then}", checkpoint]
            followed, other = reversed(names) if is_overtaken else names
            place = "ahead of" if then < done and not is_overtaken else "behind"
            _log.info("%s is followed, not %s, which is %d steps %s it", followed, other, abs(done - then), place)
        return is_overtaken

    def _pause(self, *, validates: bool) -> None:
        """Announces that no sign of life is due until the next step."""
        if self._protection is not None:
            self._paused.close()
            self._paused.enter_context(self._protection.checkpointer.paused(validates=validates))

    def _arrive(self, found: Mapping[str, Any]) -> None:
        """Puts random numbers and attributes back: on the way here loaders have drawn seeds, and callbacks have begun an epoch."""
        self._data.settle()
        take_rng_state(found["rng"], self._protection.found.new_rank)
        self._attributes.restore(found["attributes"])
        self._found, iterators.resumption.resize = None, None  # positions that are loaded later are of the present ranks

    def _save(self, finished: bool = False) -> None:
        trainer, state = self._trainer, self._trainer.state
        steps = state.global_step - self._steps_before
        if len(state.log_history) != self._history[0]:
            self._history = len(state.log_history), _packed(state.log_history)
        saved = {
            "epoch": self._epoch,
            "steps": steps,
            "of_epoch": self._of_epoch,
            "data": self._data.before_step(steps),
            "ranks": ranks(),
            "evaluations": self._evaluations.states(),
            "attributes": self._attributes.collect(),
            "finished": finished,
            "epoch_rng": self._epoch_rng,
            "rng": rng_state(),
            "state": {field.name: getattr(state, field.name) for field in dataclasses.fields(state) if field.name not in _OWN},
            "history": self._history[1],
            "counts": counts(trainer),
            "loss": trainer._tr_loss.item(),
            "trackers": open_runs(),
            "callbacks": [[name, callback.state()["attributes"]] for name, callback in _with_state(trainer)],
        }
        if getattr(trainer.model_wrapped, "lr_scheduler", None) is None:  # else it is the engine's, and saved with it
            rates = [group["lr"] for group in trainer.optimizer.param_groups]
            saved["scheduler"] = {"state": trainer.lr_scheduler.state_dict(), "rates": rates}
        self._protection.client_state[_KEY] = saved
        self._protection.save()

    def _refuse_other_steps(self, found: Mapping[str, Any], steps: int) -> None:
        """Refuses, for ``elastic``, an epoch of another number of steps: rates that follow from all steps of the training would be others.

        Raises WorldSizeError: it has another one.
        """
        if found["of_epoch"] != steps:
            raise WorldSizeError(
                f"elastic='batch': an epoch has {found['of_epoch']} steps on {found['ranks']} ranks and {steps} on {ranks()}, as "
                f"dataloader_drop_last=True leaves out other batches; start {found['ranks']} ranks, or leave that out in a new run"
            )

    def _refuse_fixed(self) -> None:
        """Refuses, for ``elastic``, what another number of ranks could not follow, or would weigh otherwise.

        Raises:
            ConfigError: there is something of the kind.
            UnsupportedStateError: the samples could not be dealt out anew.
        """
        trainer, checkpointer, micro_batches = self._trainer, self._protection.checkpointer, self._trainer.args.gradient_accumulation_steps
        if micro_batches != checkpointer.accumulation:
            raise ConfigError(
                f"elastic='batch': gradient_accumulation_steps was {checkpointer.accumulation} and has become {micro_batches} while "
                "training, which another number of ranks cannot follow; set it before the training, or leave elastic out"
            )
        if why := why_weighed_by_ranks(trainer):
            raise ConfigError(f"elastic='batch': {why}, or leave elastic out")
        checkpointer.refuse_data({"train_dataset": self._data.base})
        given = {"dispatch_batches": self._data.is_fetched_again, "auto_find_batch_size": trainer.args.auto_find_batch_size}
        if found := [name for name, is_given in given.items() if is_given]:
            raise ConfigError(f"elastic='batch' does not go with {'=True, '.join(found)}=True; leave that out, or elastic")

    def _restore_state(self, found: Mapping[str, Any]) -> None:
        trainer = self._trainer
        for name, value in found["state"].items():
            if name not in ("max_steps", "num_train_epochs"):  # a job may go on for longer than was planned
                setattr(trainer.state, name, value)
        self._evaluations.restore(found["evaluations"])
        trainer.state.log_history = _unpacked(found["history"])
        for (name, callback), (then, attributes) in zip(_with_state(trainer), found["callbacks"], strict=False):
            if name == then:
                vars(callback).update(attributes)
        if "scheduler" in found and getattr(trainer.model_wrapped, "lr_scheduler", None) is None:
            trainer.lr_scheduler.load_state_dict(found["scheduler"]["state"])
            for group, rate in zip(trainer.optimizer.param_groups, found["scheduler"]["rates"], strict=True):
                group["lr"] = rate
        if trainer.is_world_process_zero():
            _log.info("the Trainer goes on after step %d of epoch %d", found["steps"], found["epoch"])

    def _restore_counts(self, found: Mapping[str, Any]) -> None:
        for name, value in found["counts"].items():
            setattr(self._trainer, name, value)
        self._trainer._tr_loss = torch.full_like(self._trainer._tr_loss, found["loss"])


def protect(trainer: Any) -> None:
    """Gives a Trainer that is about to train a `GeminiCallback`, unless it has one; `gemini run` does so for unchanged scripts.

    Searches for hyperparameters, and engines of DeepSpeed without a "gemini" section, are left alone. So are versions of transformers and
    arguments that the callback refuses, with a warning.

    Raises ConfigError: an option of the environment is wrong.
    """
    if _of(trainer) is not None or trainer.hp_search_backend is not None:
        return
    if trainer.is_deepspeed_enabled and "gemini" not in trainer.accelerator.state.deepspeed_plugin.deepspeed_config:
        return
    try:
        _extend_trainer()
        _refuse_skipping(trainer)
    except ConfigError as error:
        _log.warning("transformers' Trainer is not protected: %s", error)
    else:
        trainer.add_callback(GeminiCallback())


def _refuse_skipping(trainer: Any) -> None:
    if trainer.args.ignore_data_skip:
        raise ConfigError("ignore_data_skip=True gives up the position in the data, which GeminiCallback restores; leave it out")


class _Protection:
    """The protection of a training that no DeepSpeed engine protects.

    Attributes:
        checkpointer: records and resumes.
        resumed: optimizer steps that were resumed; None at a first start.
        source: "memory" or "storage", which they were read from.
        found: what is resumed: with ``elastic`` at once, otherwise from `bind` on.
        client_state: the callback's own, saved with every step and restored.

    Args:
        trainer: a Trainer that is about to count its steps; with ``elastic`` it is given the micro-batches of the global batch.
        options: fields of `gemini_ft.GeminiConfig`.
    """

    def __init__(self, trainer: Any, options: Mapping[str, Any]) -> None:
        self._trainer, config = trainer, load_config(options)
        self.client_state: dict[str, Any] = {}
        self.resumed: int | None = None
        self.source, self._steps = "", 0  # the steps of the last snapshot
        self.found: Snapshot | None = None
        # A single rank trains a model that nothing wraps.
        replicated = True if config.elastic and not trainer.is_fsdp_enabled else None
        self.checkpointer = checkpointer = Checkpointer(config=config, name=attempt.next_name("trainer"), replicated=replicated)
        checkpointer.accumulation, checkpointer.asks_for_accumulation = trainer.args.gradient_accumulation_steps, True
        attempt.kept.append(self)
        checkpointer.census.register("transformers' Trainer", lambda: _findings(trainer))
        if config.elastic:
            self.found = checkpointer.open()
            trainer.args.gradient_accumulation_steps = checkpointer.accumulation

    def bind(self) -> None:
        """Names the model and the optimizer, which are prepared by now, and puts back what is found."""
        trainer = self._trainer
        self._model, self._scaler = trainer.model_wrapped, trainer.accelerator.scaler
        self.checkpointer.bind({"model": self._model, **followers(trainer)}, trainer.optimizer.optimizer)
        self.checkpointer.script_gives(of_scheduler(f"the Trainer's {type(trainer.lr_scheduler).__name__}", trainer.lr_scheduler))
        if not self.checkpointer.config.elastic:
            self.found = self.checkpointer.open()
        if (found := self.found) is None:
            return
        self.source = found.source
        self.checkpointer.load_tensors()
        with self.checkpointer.putting_back():
            if isinstance(self._model, DistributedDataParallel) and found.extras["ddp"] is not None:
                restore_buckets(self._model, found.extras["ddp"])
                restore_sync(self._model, found.extras["ddp"])
            if self._scaler is not None:
                self._scaler.load_state_dict(found.extras["scaler"])
            self.client_state, self.resumed, self._steps = {**found.extras["client_state"]}, found.iteration, found.iteration
            set_rng_state(found.extras["rng"])

    def save(self) -> None:
        """Takes a snapshot if there was a step since the last one and the interval says so."""
        before, self._steps = self._steps, max(self._steps, self._trainer.state.global_step)
        if self.checkpointer.due(before, self._steps):
            extras = {
                "client_state": self.client_state,
                "ddp": ddp_state(self._model) if isinstance(self._model, DistributedDataParallel) else None,
                "scaler": self._scaler.state_dict() if self._scaler is not None else None,
                "rng": rng_state(),
            }
            self.checkpointer.save(self._steps, extras)
        elif self._steps > before:
            self.checkpointer.alive(self._steps)


def _of_engine(trainer: Any, options: Mapping[str, Any]) -> Any:
    """The protection of the training's DeepSpeed engine; None if none is asked for."""
    if options:
        raise ConfigError('under DeepSpeed the options belong into the "gemini" section of its configuration, not into GeminiCallback()')
    from gemini_ft.deepspeed import attach

    engine = trainer.model_wrapped
    if "gemini" not in engine.config:
        _log.warning('GeminiCallback keeps nothing: the DeepSpeed configuration has no "gemini" section; {} in it means the defaults')
        if "gradient_pipeline" in engine.config:
            attach(engine)
        return None
    protection = attach(engine).gemini  # under `gemini run` it is already
    if protection.checkpointer.config.elastic:
        raise ConfigError(
            "elastic='batch' is for a Trainer on DDP or FSDP2, and this one has an engine of DeepSpeed. Leave elastic out: ZeRO 1 to 3 "
            "go on with other numbers of ranks without it, or write the loop around the engine (docs/elastic.md)"
        )
    protection.deferred, protection.moves_data = True, False
    protection.checkpointer.census.register("transformers' Trainer", lambda: _findings(trainer))
    return protection


@contextmanager
def _resuming_in_the_loader(go_on: Callable[..., Any] | None) -> Iterator[None]:
    """Inside, ``go_on`` lets a loader begin with the rest of an epoch; where it is None, accelerate makes one that skips batches.

    A loader that skips hands the epoch's number on to the whole loader. Told itself, it would miss samplers and datasets that lie one level
    deeper in it, or tell a dataset that is not told otherwise.
    """
    skip = transformers.trainer.skip_first_batches

    def rest_of(loader: Any, num_batches: int = 0) -> Any:
        if go_on is not None:
            return go_on(loader, num_batches)
        rest = skip(loader, num_batches)

        def set_epoch(epoch: int) -> None:
            rest.iteration = epoch
            for part in told_of_epochs(loader):
                part.set_epoch(epoch)

        rest.set_epoch = set_epoch
        return rest

    transformers.trainer.skip_first_batches = rest_of
    try:
        yield
    finally:
        transformers.trainer.skip_first_batches = skip


def _findings(trainer: Any) -> Iterator[Finding]:
    """Census entries for state that transformers' Trainer holds outside the DeepSpeed engine."""
    yield TRAINER.found("trainer")
    yield from (TRAINER.found(f"callbacks.{name}") for name, _ in _with_state(trainer))
    if (callback := _of(trainer)) is not None and callback.fetches_again:
        yield TRAINER_DATA.found("train_dataset", note=f"a {type(trainer.train_dataset).__name__}")


def _packed(history: list[Any]) -> str | bytes | list[Any]:
    """The entries of a log in one value, which costs a snapshot nothing; as they are where something in them has to be pickled."""
    try:
        return json.dumps(history, default=float)
    except (RuntimeError, TypeError, ValueError):  # arrays, tensors
        pass
    try:
        codec.decode(packed := codec.encode(history))
    except (CorruptDataError, StateError):  # the run's secret signs pickles, with the whole snapshot
        return [*history]
    return packed


def _unpacked(packed: str | bytes | list[Any]) -> list[Any]:
    found: list[Any] = json.loads(packed) if isinstance(packed, str) else codec.decode(packed) if isinstance(packed, bytes) else packed
    return found


def _with_state(trainer: Any) -> list[tuple[str, Any]]:
    """The callbacks that have a state to save, by the name of their class."""
    return [(type(callback).__name__, callback) for callback in trainer.callback_handler.callbacks if isinstance(callback, ExportableState)]


def _of(trainer: Any) -> GeminiCallback | None:
    return next((callback for callback in trainer.callback_handler.callbacks if isinstance(callback, GeminiCallback)), None)


def _extend_trainer() -> None:
    """Lets Trainers that have a `GeminiCallback` ask it; callbacks alone cannot move the position in the data.

    Raises ConfigError: the Trainer of this version has other methods.
    """
    check_trainer()
    if hasattr(Trainer._run_epoch, "_gemini_original"):
        return
    count, prepare, run_epoch = (getattr(Trainer, name) for name in SEAMS)

    @functools.wraps(count)
    def open_and_count(self: Any, args: Any, dataloader: Any) -> Any:
        if (callback := _of(self)) is not None:
            callback.open(self)
        return count(self, args, dataloader)

    @functools.wraps(prepare)
    def prepare_or_resume(self: Any, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        if (callback := _of(self)) is None:
            return prepare(self, max_steps, train_dataloader, resume_from_checkpoint)
        return callback.prepare(self, functools.partial(prepare, self), max_steps, train_dataloader, resume_from_checkpoint)

    @functools.wraps(run_epoch)
    def run_rest_of_epoch(self: Any, **named: Any) -> None:
        if (callback := _of(self)) is None:
            return run_epoch(self, **named)  # type: ignore[no-any-return]
        return callback.run_epoch(functools.partial(run_epoch, self), named)

    prepare_or_resume._gemini_original, run_rest_of_epoch._gemini_original = prepare, run_epoch  # type: ignore[attr-defined]
    Trainer._prepare_for_training, Trainer._run_epoch = prepare_or_resume, run_rest_of_epoch
    Trainer.set_initial_training_values = open_and_count
