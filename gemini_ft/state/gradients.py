"""The state of a gradient pipeline as training state: residuals, momenta, factors, plans and counters, in every snapshot.

    checkpointer = gemini_ft.Checkpointer(model, optimizer, gradients=pipeline)      # anything that is a `GradientState`

A pipeline writes its tensors in the next backward, before the next update: they are copied at once, like buffers. Every rank has its
own. In snapshots a tensor at ``state["a"]["b.c"]`` is called ``gradients.a.b%2Ec``; all that is no tensor belongs to the extras.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from gemini_ft.accelerator import current_device
from gemini_ft.core.census import Fate, Finding, declare
from gemini_ft.core.layout import PER_RANK, Layout, Read, TensorSpec
from gemini_ft.errors import LayoutMismatchError, UnsupportedStateError
from gemini_ft.state.base import TrainingState, as_one_rank
from gemini_ft.state.hyperparameters import Given
from gemini_ft.state.modules import Extras
from gemini_ft.state.tensors import Live, Role, Source, describe, split_state_name, state_name
from gemini_ft.wire.worker_messages import Figures, ToAgent

_PIPELINE = declare("what a gradient pipeline remembers", Fate.CAPTURED, "residuals, momenta, factors, plans and counters of each rank")
KEY = "gradients"  # begins the names of tensors; of the rest in the extras
_PREFIX = f"{KEY}."
_Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype, torch.device]
_WAY_OUT = "or start afresh with another run_id or resume='never'"
_PAUSE = 1.0  # seconds between figures
_log = logging.getLogger("gemini_ft")


class GradientState(Protocol):
    """An object that synchronises gradients and remembers something from step to step.

    One whose ``lets_ranks_differ`` is true averages every few steps only: parameters and optimizer state, which differ in between,
    are captured as each rank's own. One whose ``is_elastic`` is true goes on with the states of some of the ranks, or with one of them
    twice, and has a ``forget`` for ranks that are new.
    """

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts with keys that are strings; in them dense tensors (live, not copied), numbers, strings, lists of these.

        The keys are the same on every rank, the values differ. What lies at the same address in every step is planned once.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`; tensors are copied. They are on the kind of device where they were, if there is one."""
        ...

    def summary(self) -> Mapping[str, Mapping[str, float]]:
        """Rule or group -> figure -> value in the last step.

        Figures that ``gemini status`` knows: ``bytes_before`` and ``bytes_after`` (of this rank); ``encode_ms``,
        ``communication_ms``, ``decode_ms``; ``overlap`` (part of the communication that backward hid) and ``density`` (part of
        the elements that travelled), both from 0 to 1. Others are shown by their names.
        """
        ...


_announced: list[tuple[weakref.ref[Any], list[weakref.ref[torch.Tensor]]]] = []  # in the order of announcement


def announce(gradients: GradientState, parameters: Iterable[torch.Tensor]) -> None:
    """Lets a `gemini_ft.Checkpointer` of these parameters' model find the object that synchronises their gradients."""
    _announced.append((weakref.ref(gradients), [weakref.ref(param) for param in parameters]))


def withdraw(gradients: GradientState) -> None:
    """Takes back an announcement: the object synchronises gradients no more."""
    _announced[:] = [each for each in _announced if each[0]() is not None and each[0]() is not gradients]


def announced(parameters: Iterable[torch.Tensor]) -> GradientState | None:
    """The synchronizer of any of these parameters' gradients: several as one, None if nothing does."""
    alive = synchronizers(parameters)
    return alive[0] if len(alive) == 1 else _Several(alive) if alive else None


def synchronizers(parameters: Iterable[torch.Tensor]) -> list[GradientState]:
    """The synchronizers of any of these parameters' gradients, in the order in which they were made."""
    known = {id(param) for param in parameters} if _announced else set()
    found = [gradients() for gradients, refs in _announced if any(id(ref()) in known for ref in refs)]
    return [gradients for gradients in found if gradients is not None]


def lets_ranks_differ(gradients: GradientState | None) -> bool:
    """Whether parameters and optimizer state are each rank's own between two averages."""
    return getattr(gradients, "lets_ranks_differ", False)


def is_elastic(gradients: GradientState | None) -> bool:
    """Whether another number of ranks can go on with it."""
    return getattr(gradients, "is_elastic", False)


class _Several:
    """The states of several synchronizers, in the order in which they were made."""

    def __init__(self, inner: Sequence[GradientState]) -> None:
        self._inner: dict[str, Any] = {str(number): each for number, each in enumerate(inner)}
        self.lets_ranks_differ = any(map(lets_ranks_differ, inner))
        self.is_elastic = all(map(is_elastic, inner))

    def state_dict(self) -> dict[str, Any]:
        return {number: each.state_dict() for number, each in self._inner.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for number, each in self._inner.items():
            each.load_state_dict(state[number])

    def forget(self) -> None:
        for each in self._inner.values():
            each.forget()

    def summary(self) -> Mapping[str, Mapping[str, float]]:
        return {f"{number}, {rule}": figures for number, each in self._inner.items() for rule, figures in each.summary().items()}


class WithGradients:
    """A `gemini_ft.state.base.TrainingState` and the state of the gradients beside it.

    ``inner``: models and optimizers, or an engine. ``gradients``: the state that is added.
    """

    def __init__(self, inner: TrainingState, gradients: GradientState) -> None:
        self._inner, self._gradients = inner, gradients
        self._seen: dict[str, tuple[_Place, torch.Tensor]] = {}  # name -> as it was last surveyed
        self._rest: Extras = {}  # of the same survey, the values that are no tensors
        self._rooms: dict[str, torch.Tensor] = {}  # name -> the tensor that is being filled, until apply_extras
        self._is_new = False  # takes the state of a rank that goes on with it, too

    def survey(self) -> list[Live]:
        before, self._seen = self._seen, {}
        names, rest = list[str](), dict[str, Any]()
        for name, value in _leaves(self._gradients.state_dict()):
            names.append(name)
            if isinstance(value, torch.Tensor):
                self._seen[name] = _unless_new(name, value, before.get(name))
            else:
                rest[name] = value
        self._rest = {"names": names, "values": rest}
        return [*self._inner.survey(), *(Live(name, tensor, Role.BUFFER) for name, (_, tensor) in self._seen.items())]

    def describe(self, live: Sequence[Live], rank: int, world_size: int) -> list[Source]:
        theirs, ours = _divided(live)
        added = [_placed(source) for source in describe(ours, rank, world_size, replicated=False)]
        return [*self._inner.describe(theirs, rank, world_size), *added]

    def extras(self) -> Extras:
        return self._inner.extras() | {KEY: self._rest}

    def check(self, extras: Extras) -> None:
        check_presence(extras, attached=True)
        self._inner.check(extras)

    def findings(self) -> Iterable[Finding]:
        live = [item for item in self.survey() if is_gradient(item.name)]
        return [*self._inner.findings(), _PIPELINE.found(KEY, sum(item.tensor.nbytes for item in live))]

    def hyperparameters(self) -> Given:
        return self._inner.hyperparameters()

    def structure(self) -> object:
        return self._inner.structure()

    def destinations(self, stored: Iterable[TensorSpec], rank: int, world_size: int) -> list[Source]:
        specs = list(stored)
        ours = [spec for spec in specs if is_gradient(spec.name)]
        theirs = self._inner.destinations((spec for spec in specs if not is_gradient(spec.name)), rank, world_size)
        self._rooms = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=_device(spec)) for spec in ours}
        return [*theirs, *(Source(spec, self._rooms[spec.name], mutable=True) for spec in ours)]

    def apply_extras(self, extras: Extras) -> None:
        """Puts back `extras`. Raises LayoutMismatchError if the pipeline cannot load the state of another one."""
        self._inner.apply_extras(extras)
        rooms, self._rooms = self._rooms, {}
        if (saved := extras[KEY]) is None:  # made by another number of ranks
            return
        try:
            gradients: Any = self._gradients
            gradients.load_state_dict(_tree(saved["names"], saved["values"] | rooms))
            if self._is_new:
                gradients.forget()  # it has sent nothing of which a rest could be left
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutMismatchError(
                f"the snapshot's gradient state does not fit this pipeline ({type(error).__name__}: {error}); resume with the pipeline "
                f"that made it, {_WAY_OUT}"
            ) from error

    def resized(
        self, layouts: Mapping[int, Layout], extras: Mapping[int, Extras], rank: int, world_size: int
    ) -> tuple[Sequence[Read], Mapping[str, torch.Tensor], Extras]:
        """Starts the gradients' state anew: residuals belong to a rank's share of the data, and plans to the number of ranks.

        Not where ranks are each other's substitutes, which have trained apart.
        """
        if is_elastic(self._gradients):
            self._is_new = rank >= len(layouts)
            return as_one_rank(self, layouts, extras, rank)
        reads, tensors, own = self._inner.resized(layouts, extras, rank, world_size)
        if rank == 0:
            pieces = [piece for layout in layouts.values() for piece in layout.pieces if is_gradient(piece.name)]
            _log.warning(
                "the gradient state of %d ranks cannot be used by %d: %d tensors of residuals, momenta and factors (%s bytes over all "
                "ranks), plans and counters are dropped, and the gradient pipeline begins anew",
                len(layouts),
                world_size,
                len({piece.name for piece in pieces}),
                f"{sum(piece.nbytes for piece in pieces):,}",
            )
        return reads, tensors, own | {KEY: None}


class FiguresReporter:
    """Shows the agent the newest figures of the gradients, once a second at most, and never waits for it.

    ``summary``: see `GradientState`. ``offer``: sends a message if that can be done at once, and says whether it has been.
    """

    def __init__(self, summary: Callable[[], Mapping[str, Mapping[str, float]]], offer: Callable[[ToAgent], bool]) -> None:
        self._summary, self._offer = summary, offer
        self._due = 0.0

    def step_over(self) -> None:
        """Offers the figures to the agent after a step, at most once a second."""
        if time.monotonic() >= self._due and self._offer(Figures(figures=_finite(self._summary()))):
            self._due = time.monotonic() + _PAUSE


def is_gradient(name: str) -> bool:
    """Whether a tensor of a snapshot is of the gradients' state."""
    return name.startswith(_PREFIX)


def check_presence(extras: Extras, attached: bool) -> None:
    """Compares the gradients' state in a snapshot with that of the job.

    Raises LayoutMismatchError: one of them has a gradient pipeline, and the other has none.
    """
    if (KEY in extras) == attached:
        return
    if attached:
        raise LayoutMismatchError(
            "the snapshot was made without a gradient pipeline, and this job has one, whose residuals would be missing; resume without "
            f"it (no gradients=, no attach_gradients()), {_WAY_OUT}"
        )
    raise LayoutMismatchError(
        "the snapshot holds the state of a gradient pipeline (residuals, momenta, plans), and this job has none; give it "
        f"(Checkpointer(gradients=...), attach_gradients()) before resuming, {_WAY_OUT}"
    )


def _leaves(state: Mapping[str, Any], label: str = KEY) -> Iterator[tuple[str, Any]]:
    """Name and value of everything in nested dicts that is no dict, or an empty one."""
    for key, value in state.items():
        if type(key) is not str:
            raise UnsupportedStateError(f"{label} has the key {key!r}; keys of gradient state must be strings, so that tensors have names")
        name = state_name(label, key)
        if isinstance(value, dict) and value:
            yield from _leaves(value, name)
        else:
            yield name, value


def _tree(names: Iterable[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_leaves`."""
    nodes: dict[str, dict[str, Any]] = {KEY: {}}

    def node(name: str) -> dict[str, Any]:
        if name not in nodes:
            label, key = split_state_name(name)
            nodes[name] = node(label)[key] = {}
        return nodes[name]

    for name in names:
        label, key = split_state_name(name)
        node(label)[key] = values[name]
    return nodes[KEY]


def _unless_new(name: str, tensor: torch.Tensor, before: tuple[_Place, torch.Tensor] | None) -> tuple[_Place, torch.Tensor]:
    """The view that was found before, if this is another one of the same memory: else plans would be made anew.

    As long as ``before`` is kept, its memory cannot have been given to another tensor.
    """
    if tensor.layout != torch.strided or isinstance(tensor, DTensor):
        what = f"the layout {tensor.layout}" if tensor.layout != torch.strided else "parts on other ranks (a DTensor)"
        raise UnsupportedStateError(f"{name} has {what}; gradient state must be dense tensors of this rank alone")
    place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    return before if before is not None and before[0] == place else (place, tensor)


def _divided(live: Sequence[Live]) -> tuple[list[Live], list[Live]]:
    """The tensors that are not the gradients', and those that are."""
    return [item for item in live if not is_gradient(item.name)], [item for item in live if is_gradient(item.name)]


def _placed(source: Source) -> Source:
    """The source with the kind of its device in its words, for `_device`."""
    return replace(source, spec=replace(source.spec, logical=f"{PER_RANK} {source.tensor.device.type}"))


def _device(spec: TensorSpec) -> torch.device:
    """The device to load to, as in `gemini_ft.state.codec.decode`: the accelerator's current one if the tensor was on one."""
    kind, accelerator = spec.logical.removeprefix(PER_RANK).strip(), torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != kind:
        return torch.device("cpu")
    return current_device()


def _finite(summary: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The summary as JSON can have it: figures that are not finite are left out."""
    return {rule: {name: float(value) for name, value in figures.items() if math.isfinite(value)} for rule, figures in summary.items()}
