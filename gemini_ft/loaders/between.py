"""The state that the iterations of a loader leave behind for the next one: generators, attributes, and worker processes that live on.

A validation may be left early (``limit_val_batches``, the sanity check), so that workers have loaded batches in vain. They are at rest
only once they have made all that they were asked for.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gemini_ft.loaders.parts import LoaderParts
from gemini_ft.loaders.workers import WorkerStates
from gemini_ft.state.fields import fields_of, is_a
from gemini_ft.state.remembered import AttributeSwap, Values
from gemini_ft.state.rng import generator_states, process_randomness, set_generator_states
from gemini_ft.state.values import Opaque, is_same, snapshot

log = logging.getLogger(__name__)
_LOOKED_AT = 8  # indices
OF_WORKERS = ("dataset", "collate")  # the parts that worker processes have copies of


class Between:
    """A loader between two iterations.

    Args:
        rests: whether it is a validation's: its iterations are over whenever its state is asked for.
        insists: whether the user has declared that changes beside the generators do not matter.
    """

    def __init__(self, parts: LoaderParts, *, rests: bool, insists: bool) -> None:
        self._parts, self._says = parts, rests and not insists
        loader = parts.loader
        self._looks_at_draws = getattr(loader, "num_workers", 0) > 0 and not (rests or insists)
        persistent = getattr(loader, "persistent_workers", False)
        self._workers = getattr(loader, "num_workers", 0) if persistent or not rests else 0
        self.workers = self._new_workers()  # the states of its worker processes; None where nothing of them is needed
        self.forked: Values | None = None  # attributes of the dataset that persistent workers were started with; None before that
        self._exchange: AttributeSwap | None = None  # of attributes, while workers see those that they were started with first
        self.named: set[str] = set()  # paths of attributes that were named in a warning

    @property
    def _loader(self) -> Any:
        return self._parts.loader

    def forget_workers(self) -> None:
        """Forgets what came from the workers of an iteration that was begun too early."""
        self.workers = self._new_workers()

    def _new_workers(self) -> WorkerStates | None:
        return WorkerStates(self._workers, self._loader.persistent_workers) if self._workers else None

    def state(self) -> dict[str, Any]:
        """The state, as plain data."""
        kept, lost = self._parts.born.changes()
        iterator, workers = getattr(self._loader, "_iterator", None), None
        if self.workers and self.workers.persistent and (iterator is not None or self.workers.revived):
            if self.workers.seeded_from is None:
                lost = [*lost, "its persistent workers, which had been started before"]
            else:
                workers = self.workers.resting(iterator)
        if self._says:
            self._name(
                lost,
                "the validation's loader of a %s changes %s, which no snapshot can have: after a failure its batches may be others than "
                "without one. Keep it in small plain attributes (numbers, lists, small tensors) that are there from the beginning, or say "
                "with data_resume='skip' that batches do not depend on it",
            )
        return {
            "generators": generator_states(self._parts.generators),
            "attributes": kept,
            "workers": workers,
            "seeded_from": self.workers.seeded_from if self.workers else None,
            "forked": self.forked,
            "named": sorted(self.named),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Puts the result of `state` back. Workers are started with the next iteration."""
        set_generator_states(self._parts.generators, state["generators"])
        self._parts.born.give_back(state["attributes"])
        self.named.update(state["named"])
        if self.workers and state["workers"] is not None:
            self._loader._iterator = None  # workers that were started too early
            self.workers.revive(state["workers"], state["seeded_from"])
            self.forked = state["forked"]

    def start(self, start: Callable[[], Iterator[Any]], *, new: bool) -> Iterator[Any]:
        """The iterator that ``start`` gives; workers in the place of those at rest see the dataset that those saw."""
        if not self.workers or not self.workers.revived:
            return start()
        with self.as_forked(new):
            return start()

    @contextmanager
    def as_forked(self, new: bool) -> Iterator[None]:
        """Shows the dataset as persistent workers were started with it, but for what they share, to those that are started now.

        ``new``: whether that is without attributes that it did not have then.
        """
        if self.forked is None:
            yield
            return
        self._exchange = exchange = self._parts.born.exchange(self.forked, OF_WORKERS, new=new)
        try:
            yield
        finally:
            self._exchange = None
            exchange.end()

    def as_here(self) -> AbstractContextManager[None]:
        """Shows the dataset as it is in this process, in which the sampler is asked while workers are started."""
        return nullcontext() if self._exchange is None else self._exchange.undone()

    def drawn_here(self, indices: Iterator[Any]) -> Iterator[Any]:
        """The same indices, each drawn with the dataset as it is in this process.

        An order that goes on to be drawn ahead, for workers, from the process's generators, from which the loop draws as well, cannot be
        drawn again. Some indices of the first iteration show it.
        """
        looks, self._looks_at_draws = self._looks_at_draws, False
        for number in itertools.count():
            before = process_randomness() if looks and 0 < number <= _LOOKED_AT else None
            with self.as_here():
                try:
                    index = next(indices)
                except StopIteration:
                    return
            if before is not None and before != process_randomness():
                looks = False
                self._name(
                    ["the process's generators"],
                    "the sampler of the loader of a %s draws from %s with later batches too, not with the first alone: after a failure "
                    "its order may be another than without one. Draw the order of an epoch at once, or from a generator that the sampler "
                    "has in an attribute",
                )
            yield index

    def seed_source(self) -> bytes:
        """The state of the generator that the seed of new workers is drawn from."""
        generator = self._loader.generator if self._loader.generator is not None else torch.default_generator
        return generator.get_state().numpy().tobytes()

    def name_doubtful(self, but: Collection[str]) -> None:
        """Names, when an iteration begins, what `LoaderParts.doubtful` finds, but for some paths."""
        self._name(
            [path for path in self._parts.doubtful() if path not in but],
            "the loader of a %s has other elements in %s than when the first epoch began, and no snapshot can have that: an epoch that is "
            "resumed after a failure may begin with those of the start. If they are an order, shuffle a copy, made with a generator that "
            "is seeded with the epoch, or keep it small (a list of at most 64 entries, an array of at most 256 KiB). If they are numbers "
            "that were given to what came, a vocabulary, make it before the training begins. Or give the loader state_dict and "
            "load_state_dict, or say with data_resume='skip' that batches do not depend on it",
        )

    def first_of(self, batches: Iterator[Any]) -> Any:
        """The first batch; names attributes of modules that making it changes, if a method of theirs is what the dataset calls."""
        marks = [(module, name, snapshot(value)) for module in self._makers() for name, value in _public(module)]
        batch = next(batches)
        self._name(
            [f"{type(module).__name__}.{name}" for module, name, mark in marks if not _is_as(mark, vars(module).get(name))],
            "batches of a %s are made by the model, whose attributes %s change with them: after a failure those of the epoch are made "
            "again with the model and its attributes as they are then, and may be others. Make batches of what the dataset holds itself, "
            "give the loader state_dict and load_state_dict, or make them in training_step",
        )
        return batch

    def _makers(self) -> list[Any]:
        methods = [value for value in fields_of(getattr(self._loader, "dataset", self._loader)).values() if is_a(value, MethodType)]
        return [method.__self__ for method in methods if is_a(method.__self__, nn.Module)]

    def _name(self, paths: list[str], text: str) -> None:
        """Says once in a job, on its first rank, what no snapshot can have: ``text``, of the class of the dataset and of paths."""
        fresh = sorted(set(paths) - self.named)
        self.named.update(fresh)
        if fresh and not (dist.is_initialized() and dist.get_rank()):
            log.warning(text, type(getattr(self._loader, "dataset", self._loader)).__name__, ", ".join(fresh[:5]))


def _public(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(module).items() if not name.startswith("_") and name != "training"]


def _is_as(mark: Any, value: Any) -> bool:
    return mark.is_now(value) if type(mark) is Opaque else is_same(snapshot(value), mark)
