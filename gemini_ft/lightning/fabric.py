"""Strategies for Fabric. The user owns the loop, so the user says what belongs to its state.

    fabric = Fabric(strategy="gemini", devices=8, num_nodes=16)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "epoch": 0}
    fabric.strategy.protect(state)                     # leaves state as it is if there is nothing to resume
    for epoch in range(state["epoch"], epochs):
        state["epoch"] = epoch
        for batch in loader:                           # goes on with the next batch
            ...
    fabric.strategy.close()                            # the run is finished: nothing is kept for a restart

Where an optimizer has stepped, a snapshot is taken when the loop asks a loader in ``state`` for the next batch. A loop without such a
loader, or one that knows better, says itself where a step ends: with ``fabric.save("gemini://latest", state)`` as its last statement,
and ``fabric.load("gemini://latest", state)`` before it.

Random states are saved and loaded with the rest. Other paths than ``gemini://latest`` are files, as ever.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gemini_ft.checkpointer import GIVEN, Checkpointer, Snapshot
from gemini_ft.core.census import LOADERS, Finding
from gemini_ft.errors import ConfigError, StateError
from gemini_ft.lightning import compat
from gemini_ft.lightning.base import Gemini, join_group, make_class
from gemini_ft.lightning.fit import log
from gemini_ft.lightning.gradients import synchronizer_of
from gemini_ft.loaders.bookmark import Bookmark
from gemini_ft.loaders.loader import bookmark_of, make_resumable
from gemini_ft.loaders.parts import is_stateful
from gemini_ft.state import iterators
from gemini_ft.state.ddp import ddp_state, first_tensors, frozen_at_first, restore_buckets, restore_sync, send_first
from gemini_ft.state.loop import LoopWatch
from gemini_ft.state.rng import GivenGenerator, is_generator, rng_state, take_rng_state
from gemini_ft.worker import attempt
from gemini_ft.worker.rendezvous import exchange

if TYPE_CHECKING:
    from lightning.fabric.strategies.strategy import Strategy as _Strategy
else:
    _Strategy = object

LATEST = "gemini://latest"

_PATIENCE = 8  # steps without a snapshot, after which something is amiss; several optimizers may step before one is due

_PUBLIC = {"lightning.fabric": "gemini_ft.lightning", "lightning_fabric": "gemini_ft.pytorch_lightning"}


def by_name(name: str, package: str) -> Any:
    """The strategy class that ``Fabric(strategy=name)`` of ``package`` means."""
    if name == "gemini_fsdp2":
        raise ConfigError(
            "Fabric(strategy='gemini_fsdp2') cannot know how to shard the model; give a function that does, for example "
            f"strategy={_PUBLIC[package]}.GeminiFabricModelParallelStrategy(parallelize_fn=shard)"
        )
    if name.startswith("gemini_deepspeed"):
        raise ConfigError(
            f"Fabric(strategy={name!r}) is not supported; use it with the Trainer, or protect an engine in a loop of your own with "
            "gemini_ft.deepspeed.initialize"
        )
    options = {} if name == "gemini" else {"find_unused_parameters": name.endswith("_true")}
    return functools.partial(by_class("GeminiFabricStrategy", package), **options)


@functools.cache
def by_class(name: str, package: str) -> Any:
    """The strategy class called ``name`` for ``package``, "lightning.fabric" or "lightning_fabric"."""
    mixin, base = {
        "GeminiFabricStrategy": (GeminiFabricMixin, "DDPStrategy"),
        "GeminiFabricModelParallelStrategy": (GeminiFabricShardedMixin, "ModelParallelStrategy"),
    }[name]
    doc = f"Fabric's {base} whose training state survives failures. Keyword options: those of GeminiConfig, data_resume, "
    doc += f"gradient_pipeline, and {base}'s."
    return make_class(name, mixin, base, package, _PUBLIC[package], doc)


class GeminiFabricMixin(Gemini, _Strategy):
    """A mixin over a strategy of Fabric.

    ``accumulation``: micro-batches of each rank in a step (`Checkpointer.accumulation`), set before `protect` and asked for after it.
    """

    accumulation: int = 1
    _gemini_replicated: ClassVar[bool] = True
    _gemini_checkpointer: Checkpointer | None = None
    _gemini_found: Any = None  # the snapshot to resume, until it is loaded
    _gemini_saves: int = 0
    _gemini_unsent: bool = False  # whether nothing is resumed, and the first weights have not been sent
    _gemini_bound: tuple[int, ...] = ()
    _gemini_state: dict[str, Any] | None = None  # what is saved when the next batch is asked for; None once the script saves it
    _gemini_steps: int = 0  # of optimizers, since the last snapshot
    # Loaders that were asked for a batch since the last step, each with the mode then; and those that optimizers have stepped on.
    _gemini_asked: tuple[tuple[weakref.ref[Bookmark], object], ...] = ()
    _gemini_trained_on: tuple[weakref.ref[Bookmark], ...] = ()
    _gemini_mode: object = None  # of the last step
    _gemini_has_warned: bool = False
    _gemini_loaders: tuple[weakref.ref[Bookmark], ...] = ()  # in the order in which they were set up, until the run is joined
    _gemini_watch: LoopWatch | None = None

    @property
    def checkpointer(self) -> Checkpointer:
        """The Checkpointer under this strategy; the run is joined at the first use. Collective then."""
        if self._gemini_checkpointer is None:
            name = attempt.next_name("fabric")
            checkpointer = Checkpointer(config=self.gemini_config, name=name, hooks=False, replicated=self._gemini_replicated)
            checkpointer.accumulation, checkpointer.asks_for_accumulation = self.accumulation, True
            self._gemini_found = checkpointer.open()
            self.accumulation = checkpointer.accumulation
            self._gemini_saves = self._gemini_found.iteration if self._gemini_found else 0
            self._gemini_unsent = self._gemini_found is None and compat.ranks_begin_apart(self)
            self._gemini_checkpointer = checkpointer
        return self._gemini_checkpointer

    def protect(self, state: dict[str, Any]) -> None:
        """Loads what there is to resume into ``state``, and snapshots it from now on, when a loader in it is asked for a batch. Collective.

        ``state``: models, optimizers, schedulers, loaders, and the counters of the loop, which it keeps there.
        """
        inner = compat.unwrapped(self._gemini_package, state)
        self.load_checkpoint(LATEST, inner)
        state |= {
            name: value for name, value in inner.items() if not isinstance(value, nn.Module | Optimizer) and bookmark_of(value) is None
        }
        self._gemini_state, self._gemini_watch = state, LoopWatch()

    def close(self) -> None:
        """Ends the run, which has finished on all ranks: the agents may forget it, and the next start begins anew."""
        if self._gemini_checkpointer is not None:
            self.barrier("gemini: all ranks have finished")
            self._gemini_checkpointer.close(finished=True)
            self._gemini_checkpointer = None

    def setup_environment(self) -> None:
        join_group(self)
        super().setup_environment()

    def setup_module(self, module: nn.Module) -> Any:
        wrapped = super().setup_module(module)
        if isinstance(wrapped, DistributedDataParallel):
            frozen_at_first(wrapped)
        if self.gemini_rules is not None:
            if self.gradients is not None:
                raise ConfigError("gradient_pipeline is for one model, and a second one was set up; leave it out, or train them apart")
            self.gradients = synchronizer_of(wrapped, self.gemini_rules, self.precision)
        return wrapped

    def process_dataloader(self, dataloader: Any) -> Any:
        loader = make_resumable(super().process_dataloader(dataloader), self._gemini_data_resume, before_next=self._gemini_before_batch)
        if self._gemini_checkpointer is None:
            self._gemini_loaders = (*self._gemini_loaders, weakref.ref(loader._gemini))
        return loader

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        closure = kwargs.get("closure")
        if closure is None:
            self._gemini_before_update()  # forward and backward are over
        else:
            kwargs["closure"] = functools.partial(_run_then, closure, self._gemini_before_update)
        result = super().optimizer_step(optimizer, **kwargs)
        self._gemini_stepped()
        return result

    def _gemini_stepped(self) -> None:
        """Count the optimizer's step, and warn once of steps that no snapshot will ever have."""
        self._gemini_steps += 1
        self._gemini_mode = mode = self._gemini_mode_now()
        self._gemini_trained_on, self._gemini_asked = self._gemini_trained_on_by(mode), ()
        if self._gemini_has_warned or not self.is_global_zero or (self._gemini_checkpointer is not None and self._gemini_steps < _PATIENCE):
            return
        self._gemini_has_warned = True
        if self._gemini_checkpointer is None:
            log.warning(
                "NOTHING IS PROTECTED: an optimizer has stepped, and fabric.strategy.protect(state) was not called. Call it before the "
                "loop, with a dictionary of models, optimizers, schedulers, loaders and counters (docs/lightning.md, Fabric)"
            )
        else:
            log.warning(
                "no snapshot was taken in %d steps: no loader in the state that was given to fabric.strategy.protect(state) was under way "
                "in them, or asked in the mode (gradients, train or eval) in which they were made. Put it there, or call "
                "fabric.save(%r, state) as the last statement of the loop",
                self._gemini_steps,
                LATEST,
            )

    def _gemini_trained_on_by(self, mode: object) -> tuple[weakref.ref[Bookmark], ...]:
        """The loaders that optimizers have stepped on, with those of a step that was made in this mode.

        They were asked in the same mode. A loop that asks for its batches in another one (it evaluates after each step, say) steps on what
        it asked first and is under way: a validation after the step is over by then, one in its middle comes later.
        """
        known = tuple(there for there in self._gemini_trained_on if (mark := there()) is not None and self._gemini_has(mark))
        found = [there for there, then in self._gemini_asked if then == mode and there not in known]
        if not any(_is_under_way(there) for there in known):
            found = [*[there for there, _ in self._gemini_asked if _is_under_way(there)][:1], *found]
        return tuple(dict.fromkeys((*known, *found)))

    def _gemini_has(self, mark: Bookmark) -> bool:
        """Whether a loader belongs to the state that is saved."""
        return any(bookmark_of(item) is mark for item in (self._gemini_state or {}).values())

    def _gemini_before_batch(self, mark: Bookmark) -> None:
        """The loop asks a loader for its next batch: everything of the step before has happened, unless that loader is a validation's.

        A loop may validate in the middle of a step. It then asks the validation's loader with gradients off, or with models in another mode
        than when the optimizer stepped.
        """
        state = self._gemini_state
        if state is None or not self._gemini_has(mark):
            return
        mode, there = self._gemini_mode_now(), weakref.ref(mark)
        if self._gemini_steps and (there in self._gemini_trained_on or mode == self._gemini_mode):
            inner = compat.unwrapped(self._gemini_package, state)
            if self.is_global_zero and self._gemini_watch is not None:
                self._gemini_watch.named = self.checkpointer.named
                self._gemini_watch.look_beside(state, inner, self._gemini_saves + 1)
            self._gemini_save(self.checkpointer, inner)
        if not any(there == other for other, _ in self._gemini_asked):
            self._gemini_asked = (*self._gemini_asked, (there, mode))

    def _gemini_mode_now(self) -> object:
        """Whether gradients are on, and for each model of the state whether it is in training mode; to be compared only."""
        models = [item for item in (self._gemini_state or {}).values() if isinstance(item, nn.Module)]
        return torch.is_grad_enabled(), [_inner(model).training for model in models]

    def _gemini_before_update(self) -> None:
        if self.gemini_rules is not None and self.gradients is not None:
            self.gradients.backward_over()
        if self._gemini_checkpointer is not None:
            self._gemini_checkpointer.wait_before_update()

    def save_checkpoint(self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None) -> None:
        if not _is_ours(path):
            with self._gemini_checkpointer.paused(validates=False) if self._gemini_checkpointer else nullcontext():
                super().save_checkpoint(path, state, storage_options, filter)
            return
        if filter is not None:
            raise ConfigError(f"fabric.save({LATEST!r}, filter=...): a snapshot is always whole; leave the filter out")
        checkpointer, self._gemini_state = self.checkpointer, None
        if self._gemini_found is not None:
            log.warning(
                "a snapshot of step %d exists, but fabric.load(%r, state) was not called: starting over", self._gemini_saves, LATEST
            )
            self._gemini_found = None
        if self._gemini_unsent:
            log.warning(
                "init_sync=False was given, and fabric.load(%r, state) was not called before the first fabric.save: rank 0's first weights "
                "were not sent to the other ranks. Call it before the loop, or leave init_sync out",
                LATEST,
            )
            self._gemini_unsent = False
        self._gemini_save(checkpointer, state)

    def _gemini_save(self, checkpointer: Checkpointer, state: dict[str, Any]) -> None:
        others = self._bind(checkpointer, state)
        checkpointer.steps_made()
        iterators.resumption.random = None
        checkpointer.check_batches(others)
        self._gemini_steps = 0
        self._gemini_saves += 1
        if not checkpointer.due(self._gemini_saves - 1, self._gemini_saves):
            checkpointer.alive(self._gemini_saves)
        else:
            saved = {name: item.state_dict() if is_stateful(item) else item for name, item in others.items()}
            ddp = {name: ddp_state(item) for name, item in state.items() if isinstance(item, DistributedDataParallel)}
            # One that is under way begins anew after a failure.
            iterations = [mark.place[0] - mark.is_under_way if mark is not None else 0 for mark in self._gemini_marks()]
            checkpointer.save(self._gemini_saves, {"state": saved, "ddp": ddp, "iterations": iterations, "rng": rng_state()})

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None) -> dict[str, Any]:
        if not _is_ours(path):
            return super().load_checkpoint(path, state, strict, **compat.if_given(weights_only))
        if not isinstance(state, dict):
            raise ConfigError(f"fabric.load({LATEST!r}, state): state must be the dictionary that is saved, got {type(state).__name__}")
        checkpointer = self.checkpointer
        found, self._gemini_found = self._gemini_found, None
        unsent, self._gemini_unsent = self._gemini_unsent, False
        others = self._bind(checkpointer, state)
        self._gemini_steps = 0
        if found is None:
            if unsent:
                models = {name: item for name, item in state.items() if isinstance(item, nn.Module)}
                send_first(first_tensors(models, compat.sends_buffers(self)), exchange)
            return {}
        checkpointer.load_tensors()
        with checkpointer.putting_back():
            return self._put_back(found, state, others, strict)

    def _put_back(self, found: Snapshot, state: dict[str, Any], others: Mapping[str, Any], strict: bool) -> dict[str, Any]:
        """Fills what is neither model nor optimizer; returns what the state has no place for."""
        saved = dict(found.extras["state"])
        if strict and (missing := others.keys() - saved.keys()):
            raise StateError(
                f"fabric.load({LATEST!r}): the snapshot of step {found.iteration} has no {sorted(missing)}, only {sorted(saved)} beside "
                "models and optimizers; save and load the same state, or give strict=False"
            )
        for name in others.keys() & saved.keys():
            if found.new_rank is not None and isinstance(others[name], GivenGenerator):
                del saved[name]
            elif is_stateful(others[name]):
                others[name].load_state_dict(saved.pop(name))
            else:
                state[name] = saved.pop(name)
        for mark, over in zip(self._gemini_marks(), found.extras.get("iterations", ()), strict=False):  # older snapshots have none
            if mark is not None and not any(bookmark_of(item) is mark for item in state.values()):
                mark.count_from(over)
        for name, wrapper in found.extras["ddp"].items():
            restore_buckets(state[name], wrapper)
            restore_sync(state[name], wrapper)
        iterators.resumption.resize = None  # positions that are loaded later are of the present ranks
        take_rng_state(found.extras["rng"], found.new_rank)
        self.checkpointer.note_resume({name: item for name, item in others.items() if is_stateful(item)})
        return saved

    def _gemini_marks(self) -> list[Bookmark | None]:
        """The bookmarks of the loaders that were set up before the run was joined; None: the loader is gone."""
        return [there() for there in self._gemini_loaders]

    def _bind(self, checkpointer: Checkpointer, state: Mapping[str, Any]) -> dict[str, Any]:
        """Gives the Checkpointer the models and optimizers in ``state``; returns the rest, each generator with methods for its state."""
        models = {name: _inner(item) for name, item in state.items() if isinstance(item, nn.Module)}
        optimizers = {name: item for name, item in state.items() if isinstance(item, Optimizer)}
        if not models:
            raise ConfigError(f"{LATEST!r}: state must hold at least one module, it has only {sorted(state)}")
        identity = tuple(id(item) for item in (*models.values(), *optimizers.values()))
        if identity != self._gemini_bound:
            if self.gradients is not None and not self._gemini_bound:
                checkpointer.attach_gradients(self.gradients)
            checkpointer.bind(models, list(optimizers.values()))
            self._gemini_bound = identity
            checkpointer.census.register("state", lambda: _findings(state))
            checkpointer.wrapped_by({name: item for name, item in state.items() if isinstance(item, DistributedDataParallel)})
        rest = {name: item for name, item in state.items() if name not in models and name not in optimizers}
        return {name: GivenGenerator(item) if is_generator(item) else item for name, item in rest.items()}


class GeminiFabricShardedMixin(GeminiFabricMixin):
    """A mixin over ModelParallelStrategy: every rank holds its own parameters. Without sizes all ranks are data parallel."""

    _gemini_replicated = False
    _gemini_shards = True

    def setup_environment(self) -> None:
        compat.fill_mesh(self)
        super().setup_environment()


def _is_under_way(there: weakref.ref[Bookmark]) -> bool:
    mark = there()
    return mark is not None and mark.is_under_way


def _is_ours(path: Any) -> bool:
    if not str(path).startswith("gemini:"):
        return False
    if str(path) != LATEST:
        raise ConfigError(f"path {str(path)!r}: in memory there is only the newest state, {LATEST!r}; other paths are files")
    return True


def _findings(state: Mapping[str, Any]) -> Iterator[Finding]:
    for name, item in state.items():
        if (mark := bookmark_of(item)) is not None:
            yield LOADERS.found(name, note=f"by {mark.way}")
        elif not isinstance(item, nn.Module | Optimizer):
            yield GIVEN.found(f"state[{name!r}]", note=type(item).__name__)


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _run_then(closure: Callable[[], Any], then: Callable[[], None]) -> Any:
    result = closure()
    then()
    return result
