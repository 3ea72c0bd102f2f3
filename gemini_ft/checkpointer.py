"""Keeps every optimizer step of a torch training loop in memory that outlives it. The public face of the package.

    checkpointer = gemini_ft.Checkpointer(model, optimizer, state={"scheduler": scheduler}, replicas=2)
    for iteration in range(checkpointer.resume(), iterations):
        ...                      # forward, backward, optimizer.step(), scheduler.step()
        checkpointer.step()      # the iteration's last statement
    checkpointer.close()

The integrations use the finer grain: ``open``, ``bind``, ``load_tensors``, ``save``, ``wait_before_update``.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gemini_ft.config import GeminiConfig, load_config
from gemini_ft.core.census import Census, Fate, Finding, declare, table
from gemini_ft.errors import ConfigError, RecoveryError, StateError
from gemini_ft.faults import inject as faults
from gemini_ft.launch import hooks, notes
from gemini_ft.launch.failures import error_at_end
from gemini_ft.recovery.restore import putting_back, read_extras
from gemini_ft.state import ddp, iterators
from gemini_ft.state.base import BoundState, PlainState, TrainingState
from gemini_ft.state.ddp import ddp_state, findings, first_tensors, refuse_hooks, restore_buckets, restore_sync, send_first
from gemini_ft.state.gradients import (
    FiguresReporter,
    GradientState,
    WithGradients,
    announced,
    check_presence,
    is_elastic,
    lets_ranks_differ,
)
from gemini_ft.state.hyperparameters import Given, Hyperparameters, warn
from gemini_ft.state.iterators import Resumption, check_epochs, unkept
from gemini_ft.state.logical import Loaders, LogicalRanks
from gemini_ft.state.loop import LoopWatch, keepable
from gemini_ft.state.optimizer_steps import OptimizerSteps
from gemini_ft.state.rebuilding import Changes
from gemini_ft.state.rng import GivenGenerator, rng_state, take_rng_state
from gemini_ft.state.tensors import Live, every_optimizer, unwrap_model
from gemini_ft.state.worlds import Resize, carried_accumulation, check_schedulers, check_step, iterations, refuse_data
from gemini_ft.state.writes import is_drifting, name_loads
from gemini_ft.storage.base import WORD
from gemini_ft.torch_versions import buffers_are_broadcast
from gemini_ft.worker import attempt
from gemini_ft.worker.attempt import close_with, keep_groups, watch
from gemini_ft.worker.outcomes import Stats
from gemini_ft.worker.recorder import Recorder
from gemini_ft.worker.rendezvous import exchange, exchange_or_raise, on_all_ranks
from gemini_ft.worker.replay import Replay
from gemini_ft.worker.spreading import fill

_LAST_SECONDS = 2.0  # for the last snapshot of a script that ends without a close
EXPLAIN = "GEMINI_EXPLAIN"  # in the environment: print the census

GIVEN = declare("objects given as `state=`, or in the state of fabric.save", Fate.CAPTURED, "by their state_dict and load_state_dict")
declare("random generators of Python, numpy and torch", Fate.CAPTURED, "with the small state of each rank")
_log = logging.getLogger("gemini_ft")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The snapshot that ``open`` found."""

    iteration: int
    extras: Any  # of this rank, or of one whose state it takes over in part
    source: str  # "memory" or "storage"
    world_size: int  # ranks of the job that made it
    new_rank: int | None = None  # of this one, where it takes over another's state and must not draw the same numbers


class Checkpointer:
    """Snapshots of one stream of training state, replicated to peers, resumed after a failure.

    Args:
        model: module, or name -> module.
        optimizers: one, or several. Their ``step`` is hooked: it waits for the copy under way.
        state: name -> object with ``state_dict``/``load_state_dict`` (schedulers, scalers, loaders made by `gemini_ft.resumable`), or a
            random generator of Python, numpy or torch.
        config: options; default: from ``options``, ``GEMINI_*`` and ``GEMINI_CONFIG``.
        name: of the stream; several at a time need different ones.
        hooks: False: the caller calls ``wait_before_update`` and ``save`` itself.
        replicated: whether plain parameters hold the same bytes on all ranks; default: whether a model is a DDP one.
        gradients: state of what synchronises the gradients, captured and restored with the rest (`attach_gradients`); default: the
            `gemini_ft.GradientSynchronizer` of the model, if it has one.
        rebuild: builds what was added while training (layers, optimizers) in a fresh process, before its state is loaded; it is called
            with the `gemini_ft.state.rebuilding.Changes` that the snapshot describes, and may call ``bind``.
        resizable: whether the state to be bound can be loaded from a snapshot that another number of ranks has made.
        init_sync: whether `resume` sends the first rank's parameters and buffers to all ranks where there is nothing to resume: for models
            that ``DistributedDataParallel(init_sync=False)`` wraps, so that after a failure they are not sent only to be replaced. Models
            beside them, which may be copies, are sent too; buffers are not, if DDP leaves them to the ranks before a forward pass.
        **options: fields of ``GeminiConfig``.

    Attributes:
        accumulation: micro-batches of each rank in a step, 1 unless it is set before `resume`. With ``elastic: batch`` they change with the
            number of ranks, so that the global batch does not: a loop asks for it after `resume`.
        asks_for_accumulation: whether it does, as a plain loop has to.

    Raises:
        ConfigError: an option is wrong.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        *,
        state: Mapping[str, Any] | None = None,
        config: GeminiConfig | None = None,
        name: str = "main",
        hooks: bool = True,
        replicated: bool | None = None,
        gradients: GradientState | None = None,
        rebuild: Callable[[Changes], None] | None = None,
        resizable: bool = False,
        init_sync: bool = False,
        **options: Any,
    ) -> None:
        if config is not None and options:
            raise ConfigError(f"give either config or single options, not both: {sorted(options)}")
        if not re.fullmatch(WORD, name) or len(name) > 64:
            raise ConfigError(f"name={name!r}: must be 1 to 64 letters, digits and . _ -, not beginning with a dot")
        self.config = config if config is not None else load_config(options)
        self.name = name
        self.accumulation = 1
        self.asks_for_accumulation = False
        self.scalars: dict[str, Any] = {}
        self._stateful = {key: keepable(value, f"state[{key!r}]") for key, value in (state or {}).items()}
        self.stats = Stats()
        self.census = Census(self.config.ignore)
        self.census.register("models and optimizers", lambda: self._state.findings(), lambda: self._state.structure())
        self.census.register("state", self._stateful_findings)
        self.census.register("communication hooks", self._hook_findings, lambda: [len(m._comm_hooks) for m in self._wrapped.values()])
        self.census.register("parameters of DDP", self._unreduced, lambda: ddp.flags((self._wrapped | self._wrappers).values()))
        self._hooks, self._replicated, self._resizable, self._init_sync = hooks, replicated, resizable, init_sync
        self._rebuild = rebuild
        self._wrappers: dict[str, DistributedDataParallel] = {}  # of models that are bound without them
        self._bound: BoundState = PlainState({}, ())
        self._is_drifting = False  # whether ranks may come to differ by what the model does
        self._state: TrainingState = self._bound  # with the gradients', if there are any
        self._gradients: GradientState | None = None
        self._was_bound_at_open = False  # to models, and there was nothing to resume
        self._reporter: FiguresReporter | None = None
        self._recorder: Recorder | None = None
        self._state_extras: dict[int, Any] = {}  # of the resumed snapshot, by rank, until load_tensors
        self._iteration = 0
        self._has_looked = False  # at how the loop steps
        self._logical: LogicalRanks | None = None
        self._logical_found: list[Any] = []  # of the resumed snapshot
        self.makes_logical_ranks = False  # after `open`
        self._begun: dict[str, int] | None = None  # by loader, the iterations that had begun when loaders were looked at last
        self._scheduled: dict[str, int] = {}  # by scheduler, the steps that it had counted at the last step
        self._watch = LoopWatch()
        self._after_resume: list[Any] = []  # hooks until the first step
        self._updates = 0
        self._replay: Replay | None = None
        self._blocked = self._waited = 0.0  # seconds of this step
        self._steps = OptimizerSteps(self._wait_for_copy)
        self._hyperparameters = Hyperparameters(self._stateful)
        close_with(self, finished=False)  # the agent keeps what it holds
        if gradients is not None:
            self.attach_gradients(gradients)
        if model is not None:
            self.bind(model, optimizers)

    # -- the plain loop

    def logical_ranks(self, count: int, loader_of: Loaders | None = None) -> LogicalRanks:
        """Makes the logical ranks of a job with ``elastic: exact`` (docs/elastic.md#bit-for-bit); called before `resume`.

        The models are on their device by then.

        Args:
            count: of all logical ranks: the same for the whole job, and at least as many as there are workers at any time.
            loader_of: makes a logical rank's loader, a `gemini_ft.resumable` one, from its number.

        Raises:
            ConfigError: something cannot be carried by logical ranks; named.
        """
        is_late = self._recorder is not None and not self.makes_logical_ranks
        if self.config.elastic != "exact" or is_late or self._logical is not None:
            raise ConfigError("logical_ranks() is for elastic='exact', and called once, before resume(); give that option")
        if self.config.logical_ranks not in (None, count):
            raise ConfigError(f"logical_ranks({count}), and the option says {self.config.logical_ranks}; give one number, in one place")
        if not isinstance(self._bound, PlainState) or self._replicated is False or self._gradients is not None or self._rebuild is not None:
            raise ConfigError("elastic='exact' is for plain models, without gradients=, rebuild= or replicated=False; leave these out")
        if self.config.verify == "replay":
            raise ConfigError("elastic='exact' with verify='replay': a step of logical ranks cannot be computed again; choose verify=True")
        if loaders := [name for name, value in self._stateful.items() if hasattr(value, "_gemini")]:
            raise ConfigError(f"elastic='exact': each logical rank has a loader of its own; give loader_of in place of state={loaders}")
        self._logical = ranks = LogicalRanks(count, self._models, self._optimizers, self._stateful, loader_of)
        self._replicated = self._bound.replicated = True
        given = {name: value for name, value in self._stateful.items() if not isinstance(value, GivenGenerator)}
        ranks.common = lambda: {
            "the values that step() was given": self.scalars,
            "the options of the optimizers": [_options_of(optimizer) for optimizer in self._optimizers],
            **{f"state[{name!r}]": value.state_dict() for name, value in given.items()},
        }
        self.census.register("logical ranks", ranks.findings)
        return ranks

    def compare_logical(self, *, has_begun: bool) -> None:
        """Refuses workers whose logical ranks could not have the same bits. Collective."""
        assert self._logical is not None
        facts = self._logical.facts(has_begun=has_begun)
        on_all_ranks(partial(self._logical.compare, facts, exchange(facts)))

    def load_logical(self) -> None:
        """Gives the logical ranks here their states of the resumed snapshot, after all else has been put back."""
        assert self._logical is not None
        self._logical.load(self._logical_found)

    def resume(self) -> int:
        """Joins the run and loads the newest state there is into everything given to the constructor; the last call before the loop.

        Collective. Returns the number of iterations already done: 0 at a first start.

        Raises:
            GeminiError: see ``open`` and ``load_tensors``.
        """
        self.asks_for_accumulation = True
        found = self.open()
        if self._init_sync:
            exchange_or_raise(self._check_init_sync)
        with self._script_to_blame():
            for model in self._wrapped.values():
                refuse_hooks(model, self._is_replicated)
        self._watch = LoopWatch(self._kept.values(), has_resumed=found is not None)
        if self._logical is not None:
            self.compare_logical(has_begun=found is not None)
        if found is None:
            if self._init_sync:
                send_first(first_tensors(self._models, all(map(buffers_are_broadcast, self._wrapped.values()))), exchange)
            return 0
        with self.putting_back():
            saved = found.extras["state"]
            if saved.keys() != self._stateful.keys():
                raise StateError(
                    f"the snapshot has state of {sorted(saved)}, this job has {sorted(self._stateful)}; give the same `state` as before"
                )
        self.load_tensors()
        with self.putting_back():
            for name, value in found.extras["ddp"].items():
                if name in self._wrapped:
                    restore_buckets(self._wrapped[name], value)
                    restore_sync(self._wrapped[name], value)
            for name, value in saved.items():
                if found.new_rank is None or not isinstance(self._stateful[name], GivenGenerator):
                    self._stateful[name].load_state_dict(value)
            self.scalars = {**found.extras["scalars"]}
            iterators.resumption.resize = None  # positions that are loaded later are of the present ranks
            if self._logical is not None:
                self.load_logical()
        self._joined.prepare(self._state, found.extras, self._hyperparameters.saved())
        with self.putting_back():
            take_rng_state(found.extras["rng"], found.new_rank)
            self.note_resume(self._stateful)
            self._after_resume = name_loads(self._models.values(), every_optimizer(self._optimizers).values())
        return found.iteration

    def step(self, **scalars: Any) -> None:
        """Ends an iteration: takes a snapshot if the optimizer has stepped and the interval says so.

        In the middle of an accumulation there is none; where another optimizer steps meanwhile, the gradients that wait are part of it.

        Args:
            **scalars: values to find in ``scalars`` after a resume; those not given keep their last value.

        Raises:
            GeminiError: something that must stop the job has happened since the last call.
        """
        begin = time.perf_counter()
        if ddp.has_left_join(self._wrapped.values()):
            self._count_alike()
        self._iteration += 1
        iterators.resumption.random = None
        while self._after_resume:
            self._after_resume.pop().remove()
        self.check_batches(self._stateful)
        if not self._has_looked:
            check_epochs(self._kept.values(), then=self.scalars, now=scalars)
            self._has_looked = True
            self._look_for_uneven_steps()
        self.scalars.update(scalars)
        if self._joined.session.rank == 0:
            self._watch.named = self.named
            optimizers, has_stepped = self._optimizers, self._steps.has_stepped
            self._watch.look(self._models.values(), self._kept, optimizers, self.scalars, self._iteration, has_stepped)
        self._steps.refuse_stranger()
        self._end_of_step()
        before, self._updates = self._updates, self._updates + self._steps.take()
        if self.due(before, self._updates):
            if not self.stats.snapshots and self._joined.session.plan.version is None:
                ddp.refuse_absence(self._wrapped.values())
            extras = {
                "state": {name: value.state_dict() for name, value in self._stateful.items()},
                "scalars": self.scalars,
                "rng": rng_state(),
                "ddp": {name: ddp_state(model, self._is_replicated) for name, model in self._wrapped.items()},
            }
            if self._logical is not None:
                extras["logical"] = self._logical.state_dict()
            self._save(self._iteration, extras)
        else:
            self.alive(self._iteration)
        self._note_blocked(time.perf_counter() - begin)
        self._joined.leave_if_drained(self._iteration)

    @property
    def named(self) -> set[str]:
        """The names that warnings of this job have called missing from its snapshots."""
        return self._bound.named if isinstance(self._bound, PlainState) else self._watch.named

    # -- finer grain

    def open(self) -> Snapshot | None:
        """Joins the run, and finds out what to resume. Collective over the default process group.

        Raises:
            GeminiError: a rank could not join, or the state cannot be resumed; the same text on all ranks.
        """
        self.config.refuse_elastic(os.environ)
        is_exact = self.config.elastic == "exact"
        if is_exact and self._logical is None and not self.makes_logical_ranks:
            raise ConfigError(
                "elastic='exact' is for plain loops with checkpointer.logical_ranks(), and for Lightning's Trainer with GeminiStrategy; "
                "leave it out here (docs/elastic.md#bit-for-bit)"
            )
        if self.config.elastic and not self.asks_for_accumulation:
            raise ConfigError(
                "elastic='batch' is for plain loops, Fabric, Lightning's and transformers' Trainer under DDP or FSDP2, and for DeepSpeed's "
                "engines with ZeRO 1 to 3; leave it out here (docs/elastic.md)"
            )
        log_to_stderr()
        if isinstance(self._bound, PlainState):
            self._bound.remember()
        self._hyperparameters.note(self._bound.hyperparameters)
        atexit.register(self._end_with_process)
        notes.say(notes.PROTECTED)
        keep_groups()
        is_resizable = self._resizable or self.config.elastic is not None
        self._recorder = recorder = Recorder(self.config, self.name, self.stats, is_resizable)
        if self.config.verify == "replay":
            self._replay = Replay(lambda found: exchange(found, self.config.timeout), recorder.take_differing, recorder.refuse)
        if not is_resizable:
            notes.say(notes.FIXED)
        if self.config.storage is not None:
            notes.say(notes.STORES)
        if self.config.total_steps is not None:
            notes.say_total(self.config.total_steps)
        session, plan = recorder.session, recorder.session.plan
        trust = bool(self.config.storage and self.config.storage.trust_pickle)  # the state in memory may have come from storage
        notes.step = 0 if plan.version is None else plan.version.iteration
        if plan.version is None:
            if self.config.elastic == "batch" and session.rank == 0:
                _log.info(
                    "elastic='batch': a step has %d micro-batches from now on, %d on each of %d ranks",
                    *(self.accumulation * session.world_size, self.accumulation, session.world_size),
                )
            self._find_gradients()
            self._was_bound_at_open = bool(self._models)
            return None
        self._refuse_finished()
        iterators.resumption = Resumption()
        self._iteration = self.stats.committed = plan.version.iteration
        with self._script_to_blame():
            extras = on_all_ranks(lambda: read_extras(session.sources, session.rank, session.world_size, session.secret, trust))
        with self.putting_back():
            own = extras[session.rank % plan.world_size]
            if ("logical" in own["extras"]) != is_exact:
                raise StateError(
                    "the snapshot was made with logical ranks and this job has none, or the reverse; resume it with the same "
                    "logical_ranks() and elastic, or begin anew with another run_id"
                )
            if is_exact:
                self._logical_found = [value["extras"]["logical"] for value in extras.values()]
            if self.config.elastic == "batch":
                resize = Resize(then=plan.world_size, now=session.world_size, rank=session.rank)
                self.accumulation = carried_accumulation(own["extras"], self.accumulation, resize)
                iterators.resumption.resize = resize if plan.world_size != session.world_size else None
            self._state_extras = {owner: value["tensors"] for owner, value in extras.items()}
            self._hyperparameters.then = own.get("given", {})  # snapshots in storage may be older
            is_new = self.config.elastic == "batch" and session.rank >= plan.world_size and _draw_apart(extras.values())
            found = Snapshot(iteration=self._iteration, extras=own["extras"], source=plan.kind, world_size=plan.world_size)
            return replace(found, new_rank=session.rank) if is_new else found

    @contextlib.contextmanager
    def putting_back(self) -> Iterator[None]:
        """Refuses, inside, a snapshot that has another form than the one in which its parts are put back (`recovery.restore`)."""
        with self._script_to_blame(), putting_back(self._iteration):
            yield

    def bind(self, models: nn.Module | Mapping[str, nn.Module], optimizers: Any = (), *, modes: bool = True) -> None:
        """Names the objects to capture; call it as early as they exist.

        Args:
            models: module, or name -> module.
            optimizers: one, or several.
            modes: False: the caller keeps flags and attributes of modules (`gemini_ft.state.modes`) itself.
        """
        state = PlainState.of(
            models,
            optimizers,
            self._replicated,
            ignored=self.census.is_ignored,
            modes=modes,
            can_rebuild=self._rebuild is not None,
            before=self._bound if self._recorder is not None and self._has_begun and isinstance(self._bound, PlainState) else None,
        )
        self.bind_state(state)
        if self._recorder is not None and not (self._has_begun or self._was_bound_at_open):
            self._find_gradients()  # Fabric names the models when the script loads or saves for the first time
        for wrapper in self._wrapped.values():
            ddp.frozen_at_first(wrapper)
        others = [value for value in self._stateful.values() if isinstance(value, torch.optim.Optimizer)]
        params = [param for model in state.models.values() for param in model.parameters()]
        given = [value.generator if isinstance(value, GivenGenerator) else value for value in self._stateful.values()]
        meshes = {param.device_mesh for param in params if isinstance(param, DTensor)}
        watch([*state.models.values(), *params, *meshes, *every_optimizer(state.optimizers).values(), *given])
        self._steps.follow(state, others, hooks=self._hooks)

    def bind_state(self, state: BoundState) -> None:
        """Names a state to capture that is no plain module and optimizer; the caller calls ``wait_before_update`` and ``save``."""
        if self.config.verify == "replay" and state.unrepeatable:
            raise ConfigError(f"verify='replay' is not possible here: {state.unrepeatable}; give verify=True")
        if self._logical is not None:
            raise ConfigError("the models of logical ranks are those that were given before logical_ranks(); give all of them by then")
        self._steps.forget()
        self._bound, self._is_drifting = state, is_drifting(state.models.values())
        self._state = state if self._gradients is None else WithGradients(state, self._gradients)
        self._hyperparameters.note(self._bound.hyperparameters)

    def wrapped_by(self, models: Mapping[str, DistributedDataParallel]) -> None:
        """Says which DDP wraps the models that `bind` is given without it: parameters that DDP does not reduce are refused once trained."""
        self._wrappers = dict(models)

    def script_gives(self, snapshots: Given, scripts: Given | None = None) -> None:
        """Says which hyperparameters the script has given beside those of the optimizers, so that a resume tells what has changed.

        Args:
            snapshots: those that a resume puts back as they were (of schedulers).
            scripts: those that stay as the script gives them.
        """
        self._hyperparameters.add(snapshots, scripts or {})
        self._hyperparameters.note(self._bound.hyperparameters)

    def attach_gradients(self, gradients: GradientState) -> None:
        """Captures and restores the state of a gradient synchronizer, too, and shows its figures in ``gemini status``.

        Raises:
            StateError: there is one already, or it is too late: part of the state has been resumed or recorded without it.
        """
        if gradients is self._gradients:
            return
        if self._gradients is not None:
            raise StateError("a Checkpointer has one gradient state; give one object that has the state of both")
        if self._has_begun:
            raise StateError("attach_gradients() must come before resume() or load_tensors(), and before the first snapshot")
        self._gradients = gradients
        if lets_ranks_differ(gradients):
            if self.config.verify == "replay":
                raise ConfigError(
                    "verify: replay makes an update again without the average that a rule with every, or quality: loss, makes in it: leave "
                    "one of the two out"
                )
            self._replicated = False
            if isinstance(self._bound, PlainState):
                self._bound.replicated = False
        watch([gradients])
        self._state = WithGradients(self._bound, gradients)
        self._reporter = FiguresReporter(gradients.summary, lambda message: self._joined.client.offer(message))

    def _find_gradients(self, *, is_late: bool = False) -> None:
        """Attaches the synchronizer of the models' gradients, unless one was named; one that comes late no restart could resume."""
        if self._gradients is not None:
            return
        found = announced(param for model in self._models.values() for param in model.parameters())
        if found is None:
            return
        if is_late or self._has_begun:
            raise StateError(
                "a GradientSynchronizer was given to the model after resume(), or after the first snapshot, so that its residuals would be "
                "missing in snapshots; make it before the Checkpointer resumes, or close() it"
            )
        self.attach_gradients(found)

    def load_tensors(self) -> None:
        """Fills the bound models and optimizers with the snapshot that ``open`` found. Collective.

        Raises:
            LayoutMismatchError: the snapshot is of another model; the first differences are named.
            RecoveryError: a shard could not be read from anywhere.
        """
        session = self._joined.session
        if session.plan.version is None:
            raise RecoveryError("load_tensors() was called, but open() found nothing to resume")
        begin = time.perf_counter()

        def compare() -> Any:
            with putting_back(self._iteration):
                return self._hyperparameters.compare(self._iteration)

        def put_back() -> None:
            with putting_back(self._iteration):
                self._state.apply_extras(own)

        changed = exchange_or_raise(compare)
        if session.rank == 0:
            warn(changed)
        if isinstance(self._bound, PlainState):
            self._bound.remember()
        with self.putting_back():
            found = self._state_extras[session.rank % session.plan.world_size].get("changes")
            changes = Changes(**found) if found is not None else None
        if changes is not None and self._rebuild is not None:
            fresh = self._bound
            self._rebuild(changes)
            if isinstance(fresh, PlainState) and isinstance(self._bound, PlainState):
                self._bound.inherit(fresh)
        self._find_gradients()
        with self._script_to_blame():
            if self.config.elastic:
                self._refuse_fixed()
            if self._gradients is None:
                on_all_ranks(lambda: check_presence(self._state_extras[session.rank % session.plan.world_size], attached=False))
            self.stats.restored, own = fill(session, self._state, self._state_extras)
            on_all_ranks(put_back, self.config.timeout + 600)
        seconds = self.stats.restore_seconds = time.perf_counter() - begin
        self._joined.events.write("resumed", iteration=self._iteration, sources=self.stats.restored, seconds=seconds)
        self._state_extras = {}
        if session.rank == 0:
            read = ", ".join(f"{nbytes:,} bytes from {where}" for where, nbytes in sorted(self.stats.restored.items()))
            _log.info("resumed at iteration %d: rank 0 read %s in %.2f s", self._iteration, read or "nothing", self.stats.restore_seconds)

    def note_resume(self, state: Mapping[str, Any]) -> None:
        """Records that all has been put back: a seed that is set again, and the first step of present schedulers, are seen from here on."""
        if self.config.elastic == "batch":
            self._scheduled = check_schedulers(state, {})
        iterators.resumption.note_resume()

    def save(self, iteration: int, extras: Any) -> None:
        """Takes a snapshot of the state after ``iteration``: some state is copied now, the rest in the background.

        Raises:
            GeminiError: something that must stop the job has happened since the last call.
        """
        begin = time.perf_counter()
        self._iteration = iteration
        self._end_of_step()
        self._save(iteration, extras)
        self._note_blocked(time.perf_counter() - begin)
        self._joined.leave_if_drained(iteration)

    def marks(self) -> dict[str, list[tuple[int, int]]]:
        """Name -> a value that changes with every write, of each tensor that the last snapshot has."""
        return self._joined.marks()

    def due(self, before: int, now: int) -> bool:
        """Whether a snapshot is due, from the number of updates at the last question, and now.

        The same on all ranks that count alike; where ``interval`` is auto, it changes as the network asks for.
        """
        return now // self.interval > before // self.interval

    def survey(self) -> Sequence[Live]:
        """Returns the tensors of the bound state, as they are now."""
        return self._bound.survey()

    @property
    def run(self) -> str:
        """The id of the run."""
        return self._joined.session.run

    @property
    def secret(self) -> bytes:
        """The run's secret, with which pickles of its snapshots are signed."""
        return self._joined.session.secret

    @property
    def launch(self) -> str:
        """Name of the launch: the same on all ranks, and after each restart by the same launcher."""
        assert self._joined.session.hello.launch is not None
        return self._joined.session.hello.launch.id

    @property
    def has_past(self) -> bool:
        """Whether this run was begun before, by this command or by an attempt that has failed."""
        return self._joined.has_past

    @property
    def interval(self) -> int:
        """Steps between snapshots at present."""
        return self._joined.interval(self._iteration)

    def alive(self, iteration: int) -> None:
        """Gives a sign of life for the hang detection, in place of ``save``, after a step of which no snapshot is due."""
        self._iteration = iteration
        self._joined.alive(iteration)
        if self._replay is not None and self._replay.is_over:
            self._replay.disarm()
        self._report()

    def wait_before_update(self) -> None:
        """Returns when the copy under way has been made; call it before parameters or optimizer state are written.

        Hooks of the optimizers do so by themselves, but not when a CUDA graph that has captured their step is replayed: from the first
        capture on, each call counts as a step.
        """
        self._steps.announced()
        self._wait_for_copy()

    def steps_made(self) -> int:
        """Returns the number of steps that optimizers have made in this process.

        Names an optimizer with a state that was not given and has stepped parameters of a model that was; where there are hooks, it raises
        StateError, as `step` does.
        """
        self._steps.refuse_stranger()
        return self._steps.made

    def _wait_for_copy(self) -> None:
        faults.at_step(self._iteration, "before_update", self._any_tensor)
        begin = time.perf_counter()
        if self._recorder is not None:
            self._recorder.before_update(self._replay.changed_at_rest() if self._replay is not None else ())
        waited = time.perf_counter() - begin
        self._blocked, self._waited = self._blocked + waited, self._waited + waited

    def _note_blocked(self, seconds: float) -> None:
        self.stats.note_blocked(self._blocked + seconds, self._waited)
        self._blocked = self._waited = 0.0

    def flush(self) -> None:
        """Waits until the newest snapshot is committed, or given up; for at most ``timeout`` seconds."""
        begin = time.perf_counter()
        self._joined.flush()
        self._blocked += time.perf_counter() - begin

    def is_committed(self, iteration: int) -> bool | None:
        """Whether a snapshot has been committed, or a later one; None: that is not known yet. Any thread may ask."""
        return self.stats.has_committed(iteration) if self._recorder is None else self._recorder.outcome(iteration)

    def raise_fatal(self) -> None:
        """Raises what the agents have found since the last call, if it must stop the job. Any thread may call it."""
        if self._recorder is not None:
            self._recorder.raise_fatal()

    @contextlib.contextmanager
    def mutate(self) -> Iterator[None]:
        """Allows writes to parameters or optimizer state outside the optimizer's step (weight averaging, pruning, clamping)."""
        if self._recorder is not None:
            self._recorder.settle()
        yield

    @contextlib.contextmanager
    def paused(self, *, validates: bool = True) -> Iterator[None]:
        """Switches hang detection off meanwhile, as no progress is expected.

        ``validates``: whether `gemini goodput` counts the time as validation, and not as a part of the next step.
        """
        with self._joined.suspended(self._iteration, validates=validates):
            yield

    def close(self, finished: bool = True, interrupted: bool = False) -> None:
        """Leaves the run. Only a finished or interrupted one lets its agents go; after a failure they keep the state."""
        self._steps.forget()
        if self._replay is not None:
            self._replay.disarm()
        atexit.unregister(self._end_with_process)
        if self._recorder is not None:
            if finished and sys.exc_info()[0] is None:  # a script may close in a `finally` what has failed, and try it again
                attempt.finished[self.run, self.name] = [weakref.ref(unwrap_model(model)) for model in self._models.values()]
            self._recorder.close(finished, interrupted)
            self._recorder = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(finished=kind is None, interrupted=kind is not None and issubclass(kind, KeyboardInterrupt))

    # -- inside

    def _refuse_finished(self) -> None:
        """Refuses to go on with a training of other models that has finished in this process, and warns where the models are the same.

        Raises:
            ConfigError: see above.
        """
        before = attempt.finished.get((self.run, self.name))
        if before is None:
            return
        text = f"a Checkpointer with name={self.name!r} has finished in this process, and its last state would be resumed here"
        way = "give each training of a script a name of its own, for example Checkpointer(..., name='fold-1')"
        if any(not any(model is there() for there in before) for model in map(unwrap_model, self._models.values())):
            raise ConfigError(f"{text}, in other models; {way}; or, to go on with it, end the first one by close(finished=False)")
        _log.warning("%s, with its scalars and positions: if it is another training, %s", text, way)

    def _check_init_sync(self) -> None:
        if not self._wrapped:
            raise ConfigError("init_sync=True, but no model is a DistributedDataParallel; give the wrapped model, or leave init_sync out")
        if not self._is_replicated:
            raise ConfigError("init_sync=True is for ranks that hold the same, and replicated=False was given; leave one of them out")

    def _look_for_uneven_steps(self) -> None:
        """Warns of ranks that may make unequal numbers of steps, at the first of them."""
        if self._joined.session.rank == 0 and any(model._join_config.enable for model in self._wrapped.values()):
            waits = ", and each waits for one in vain (on_late='wait')" if self.config.waits else ""
            _log.warning(
                "this loop is inside join(): steps that a rank makes after another has made its last one have no snapshots%s. A failure "
                "there costs all of these. Give all ranks the same number of steps (drop_last=True, DistributedSampler) to protect each",
                waits,
            )

    def _count_alike(self) -> None:
        """Counts on from the rank that has made most steps inside a `join()` that is over: a number is to mean one moment. Collective.

        Raises:
            ReplicaDivergedError: the steps that only some ranks have made have left ranks with different optimizer state.
        """
        ddp.refuse_absence(self._wrapped.values())
        steps = self._steps
        told = exchange(((self._iteration, self._updates, steps.made), steps.has_stepped), self.config.timeout)
        counts, stepped = zip(*told, strict=True)
        self._iteration, self._updates, steps.made = max(counts)
        steps.has_stepped = any(stepped)  # one that has had no inputs has the others' weights
        if min(counts) != max(counts):
            self._joined.compare(self._state)

    def _end_with_process(self) -> None:
        """Ends this rank's threads with the process; after Ctrl-C leaves the run: the agents' memory will not be needed."""
        if isinstance(error_at_end(), KeyboardInterrupt):
            self.close(finished=False, interrupted=True)
        elif self._recorder is not None:
            if error_at_end() is None:  # a script that ends without `close`, by `sys.exit` perhaps: its last step is kept
                self._recorder.await_last(_LAST_SECONDS)
            self._recorder.halt()
            if hooks.has_ended_well:
                if (fatal := self._recorder.fatal) is not None:
                    _log.error("%s", fatal)
                self._recorder.say_over(failed=fatal is not None)

    @contextlib.contextmanager
    def _script_to_blame(self) -> Iterator[None]:
        """Excuses a snapshot that does not fit a changed script from being given up after a few restarts: the user will mend the script."""
        try:
            yield
        except StateError:
            self._joined.excuse()
            raise

    def explain(self) -> str:
        """The census as a table: the parts of this rank's state, their places, fates and bytes."""
        return table(self.census.findings())

    def _stateful_findings(self) -> Iterator[Finding]:
        for name, value in self._stateful.items():
            yield GIVEN.found(f"state[{name!r}]", note=f"the state_dict of a {type(value).__qualname__}")

    def _hook_findings(self) -> Iterator[Finding]:
        for name, model in self._wrapped.items():
            yield from findings(name, model)

    def _unreduced(self) -> Iterable[Finding]:
        state = self._bound
        if not isinstance(state, PlainState) or not (state.is_replicated or lets_ranks_differ(self._gradients)):
            return ()
        return ddp.unreduced(self._wrapped | self._wrappers, state.optimizers)

    def _take_census(self) -> None:
        """Refuses state that is not captured, at the first snapshot and after a change; shows it for ``gemini run --explain``."""
        if self.census.is_due():
            found = self.census.take()
            if os.environ.get(EXPLAIN) and self._joined.session.rank == 0:
                print(f"gemini: state of rank 0, stream {self.name}, after iteration {self._iteration}\n{table(found)}", flush=True)

    def check_batches(self, given: Mapping[str, Any]) -> None:
        """Compares a loop's step, for ``elastic: batch``, with what another number of ranks could go on from; to be called after each.

        Args:
            given: objects with a state, by name: loaders, schedulers.

        Raises:
            GeminiError: it took other batches than `accumulation` says, or from loaders of another kind, or stepped a scheduler with each.
        """
        if self.config.elastic != "batch":
            return
        if (begun := iterations(given)) != self._begun:
            self.refuse_data(given, unkept(given.values(), generators=True) if self._begun is None else ())
            self._begun = begun
        check_step(given.values(), self.accumulation)
        self._scheduled = check_schedulers(given, self._scheduled)

    def refuse_data(self, loaders: Mapping[str, Any], strangers: Sequence[str] = ()) -> None:
        """Refuses, as `gemini_ft.state.worlds.refuse_data`, what another number of ranks could not take over."""
        refuse_data(loaders, strangers, self._joined.session.rank, self._joined.session.world_size)

    def _save(self, iteration: int, extras: Any) -> None:
        self._find_gradients(is_late=self._was_bound_at_open)
        if self.config.elastic:
            self._refuse_fixed()
        if self.config.elastic == "batch":
            extras = extras | {"accumulation": self.accumulation}
        self._take_census()
        self._joined.record(iteration, self._state, extras, self._hyperparameters.saved(), is_drifting=self._is_drifting)
        self._prepare_replay()
        self._report()
        faults.at_step(iteration, "in_copy", self._any_tensor)

    def _refuse_fixed(self) -> None:
        """Refuses, for ``elastic``, a state that another number of ranks could not load."""
        why = ""
        if self._gradients is not None and (self._logical is not None or not is_elastic(self._gradients)):
            why = "a gradient pipeline, whose residuals belong to each rank"
        elif isinstance(self._bound, PlainState):
            why = self._bound.why_fixed(self._joined.session.world_size, has_local_steps=self._gradients is not None)
        elif not (self._resizable or getattr(self._bound, "resizable", False)):
            why = f"the state of a {type(self._bound).__name__}, which as many ranks load"
        if why:
            raise ConfigError(
                f"elastic={self.config.elastic!r} keeps what DDP, FSDP2 or ZeRO trains, and this job has {why}; give a fixed number of "
                "hosts, or leave elastic out"
            )

    def _prepare_replay(self) -> None:
        """Has the iteration that begins checked where it is due (``verify: replay``)."""
        if self._replay is not None:
            self._replay.disarm()
            if self._joined.checked is not None:
                self._replay.arm(self._bound.models, every_optimizer(self._bound.optimizers).values())

    def _report(self) -> None:
        if self._reporter is not None:
            self._reporter.step_over()

    def _end_of_step(self) -> None:
        notes.step = self._iteration
        blocked = self.stats.blocked[-1] if self.stats.blocked else 0.0
        self._joined.events.write("step", iteration=self._iteration, blocked=blocked)
        faults.at_step(self._iteration, live=self._any_tensor)

    def _any_tensor(self, place: str) -> torch.Tensor | None:
        """A weight, its gradient, or a moment of it, for the drill of a flipped bit; None: there is none."""
        for optimizer in every_optimizer(self._bound.optimizers).values():
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                moments = [value for value in optimizer.state.get(param, {}).values() if isinstance(value, torch.Tensor) and value.dim()]
                places: dict[str, torch.Tensor | None] = {"weight": param, "gradient": param.grad, "moment": next(iter(moments), None)}
                found = places[place]
                if found is not None:
                    return found
        return None

    @property
    def _has_begun(self) -> bool:
        """Whether part of the state has been resumed or recorded."""
        return bool(self.stats.snapshots or self.stats.restore_seconds)

    @property
    def _joined(self) -> Recorder:
        if self._recorder is None:
            raise StateError("the Checkpointer has not joined a run; call resume() (or open()) before the first step")
        return self._recorder

    @property
    def _models(self) -> Mapping[str, nn.Module]:
        return self._bound.models if isinstance(self._bound, PlainState) else {}

    @property
    def _optimizers(self) -> Sequence[Any]:
        return self._bound.optimizers if isinstance(self._bound, PlainState) else ()

    @property
    def _wrapped(self) -> dict[str, DistributedDataParallel]:
        """The models that DDP wraps."""
        return {name: model for name, model in self._models.items() if isinstance(model, DistributedDataParallel)}

    @property
    def _kept(self) -> dict[str, Any]:
        """The objects beside the models whose state snapshots have, by name."""
        return self._stateful if self._logical is None else {**self._stateful, **self._logical.loaders, "logical ranks": self._logical}

    @property
    def _is_replicated(self) -> bool:
        return isinstance(self._bound, PlainState) and self._bound.is_replicated


def _draw_apart(extras: Iterable[Any]) -> bool:
    """Whether the ranks of a snapshot draw numbers of their own, as far as that can be told."""
    first, *others = (value["extras"]["rng"]["host"] for value in extras)
    return not others or any(other != first for other in others)


def log_to_stderr() -> None:
    """Lets a user without any logging set-up see the messages about the job.

    A first ``logging.warning()`` of the script's own, which gives the root logger a handler and leaves its level, is no set-up.
    """
    root = logging.getLogger()
    if not _log.handlers and not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[gemini %(levelname).1s rank %(rank)s] %(message)s"))
        handler.addFilter(lambda record: record.__dict__.setdefault("rank", os.environ.get("RANK") or "0"))  # of this attempt
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)
    elif _log.level == logging.NOTSET and root.level == logging.WARNING:
        _log.setLevel(logging.INFO)


def _options_of(optimizer: Any) -> list[dict[str, Any]]:
    """The groups of an optimizer without their parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
