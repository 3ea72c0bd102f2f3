"""The ways in which one tensor can be exchanged, Espresso's decision tree as a grammar, and their costs. Pure.

Espresso (Wang et al., EuroSys 2023), section 3 and figure 8. An option is a sequence of operations: compressing and
decompressing, each on the GPU or on the CPU, and collectives, flat over all ranks or hierarchical (within machines, between
them, within machines), in one step (indivisible) or two (divisible). The grammar, with first and second steps that belong
together, gives 4341 options, of which 174 use the GPU only: the numbers of the paper.

"GPU" is the device on which the backward pass runs, whatever it is.

What an executor does with an option, beginning with a dense gradient:

- `Codec` COMPRESS: what the rank holds becomes one payload; DECOMPRESS: all payloads of the rank are decompressed and added up;
- `PlannedCollective`, WHOLE: every rank gets the data of all (all-reduce, or an all-gather of payloads);
- FIRST: every rank gets one part of all ranks' data (reduce-scatter, all-to-all), or one rank all of it (reduce, gather);
- SECOND: parts are brought together again (all-gather), or sent out by the one rank (broadcast).

Compression is measured, collectives follow alpha-beta formulas or are measured as well (section 4.1). Sizes follow the operations: a first
step divides what a rank holds, an all-gather multiplies the payloads that it holds, and decompressing adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from itertools import chain, product

from .costs import Affine, Cost
from .topology import Scope, Topology


class Processor(Enum):
    """The processor that compresses or decompresses."""

    GPU = "gpu"
    CPU = "cpu"


class Routine(Enum):
    """A collective."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    REDUCE = "reduce"
    ALL_GATHER = "all-gather"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all-to-all"
    GATHER = "gather"


class ExchangePart(Enum):
    """The part of an exchange that a collective does."""

    WHOLE = "whole"
    FIRST = "first"
    SECOND = "second"


@dataclass(frozen=True)
class Codec:
    """Compression or decompression on a processor."""

    compress: bool
    processor: Processor

    def __str__(self) -> str:
        return f"{'compress' if self.compress else 'decompress'}@{self.processor.value}"


@dataclass(frozen=True)
class PlannedCollective:
    """One collective; ``compressed``: it carries payloads, otherwise dense values."""

    routine: Routine
    scope: Scope
    step: ExchangePart
    compressed: bool

    @property
    def sharded(self) -> bool:
        """Whether every rank has its part between the two steps, rather than one rank everything."""
        return self.routine not in (Routine.REDUCE, Routine.GATHER, Routine.BROADCAST)

    def __str__(self) -> str:
        return f"{self.routine.value}@{self.scope.value}{' of payloads' if self.compressed else ''}"


Operation = Codec | PlannedCollective
Operations = tuple[Operation, ...]


@dataclass(frozen=True)
class Option:
    """One way to exchange a tensor: its operations, in their order."""

    operations: Operations

    def __str__(self) -> str:
        return ", ".join(map(str, self.operations))

    @property
    def processors(self) -> frozenset[Processor]:
        """The processors that compress and decompress."""
        return frozenset(operation.processor for operation in self.operations if isinstance(operation, Codec))

    def on(self, processor: Processor) -> Option:
        """The same option with all compressing and decompressing on one processor."""
        moved = (replace(step, processor=processor) if isinstance(step, Codec) else step for step in self.operations)
        return Option(tuple(moved))


UNCOMPRESSED = Option((PlannedCollective(Routine.ALL_REDUCE, Scope.FLAT, ExchangePart.WHOLE, compressed=False),))


@cache
def options(processors: Sequence[Processor] = (Processor.GPU,), *, flat_only: bool = False) -> tuple[Option, ...]:
    """Every option of the decision tree whose codecs run on ``processors``; the first is `UNCOMPRESSED`.

    ``flat_only``: leave hierarchical options out: there is one machine, or one rank in each.

    Raises ValueError: no processor, or one twice.
    """
    if not processors or len(set(processors)) != len(processors):
        raise ValueError(f"processors {processors}: give Processor.GPU, Processor.CPU, or both once")
    grammar = _Grammar(processors)
    return tuple(Option(operations) for operations in chain(grammar.flat(), () if flat_only else grammar.hierarchical()))


def _then(*parts: Iterable[Operations]) -> Iterator[Operations]:
    """Every sequence that takes one of each."""
    for picked in product(*parts):
        yield tuple(chain.from_iterable(picked))


def _whole(scope: Scope, compressed: bool) -> list[Operations]:
    return [(PlannedCollective(Routine.ALL_GATHER if compressed else Routine.ALL_REDUCE, scope, ExchangePart.WHOLE, compressed),)]


def _first(scope: Scope, compressed: bool, sharded: bool) -> list[Operations]:
    dense, payloads = (Routine.REDUCE_SCATTER, Routine.ALL_TO_ALL) if sharded else (Routine.REDUCE, Routine.GATHER)
    return [(PlannedCollective(payloads if compressed else dense, scope, ExchangePart.FIRST, compressed),)]


def _second(scope: Scope, compressed: bool, sharded: bool) -> list[Operations]:
    return [(PlannedCollective(Routine.ALL_GATHER if sharded else Routine.BROADCAST, scope, ExchangePart.SECOND, compressed),)]


class _Grammar:
    """Figure 8. The methods ``t1`` to ``t5`` are the paper's tasks 1 to 5; ``inner`` says how the first step within machines was
    done (sharded or by one rank), because the last one has to match it."""

    def __init__(self, processors: Sequence[Processor]) -> None:
        self.comp: list[Operations] = [(Codec(True, processor),) for processor in processors]
        self.decomp: list[Operations] = [(Codec(False, processor),) for processor in processors]

    def flat(self) -> Iterator[Operations]:
        scope = Scope.FLAT
        yield from _whole(scope, False)
        yield from _then(self.comp, _whole(scope, True), self.decomp)
        for sharded in (True, False):
            yield from _then(_first(scope, False, sharded), self.t1(scope, sharded))
            yield from _then(self.comp, _first(scope, True, sharded), self.t2(scope, sharded))

    def hierarchical(self) -> Iterator[Operations]:
        for inner in (True, False):
            yield from _then(_first(Scope.INTRA, False, inner), self.between(inner))
            yield from _then(self.comp, _first(Scope.INTRA, True, inner), self.t4(inner))
            yield from _then(self.comp, _first(Scope.INTRA, True, inner), self.decomp, self.between(inner))

    def between(self, inner: bool) -> list[Operations]:
        """The operations that follow dense values in each machine."""
        return [*self.t3(inner), *_then(self.comp, self.t4(inner))]

    def t1(self, scope: Scope, sharded: bool) -> list[Operations]:
        """The second step of dense values."""
        return [*_second(scope, False, sharded), *_then(self.comp, _second(scope, True, sharded), self.decomp)]

    def t2(self, scope: Scope, sharded: bool) -> list[Operations]:
        """The second step of payloads."""
        return [*_then(_second(scope, True, sharded), self.decomp), *_then(self.decomp, self.t1(scope, sharded))]

    def t3(self, inner: bool) -> Iterator[Operations]:
        """The exchange of dense values between machines, and all that follows it."""
        yield from _then(_whole(Scope.INTER, False), self.t1(Scope.INTRA, inner))
        for outer in (True, False):
            yield from _then(_first(Scope.INTER, False, outer), self.t5(inner, outer))

    def t4(self, inner: bool) -> list[Operations]:
        """The exchange of payloads between machines, and all that follows it."""
        found = list(_then(_whole(Scope.INTER, True), self.t2(Scope.INTRA, inner)))
        for outer in (True, False):
            first = _first(Scope.INTER, True, outer)
            found += _then(first, _second(Scope.INTER, True, outer), self.t2(Scope.INTRA, inner))
            found += _then(first, self.decomp, self.t5(inner, outer))
        return found

    def t5(self, inner: bool, outer: bool) -> list[Operations]:
        """The second step between machines, of dense values, and the rest."""
        dense = _then(_second(Scope.INTER, False, outer), self.t1(Scope.INTRA, inner))
        return [*dense, *_then(self.comp, _second(Scope.INTER, True, outer), self.t2(Scope.INTRA, inner))]


Network = Mapping[tuple[Routine, Scope], Cost]


def alpha_beta(topology: Topology, intra: Affine, inter: Affine) -> dict[tuple[Routine, Scope], Affine]:
    """The cost of every collective by its formula.

    Rings for all-reduce, reduce-scatter and all-gather; pipelined chains for reduce and broadcast; direct messages for
    all-to-all and gather, which in a flat exchange share the link of their machine.

    Args:
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
            found[routine, scope] = Affine(alpha=link.alpha * messages, beta=link.beta * share)
    return found


@dataclass(frozen=True, kw_only=True)
class TensorCosts:
    """The costs of exchanging one tensor."""

    topology: Topology  # the machines and ranks that take part
    network: Network = field(hash=False)  # each collective, by the bytes named in `alpha_beta`
    compress: Mapping[Processor, Cost] = field(hash=False)  # on each processor, by dense bytes; for the CPU with the way there and back
    decompress: Mapping[Processor, Cost] = field(hash=False)  # of one payload, by its dense bytes
    wire_bytes: Callable[[int], int]  # of the payload, by the number of elements
    itemsize: int = 4  # bytes of one element of a dense gradient

    def __post_init__(self) -> None:
        if self.itemsize < 1:
            raise ValueError(f"itemsize={self.itemsize} bytes: must be at least 1")
        if set(self.compress) != set(self.decompress) or not self.compress:
            raise ValueError(f"compress on {set(self.compress)}, decompress on {set(self.decompress)}: give both for the same processors")

    def seconds(self, load: Load, elements: int) -> float:
        """Seconds that one operation takes for a tensor of ``elements`` elements. Raises ValueError: there is no cost for it."""
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


@dataclass(frozen=True, kw_only=True)
class Load:
    """The work of one operation on each rank that takes part."""

    operation: Operation
    splits: int  # into how many parts the tensor is divided, of which a rank holds one
    payloads: int  # of that part that it holds, not added up yet; 1 for dense values
    groups: int  # of ranks in each machine which do the same at the same time, over the same link


def loads(option: Option, topology: Topology) -> Iterator[Load]:
    """The work of each operation of an option."""
    splits = payloads = groups = 1
    for operation in option.operations:
        between = isinstance(operation, PlannedCollective) and operation.scope is Scope.INTER
        yield Load(operation=operation, splits=splits, payloads=payloads, groups=groups if between else 1)
        if isinstance(operation, Codec):
            payloads = 1
            continue
        members = topology.members(operation.scope)
        if operation.step is ExchangePart.SECOND:
            splits //= members if operation.sharded else 1
            continue
        if operation.compressed:
            payloads *= members
        if operation.step is ExchangePart.FIRST and operation.sharded:
            splits *= members
            groups = topology.ranks if operation.scope is Scope.INTRA else groups
