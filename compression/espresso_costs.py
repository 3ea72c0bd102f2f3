"""The work of each operation of an Espresso option, and the seconds that it takes. Pure.

Espresso (Wang et al., EuroSys 2023), section 4.1: compression is measured, collectives follow alpha-beta formulas or are
measured as well. Sizes follow the operations: a first step divides what a rank holds, an all-gather multiplies the payloads
that it holds, and decompressing adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from .costs import Affine, Cost
from .espresso_options import Codec, ExchangePart, Operation, Option, PlannedCollective, Processor, Routine
from .topology import Scope, Topology

Network = Mapping[tuple[Routine, Scope], Cost]


def alpha_beta(topology: Topology, intra: Affine, inter: Affine) -> dict[tuple[Routine, Scope], Affine]:
    """The cost of every collective by its formula.

    Rings for all-reduce, reduce-scatter and all-gather; pipelined chains for reduce and broadcast; direct messages for
    all-to-all and gather, which in a flat exchange share the link of their machine.

    Args:
        topology: the machines and ranks.
        intra: a message between two ranks of a machine: seconds, and seconds per byte.
        inter: a message between two machines, over the link that all ranks of a machine share.

    Returns:
        Seconds by the bytes that a rank holds when the collective begins; for `Scope.INTER` by the bytes of all ranks of a
        machine that take part together.
    """
    found = {}
    for scope in Scope:
        p = topology.members(scope)
        inside = scope is Scope.INTRA or topology.machines == 1
        link, near = (intra, 1) if inside else (inter, topology.ranks if scope is Scope.FLAT else 1)
        for routine, messages, share in (
            (Routine.ALL_REDUCE, 2 * (p - 1), 2 * (p - 1) / p),
            (Routine.REDUCE_SCATTER, p - 1, (p - 1) / p),
            (Routine.REDUCE, p - 1, min(p - 1, 1)),
            (Routine.ALL_GATHER, p - 1, p - 1),
            (Routine.BROADCAST, p - 1, min(p - 1, 1)),
            (Routine.ALL_TO_ALL, p - 1, near * (p - near) / p),
            (Routine.GATHER, p - 1, p - near),
        ):
            found[routine, scope] = Affine(link.alpha * messages, link.beta * share)
    return found


@dataclass(frozen=True)
class TensorCosts:
    """The costs of exchanging one tensor.

    Attributes:
        topology: the machines and ranks that take part.
        network: each collective, by the bytes named in `alpha_beta`.
        compress: on each processor, by dense bytes; for the CPU with the way there and back.
        decompress: of one payload, by its dense bytes.
        wire_bytes: of the payload, by the number of elements.
        itemsize: bytes of one element of a dense gradient.
        adds: whether payloads are added up without decompressing them, so that a rank never holds more than one.
    """

    topology: Topology
    network: Network = field(hash=False)
    compress: Mapping[Processor, Cost] = field(hash=False)
    decompress: Mapping[Processor, Cost] = field(hash=False)
    wire_bytes: Callable[[int], int]
    itemsize: int = 4
    adds: bool = False

    def __post_init__(self) -> None:
        if self.itemsize < 1:
            raise ValueError(f"itemsize={self.itemsize} bytes: must be at least 1")
        if set(self.compress) != set(self.decompress) or not self.compress:
            raise ValueError(f"compress on {set(self.compress)}, decompress on {set(self.decompress)}: give both for the same processors")

    def seconds(self, load: Load, elements: int) -> float:
        """Seconds that one operation takes for a tensor of ``elements`` elements.

        Raises:
            ValueError: there is no cost for it.
        """
        held = -(-elements // load.splits)
        operation = load.operation
        if isinstance(operation, Codec):
            costs = self.compress if operation.compress else self.decompress
            if operation.processor not in costs:
                raise ValueError(f"{operation}: no cost is given for this processor, only for {[known.value for known in costs]}")
            return load.payloads * costs[operation.processor](held * self.itemsize)
        key = operation.routine, operation.scope
        if key not in self.network:
            raise ValueError(f"{operation}: no cost is given for this collective; measure it, or take alpha_beta()")
        return self.network[key](load.groups * (load.payloads * self.wire_bytes(held) if operation.compressed else held * self.itemsize))


@dataclass(frozen=True)
class Load:
    """The work of one operation on each rank that takes part.

    Attributes:
        operation: the operation.
        splits: into how many parts the tensor is divided, of which a rank holds one.
        payloads: of that part that it holds, not added up yet; 1 for dense values.
        groups: of ranks in each machine which do the same at the same time, over the same link.
    """

    operation: Operation
    splits: int
    payloads: int
    groups: int


def loads(option: Option, topology: Topology, adds: bool = False) -> Iterator[Load]:
    """The work of each operation of an option; ``adds`` as in `TensorCosts`."""
    splits = payloads = groups = 1
    for operation in option.operations:
        between = isinstance(operation, PlannedCollective) and operation.scope is Scope.INTER
        yield Load(operation, splits, payloads, groups if between else 1)
        if isinstance(operation, Codec):
            payloads = 1
            continue
        members = topology.members(operation.scope)
        if operation.step is ExchangePart.SECOND:
            splits //= members if operation.sharded else 1
            continue
        if operation.compressed and not adds:
            payloads *= members
        if operation.step is ExchangePart.FIRST and operation.sharded:
            splits *= members
            groups = topology.ranks if operation.scope is Scope.INTRA else groups
