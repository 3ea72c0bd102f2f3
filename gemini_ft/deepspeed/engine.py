"""Protects an engine (``attach``): updates wait for the copy under way, and every update is followed by a snapshot.

A "gradient_pipeline" section gives the engine a pipeline as well (`gemini_ft.deepspeed.gradients`), with protection or without.

Only the one engine that is given is changed: it becomes an instance of a subclass of its own class.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader

from gemini_ft.checkpointer import Checkpointer, Snapshot
from gemini_ft.config import load_config
from gemini_ft.core.census import LOADERS
from gemini_ft.deepspeed.border import Border
from gemini_ft.deepspeed.data import EngineData, initialize_protected
from gemini_ft.deepspeed.gradients import EngineGradients, install
from gemini_ft.deepspeed.partitions import base_optimizer
from gemini_ft.deepspeed.state import EngineState
from gemini_ft.errors import ConfigError, GeminiError
from gemini_ft.launch import hooks
from gemini_ft.state.gradients import GradientState
from gemini_ft.state.iterators import unkept
from gemini_ft.state.left_out import left_out
from gemini_ft.state.rng import branch_randomness, rng_state, set_rng_state, unchanged_randomness
from gemini_ft.worker.attempt import never_stay, next_name

_log = logging.getLogger("gemini_ft")
_HANG_SECONDS = 600.0  # for a collective of the engine, where hang_timeout is not set: NCCL's own default
_COUNTERS = {"global_steps", "global_samples"}  # a script that follows the engine reads one of them
_NOT_SCRIPTS = {"accelerate", "deepspeed", "gemini_ft", "transformers"}
ONLY_ANEW = "DeepSpeed begins anew in a new process only"
_open: weakref.WeakSet[Protection] = weakref.WeakSet()


class Protection:
    """gemini-ft's part of one engine, ``engine.gemini``.

    Attributes:
        checkpointer: records and resumes.
        resumed: optimizer steps (``engine.global_steps``) that were resumed; None at a first start.
        client_state: values of the user's own, saved with every step and restored: an epoch's number, for example.
        deferred: True: the state after a step is saved when `save` is called, not at the end of ``engine.step()``. For loops
            that do more than that in a step: schedulers of their own, evaluation, logs.
        moves_data: False: the caller puts the position in the data back by itself.

    Args:
        engine: as ``deepspeed.initialize`` returned it.
        options: fields of `GeminiConfig`.
    """

    def __init__(self, engine: Any, options: Mapping[str, Any]) -> None:
        self._engine = engine
        gradients: GradientState | None = vars(engine).get("gradients")  # of its pipeline; getattr would find the module's too
        state = EngineState(engine)
        never_stay(ONLY_ANEW)
        name = next_name("deepspeed")
        self.checkpointer = Checkpointer(
            config=load_config(options), name=name, hooks=False, resizable=state.resizable, gradients=gradients
        )
        self.client_state = {}
        self.deferred = False
        self.moves_data = True
        self.is_followed = False  # the script has asked how far the resumed engine has come
        self._resumed: int | None = None
        self._updated = self._closed = self._has_looked = False
        self._border = Border(self, engine.module)
        _open.add(self)
        bound_collectives(engine, self.checkpointer.config.hang_timeout)
        self._iteration = 0  # of the last update that counted; it never goes back, whatever is loaded into the engine
        found = self.checkpointer.open()
        with self.checkpointer.putting_back():
            self._data = EngineData(_kept(found))
        self.checkpointer.census.register("data", lambda: (LOADERS.found(name) for name in self._data.objects))
        self.checkpointer.bind_state(state)
        if found is not None:
            self.checkpointer.load_tensors()
            with self.checkpointer.putting_back():
                self.client_state = {**found.extras["client_state"]}
                self._border.is_late = bool(found.extras["late"])
                is_new = dist.get_rank() >= found.world_size
                set_rng_state(found.extras["rng"], of_script=not is_new)  # two ranks never share the script's generators
            if is_new:
                branch_randomness(dist.get_rank())
            self._resumed, self._iteration = engine.global_steps, found.iteration
            self.is_followed = False

    @property
    def resumed(self) -> int | None:
        self.is_followed = True
        return self._resumed

    @property
    def client_state(self) -> dict[str, Any]:
        self.is_followed = True
        return self._client_state

    @client_state.setter
    def client_state(self, values: dict[str, Any]) -> None:
        self._client_state = values

    def keep(self, **objects: Any) -> None:
        """Makes objects part of every snapshot, as the loop's loaders; where the engine was resumed, their state is loaded at once.

        Args:
            **objects: what has ``state_dict`` and ``load_state_dict``: loaders made by `gemini_ft.resumable` or ``engine.deepspeed_io``,
                schedulers, metrics. The loader that DeepSpeed makes of ``training_data`` is kept already.

        Raises:
            ConfigError: an object has no state, or its name is taken.
        """
        for name, item in objects.items():
            self._data.add(name, item)

    def follow(self, loader: Any, begun: bool = False) -> Any:
        """Keeps the loader of the engine's training data, and returns it; see `EngineData.follow`."""
        self._data.follow(loader, begun=begun)
        return loader

    def others(self) -> dict[str, Any]:
        """The states of what is kept and is no data."""
        return self._data.others()

    def tell_who_does_not_follow(self) -> None:
        """Warn of a loop that begins again although the engine has been resumed, once, at its first step."""
        kind = type(self._engine)
        for name in _COUNTERS & vars(kind).keys():
            delattr(kind, name)
        if self._resumed and not self.is_followed and dist.get_rank() == 0:
            _log.warning(
                "THE LOOP HAS BEGUN AGAIN, and the engine was resumed at step %d: nothing has read engine.global_steps before the first "
                "step, so that a loop of N steps makes %d too many. Write `for step in range(engine.global_steps, N)` (docs/deepspeed.md). "
                "Only a loop over one epoch of its loader ends where it should",
                self._resumed,
                self._resumed,
            )

    def updated(self) -> None:
        """Marks weights and optimizer state as written by the engine, unless a scaler skipped the step."""
        self._updated = self._engine.was_step_applied()
        if not self._updated:
            self.checkpointer.alive(self._iteration)

    def stepped(self) -> None:
        """Records that DeepSpeed's step is over, counters included."""
        if not self.deferred:
            self._border.stepped()

    def begins(self) -> None:
        """Records that the next iteration's forward pass is about to begin."""
        if not self.deferred:
            self._border.passed()

    def moment(self) -> dict[str, Any]:
        """The random generators and the position in the data, which the next batch may change."""
        return {"rng": rng_state(), "data": self._data.positions()}

    def save(self, moment: dict[str, Any] | None = None) -> None:
        """Takes a snapshot, if there was an update since the last one and the interval says so.

        Args:
            moment: the result of `moment` when the iteration ended; default: that of now.
        """
        if not self._updated:
            return
        self._updated = False
        self._look_for_what_is_left_out()
        before, self._iteration = self._iteration, max(self._engine.global_steps, self._iteration + 1)
        if self.checkpointer.due(before, self._iteration):
            extras = {"client_state": self.client_state, "kept": self.others(), "late": self._border.is_late}
            self.checkpointer.save(self._iteration, extras | (self.moment() if moment is None else moment))
        else:
            self.checkpointer.alive(self._iteration)

    def _look_for_what_is_left_out(self) -> None:
        """Warns, at the first step, of data and other parts that would not go on where they were."""
        if self._has_looked:
            return
        self._has_looked = True
        if not self.moves_data or dist.get_rank():
            return
        optimizer = self._engine.optimizer
        kept = [item for each in _open for item in (*each._data.objects.values(), each._engine.module, each._engine.lr_scheduler)]
        if others := left_out([*kept, self._client_state], [optimizer, base_optimizer(optimizer)]):
            _log.warning(
                "this script has a %s that is in no snapshot: unless its state goes by way of engine.gemini.client_state, it begins anew "
                "after a failure. Give schedulers to deepspeed.initialize, or anything to engine.gemini.keep(name=...) before the loop "
                "(docs/deepspeed.md)",
                ", a ".join(others),
            )
        if found := unkept(kept, generators=True):
            _log.warning(
                "this loop iterates a DataLoader (of a %s) whose position is in no snapshot: unless the loop itself skips what it has "
                "seen, its epoch begins anew after a failure. Iterate loader = gemini_ft.resumable(loader), and call "
                "engine.gemini.keep(loader=loader) before the loop (docs/deepspeed.md)",
                ", ".join(found),
            )

    def close(self, finished: bool = True) -> None:
        """Leaves the run; after a finished one the agents leave too."""
        if not self._closed:
            if finished:
                self._border.passed()
            self._closed = True
            self._border.close()
            self.checkpointer.close(finished=finished)


def finish() -> None:
    """Ends, with the script that has ended well, the training of every engine that was not destroyed; then raises the first error."""
    errors: list[GeminiError] = []
    for protection in list(_open):
        try:
            protection.close()
        except GeminiError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def bound_collectives(engine: Any, hang_timeout: float | None) -> None:
    """Gives DeepSpeed's groups a timeout, which they lack: a peer that hangs would stop the others for half an hour.

    Args:
        hang_timeout: seconds, as in `GeminiConfig`; None: ten minutes; 0: as DeepSpeed has it.
    """
    if hang_timeout == 0:
        return
    gradients = vars(engine).get("gradients")
    pipeline = gradients.groups if isinstance(gradients, EngineGradients) else []
    for group in {engine.data_parallel_group, engine.seq_data_parallel_group, *pipeline} - {None}:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=hang_timeout or _HANG_SECONDS), group)


def _told(name: str) -> property:
    """A counter of an engine that tells its `Protection` when the script reads it."""

    def read(engine: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] not in _NOT_SCRIPTS:
            engine.gemini.is_followed = True
        return vars(engine)[name]

    def write(engine: Any, value: Any) -> None:
        vars(engine)[name] = value

    return property(read, write)


def _kept(found: Snapshot | None) -> dict[str, Any]:
    """The states that a snapshot has for this rank of what was kept; positions in the data of another number of ranks are dropped."""
    if found is None:
        return {}
    positions, others = found.extras["data"], found.extras["kept"]
    if found.world_size == dist.get_world_size():
        return {**positions, **others}
    if positions and dist.get_rank() == 0:
        _log.warning(
            "the snapshot is of %d ranks: the positions in %s do not fit %d, and these data begin anew",
            found.world_size,
            ", ".join(sorted(positions)),
            dist.get_world_size(),
        )
    return {**others}


class _Protected:
    """The mixin that extends a protected engine's class."""

    gemini: Protection

    def _take_model_step(self, lr_kwargs: Any = None) -> Any:
        self.gemini.tell_who_does_not_follow()
        self.gemini.checkpointer.wait_before_update()
        result = super()._take_model_step(lr_kwargs)  # type: ignore[misc]
        self.gemini.updated()
        return result

    def load_checkpoint(self, *arguments: Any, **named: Any) -> Any:
        with self.gemini.checkpointer.mutate():
            return super().load_checkpoint(*arguments, **named)  # type: ignore[misc]

    def destroy(self) -> Any:
        """Ends the training, unless this is the way out of an exception."""
        self.gemini.close(finished=sys.exc_info()[0] is None)
        return super().destroy()  # type: ignore[misc]

    def __del__(self) -> None:
        self.gemini.close(finished=False)  # training has not been ended by hand; the engine's own calls destroy()
        super().__del__()  # type: ignore[misc]


class _ProtectedEngine(_Protected):
    def step(self, *arguments: Any, **named: Any) -> Any:
        result = super().step(*arguments, **named)  # type: ignore[misc]
        self.gemini.stepped()
        return result


class _ProtectedPipeline(_Protected):
    def _build_data_iter(self, dataset: Any) -> None:
        make = super().deepspeed_io  # type: ignore[misc]
        vars(self)["deepspeed_io"] = lambda *arguments, **named: self.gemini.follow(make(*arguments, **named))
        try:
            super()._build_data_iter(dataset)  # type: ignore[misc]
        finally:
            del vars(self)["deepspeed_io"]

    def train_batch(self, *arguments: Any, **named: Any) -> Any:
        self.gemini.begins()
        result = super().train_batch(*arguments, **named)  # type: ignore[misc]
        self.gemini.stepped()
        return result


def attach(engine: Any, options: Mapping[str, Any] | None = None) -> Any:
    """Protects an engine, with its gradient pipeline, and resumes it if there is something to resume. Collective.

    Args:
        engine: as ``deepspeed.initialize`` returned it, before its first step.
        options: fields of `gemini_ft.GeminiConfig`; default: the ``"gemini"`` section of the engine's configuration.

    Returns:
        The same engine. ``engine.global_steps`` says how many steps are done, ``engine.gemini`` is its `Protection`.

    In workers of ``gemini run`` an engine with such a section is protected already (`gemini_ft.launch.autoprotect`); that is no error.
    An engine whose configuration has a "gradient_pipeline" section and no "gemini" section gets the pipeline alone.

    Raises:
        ConfigError: there is no section, or an option in it is wrong; or the engine is protected already, with other options; or the
            gradient pipeline does not fit the engine.
        GeminiError: the state cannot be captured or resumed.
    """
    if isinstance(engine, _Protected):
        if options is not None:
            raise ConfigError('this engine is protected already; give the options in one place, the "gemini" section or attach()')
        return engine
    section = engine.config.get("gemini") if options is None else options
    if (pipeline := engine.config.get("gradient_pipeline")) is not None:
        install(engine, pipeline)
        if section is None:
            return engine
    if section is None:
        raise ConfigError('the configuration has no "gemini" section; add one ({} for the defaults), or give options to attach()')
    if not isinstance(section, Mapping):
        raise ConfigError(f'the "gemini" section must be a mapping of options, got {section!r}; {{}} stands for the defaults')
    kind = type(engine)
    extension = _ProtectedPipeline if isinstance(engine, deepspeed.PipelineEngine) else _ProtectedEngine
    engine.__dict__["gemini"] = Protection(engine, section)  # past nn.Module's own __setattr__
    engine.__class__ = type(
        f"Gemini{kind.__name__}", (extension, kind), {"__module__": kind.__module__, **{name: _told(name) for name in _COUNTERS}}
    )
    loader = engine.training_dataloader
    if isinstance(loader, RepeatingLoader) and isinstance(loader.loader, DeepSpeedDataLoader):
        with unchanged_randomness():  # an iteration has begun with the pipeline, and is begun again; its workers draw other numbers
            loader.data_iter = iter(engine.gemini.follow(loader.loader, begun=True))
    elif isinstance(loader, DeepSpeedDataLoader):
        engine.gemini.follow(loader)
    hooks.at_end[finish] = None
    return engine


def initialize(*arguments: Any, **named: Any) -> tuple[Any, Any, Any, Any]:
    """Does what ``deepspeed.initialize`` does, and `attach` if the configuration has a section of ours.

    Raises:
        GeminiError: see `attach`.
    """
    return initialize_protected(deepspeed.initialize, _attach_or_warn, *arguments, **named)  # type: ignore[no-any-return]


def _attach_or_warn(engine: Any) -> None:
    if isinstance(engine.config, dict) and not engine.config.keys().isdisjoint(hooks.DEEPSPEED_SECTIONS):
        attach(engine)
    else:
        _log.warning('the DeepSpeed configuration has no "gemini" section: nothing is protected')
