"""gemini-ft's part of one engine: what it resumes, when its state is saved, and what the script is told."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gemini_ft.checkpointer import Checkpointer, Snapshot
from gemini_ft.config import load_config
from gemini_ft.core.census import LOADERS
from gemini_ft.deepspeed.border import Border, Weights
from gemini_ft.deepspeed.data import EngineData
from gemini_ft.deepspeed.gradients import EngineGradients
from gemini_ft.deepspeed.partitions import base_optimizer, follow_writes, has_gradients, masters
from gemini_ft.deepspeed.several import engines
from gemini_ft.deepspeed.state import EngineState
from gemini_ft.deepspeed.versions import put_back_trackers
from gemini_ft.errors import StateError
from gemini_ft.state import iterators
from gemini_ft.state.gradients import GradientState
from gemini_ft.state.iterators import unkept
from gemini_ft.state.left_out import left_out
from gemini_ft.state.rng import rng_state, rng_trackers, take_rng_state
from gemini_ft.worker.attempt import never_stay, next_name

_log = logging.getLogger("gemini_ft")
_HANG_SECONDS = 600.0  # for a collective of the engine, where hang_timeout is not set: NCCL's own default
COUNTERS = {"global_steps", "global_samples"}  # a script that follows the engine reads one of them
ONLY_ANEW = "DeepSpeed begins anew in a new process only"


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
        self._state = EngineState(engine)
        never_stay(ONLY_ANEW)
        self.name = next_name("deepspeed")
        self.checkpointer = Checkpointer(
            config=load_config(options), name=self.name, hooks=False, resizable=self._state.resizable, gradients=gradients
        )
        self.client_state = {}
        self.deferred = False
        self.moves_data = True
        self.is_followed = False  # the script has asked how far the resumed engine has come
        self.found: Snapshot | None = None
        self._resumed: int | None = None
        self.is_updated = self.has_stepped = self._closed = self._has_looked = self._has_gradients = False
        self._is_ahead = False  # masters have been written, and the weights follow at the next step
        self._has_skipped = False  # the last snapshot that was due, because of that
        self._border, self._weights = Border(self, engine.module), Weights(engine)
        self._data = EngineData({}, is_new=False)
        engines.open.add(self)
        bound_collectives(engine, self.checkpointer.config.hang_timeout)
        self.iteration = self.number = 0  # of the last snapshot and of the last update that counted; they never go back
        self.checkpointer.accumulation = engine.gradient_accumulation_steps()
        self.checkpointer.asks_for_accumulation = self._state.resizable
        found = self.found = self.checkpointer.open()
        is_elastic = self.checkpointer.config.elastic is not None
        if is_elastic:
            self._state.accumulate(self.checkpointer.accumulation)
        with self.checkpointer.putting_back():
            self._data = EngineData(_kept(found, is_elastic), self._is_new)
        self.checkpointer.census.register("data", lambda: (LOADERS.found(name) for name in self._data.objects))
        self.checkpointer.bind_state(self._state)
        if found is not None:
            self.checkpointer.load_tensors()
            with self.checkpointer.putting_back():
                self.client_state = {**found.extras["client_state"]}
                self._border.is_late = bool(found.extras["late"])
                engines.put_back_generators(self)
            self._resumed, self.iteration = engine.global_steps, found.iteration
            self.number = found.iteration
            self.is_followed = False
        follow_writes(engine, self._written)

    def put_back_generators(self) -> None:
        """Gives all generators of the process the states that they had at the moment of the resumed snapshot."""
        assert self.found is not None
        take_rng_state(self.found.extras["rng"], dist.get_rank() if self._is_new else None)  # two ranks never share the script's generators
        put_back_trackers(self.found.extras.get("tracked", {}))  # snapshots in storage may be older

    @property
    def _is_new(self) -> bool:
        """Whether what is resumed has no state of this rank's number."""
        return self.found is not None and dist.get_rank() >= self.found.world_size

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
        for name in COUNTERS & vars(kind).keys():
            delattr(kind, name)
        if self._resumed and not any(each.is_followed for each in engines.open) and dist.get_rank() == 0:
            _log.warning(
                "THE LOOP HAS BEGUN AGAIN, and the engine was resumed at step %d: nothing has read engine.global_steps before the first "
                "step, so that a loop of N steps makes %d too many. Write `for step in range(engine.global_steps, N)` (docs/deepspeed.md). "
                "Only a loop over one epoch of its loader ends where it should",
                self._resumed,
                self._resumed,
            )

    def updated(self) -> None:
        """Marks weights and optimizer state as written by the engine, unless a scaler skipped the step."""
        self.has_stepped = True
        self.is_updated = self._engine.was_step_applied()
        if self.is_updated:
            self._is_ahead = False
            self._weights.stepped()
        else:
            self.checkpointer.alive(self.number)

    def _written(self, is_master: bool) -> None:
        """Counts a write to masters or their state that torch does not count."""
        torch.autograd.graph.increment_version([master for _, master in masters(self._engine)])
        self._is_ahead |= is_master
        if is_master:
            self._weights.forget()

    def stepped(self) -> None:
        """Records that DeepSpeed's step is over, counters included; in the middle of an accumulation this is none of the engine."""
        if self.has_stepped:
            self.has_stepped = False
            self.found = iterators.resumption.resize = None  # positions that are loaded later are of the present ranks
            self.checkpointer.check_batches(self._data.objects)
            if self.is_updated:
                self.number = self.next_number()
            engines.stepped(self)
            if not self.deferred:
                self._border.stepped()

    def loaded(self) -> None:
        """Records that a checkpoint has been loaded; in the middle of the training, the next snapshot does not wait for a step."""
        self._is_ahead = False
        self._weights.forget()
        follow_writes(self._engine, self._written)  # DeepSpeed has linked masters anew
        now = vars(self._engine)["global_steps"]
        if self.found is not None and now < (self._resumed or 0):
            self.is_followed = True
            if dist.get_rank() == 0:
                _log.warning(
                    "load_checkpoint has taken the engine back to step %d, although it was resumed at step %d: loaders, random generators "
                    "and client_state stay those of step %d, so that other batches follow. Load only `if engine.gemini.resumed is None`",
                    *(now, self._resumed, self._resumed),
                )
        elif self.number and self.found is None and not self.deferred:
            self.is_updated, self.number = True, self.next_number()
            self._border.stepped()

    def next_number(self) -> int:
        """The number of the next snapshot, from that of the last update."""
        steps: int = self._engine.global_steps
        return max(steps, self.number + 1)

    def begins(self) -> None:
        """Records that the next iteration's forward pass is about to begin."""
        if not self._closed:
            self._weights.check()
            if not self.deferred:
                self._border.passed()

    def moment(self) -> dict[str, Any]:
        """The random generators, the position in the data and the steps of other engines, which the next batch may change."""
        tracked = {name: {**tracker.get_states()} for name, tracker in rng_trackers().items()}
        return {"rng": rng_state(), "tracked": tracked, "data": self._data.positions(), "others": engines.others(self)}

    def save(self, moment: dict[str, Any] | None = None) -> None:
        """Takes a snapshot, if there was an update since the last one and the interval says so.

        Args:
            moment: the result of `moment` when the iteration ended; default: that of now.

        Raises:
            StateError: weights do not follow from the masters, as at the snapshot before.
        """
        if not self.is_updated:
            return
        self.is_updated = False
        self._look_for_what_is_left_out()
        before, self.iteration = self.iteration, self.number
        is_due = self.checkpointer.due(before, self.number)
        if is_due and self._is_ahead:  # a resumed engine makes its weights of the masters
            why = (
                "masters have been written after engine.step() (safe_set_full_fp32_param), and the weights follow at the next step, so "
                "that no snapshot can have both; write them before engine.step(), behind the last backward()"
            )
            if self._has_skipped:
                raise StateError(why)
            self._has_skipped = True
            _log.warning("step %d has no snapshot: %s", self.number, why)
            self.checkpointer.alive(self.number)
        elif is_due:
            self._has_skipped = False
            extras = {"client_state": self.client_state, "kept": self.others(), "late": self._border.is_late}
            self.checkpointer.save(self.number, extras | (self.moment() if moment is None else moment))
        else:
            self.checkpointer.alive(self.number)

    def _look_for_what_is_left_out(self) -> None:
        """Warns of what the loop changes and no snapshot has; at the first step also of data and other parts that would begin anew."""
        if not self.moves_data or dist.get_rank():
            return
        there = {each.name: each._engine for each in engines.in_order()}
        objects = [item for each in engines.in_order() for item in each._data.objects.values()]
        kept = [*objects, *(part for engine in there.values() for part in (engine.module, engine.lr_scheduler))]
        if self.name == min(there, default=None):
            engines.watch.named = self._state.named
            optimizers = [part for engine in there.values() for part in (engine.optimizer, base_optimizer(engine.optimizer))]
            given = [*kept, *optimizers, *there.values(), self._client_state]
            engines.watch.look_at_script([engine.module for engine in there.values()], given, self._client_state, self.number)
        if not self._has_gradients and has_gradients(self._engine):
            self._has_gradients = True
            _log.warning(
                "gradients of a %s wait for its next step, and are in no snapshot: after a failure that step lacks them. Where the loss of "
                "another engine goes through this one, call its zero_grad() before engine.gemini.save(), or switch off requires_grad there",
                type(self._engine.module).__name__,
            )
        if self._has_looked:
            return
        self._has_looked = True
        optimizer = self._engine.optimizer
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
            engines.open.discard(self)
            self._closed = True
            self._border.close()
            self.checkpointer.close(finished=finished)


def bound_collectives(engine: Any, hang_timeout: float | None) -> None:
    """Gives DeepSpeed's groups a timeout, which they lack: a peer that hangs would stop the others for half an hour.

    ``hang_timeout``: seconds, as in `GeminiConfig`; None: ten minutes; 0: as DeepSpeed has it.
    """
    if hang_timeout == 0:
        return
    gradients = vars(engine).get("gradients")
    pipeline = gradients.groups if isinstance(gradients, EngineGradients) else []
    for group in {engine.data_parallel_group, engine.seq_data_parallel_group, *pipeline} - {None}:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=hang_timeout or _HANG_SECONDS), group)


def _kept(found: Snapshot | None, is_elastic: bool) -> dict[str, Any]:
    """The states that a snapshot has for this rank of what was kept; of another number of ranks positions in the data are dropped, but for
    those that are shared out anew (``elastic: batch``).
    """
    if found is None:
        return {}
    positions, others = found.extras["data"], found.extras["kept"]
    if is_elastic or found.world_size == dist.get_world_size():
        return {**positions, **others}
    if positions and dist.get_rank() == 0:
        _log.warning(
            "the snapshot is of %d ranks: the positions in %s do not fit %d, and these data begin anew",
            found.world_size,
            ", ".join(sorted(positions)),
            dist.get_world_size(),
        )
    return {**others}
