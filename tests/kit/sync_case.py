"""What ranks do in the tests of gradient synchronisation: every scheme on every case, in one process per rank."""

from __future__ import annotations

import functools
import gc
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import switch_kit
import torch
import torch.distributed as dist

from gemini_ft.compression import truncation
from gemini_ft.sync import auto, backends, wire
from gemini_ft.sync.auto import Auto, candidates
from gemini_ft.sync.base import Scheme, line_of
from gemini_ft.sync.costs import Link
from gemini_ft.sync.ddp_hook import HookState, hook
from gemini_ft.sync.hierarchical import Hierarchical
from gemini_ft.sync.partition import EvenPartition, HashedPartition, RotatedPartition
from gemini_ft.sync.ring import InceptionnRing, Ring8
from gemini_ft.sync.rows import GradientError, to_rows
from gemini_ft.sync.schemes import LOSSY_SCHEMES, SCHEMES, SWITCH_SCHEMES
from gemini_ft.sync.sparcml import DSARSplitAllgather
from gemini_ft.sync.switch_scheme import SwitchScheme
from gemini_ft.sync.zen import Zen
from gemini_ft.testing import digest

IN_RANK_ORDER = {"agsparse", "ssar-split-allgather", "dsar-split-allgather", "single-ps", "sparse-ps", "omnireduce", "zen"}
"""Schemes that add in rank order, 16-bit values in 32 bits: their sum is that of `expected`, bit for bit."""

SWITCH = "TEST_SWITCH"  # variable with its address
# Schemes whose bits may differ from call to call: another one is tried, or values are added up as they arrive.
IN_ANY_ORDER = {"auto", "fpisa", "omnireduce-streaming"}
INTEGERS = {"switchml"}
"""Schemes that add integers: their error has a bound of its own."""
TRUNCATED = {"inceptionn-ring"}
"""Schemes whose values are off by less than 2^-10 for every rank."""
QUANTISED = {"ring8"}
"""Schemes that round n times by less than a 127th of the largest partial sum of a bucket."""
IN_32_BITS = {"fpisa", *TRUNCATED, *QUANTISED}
"""Schemes that round float64 to float32."""


def join() -> dist.ProcessGroup:
    """The group of all ranks, which is made at the first call."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    return group


def schemes(world: int) -> list[Scheme]:
    local = next(size for size in (2, 3, 1) if world % size == 0)
    alone: list[type[Scheme]] = [*SCHEMES.values(), *LOSSY_SCHEMES.values()]
    return [*(scheme() for scheme in alone), Zen("hierarchical"), Hierarchical(Zen(), local), Auto(), *switched()]


def switched() -> list[SwitchScheme[Any]]:
    """The schemes that go through the switch that the test has started, if it has. Few slots: all kinds of rounds come up."""
    if (place := os.environ.get(SWITCH)) is None:
        return []
    return [scheme(place, switch_kit.KEY, slots=16, patience=switch_kit.PATIENCE) for scheme in SWITCH_SCHEMES.values()]


# -- gradients: make(rank) is that of a rank, so that every rank knows what all have


Make = Callable[[int], torch.Tensor]


def rows(shape: tuple[int, ...], touched: torch.Tensor, dtype: torch.dtype, seed: int, sparse_dim: int = 1) -> torch.Tensor:
    """Uncoalesced, with every index that ``touched`` has twice twice."""
    values = torch.randn(len(touched), *shape[sparse_dim:], generator=torch.Generator().manual_seed(seed)).to(dtype)
    indices = torch.stack(torch.unravel_index(touched, shape[:sparse_dim]))
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def draw(count: int, limit: int, rank: int, skew: float = 1.0) -> torch.Tensor:
    """Indices below ``limit``, with duplicates; the more ``skew``, the more of them small."""
    return (torch.rand(count, generator=torch.Generator().manual_seed(100 + rank)) ** skew * limit).long()


def _rows_of(dtype: torch.dtype, rank: int) -> torch.Tensor:
    return rows((1009, 12), draw(150, 1009, rank), dtype, rank)


def cases(world: int) -> Iterator[tuple[str, Make]]:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        yield f"rows {dtype}", partial(_rows_of, dtype)
    yield "rows, coalesced", lambda rank: rows((300, 12), draw(40, 300, rank), torch.float32, rank).coalesce()
    yield "rows skewed", lambda rank: rows((5000, 4), draw(400, 5000, rank, 6.0), torch.float32, rank)
    yield "rows of 256", lambda rank: rows((300, 256), draw(40, 300, rank), torch.float32, rank)
    yield "rows of two dimensions", lambda rank: rows((70, 3, 5), draw(20, 70, rank), torch.float32, rank)
    yield "two sparse dimensions", lambda rank: rows((40, 50, 3), draw(90, 2000, rank), torch.float32, rank, 2)
    yield "elements", lambda rank: rows((37, 41), draw(80, 37 * 41, rank), torch.float32, rank, 2)
    yield "no overlap", lambda rank: rows((64 * world, 3), torch.arange(64) * world + rank, torch.float32, rank)
    yield "full overlap", lambda rank: rows((500, 3), draw(100, 500, 0), torch.float32, rank)
    yield "one rank has all", lambda rank: rows((90, 3), torch.arange(90 if rank == world - 1 else 0), torch.float32, rank)
    yield "empty", lambda rank: rows((90, 3), torch.arange(0), torch.float32, rank)
    yield "full", lambda rank: rows((90, 3), torch.arange(90), torch.float32, rank)
    yield "one row", lambda rank: rows((1, 7), torch.zeros(2, dtype=torch.int64), torch.float32, rank)
    yield "no rows", lambda rank: rows((0, 7), torch.arange(0), torch.float32, rank)
    yield "values of no width", lambda rank: rows((9, 0), torch.arange(0), torch.float32, rank)
    yield "above 2**31", lambda rank: rows((2**20, 2**14), draw(60, 2**34, rank), torch.float32, rank, 2)
    yield "strided", lambda rank: rows((33, 65), draw(200, 33 * 65, rank), torch.float32, rank, 2).to_dense()
    yield "strided bfloat16", lambda rank: rows((33, 65), draw(200, 33 * 65, rank), torch.bfloat16, rank, 2).to_dense()
    yield "strided, transposed", lambda rank: rows((33, 65), draw(200, 33 * 65, rank), torch.float32, rank, 2).to_dense().t()
    yield "scalar", lambda rank: torch.tensor(1.5 + rank)
    yield "strided, nothing", lambda rank: torch.zeros(3, 0)
    many = 9000 // world  # in a world of two, longer than what is received, and passed on, at once
    yield "long messages", lambda rank: rows((many, 512), torch.arange(rank % 2, many, 2), torch.float32, rank)


HUGE = "above 2**31"
SPARSE = {"agsparse", "ssar-recursive-doubling", "ssar-split-allgather", "single-ps", "sparse-ps", "omnireduce", "zen"}
"""Schemes that do not make the gradient dense, which takes 64 GiB for the huge one."""


@functools.lru_cache(1)  # cases come one after the other, each for every scheme
def expected(make: Make, world: int) -> torch.Tensor:
    """The sum in rank order, dense, wide where values are of 16 bits; exact to one rounding per addition of the dtype it has."""
    gradients = [make(rank) for rank in range(world)]
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    total = torch.zeros(gradients[0].shape, dtype=wide)
    for gradient in gradients:
        dense = gradient.coalesce().to_dense() if gradient.is_sparse else gradient
        total = total + dense.to(wide)
    return total


@functools.lru_cache(1)
def integer_bound(make: Make, world: int) -> float:
    """SwitchML's n / (2 f), as if all values had the exponent of the largest one, and roundings to float32."""
    largest = max((float(gradient.to_dense().abs().max()) if gradient.numel() else 0.0) for gradient in map(make, range(world)))
    return world * largest * (2 * world / 2**32 + 2.0**-22)


@functools.lru_cache(1)
def bound(make: Make, world: int) -> torch.Tensor:
    """How far a sum in another order may be off: one unit in the last place of the sum of magnitudes per addition."""
    gradients = [make(rank) for rank in range(world)]
    dense = [gradient.coalesce().to_dense() if gradient.is_sparse else gradient for gradient in gradients]
    return world * torch.finfo(dense[0].dtype).eps * torch.stack([each.double().abs() for each in dense]).sum(0)


def sums(third: int | None = None) -> list[str]:
    """Every scheme on every case, or on every third one, each on others; what is wrong."""
    group = join()
    world, wrong = group.size(), []
    tried = dict(cases(world))
    enormous = tried.pop(HUGE)
    huge = [(HUGE, enormous, SCHEMES[name]()) for name in sorted(SPARSE)]
    numbered = list(enumerate(schemes(world)))
    small = [(*case, scheme) for at, case in enumerate(tried.items()) for number, scheme in numbered if third in (None, (at + number) % 3)]
    for case, make, scheme in small + huge:
        own = make(group.rank())
        kept = own.clone()
        result = scheme.all_reduce(own)
        problem = _problem_huge(make, result, world) if case == HUGE else _problem(make, result, world, scheme.name)
        if problem or not _same(own, kept):
            wrong.append(f"{scheme.name}, {case}: {problem or 'the input was changed'}")
        elif _memory(own) and _memory(result) == _memory(own):
            wrong.append(f"{scheme.name}, {case}: the sum lies where the gradient does")
        elif not alike(result, group):
            wrong.append(f"{scheme.name}, {case}: ranks differ")
        if world > 1 and isinstance(scheme, SwitchScheme) and not scheme.in_use():
            wrong.append(f"{scheme.name}, {case}: did not go through the switch")
    dist.destroy_process_group()
    return wrong


def _memory(tensor: torch.Tensor) -> int:
    """The address of a tensor's values; 0: there are none."""
    return (tensor._values() if tensor.is_sparse else tensor).untyped_storage().data_ptr()


def _problem(make: Make, result: torch.Tensor, world: int, scheme: str) -> str:
    like, total = make(0), expected(make, world)
    if (result.shape, result.dtype, result.layout) != (like.shape, like.dtype, like.layout):
        return f"{result.shape} {result.dtype} {result.layout}"
    if result.is_sparse and not (result.is_coalesced() and _ascending(result)):
        return "is not coalesced"
    dense = result.to_dense()
    if scheme in IN_RANK_ORDER:
        return "" if torch.equal(dense, total.to(dense.dtype)) else f"off by {(dense - total).abs().max()}"
    off = (dense.double() - total.double()).abs()
    allowed = bound(make, world) + (integer_bound(make, world) if scheme in INTEGERS else 0.0)
    if scheme in TRUNCATED:
        allowed = allowed + world * 2.0**-10
    if scheme in QUANTISED:
        allowed = allowed + (allowed.max() if allowed.numel() else 0.0) / torch.finfo(like.dtype).eps / 127
    if scheme in IN_32_BITS and like.dtype == torch.float64:
        allowed = allowed * (torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps)
    return "" if bool((off <= allowed).all()) else f"off by up to {float(off.max())}"


def _problem_huge(make: Make, result: torch.Tensor, world: int) -> str:
    total = sum((make(rank).coalesce().double() for rank in range(1, world)), make(0).coalesce().double()).coalesce()
    if not _same(result.indices(), total.indices()):
        return "other indices"
    off = float((result.values().double() - total.values()).abs().max())
    return "" if off < 1e-5 else f"off by {off}"


def _ascending(result: torch.Tensor) -> bool:
    flat = torch.zeros(result.indices().shape[1], dtype=torch.int64)
    for size, each in zip(result.shape, result.indices(), strict=False):
        flat = flat * size + each
    return bool((flat.diff() > 0).all())


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return all(torch.equal(a, b) for a, b in zip(_parts(one), _parts(other), strict=True))


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]


def alike(result: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether all ranks have the same bits."""
    parts = [part.contiguous().flatten().view(torch.uint8) for part in _parts(result)]
    own = hash(tuple(bytes(part.numpy()) for part in parts))
    first = torch.tensor([own])
    dist.broadcast(first, 0, group=group)  # forked from one process, ranks have one hash seed
    return int(first) == own


# -- what is refused


def refusals() -> list[tuple[str, str, str]]:
    """(scheme, case, error) of every scheme on what cannot be summed; the last of each scheme is a sum after all that."""
    group = join()
    rank, last = group.rank(), group.rank() == group.size() - 1
    outside = torch.sparse_coo_tensor(torch.tensor([[9 if last else 1]]), torch.ones(1, 2), (9, 2), check_invariants=False)
    outside._coalesced_(True)
    wrong = {
        "shape": torch.zeros(4 if last else 3),
        "same size, other shape": torch.zeros(*((2, 6) if last else (3, 4))),
        "dtype": torch.zeros(3, dtype=torch.float64 if last else torch.float32),
        "layout": torch.zeros(3).to_sparse() if last else torch.zeros(3),
        "integers": torch.zeros(3, dtype=torch.int64) if last else torch.zeros(3),
        "csr": torch.eye(3).to_sparse() if rank else torch.eye(3),
        "index": outside,
    }
    found = []
    for scheme in schemes(group.size()):
        for case, tensor in wrong.items():
            try:
                scheme.all_reduce(tensor)
            except GradientError as error:
                found.append((scheme.name, case, str(error)))
            else:
                found.append((scheme.name, case, "nothing was raised"))
        found.append((scheme.name, "afterwards", str(scheme.all_reduce(torch.ones(3)).tolist())))
    return found


def other_schemes() -> list[str]:
    """What is said where ranks have different schemes, different seeds, different ways of hashing."""
    rank = join().rank()
    choices = (Zen() if rank else SCHEMES["sparse-ps"](), Zen(seed=rank), Zen("hierarchical" if rank else "rotation"))
    return [_error(partial(scheme.all_reduce, torch.zeros(3))) for scheme in choices]


# -- special values, order, threads


def special_values() -> list[str]:
    """Schemes that lose a NaN or an infinity, or let one spread."""
    group = join()
    own = torch.zeros(2000)
    own[group.rank()] = math.nan
    own[100] = math.inf
    own[200] = math.inf if group.rank() else -math.inf
    own[300] = 1e38 * 3  # the sum overflows
    own[400] = 1e-45
    wrong = []
    for scheme in [*schemes(group.size()), DSARSplitAllgather(4)]:  # parts that hold any travel as they are
        for tensor in (own, own.to_sparse()):
            result = scheme.all_reduce(tensor).to_dense()
            marks = [*range(group.size()), 200]
            good = bool(result[marks].isnan().all()) and int(result.isnan().sum()) == len(marks)
            good = good and float(result[100]) == math.inf and float(result[300]) == math.inf
            good = good and (scheme.name in INTEGERS | TRUNCATED | QUANTISED or bool(result[400] == group.size() * torch.tensor(1e-45)))
            if not good:
                wrong.append(f"{scheme.name} {tensor.layout}")
    return wrong


def in_the_background() -> list[str]:
    """Many at once, of all schemes, in one order; some waited for late, some followed by one in the foreground."""
    group = join()
    wrong, all_schemes = [], schemes(group.size())
    makes = [make for case, make in cases(group.size()) if case in ("rows torch.float32", "elements", "strided")]
    direct = [[scheme.all_reduce(make(group.rank())) for make in makes] for scheme in all_schemes]
    for scheme in all_schemes:
        if scheme.name in QUANTISED:
            scheme.load_state_dict(type(scheme)().state_dict())  # the same chances once more
    futures = [[scheme.all_reduce(make(group.rank()), async_op=True) for make in makes] for scheme in all_schemes]
    again = all_schemes[0].all_reduce(makes[0](group.rank()))
    for scheme, waiting, results in zip(all_schemes, futures, direct, strict=True):
        for future, result in zip(waiting, results, strict=True):
            value = future.wait()
            close = torch.allclose(value.to_dense(), result.to_dense(), atol=1e-5)
            if not (close if scheme.name in IN_ANY_ORDER else _same(value, result)):
                wrong.append(scheme.name)
    if not _same(again, direct[0][0]):
        wrong.append("the one in the foreground")
    gate = threading.Event()
    chained = line_of(group).later(gate.wait).then(lambda _: Zen().all_reduce(torch.ones(3)))
    gate.set()
    if "called from a callback" not in _error(chained.wait):
        wrong.append("a callback was not refused")
    broken = Zen().all_reduce(torch.zeros(3 + group.rank()), async_op=True)
    try:
        broken.wait()
    except Exception as error:
        if "cannot be summed" not in str(error):
            wrong.append(f"error: {error!r}")
    else:
        wrong.append("no error")
    return wrong


def collectives(third: int | None) -> list[str]:
    """The cases once more, over the exchange for backends that need to know sizes."""
    backends.PointToPoint = backends.CollectiveExchange  # type: ignore[misc, assignment]
    return sums(third)


def subgroups() -> list[str]:
    """Each half of the world sums for itself, both at once."""
    world = join()
    halves = [list(range(world.size()))[start::2] for start in (0, 1)]
    groups = [dist.new_group(half) for half in halves]
    wrong = []
    for scheme in [*(kind() for kind in (*SCHEMES.values(), *LOSSY_SCHEMES.values())), *switched()]:
        for half, group in zip(halves, groups, strict=True):
            if world.rank() in half:
                total = scheme.all_reduce(torch.full((50,), float(world.rank())), group)
                if not torch.allclose(total, torch.full((50,), float(sum(half)))):
                    wrong.append(scheme.name)
                if isinstance(scheme, SwitchScheme) and not scheme.in_use(group):
                    wrong.append(f"{scheme.name}: did not go through the switch")
            elif "not a member" not in _error(partial(scheme.all_reduce, torch.zeros(3), group)):
                wrong.append(f"{scheme.name}: a stranger was let in")
    return wrong


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    return ""


# -- zen, whatever the indices


def of_one_server(rotated: bool, server: int, size: int) -> list[int]:
    """All that one of three servers gets."""
    partition = RotatedPartition(size, 3) if rotated else HashedPartition(size, 3)
    positions = torch.arange(size // 4)
    return [int(index) for index in partition.indices(torch.full_like(positions, server), positions) if index < size]


def zen_on(sets: list[list[list[int]]], size: int) -> list[bool]:
    """Whether Zen's sum is exact, for each choice of indices, by rank; with both ways of hashing."""
    group = join()
    good = []
    for choice in sets:
        for zen in (Zen(), Zen("hierarchical")):

            def make(rank: int, choice: list[list[int]] = choice) -> torch.Tensor:
                indices = torch.tensor(choice[rank % len(choice)], dtype=torch.int64)
                values = torch.randn(len(indices), 2, generator=torch.Generator().manual_seed(rank))
                return torch.sparse_coo_tensor(indices[None], values, (size, 2), check_invariants=False)

            good.append(torch.equal(zen.all_reduce(make(group.rank())).to_dense(), expected(make, group.size())))
    return good


# -- DSAR in few bits


def quantised_sums() -> list[str]:
    """What is wrong with DSAR's sums in few bits: their errors, their mean, special values, the sum after a restored state."""
    group, wrong = join(), []
    world, bucket = group.size(), 64
    for bits, dtype in ((2, torch.float32), (4, torch.bfloat16), (4, torch.float64), (8, torch.float32)):
        make = partial(_rows_of, dtype)
        scheme = DSARSplitAllgather(bits, bucket, seed=3)  # type: ignore[arg-type]
        sums = [scheme.all_reduce(make(group.rank())).to_dense().double() for _ in range(40)]
        if not all(alike(each, group) for each in sums[:3]):
            wrong.append(f"{bits} bits, {dtype}: ranks differ")
        total = expected(make, world).double()
        most = 0.0
        parts = EvenPartition(len(total), world)
        for part in torch.split(total, [parts.size(number) for number in range(world)]):  # buckets begin anew in each
            most = max([most, *(float(each.norm()) for each in torch.split(part.flatten(), bucket))])
        steps = most / (2 ** (bits - 1) - 1)
        if max(float((each - total).abs().max()) for each in sums) > steps + most * torch.finfo(dtype).eps:
            wrong.append(f"{bits} bits, {dtype}: off by more than a level")
        mean_off = float((torch.stack(sums).mean(0) - total).abs().mean())
        if mean_off > steps * 40**-0.5 / 2 + most * torch.finfo(dtype).eps:  # a level's standard deviation is half of it at most
            wrong.append(f"{bits} bits, {dtype}: biased by {mean_off}")
        again = DSARSplitAllgather(bits, bucket, seed=3)  # type: ignore[arg-type]
        again.load_state_dict(scheme.state_dict())
        following = [each.all_reduce(make(group.rank())).to_dense() for each in (scheme, again)]
        if not torch.equal(*following) or torch.equal(following[0].double(), sums[-1]):
            wrong.append(f"{bits} bits, {dtype}: chances are not those of the state")
    return wrong


# -- INCEPTIONN's ring


def truncated_sums() -> list[str]:
    """What is wrong with the sums of a ring that truncates, and with the messages that it sends."""
    group, sent, wrong = join(), list[int](), []

    class Spy(backends.PointToPoint):
        def shift(self, message: torch.Tensor, to: int, source: int) -> torch.Tensor:
            sent.append(len(message) - wire.HEADER)
            return super().shift(message, to, source)

    backends.PointToPoint = Spy  # type: ignore[misc]
    for size, bound in ((1000, 10), (7, 3), (1, 10), (200_000, 6)):
        ranks = [0.1 * torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in range(group.size())]
        total, lengths = _ring(ranks, bound, group.rank())
        sent.clear()
        result = InceptionnRing(bound).all_reduce(ranks[group.rank()])
        if not torch.equal(result, total):
            wrong.append(f"{size} values: other sums")
        if sent[-len(lengths) :] != lengths:  # the ones before are short and compare what ranks were given
            wrong.append(f"{size} values: messages of {sent} bytes, not {lengths}")
        off = float((total - sum(ranks)).abs().max())
        if not 0 < off < group.size() * 2.0**-bound:
            wrong.append(f"{size} values: off by {off}")
    return wrong


def _ring(ranks: list[torch.Tensor], bound: int, rank: int) -> tuple[torch.Tensor, list[int]]:
    """The sums of a ring that truncates all that is sent, and the bytes that a rank sends, in order."""
    size, sums, sent = len(ranks), list[torch.Tensor](), dict[int, int]()
    length = -(-ranks[0].numel() // size)
    padded = [torch.cat([each, torch.zeros(size * length - each.numel())]).view(size, length) for each in ranks]
    for part in range(size):
        partial_sum = padded[part][part]  # rank ``part`` begins with the part of its number
        for step in range(1, size + 1):
            message = torch.cat([each.view(torch.uint8) for each in truncation.encode(partial_sum, bound)])
            come = truncation.decode(message, torch.empty(length), bound)
            sender = (part + step - 1) % size
            if sender == rank and step < size:
                sent[step - 1] = len(message)
            if step < size:
                partial_sum = come + padded[(part + step) % size][part]
        sums.append(come)  # the last rank has truncated the whole sum, which goes around as it is
        for step in range(size - 1):
            if (sender + step) % size == rank:
                sent[size - 1 + step] = len(message)
    return torch.cat(sums)[: ranks[0].numel()], [sent[step] for step in sorted(sent)]


def ddp_truncated() -> list[float]:
    """How far gradients are from DDP's own, where buckets go over a ring that truncates; the same on all ranks."""
    group = join()

    def gradients(truncate: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 200), torch.nn.Linear(200, 3))
        ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
        if truncate:
            ddp.register_comm_hook(HookState(dense=InceptionnRing()), hook)
        values = torch.randn(6, 32, generator=torch.Generator().manual_seed(group.rank()))
        ddp(values).square().mean().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    found = gradients(True)
    return [float((found - gradients(False)).abs().max())] if alike(found, group) else []


# -- auto


def auto_plans() -> list[str | None]:
    """What is chosen after each call: before, while and after the gradient changes."""
    group = join()
    auto = Auto()
    chosen: list[str | None] = []

    def call(count: int) -> str | None:
        auto.all_reduce(rows((2000, 4), draw(count, 2000, group.rank()), torch.float32, 0))
        [plan] = auto.plans.values()
        chosen.append(plan.chosen)
        return plan.chosen

    while call(30) is None:
        pass
    call(30)
    for _ in range(3):
        call(900)
    while call(900) is None:
        pass
    return chosen


def auto_alone() -> tuple[bool, dict[tuple[object, ...], Any], dict[str, Any]]:
    """Whether the sums of one rank are its gradients, and what is planned and kept for them."""
    group, auto = join(), Auto()
    make = partial(_rows_of, torch.bfloat16)
    right = [torch.equal(auto.all_reduce(make(group.rank())).to_dense(), expected(make, 1).bfloat16()) for _ in range(2)]
    return all(right), dict(auto.plans), auto.state_dict()


def most_messages_at_a_server() -> int:
    """The most messages that a rank holds at once while it is the only server, the one that has just come included."""
    group, held, most = join(), list[weakref.ref[Any]](), 0

    class Spy(backends.PointToPoint):
        def receive(self, peer: int) -> torch.Tensor:
            nonlocal most
            message = super().receive(peer)
            held.append(weakref.ref(message.untyped_storage()))
            gc.collect()
            most = max(most, sum(each() is not None for each in held))
            return message

    backends.PointToPoint = Spy  # type: ignore[misc]
    SCHEMES["single-ps"]().all_reduce(_rows_of(torch.bfloat16, group.rank()))
    return most


def auto_tries() -> Any:
    """(names that were tried, names that the formulas find close, least seconds of each, median seconds of the chosen one)."""
    group = join()
    auto = Auto()
    while True:
        auto.all_reduce(rows((2000, 4), draw(30, 2000, group.rank()), torch.float32, 0))
        [plan] = auto.plans.values()
        if plan.chosen is not None and plan.traffic is not None:
            [[_, alpha, beta]] = auto.state_dict()["links"]
            link = Link(alpha=alpha, beta=beta)
            took = plan.trial.medians()[plan.tried.index(plan.chosen)]
            return set(plan.judged), set(candidates(plan.least, plan.traffic, link)), dict(plan.least), took


def profile() -> Any:
    """(traffic, link) as this rank sees them."""
    group = join()
    exchange = backends.open_exchange(group, torch.device("cpu"), "a test")
    gradient = to_rows(rows((800, 4), draw(60, 800, group.rank(), 3.0), torch.float32, 0))
    return auto.traffic(gradient, exchange), auto.link(exchange)


# -- DDP


def ddp_gradients() -> list[float]:
    """How far the averaged gradients are from DDP's own, with a dense embedding: of each parameter."""
    group = join()

    states = {torch.float32: HookState(group=group), torch.bfloat16: group}  # a group stands for its defaults, as in torch's hooks

    def gradients(sparse: bool, dtype: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(0)
        embed = torch.nn.Embedding(300, 8, sparse=sparse)
        model = torch.nn.Sequential(embed, torch.nn.Flatten(), torch.nn.Linear(32, 200), torch.nn.Linear(200, 3)).to(dtype)
        ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
        if sparse:
            ddp.register_comm_hook(states[dtype], hook)
        for step in range(3):  # DDP sorts its buckets anew after the first
            ddp.zero_grad()
            ddp(draw(24, 300, 10 * step + group.rank()).view(6, 4)).square().sum().backward()
        return [parameter.grad.to_dense() for parameter in model.parameters() if parameter.grad is not None]

    return [
        float((one - other).abs().max() / other.abs().max())
        for dtype in (torch.float32, torch.bfloat16)
        for one, other in zip(gradients(True, dtype), gradients(False, dtype), strict=True)
    ]


def hook_without_state() -> str:
    """Averages through the hook with None as its state; the beginning of the error that another state gets."""
    join()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model.register_comm_hook(None, hook)
    model(torch.full((1, 4), 1.0 + torch.distributed.get_rank())).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    assert torch.equal(gradient, torch.full((4, 4), 1.5))
    bucket: Any = None
    try:
        hook("zen", bucket)  # type: ignore[arg-type]
    except TypeError as error:
        return str(error).partition(";")[0]
    return "none"


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """How the sums of one scheme are rounded.

    Attributes:
        largest: error, for values up to 1.
        deviations: the largest of the errors of the mean of many sums, in standard errors.
        bits: of all sums, as a digest.
        resumed: whether a scheme that loads the state of another goes on with the same bits.
        varies: whether two sums of the same values differ.
    """

    largest: float
    deviations: float
    bits: str
    resumed: bool
    varies: bool


def roundings(every: Sequence[Any], sums: int = 400) -> dict[str, Rounding]:
    """By words of ring8: how sums of the same 128 uniform values are rounded, many times in one."""
    rank, found = join().rank(), {}

    def uniform(rank: int) -> torch.Tensor:
        return torch.rand(128, generator=torch.Generator().manual_seed(rank)) * 2 - 1

    exact = torch.stack([uniform(each).double() for each in range(dist.get_world_size())]).sum(0)
    values = uniform(rank).repeat(sums)
    for words in every:
        scheme, other = Ring8(words), Ring8(words)
        first = scheme.all_reduce(values).view(sums, 128)
        other.load_state_dict(scheme.state_dict())
        following = [each.all_reduce(values) for each in (scheme, other)]
        errors = first.double() - exact
        spread = errors.std(0).clamp_(min=1e-4) / sums**0.5
        found[words] = Rounding(
            largest=float(errors.abs().max()),
            deviations=float((errors.mean(0) / spread).abs().max()),
            bits=digest(first),
            resumed=torch.equal(*following),
            varies=not torch.equal(first[0], first[1]),
        )
    return found


def ring_bytes() -> tuple[int, int]:
    """Bytes that a rank sends for a sum of 100 000 values by ring8, and the bytes of those values."""
    sent, original = [], wire.wrap

    def counted(payload: torch.Tensor) -> torch.Tensor:
        sent.append(payload.nbytes)
        return original(payload)

    join()
    with patch("gemini_ft.sync.wire.wrap", counted):
        Ring8().all_reduce(torch.ones(100_000))
    return sum(sent), 400_000
