"""Carries Espresso's options out: one interpreter over the operations of the decision tree.

    executor = OptionExecutor(ScaledSign(), dict(zip(names, plan(...).options)), Topology(machines=2, ranks=4))
    means = reduce(executor, gradients, step, ScopedGroups.of(ranks_per_machine=4))     # gemini_ft.compression.collective

Espresso (Wang et al., EuroSys 2023), section 3; `espresso_options` says what each operation does. Sums are in rank order, of the
places in a machine first and of machines then, and become means at the end. Dense values travel as float32. What is sent in parts
is compressed in parts: a payload cannot be cut. The one rank of a reduce, gather or broadcast is the first of its scope.

Between two operations a rank holds parts of tensors, payloads, or nothing. `Held` is the shape of that. Every rank can tell its own, also
while it waits for a broadcast, so lengths never travel.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from .base import Bundle, CollectiveRequest, Compressor, Exchange, FlatLayout, Kind, Payload, Primitive, Reducer, Turn
from .collective import added
from .espresso_options import Codec, ExchangePart, Operation, Option, PlannedCollective, Processor
from .feedback import Memory, Worlds, compress_parts, divide, layouts, renamed, selection, unite
from .topology import Scope, Topology

DENSE = torch.float32  # how dense values travel
_ALIGNED = 8  # bytes; parts of payloads are read as larger elements where they lie

Cells: TypeAlias = list[list[Tensor]]  # of each part that is held: payloads, or dense values, of one rank or of several
Steps: TypeAlias = Generator[CollectiveRequest, list[Tensor], None]


@dataclass(kw_only=True)
class Held:
    """The shape of what one rank holds."""

    wire_bytes: Callable[[FlatLayout], int]  # of a payload for tensors of a layout
    layouts: list[FlatLayout | None]  # of all tensors, then of the part of them that is held after each division; None: nothing is in it
    topology: Topology  # the machines and ranks that take part
    rank: int  # the rank that holds it
    worlds: Worlds = ()  # into which parts payloads are cut; (): one
    sources: int = 1  # payloads of each part, not added up yet
    compressed: bool = False  # payloads are held, not dense values
    stage: int = 0  # compressions so far
    repeated: bool = False  # what is held is the same in all machines
    waiting: Scope | None = None  # of which scope the broadcast is that this rank waits for, empty-handed

    def parts(self) -> tuple[FlatLayout | None, ...]:
        """The layouts of the parts that are held."""
        return layouts(self.layouts[-1], self.worlds)

    def divisions(self, operations: Sequence[Operation]) -> Worlds:
        """The divisions that payloads of ``operations[0]``, a compression, go through until they are decompressed."""
        found = []
        for operation in operations[1:]:
            if isinstance(operation, Codec):
                break
            if divides(operation):
                found.append(self.topology.members(operation.scope))
        return tuple(found)

    def lengths(self, operation: PlannedCollective) -> list[int]:
        """Elements of each part that a collective moves, from one source: bytes of a payload, or dense values."""
        members = (self.topology.members(operation.scope),)
        if operation.step is ExchangePart.SECOND and operation.sharded:
            moved = layouts(self.layouts[-2], members + self.worlds)
        elif divides(operation) and not self.compressed:
            moved = layouts(self.layouts[-1], members)
        else:
            moved = self.parts()
        return [0 if each is None else self.wire_bytes(each) if self.compressed else each.total for each in moved]

    def handed(self, operation: PlannedCollective) -> int:
        """Bytes that a rank which takes part hands over."""
        lengths = self.lengths(operation)
        if operation.step is ExchangePart.SECOND and operation.sharded:
            lengths = [max(map(sum, blocks(lengths, self.topology.members(operation.scope))))]
        return sum(lengths) * self.sources * (1 if self.compressed else DENSE.itemsize)

    def follow(self, operation: Operation, worlds: Worlds = ()) -> None:
        """Takes the shape after an operation; ``worlds``: `divisions`, for a compression."""
        if isinstance(operation, Codec):
            self.worlds, self.sources = worlds if operation.compress else (), 1
            self.compressed, self.stage = operation.compress, self.stage + operation.compress
            return
        members, place = self.topology.members(operation.scope), self.topology.place(self.rank, operation.scope)
        if operation.step is not ExchangePart.SECOND:
            self.sources *= members if self.compressed else 1
        if divides(operation):
            self.layouts.append(layouts(self.layouts[-1], (members,))[place])
            self.worlds = self.worlds[1:]
        elif operation.step is ExchangePart.FIRST and place and self.waiting is None:
            self.waiting = operation.scope
        elif operation.step is ExchangePart.SECOND and operation.sharded:
            self.layouts.pop()
            self.worlds = (members, *self.worlds) if self.compressed else ()
        elif operation.step is ExchangePart.SECOND and self.waiting is operation.scope:
            self.waiting = None
        self.repeated |= operation.scope is Scope.INTER and operation.step is not ExchangePart.FIRST


def divides(operation: PlannedCollective) -> bool:
    """Whether the operation leaves each rank with a part of its own."""
    return operation.step is ExchangePart.FIRST and operation.sharded


def blocks(lengths: Sequence[int], members: int) -> list[Sequence[int]]:
    """The parts, by the rank that owns them."""
    each = len(lengths) // members
    return [lengths[rank * each : (rank + 1) * each] for rank in range(members)]


class OptionExecutor(Reducer):
    """Averages each tensor by its option.

    Error feedback keeps a residual at each compression of an option: what it leaves out is missing in the sum of all ranks, and is
    added at the next step. After a collective between machines is complete, their ranks compress equal values and keep equal
    residuals, so machines must compute alike: the same devices and libraries.

    Args:
        inner: a compressor with payloads of one length (`Primitive.ALL_GATHER`), or one whose payloads could be added up
            (`Primitive.ALL_REDUCE`); they are gathered as well.
        options: one for all tensors, or by tensor name. Tensors of one bundle that have the same travel together.
    """

    primitive = Primitive.SCOPED
    kept = ("residuals", "inner")
    tables = MappingProxyType({"options": "_taken"})

    def __init__(self, inner: Reducer, options: Option | Mapping[str, Option], topology: Topology, error_feedback: bool = True) -> None:
        if not isinstance(inner, Compressor) or not inner.has_parts_of_one_length:
            raise ValueError(
                f"OptionExecutor({type(inner).__name__}): needs a compressor alone, with payloads of one length that parts of a tensor "
                "have too, such as TopK, ScaledSign or QSGD; choose error feedback by error_feedback="
            )
        self.inner, self.options, self.topology, self.error_feedback = inner, options, topology, error_feedback
        self.unbiased = inner.unbiased and not error_feedback
        self.align = inner.align
        self.residuals = Memory()
        self._taken: dict[str, str] = {}  # the option of each tensor that has been exchanged
        probe = inner.compress(Bundle.of({"probe": torch.zeros(inner.align, dtype=torch.float32)}, inner.align), Turn())
        self._dtype, self._shares = probe.data.dtype, probe.shared is not None

    def exchange(self, bundle: Bundle, turn: Turn) -> Exchange:
        if turn.world != self.topology.world:
            raise ValueError(f"a turn among {turn.world} ranks, options for {self.topology}: make the executor for the ranks there are")
        chosen = self._by_option(bundle.layout)
        self._agree(bundle.layout.names, chosen)
        if len(chosen) == 1:
            total = yield from _Course(self, next(iter(chosen)), bundle, turn).sum()
            return Bundle(bundle.layout, total / turn.world)
        result = Bundle(bundle.layout, torch.zeros_like(bundle.flat))
        for option, numbers in chosen.items():
            some = selection(bundle.layout, numbers)
            total = yield from _Course(self, option, some.take(bundle), turn).sum()
            some.put(Bundle(some.layout, total / turn.world), result)
        return result

    def _by_option(self, layout: FlatLayout) -> dict[Option, tuple[int, ...]]:
        if isinstance(self.options, Option):
            return {self.options: tuple(range(len(layout.names)))}
        found: dict[Option, tuple[int, ...]] = {}
        for number, name in enumerate(layout.names):
            if name not in self.options:
                raise ValueError(f"no option for {name!r}: there are options for {len(self.options)} tensors; plan for all")
            found[self.options[name]] = (*found.get(self.options[name], ()), number)
        return found

    def _agree(self, names: Sequence[str], chosen: Mapping[Option, Sequence[int]]) -> None:
        """Refuses residuals of another option: each residual belongs to its place in one option."""
        if not self.error_feedback:
            return
        for option, numbers in chosen.items():
            text = f"{option} on {self.topology}"
            for number in numbers:
                if (before := self._taken.setdefault(names[number], text)) != text:
                    raise ValueError(
                        f"{names[number]!r} has residuals of the option [{before}], not of [{text}]: restore the plan together with the "
                        "state, or begin without it"
                    )

    def decompressed(self, layout: FlatLayout, payloads: Sequence[Tensor], turn: Turn) -> Tensor:
        """The sum of the tensors in payloads, uint8: float32 (layout.total,)."""
        shared = None
        if self._shares:  # the same on all ranks, but this one may have compressed other parts only
            shared = self.inner.compress(Bundle(layout, payloads[0].new_zeros(layout.total, dtype=torch.float32)), turn).shared
        found = [Payload(layout=layout, data=data.view(self._dtype), shared=shared) for data in payloads]
        total = self.inner.decompress(found[0]).flat
        for payload in found[1:]:
            total.add_(self.inner.decompress(payload).flat)
        return total

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        """Bytes that rank 0 hands over, which are the most; ``world`` is the topology's."""
        total = 0
        for option, numbers in self._by_option(layout).items():
            held = Held(wire_bytes=self.inner.wire_bytes, layouts=[selection(layout, numbers).layout], topology=self.topology, rank=0)
            for number, operation in enumerate(option.operations):
                total += held.handed(operation) if isinstance(operation, PlannedCollective) else 0
                held.follow(operation, held.divisions(option.operations[number:]))
        return total


class _Course:
    """The way of one rank's tensors through an option."""

    def __init__(self, executor: OptionExecutor, option: Option, bundle: Bundle, turn: Turn) -> None:
        self.executor, self.option, self.turn = executor, option, turn
        self.device = bundle.flat.device
        self.held = Held(wire_bytes=executor.inner.wire_bytes, layouts=[bundle.layout], topology=executor.topology, rank=turn.rank)
        self.cells: Cells = [[bundle.flat]]

    def sum(self) -> Generator[CollectiveRequest, list[Tensor], Tensor]:
        """The sum over all ranks, float32 (layout.total,); it may be the bundle's buffer."""
        for number, operation in enumerate(self.option.operations):
            worlds = self.held.divisions(self.option.operations[number:])
            if isinstance(operation, PlannedCollective):
                if self.held.waiting in (None, operation.scope):
                    yield from self._communicate(operation)
            elif self.held.waiting is None:
                device = self.device if operation.processor is Processor.GPU else torch.device("cpu")
                self.cells = self._compressed(worlds, device) if operation.compress else self._decompressed(device)
            self.held.follow(operation, worlds)
        return self.cells[0][0]

    # -- compressing

    def _compressed(self, worlds: Worlds, device: torch.device) -> Cells:
        executor, held, layout = self.executor, self.held, self.held.layouts[-1]
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        if layout is None:
            return [[empty] for _ in layouts(None, worlds)]
        rank = executor.topology.place(held.rank, Scope.INTRA) if held.repeated else held.rank  # equal values, equal random numbers
        payloads = compress_parts(
            executor.inner,
            executor.residuals if executor.error_feedback else None,
            Bundle(layout, self.cells[0][0].to(device)),
            worlds,
            replace(self.turn, rank=rank),
            _suffix(held.stage),
        )
        return [[empty if payload is None else payload.data.view(torch.uint8).to(self.device)] for payload in payloads]

    def _decompressed(self, device: torch.device) -> Cells:
        held, suffix = self.held, _suffix(self.held.stage - 1)
        sums: list[Bundle | None] = []
        for layout, cell in zip(held.parts(), self.cells, strict=True):
            if layout is None:
                sums.append(None)
                continue
            payloads = [data.to(device) for data in cell]
            sums.append(Bundle(layout, self.executor.decompressed(renamed(layout, suffix), payloads, self.turn)))
        return self._dense(held.layouts[-1], sums, held.worlds)

    def _dense(self, layout: FlatLayout | None, parts: Sequence[Bundle | None], worlds: Worlds) -> Cells:
        whole = unite(layout, parts, worlds)
        return [[torch.empty(0, dtype=torch.float32, device=self.device) if whole is None else whole.flat.to(self.device)]]

    # -- collectives

    def _communicate(self, operation: PlannedCollective) -> Steps:
        if operation.step is ExchangePart.SECOND:
            yield from self._gather(operation) if operation.sharded else self._broadcast(operation)
        elif not self.held.compressed and not divides(operation):
            kind: Kind = "sum" if operation.step is ExchangePart.WHOLE else "reduce"
            self.cells = [(yield self._request(kind, operation, self.cells[0][0]))]
        elif operation.step is ExchangePart.WHOLE:
            self._receive((yield self._request("gather", operation, self._message())), self.held.lengths(operation))
        else:
            yield from self._send(operation)

    def _send(self, operation: PlannedCollective) -> Steps:
        """The parts that go to each rank, or everything to the first; dense values are summed."""
        held, place = self.held, self.held.topology.place(self.held.rank, operation.scope)
        if not held.compressed:
            layout = held.layouts[-1]
            whole = None if layout is None else Bundle(layout, self.cells[0][0])
            parts = divide(whole, (held.topology.members(operation.scope),))
            self.cells = [[self.cells[0][0][:0] if each is None else each.flat] for each in parts]
        members, lengths = held.topology.members(operation.scope), held.lengths(operation)
        owned = blocks(lengths, members) if operation.sharded else [lengths, *([] for _ in range(members - 1))]
        sizes = [sum(block) * held.sources for block in owned]
        received = yield self._request("all_to_all", operation, self._message(), sizes, sizes[place])
        self._receive(received, owned[place])
        if not held.compressed:
            self.cells = [[added(cell)] for cell in self.cells]

    def _gather(self, operation: PlannedCollective) -> Steps:
        held = self.held
        worlds = (held.topology.members(operation.scope),)
        owned = blocks(held.lengths(operation), worlds[0])
        message = self._message()
        padded = message.new_zeros(max(map(sum, owned)) * held.sources)
        padded[: message.numel()] = message
        answers = yield self._request("gather", operation, padded)
        self.cells = [cell for block, data in zip(owned, answers, strict=True) for cell in self._cut(data, block)]
        if not held.compressed:
            parts = layouts(held.layouts[-2], worlds)
            bundles = [None if each is None else Bundle(each, cell[0]) for each, cell in zip(parts, self.cells, strict=True)]
            self.cells = self._dense(held.layouts[-2], bundles, worlds)

    def _broadcast(self, operation: PlannedCollective) -> Steps:
        held, lengths = self.held, self.held.lengths(operation)
        message = self._message() if held.waiting is None else self._nothing()
        (data,) = yield self._request("broadcast", operation, message, received=sum(lengths) * held.sources)
        self.cells = self._cut(data, lengths)

    def _request(
        self, kind: Kind, operation: PlannedCollective, tensor: Tensor, lengths: Sequence[int] = (), received: int = 0
    ) -> CollectiveRequest:
        return CollectiveRequest(kind, tensor, lengths, received, operation.scope, self.held.topology.members(operation.scope))

    def _message(self) -> Tensor:
        tensors = [tensor for cell in self.cells for tensor in cell]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _nothing(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8 if self.held.compressed else DENSE, device=self.device)

    def _receive(self, answers: Sequence[Tensor], lengths: Sequence[int]) -> None:
        messages = [self._cut(data, lengths) for data in answers]
        self.cells = [[tensor for cell in cells for tensor in cell] for cells in zip(*messages, strict=True)]

    def _cut(self, data: Tensor, lengths: Sequence[int]) -> Cells:
        """Cuts a message into parts, by source; the rest of it is padding."""
        cells, at = [], 0
        for length in lengths:
            cell = [data[at + number * length : at + (number + 1) * length] for number in range(self.held.sources)]
            cells.append([each if each.storage_offset() * each.element_size() % _ALIGNED == 0 else each.clone() for each in cell])
            at += length * self.held.sources
        return cells


def _suffix(stage: int) -> str:
    """The suffix of tensors' names at a compression, so that each compression has its own random numbers and residuals."""
    return f"#{stage}" if stage else ""
