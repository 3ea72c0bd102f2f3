"""The interface of every gradient compressor, and the few words all of them share.

A group of named tensors lies in one flat float32 buffer (`Bundle`, described by its `FlatLayout`), is compressed in one call and
travels in one payload. Statistics and random numbers are per tensor, so a group gives exactly what its tensors give one by one.

    means = reduce(method, {"weight": gradient, "bias": other}, step, group)     # gemini_ft.compression.collective

`Reducer` is the whole surface: it averages a bundle over ranks. It never communicates itself: ``exchange`` is a generator that
asks for collectives and is given their results, so the same code runs on a process group and, rank beside rank, in one process.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from .buffers import BUFFERS
from .topology import Scope

Shape: TypeAlias = tuple[int, ...]
Kind: TypeAlias = Literal["sum", "max", "gather", "gather_v", "all_to_all", "reduce", "broadcast"]
State: TypeAlias = dict[str, Any]  # of tensors, numbers, strings and dicts of them

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_MOST = 2**31 - 1  # elements of a group: indices travel as int32


class Primitive(enum.Enum):
    """The communication a method needs."""

    ALL_REDUCE = "all-reduce"
    TWO_ALL_REDUCES = "two all-reduces"
    ALL_GATHER = "all-gather"
    ALL_GATHER_V = "all-gather of lengths that differ"
    ALL_TO_ALL = "all-to-all and all-gather"
    SCOPED = "collectives within machines and between them"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One synchronisation: which step, of which rank among how many. ``step`` and ``world`` are the same on all ranks.

    ``lr`` is the learning rate of the step, for error feedback that follows it. ``update``: the optimizer's step, which schedules follow,
    where there are several synchronisations in one; None: ``step``.
    """

    step: int = 0
    rank: int = 0
    world: int = 1
    lr: float | None = None
    update: int | None = None


@dataclass(frozen=True)
class CollectiveRequest:
    """A collective that is asked for.

    sum, max: over ranks, elementwise, in rank order; the answer is one tensor. Floats are added in float32 and rounded once. The answer may
    be formed in ``tensor`` itself, which the asker gives away.
    gather: tensors of one length; gather_v: of lengths that differ. The answer has every rank's.
    all_to_all: ``lengths[i]`` elements for rank i follow each other in ``tensor``; the answer has what each rank sent to this one,
    ``received`` elements from each.
    reduce: as sum, but only the first rank is answered, the others get an empty list.
    broadcast: the answer is the first rank's tensor, of ``received`` elements; the others' have the dtype and no elements.
    """

    kind: Kind
    tensor: Tensor
    lengths: Sequence[int] = ()
    received: int = 0
    scope: Scope = Scope.FLAT  # among whom; "rank" means the place among them
    members: int = 0  # how many they are, where the asker's values depend on that; 0: any number


@dataclass(frozen=True)
class FlatLayout:
    """The place of each tensor of a group in a flat buffer: one after the other, each from a multiple of ``align`` elements on.

    Elements between them are zero. Equal groups share one object.
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    align: int
    _segments: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _padding: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, dtype in zip(self.names, self.dtypes, strict=True):
            if dtype not in _FLOATS:
                raise TypeError(f"gradient {name!r} is {dtype}: must be float32, float16 or bfloat16; convert it first")
        if 0 in self.sizes:
            raise ValueError(f"gradient {self.names[self.sizes.index(0)]!r} has no elements; leave it out")
        if self.total > _MOST:
            raise ValueError(f"{self.total} elements in one group: at most {_MOST}; make more groups of them")

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each tensor."""
        return [int(torch.Size(shape).numel()) for shape in self.shapes]

    @cached_property
    def spans(self) -> list[int]:
        """Elements that each tensor takes, padding included."""
        return [-(-size // self.align) * self.align for size in self.sizes]

    @cached_property
    def starts(self) -> list[int]:
        """The element at which each tensor begins."""
        starts, at = [], 0
        for span in self.spans:
            starts.append(at)
            at += span
        return starts

    @cached_property
    def total(self) -> int:
        """Elements of the flat buffer."""
        return sum(self.spans)

    @cached_property
    def _cuts(self) -> list[int]:
        return [part for size, span in zip(self.sizes, self.spans, strict=True) for part in (size, span - size)]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each tensor's elements of a flat buffer, padding left out."""
        if flat.numel() != self.total:
            raise ValueError(f"a flat buffer of {flat.numel()} elements: this layout has {self.total}")
        return list(flat.split_with_sizes(self._cuts)[::2])

    def segments(self, device: torch.device) -> Tensor:
        """Number of the tensor that each run of eight elements belongs to, int32 (total / 8,)."""
        if device not in self._segments:
            runs = torch.tensor([span // 8 for span in self.spans])
            self._segments[device] = torch.repeat_interleave(torch.arange(len(self.spans), dtype=torch.int32), runs).to(device)
        return self._segments[device]

    def clear_padding(self, flat: Tensor) -> Tensor:
        """Sets the elements between tensors to zero; returns ``flat``."""
        if self.total == sum(self.sizes):
            return flat
        if flat.device not in self._padding:
            gaps = [torch.arange(at + size, at + span) for at, size, span in zip(self.starts, self.sizes, self.spans, strict=True)]
            self._padding[flat.device] = torch.cat(gaps).to(flat.device)
        return flat.index_fill_(0, self._padding[flat.device], 0)


@lru_cache(maxsize=4096)
def layout_of(names: tuple[str, ...], shapes: tuple[Shape, ...], dtypes: tuple[torch.dtype, ...], align: int) -> FlatLayout:
    """The layout of a group; see `FlatLayout`."""
    return FlatLayout(names, shapes, dtypes, align)


@dataclass(frozen=True)
class Bundle:
    """A group of tensors in one flat float32 buffer (layout.total,).

    A function does not write into a bundle that it was given, unless it is ``own``: then no one else uses the buffer.
    """

    layout: FlatLayout
    flat: Tensor
    own: bool = False

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], align: int = 8) -> Bundle:
        """Lays tensors out one after the other.

        Args:
            tensors: float32, float16 or bfloat16, of any shapes and strides, on one device. They are only read; a single float32
                tensor that needs no padding is not even copied.
            align: what the method's ``align`` says.

        Raises:
            TypeError: another dtype.
            ValueError: no tensors, an empty one, or more than 2**31 - 1 elements.
        """
        if not tensors:
            raise ValueError("a group of no tensors: give at least one")
        given = [tensor.detach() for tensor in tensors.values()]
        layout = layout_of(tuple(tensors), tuple(tuple(t.shape) for t in given), tuple(t.dtype for t in given), align)
        first = given[0]
        if len(given) == 1 and first.dtype == torch.float32 and first.is_contiguous() and first.numel() == layout.total:
            return cls(layout, first.view(-1))
        flat = BUFFERS.empty(layout.total, device=first.device)
        torch._foreach_copy_([view.view(shape) for view, shape in zip(layout.views(flat), layout.shapes, strict=True)], given)
        return cls(layout, layout.clear_padding(flat), own=True)

    def plus(self, other: Tensor, alpha: float = 1.0) -> Bundle:
        """``self + alpha other``, in memory that may be written."""
        out = self.flat if self.own else BUFFERS.empty(self.layout.total, device=self.flat.device)
        return Bundle(self.layout, torch.add(self.flat, other, alpha=alpha, out=out), own=True)

    def magnitudes(self) -> list[Tensor]:
        """The magnitudes of each tensor's elements, float32 (size,), in memory of their own."""
        flat = BUFFERS.empty(self.layout.total, device=self.flat.device)
        return self.layout.views(torch.abs(self.flat, out=flat))

    @cached_property
    def views(self) -> list[Tensor]:
        """Each tensor's elements, float32 (size,)."""
        return self.layout.views(self.flat)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors in their own shapes and dtypes; float32 ones share the buffer's memory."""
        kept = zip(self.layout.names, self.views, self.layout.shapes, self.layout.dtypes, strict=True)
        return {name: view.view(shape).to(dtype) for name, view, shape, dtype in kept}


@dataclass(frozen=True, kw_only=True)
class Payload:
    """The data that one rank sends for a bundle.

    ``data`` is flat: bytes (uint8), or elements that a sum adds. ``shared`` is what an earlier collective has made the same on all
    ranks, so that it does not travel.
    """

    layout: FlatLayout
    data: Tensor
    shared: Tensor | None = None


Exchange: TypeAlias = Generator[CollectiveRequest, list[Tensor], Bundle]


class Reducer(ABC):
    """Averages a bundle over all ranks.

    Non-finite gradients stay visible: a tensor that has a NaN or an infinity on any rank comes out with one on all ranks.
    """

    primitive: Primitive  # the communication it needs
    unbiased: bool = False  # whether the expectation of the average is the average of the gradients
    align: int = 8  # multiple at which tensors begin in its bundles; a multiple of 8
    kept: tuple[str, ...] = ()  # names of the attributes with state: memories, and the method inside
    tables: Mapping[str, str] = MappingProxyType({})  # key in the state -> attribute: dicts with state, by tensor name

    @abstractmethod
    def exchange(self, bundle: Bundle, turn: Turn) -> Exchange:
        """Averages over ranks: asks for collectives, returns the mean, the same bits on all ranks. One call per group and step."""

    @abstractmethod
    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        """Bytes that one rank hands to collectives for one bundle, by the method's formula.

        ``selected``: elements that were picked, or bytes that are left, where the data decide on that: ValueError without it.
        """

    @property
    def ratio(self) -> float:
        """Part of each tensor that travels; AttributeError: the method has none.

        Another one may be set between steps, alike on all ranks; it is an option and not state.
        """
        return self._with_ratio().ratio

    @ratio.setter
    def ratio(self, ratio: float) -> None:
        self._with_ratio().ratio = ratio

    def _with_ratio(self) -> Reducer:
        inner: Reducer | None = getattr(self, "inner", None)  # of a method around another one
        if inner is None:
            raise AttributeError(f"{type(self).__name__} has no ratio; topk, randomk, dgc, sidco_e and adaq are among the methods that do")
        return inner

    def _keepers(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.kept}

    def state_dict(self) -> State:
        """All state that the next step depends on: tensors (not copied), numbers and dicts. It differs between ranks."""
        tables = {key: dict(sorted(getattr(self, name).items())) for key, name in self.tables.items()}
        return {name: keeper.state_dict() for name, keeper in self._keepers().items()} | tables

    def hold_still(self) -> None:
        """Keeps the tensors of ``state_dict`` where they are from now on, as long as the groups stay the same.

        What copies them step by step can then be planned once. It costs a copy of every residual a step; results are the same bits.
        """
        for keeper in self._keepers().values():
            keeper.hold_still()

    def forget(self, names: Collection[str]) -> None:
        """Sets to zero all that residuals and momenta keep of the tensors of these names."""
        for keeper in self._keepers().values():
            keeper.forget(names)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`, to go on as if never interrupted; tensors are copied."""
        if set(state) != {*self.kept, *self.tables}:
            what = " and ".join((*self.kept, *self.tables)) or "no state"
            raise ValueError(f"{type(self).__name__} has {what}; given {sorted(state)}: was it another method's?")
        for name, keeper in self._keepers().items():
            keeper.load_state_dict(state[name])
        for key, name in self.tables.items():
            setattr(self, name, {each: kept.clone() if isinstance(kept, Tensor) else kept for each, kept in state[key].items()})


class Compressor(Reducer):
    """A reducer whose payload can be made and read alone, without other ranks."""

    in_parts: bool = True  # whether a run of a tensor's elements gets smaller as the tensor does, which has a shape
    bits: int = 0  # of every element in a payload
    scales: int = 0  # words of 4 bytes of every tensor beside them
    selected_bytes: int = 0  # of each of ``selected`` beside them; 0: all payloads of a layout have one length

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        if self.selected_bytes and selected is None:
            raise ValueError(f"{type(self).__name__}: how much travels depends on the data; give selected=")
        return layout.total * self.bits // 8 + 4 * self.scales * len(layout.names) + self.selected_bytes * (selected or 0)

    @property
    def has_parts_of_one_length(self) -> bool:
        """Whether payloads, of parts of tensors too, have a length that is known beforehand."""
        return self.in_parts and self.primitive in (Primitive.ALL_GATHER, Primitive.ALL_REDUCE)

    @abstractmethod
    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        """Makes the payload that travels in place of ``bundle``."""

    @abstractmethod
    def decompress(self, payload: Payload) -> Bundle:
        """The bundle that ``payload`` stands for, in memory of its own."""

    def aggregate(self, payloads: Sequence[Payload]) -> Bundle:
        """The mean of what ranks have sent, added up in rank order."""
        total = self.decompress(payloads[0])
        for payload in payloads[1:]:
            total.flat.add_(self.decompress(payload).flat)
        return divided(total, len(payloads))

    def residual(self, bundle: Bundle, payload: Payload) -> Tensor:
        """The part of ``bundle`` that ``payload`` leaves out, float32; it is computed in the bundle's own buffer."""
        return bundle.layout.clear_padding(bundle.flat.sub_(self.decompress(payload).flat))

    def share(self, payload: Payload, turn: Turn) -> Exchange:
        """The collective part of ``exchange``."""
        answers = yield CollectiveRequest("gather" if self.primitive is Primitive.ALL_GATHER else "gather_v", payload.data)
        return self.aggregate([Payload(layout=payload.layout, data=data, shared=payload.shared) for data in answers])

    def exchange(self, bundle: Bundle, turn: Turn) -> Exchange:
        return (yield from self.share(self.compress(bundle, turn), turn))


class Summed(Compressor):
    """A compressor whose payloads are added up under way, by an all-reduce."""

    primitive = Primitive.ALL_REDUCE

    def share(self, payload: Payload, turn: Turn) -> Exchange:
        (total,) = yield CollectiveRequest("sum", payload.data)
        return divided(self.decompress(Payload(layout=payload.layout, data=total, shared=payload.shared)), turn.world)


def divided(bundle: Bundle, world: int) -> Bundle:
    """Divides a bundle by the number of ranks, in place."""
    if world > 1:
        bundle.flat.div_(world)
    return bundle


def join(*parts: Tensor) -> Tensor:
    """One payload of several tensors, uint8. Those of larger elements come first, so that each can be read where it lies."""
    full = [part.reshape(-1).view(torch.uint8) for part in parts if part.numel()]  # empty ones may have strides that have no view
    data = BUFFERS.empty(sum(part.numel() for part in full), torch.uint8, parts[0].device)
    return torch.cat(full, out=data) if full else data


def cut(data: Tensor, *parts: tuple[torch.dtype, int]) -> list[Tensor]:
    """Undoes `join`, given the dtype and the number of elements of each part."""
    found, at = [], 0
    for dtype, count in parts:
        nbytes = count * dtype.itemsize
        found.append(data[at : at + nbytes].view(dtype))
        at += nbytes
    if at != data.numel():
        raise ValueError(f"a payload of {data.numel()} bytes where {at} were expected: was it made by another method or layout?")
    return found
