"""The routes of gradients under one rule: as they are, added up by a sparse scheme, or compressed.

A route turns a group of named gradients into their averages over ranks. It computes, and yields every collective as a `PendingCollective`;
`gemini_ft.pipeline.lanes` carries both out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gemini_ft.compression.base import Bundle, CollectiveRequest, FlatLayout, Payload, Primitive, Reducer, Turn, join
from gemini_ft.compression.collective import ScopedGroups, answer
from gemini_ft.compression.control import DelayControl
from gemini_ft.compression.dgc import MomentumCorrection
from gemini_ft.compression.feedback import ErrorFeedback
from gemini_ft.compression.sparse import entries
from gemini_ft.errors import ConfigError, StateError
from gemini_ft.pipeline.lanes import PendingCollective, Work
from gemini_ft.sync.base import Scheme
from gemini_ft.sync.builtin import Dense
from gemini_ft.sync.ring import Ring8

T = TypeVar("T")
Gradients: TypeAlias = Mapping[str, Tensor]
_ONE_COLLECTIVE = (Primitive.ALL_REDUCE, Primitive.ALL_GATHER, Primitive.ALL_GATHER_V)


def of_all_ranks(own: T, group: Any) -> list[T]:
    """The objects of all ranks, by rank; ``group`` None: there is one. Collective."""
    found = [own] * (dist.get_world_size(group) if group is not None else 1)
    if len(found) > 1:
        dist.all_gather_object(found, own, group=group)
    return found


class Route(ABC):
    """Averages groups of gradients, and keeps what the next step needs. ``single``: whether every group needs exactly one collective."""

    single: bool = True

    @abstractmethod
    def average(self, gradients: Gradients, turn: Turn, group: Any, scale: float) -> Work:
        """Averages one group over ranks.

        Args:
            gradients: in the order that all ranks have agreed on. They are only read.
            turn: the step, the same on all ranks.
            scale: of the loss; anything kept for later steps is kept without it.
        """

    def hold_still(self) -> None:
        """Keeps tensors of the state where they are from now on."""
        return  # most have none

    def forget(self, names: Collection[str]) -> None:
        return  # most keep nothing

    def choices(self) -> Any:
        """Findings and decisions, alike on all ranks, as plain data; nothing where there is nothing to decide."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """All state that the next step depends on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise StateError(f"a {type(self).__name__.lower()} route has no state; given {sorted(state)}: was it another rule's?")


class Plain(Route):
    """An all-reduce as DDP does it: divided first, because in 16 bits the sum may be too large.

    Args:
        dtype: that travels and is added up, as by torch's hooks; None: the gradients' own.
        scheme: adds up in place of the backend's all-reduce.
        takes_sparse: makes sparse gradients dense; no: refuses them.
    """

    def __init__(self, dtype: torch.dtype | None = None, scheme: Scheme | None = None, *, takes_sparse: bool = True) -> None:
        self._dtype, self._scheme, self._takes_sparse = dtype, scheme, takes_sparse
        self.buffers: dict[tuple[str, ...], tuple[int, list[Tensor]]] = {}  # by names: when it was used last, and buffers

    def average(self, gradients: Gradients, turn: Turn, group: Any, scale: float) -> Work:
        if not self._takes_sparse:
            _refuse_sparse(gradients)
        by_dtype: dict[torch.dtype, dict[str, Tensor]] = {}
        for name, gradient in gradients.items():
            real = as_real(gradient.to_dense() if gradient.is_sparse else gradient)  # a sparse one was not known beforehand
            by_dtype.setdefault(self._dtype or real.dtype, {})[name] = real
        flats = self._flat(tuple(gradients), by_dtype, turn.step)
        for flat, kind in zip(flats, by_dtype.values(), strict=True):
            lines = [gradient.reshape(-1) for gradient in kind.values()]
            torch._foreach_copy_(flat.split_with_sizes([line.numel() for line in lines]), lines)
            flat.div_(turn.world)
        if turn.world > 1:
            nbytes = sum(self._scheme.wire_bytes(flat.numel()) if isinstance(self._scheme, Ring8) else flat.nbytes for flat in flats)
            if self._scheme is None:
                yield PendingCollective(
                    run=partial(_all_reduce, flats, group), nbytes=nbytes, begin=partial(_begin_all_reduce, flats, group)
                )
            else:
                flats = yield PendingCollective(run=partial(_sums, self._scheme, flats, group), nbytes=nbytes)
        means: dict[str, Tensor] = {}
        for flat, kind in zip(flats, by_dtype.values(), strict=True):
            parts = flat.split_with_sizes([gradient.numel() for gradient in kind.values()])
            means.update({name: as_given(part.view(kind[name].shape), gradients[name]) for name, part in zip(kind, parts, strict=True)})
        return means

    def _flat(self, names: tuple[str, ...], by_dtype: Mapping[torch.dtype, Gradients], step: int) -> list[Tensor]:
        """Buffers that stay as long as every step uses them: fresh memory costs more than the work done with it."""
        self.buffers = {key: (used, flats) for key, (used, flats) in self.buffers.items() if used >= step - 1}
        wanted = [(sum(gradient.numel() for gradient in kind.values()), dtype) for dtype, kind in by_dtype.items()]
        _, kept = self.buffers.get(names, (step, list[Tensor]()))
        if [(flat.numel(), flat.dtype) for flat in kept] != wanted:
            device = next(iter(next(iter(by_dtype.values())).values())).device
            kept = [torch.empty(size, dtype=dtype, device=device) for size, dtype in wanted]
        self.buffers[names] = step, kept
        return kept

    def choices(self) -> Any:
        return self.state_dict() or None

    def state_dict(self) -> dict[str, Any]:
        return {} if self._scheme is None else self._scheme.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._scheme is None:
            super().load_state_dict(state)
        else:
            self._scheme.load_state_dict(state)


def _all_reduce(flats: Sequence[Tensor], group: Any) -> None:
    for flat in flats:
        dist.all_reduce(flat, group=group)


def _sums(scheme: Scheme, flats: Sequence[Tensor], group: Any) -> list[Tensor]:
    return [scheme.all_reduce(flat, group) for flat in flats]


def _begin_all_reduce(flats: Sequence[Tensor], group: Any) -> torch.futures.Future[Any]:
    futures = [dist.all_reduce(flat, group=group, async_op=True).get_future() for flat in flats]
    return futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)


class Sparse(Route):
    """A route through a sparse scheme, every gradient for itself. Dense-stored matrices are taken row by row.

    ``make``: gives a scheme; called for every gradient.
    """

    single = False

    def __init__(self, make: Callable[[], Scheme]) -> None:
        self._make = make
        self.schemes: dict[str, Scheme] = {}

    def average(self, gradients: Gradients, turn: Turn, group: Any, scale: float) -> Work:
        means = {}
        for name, gradient in gradients.items():
            if not math.prod(gradient.shape):
                means[name] = gradient
                continue
            scheme = self._scheme_of(name)
            sparse = _by_rows(as_real(gradient)) / turn.world
            if turn.world > 1:
                units = max(1, gradient.shape[: sparse.sparse_dim()].numel())
                found = sparse._indices().shape[1]
                nbytes = gradient.numel() * gradient.element_size() if isinstance(scheme, Dense) else sparse._values().nbytes + 4 * found
                sparse = yield PendingCollective(run=partial(scheme.all_reduce, sparse, group), nbytes=nbytes, density=found / units)
            means[name] = as_given(sparse if gradient.is_sparse else sparse.to_dense().reshape(as_real(gradient).shape), gradient)
        return means

    def _scheme_of(self, name: str) -> Scheme:
        if name not in self.schemes:
            self.schemes[name] = self._make()
        return self.schemes[name]

    def choices(self) -> Any:
        return self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        states = {name: scheme.state_dict() for name, scheme in sorted(self.schemes.items())}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, saved in state.items():
            self._scheme_of(name).load_state_dict(saved)


def as_real(gradient: Tensor) -> Tensor:
    """A complex gradient as (..., 2) real numbers, which is how its parts travel and are added up; a real one as it is."""
    if not gradient.is_complex():
        return gradient
    if not gradient.is_sparse:
        return torch.view_as_real(gradient.resolve_conj())
    return _of_values(gradient, torch.view_as_real(gradient._values().resolve_conj()), (*gradient.shape, 2))


def as_given(mean: Tensor, gradient: Tensor) -> Tensor:
    """The inverse of `as_real`, for an average of gradients of which one is given; sparse and complex ones in their own dtype."""
    if gradient.is_sparse or gradient.is_complex():
        mean = mean.to(gradient.dtype.to_real())
    if gradient.is_sparse and not mean.is_sparse:
        return as_given(mean, gradient.to_dense()).to_sparse(gradient.sparse_dim())
    if not gradient.is_complex():
        return mean
    if not mean.is_sparse:
        return torch.view_as_complex(mean.clone() if mean.storage_offset() % 2 else mean)  # beside real numbers it may begin anywhere
    return _of_values(mean, torch.view_as_complex(mean._values()), mean.shape[:-1])


def _of_values(sparse: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """A sparse tensor with other values in the same places."""
    return torch.sparse_coo_tensor(sparse._indices(), values, tuple(shape), is_coalesced=sparse.is_coalesced(), check_invariants=False)


def _by_rows(gradient: Tensor) -> Tensor:
    """The gradient as a sparse tensor; of a dense one, the rows that hold anything but zeros (NaN is no zero)."""
    if gradient.is_sparse:
        return gradient
    matrix = gradient.reshape(gradient.shape[0], -1) if gradient.dim() else gradient.reshape(1, 1)
    present = matrix.ne(0).any(1).nonzero().flatten()
    if gradient.dim() < 2:
        return torch.sparse_coo_tensor(
            present.unsqueeze(0), gradient.reshape(-1)[present], (matrix.shape[0],), is_coalesced=True, check_invariants=False
        )
    return torch.sparse_coo_tensor(present.unsqueeze(0), gradient[present], gradient.shape, is_coalesced=True, check_invariants=False)


class Compressed(Route):
    """A route through a method of `gemini_ft.compression`.

    Args:
        reducer: the method, with its memory.
        scheme: adds up what a sparsifier has picked, in place of an all-gather.
        scoped: groups within machines and between them, for a method that asks for them.
    """

    def __init__(self, reducer: Reducer, scheme: Scheme | None = None, scoped: ScopedGroups | None = None) -> None:
        self.reducer, self.scheme, self._scoped = reducer, scheme, scoped
        self.single = reducer.primitive in _ONE_COLLECTIVE

    def steer(self, control: DelayControl) -> None:
        """Sends as much as a control says from now on: by an all-reduce where that brings no more bytes."""
        assert isinstance(self.reducer, ErrorFeedback | MomentumCorrection)
        self.reducer.ratio, self.reducer.dense = control.ratio, control.dense

    def average(self, gradients: Gradients, turn: Turn, group: Any, scale: float) -> Work:
        _refuse_sparse(gradients)
        bundle = Bundle.of(gradients, self.reducer.align)
        if scale != 1:
            bundle = Bundle(bundle.layout, bundle.flat / scale, own=True)
        exchange = self.reducer.exchange(bundle, turn)
        answers = None
        while True:
            try:
                request = exchange.send(answers) if answers is not None else next(exchange)
            except StopIteration as end:
                mean: Bundle = end.value
                return (mean if scale == 1 else Bundle(mean.layout, mean.flat * scale, own=True)).tensors()
            answers = yield PendingCollective(run=partial(self._answer, request, bundle.layout, turn, group), nbytes=request.tensor.nbytes)

    def _answer(self, request: CollectiveRequest, layout: FlatLayout, turn: Turn, group: Any) -> list[Tensor]:
        if turn.world == 1:
            return [request.tensor]
        if self.scheme is None or request.kind == "sum":  # a sparsifier that is steered sends everything now and then
            return answer(request, self._scoped if self._scoped is not None else group)
        # The sum is given in one rank's place, and nothing in the others': adding up what all have sent comes to the same.
        values, indices = entries(Payload(layout=layout, data=request.tensor))
        picked = torch.sparse_coo_tensor(indices.long().unsqueeze(0), values, (layout.total,), check_invariants=False)
        total = self.scheme.all_reduce(picked, group).coalesce()
        data = join(total.values(), total.indices()[0].int())
        return [data, *[data[:0]] * (turn.world - 1)]

    def hold_still(self) -> None:
        self.reducer.hold_still()

    def forget(self, names: Collection[str]) -> None:
        self.reducer.forget(names)

    def choices(self) -> Any:
        return self.scheme.state_dict() if self.scheme is not None else None

    def state_dict(self) -> dict[str, Any]:
        if self.scheme is None:
            return self.reducer.state_dict()
        return {"reducer": self.reducer.state_dict(), "scheme": self.scheme.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reducer.load_state_dict(state if self.scheme is None else state["reducer"])
        if self.scheme is not None:
            self.scheme.load_state_dict(state["scheme"])


def _refuse_sparse(gradients: Gradients) -> None:
    if sparse := next((name for name, gradient in gradients.items() if gradient.is_sparse), None):
        raise ConfigError(
            f"the gradient of {sparse} is a sparse tensor, which cannot be compressed; give the parameter a rule with sync: zen "
            "(or agsparse, auto, ...) and without compress, before the one that matches it now"
        )
