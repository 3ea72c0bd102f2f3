"""The data that a rank holds between two operations of an Espresso option: parts of tensors, payloads, or nothing.

Every rank can tell its own, also while it waits for a broadcast, so lengths never travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .base import FlatLayout
from .espresso_options import Codec, ExchangePart, Operation, PlannedCollective
from .parts import Worlds, layouts
from .topology import Scope, Topology

DENSE = torch.float32  # how dense values travel


@dataclass
class Held:
    """The shape of what one rank holds.

    Attributes:
        wire_bytes: of a payload for tensors of a layout.
        layouts: of all tensors, then of the part of them that is held after each division; None: nothing is in it.
        topology: the machines and ranks that take part.
        rank: the rank that holds it.
        worlds: into which parts payloads are cut; (): one.
        sources: payloads of each part, not added up yet.
        compressed: payloads are held, not dense values.
        stage: compressions so far.
        repeated: what is held is the same in all machines.
        waiting: of which scope the broadcast is that this rank waits for, empty-handed.
    """

    wire_bytes: Callable[[FlatLayout], int]
    layouts: list[FlatLayout | None]
    topology: Topology
    rank: int
    worlds: Worlds = ()
    sources: int = 1
    compressed: bool = False
    stage: int = 0
    repeated: bool = False
    waiting: Scope | None = None

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
