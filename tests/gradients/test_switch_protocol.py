"""Workers and switch without a network between them: state machines under loss, duplication, reordering and deaths."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gemini_ft.sync import switch_adders
from gemini_ft.sync.fpisa import Accuracy
from gemini_ft.sync.omnireduce import OmniReduceStream
from gemini_ft.sync.switch_adders import ADDERS
from gemini_ft.sync.switch_packets import Array, Packets
from gemini_ft.sync.switch_server import Slots
from gemini_ft.sync.switch_worker import TensorStream, Worker
from gemini_ft.sync.switchml import SPECIAL, SwitchMLStream, exponents, factors, to_integers

ELEMENTS = 4
STEP = 0.02  # seconds of the simulated clock


class Air:
    """A network that loses, repeats and reorders packets by a seed; every packet travels alone."""

    def __init__(self, seed: int, loss: float, twice: float) -> None:
        self._random, self._loss, self._twice = random.Random(seed), loss, twice
        self.under_way: list[tuple[int | None, Packets]] = []

    def put(self, where: int | None, packets: Sequence[Packets]) -> None:
        """Sends to a worker, or to the switch (None)."""
        for each in packets:
            for number in range(len(each)):
                copies = (self._random.random() >= self._loss) + (self._random.random() < self._twice)
                self.under_way += [(where, each.pick(np.array([number])))] * copies

    def next(self) -> tuple[int | None, Packets]:
        return self.under_way.pop(self._random.randrange(len(self.under_way)))


def simulate(
    tensors: Sequence[Sequence[TensorStream]], slots: int, pool: Slots, air: Air, stop: Callable[[int], bool] = lambda _: False
) -> bool:
    """Every worker's tensors one after the other, each as soon as the worker has the one before; whether all came to their end."""
    workers = [Worker(slots, 4 * ELEMENTS) for _ in tensors]
    left = [list(each) for each in tensors]
    now, deliveries = 0.0, 0
    for _ in range(20_000):
        for number, worker in enumerate(workers):
            while worker.done and left[number]:
                air.put(None, [_from(number, each) for each in worker.start(left[number].pop(0), now)])
        if all(worker.done for worker in workers) and not any(left):
            return True
        if not air.under_way:
            now += STEP
            for number, worker in enumerate(workers):
                air.put(None, [_from(number, each) for each in worker.tick(now)])
            continue
        where, packets = air.next()
        deliveries += 1
        if stop(deliveries):
            return False
        if where is None:
            rank, packets = _sender(packets)
            outcome = pool.take(rank, packets)
            air.put(rank, outcome.again)
            for number in range(len(workers)):
                air.put(number, outcome.everybody)
        else:
            air.put(None, [_from(where, each) for each in workers[where].take(packets, now)])
    raise AssertionError("no end")


def _from(rank: int, packets: Packets) -> Packets:
    """The rank travels in the slot's upper bits, where a datagram's header would have it."""
    return Packets(slots=packets.slots + (rank << 32), rounds=packets.rounds, sides=packets.sides, values=packets.values)


def _sender(packets: Packets) -> tuple[int, Packets]:
    return int(packets.slots[0]) >> 32, Packets(
        slots=packets.slots & 0xFFFFFFFF, rounds=packets.rounds, sides=packets.sides, values=packets.values
    )


def pool(world: int, slots: int, adder: str = "int32", largest: bool = True) -> Slots:
    return Slots(world, slots, ADDERS[adder](2 * slots, 4 * ELEMENTS), largest=largest)


def gradient(rank: int, count: int, seed: int) -> Array:
    noise = np.random.default_rng([seed, rank])
    return (noise.standard_normal((count, ELEMENTS)) * np.exp2(noise.integers(-20, 20, (count, 1)))).astype(np.float32)


def integer_sum(parts: Sequence[Array]) -> Array:
    """SwitchML's sum of packets, computed in one go."""
    world = len(parts)
    factor = factors(np.max([exponents(part) for part in parts], axis=0), world)
    return sum(to_integers(part, factor).astype(np.int64) for part in parts).astype(np.float32) / factor


worlds = st.integers(1, 5)
losses = st.sampled_from([0.0, 0.05, 0.4])


@settings(max_examples=60, deadline=None)
@given(worlds, st.integers(1, 5), st.lists(st.integers(1, 17), min_size=1, max_size=3), st.integers(0, 2**32), losses, losses)
def test_integer_sums_are_the_same_bits_whatever_the_network_does(
    world: int, slots: int, counts: list[int], seed: int, loss: float, twice: float
) -> None:
    """Section 3.5: shadow copies and bitmaps survive any loss; a pool much smaller than the tensors, which follow without a pause."""
    parts = [[gradient(rank, count, seed + number) for number, count in enumerate(counts)] for rank in range(world)]
    streams = [[SwitchMLStream(each, slots, world) for each in own] for own in parts]
    assert simulate(streams, slots, pool(world, slots), Air(seed, loss, twice))
    for number in range(len(counts)):
        right = integer_sum([own[number] for own in parts])
        for own in streams:
            np.testing.assert_array_equal(own[number].sums, right)


@settings(max_examples=30, deadline=None)
@given(worlds, st.integers(0, 2**32), st.integers(1, 60))
def test_a_worker_that_dies_leaves_no_sum_without_its_part(world: int, seed: int, moment: int) -> None:
    """A rank stops for good somewhere: what others have by then is right, and the rest never comes."""
    parts = [gradient(rank, 12, seed) for rank in range(world)]
    streams = [SwitchMLStream(each, 3, world) for each in parts]
    marks = [stream.sums for stream in streams]
    for mark in marks:
        mark.fill(np.nan)
    simulate([[stream] for stream in streams], 3, pool(world, 3), Air(seed, 0.2, 0.2), lambda count: count == moment)
    right = integer_sum(parts)
    for mark in marks:
        there = ~np.isnan(mark).any(1)
        np.testing.assert_array_equal(mark[there], right[there])


def one(slot: int, round_: int, value: int, side: int = 0) -> Packets:
    return Packets(
        slots=np.array([slot]),
        rounds=np.array([round_]),
        sides=np.array([side]),
        values=np.full((1, ELEMENTS), value, np.int32).view(np.uint8),
    )


def test_packets_of_the_past_and_of_the_future_change_nothing() -> None:
    """The paper's one bit for the copy would take a duplicate that is two rounds late for a new packet."""
    slots = pool(2, 2)
    for round_ in range(3):
        slots.take(0, one(1, round_, 1))
        slots.take(1, one(1, round_, 10))
    slots.take(0, one(1, 3, 1))
    for wrong in (one(1, 1, 99), one(1, 5, 99), one(1, 4, 99), one(1, 3, 99), one(7, 0, 99)):
        for rank in (0, 1):
            if (rank, int(wrong.rounds[0])) != (1, 3):
                assert slots.take(rank, wrong).everybody == []
    [sums] = slots.take(1, one(1, 3, 10)).everybody
    assert sums.values is not None
    assert sums.values.view(np.int32).tolist() == [[11] * ELEMENTS]
    assert slots.counts["malformed"] == 2
    assert slots.counts["duplicate"] == 7


def test_a_sum_is_given_again_to_the_one_that_asks() -> None:
    slots = pool(2, 1)
    slots.take(0, one(0, 0, 1, side=5))
    [sums] = slots.take(1, one(0, 0, 2, side=3)).everybody
    slots.take(1, one(0, 1, 7))  # this worker is a round ahead
    outcome = slots.take(0, one(0, 0, 1, side=5))
    assert outcome.everybody == []
    [again] = outcome.again
    assert again.sides.tolist() == sums.sides.tolist() == [5]
    np.testing.assert_array_equal(again.values, sums.values)


def test_packets_that_are_repeated_at_once_are_taken_in_few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded packet can be sent again by anybody on its way, and thousands of small ones come in one go."""
    slots = pool(2, 1)
    for round_ in range(4):
        slots.take(0, one(0, round_, 1))
        slots.take(1, one(0, round_, 2))
    turns, apart = [], Packets.apart

    def counted(packets: Packets) -> Iterator[Packets]:
        for each in apart(packets):
            turns.append(len(each))
            yield each

    monkeypatch.setattr(Packets, "apart", counted)
    recorded = [one(0, round_, 1) for round_ in range(4)] * 50
    [flood] = Packets.join([*recorded, one(0, 4, 10)])
    slots.take(0, flood)
    assert len(turns) <= 3
    assert slots.counts["duplicate"] == 198
    assert slots.counts["again"] == 2
    [sums] = slots.take(1, one(0, 4, 20)).everybody
    assert sums.values is not None
    assert sums.values.view(np.int32).tolist() == [[30] * ELEMENTS]


@pytest.mark.parametrize("adder", ["int32", "float32", "float64"])
def test_a_sum_that_is_given_again_is_that_of_its_round(adder: str) -> None:
    """An old packet that is repeated beside a new one for the same row: the nonce of the old sum is never used for other values."""
    slots = pool(2, 1, adder)
    sums = []
    for round_ in (0, 1):
        slots.take(0, one(0, round_, 1))
        sums += [each.values.copy() for each in slots.take(1, one(0, round_, 2)).everybody if each.values is not None]
    [both] = Packets.join([one(0, 0, 1), one(0, 2, 50)])
    [again] = slots.take(0, both).again
    assert again.rounds.tolist() == [0]
    np.testing.assert_array_equal(again.values, sums[0])


@pytest.mark.parametrize("world", [1, 2, 3, 8, 64, 255])
def test_no_sum_of_integers_overflows(world: int) -> None:
    """Appendix C: with f = (2^31 - 1) / (n 2^e) the sum of n values below 2^e fits in 32 bits."""
    for exponent in (-90, 0, 100):
        most = np.full((1, 1), np.nextafter(np.float32(2.0**exponent), np.float32(0)), np.float32)
        assert exponents(most).tolist() == [exponent]
        assert world * int(to_integers(most, factors(np.array([exponent]), world))[0, 0]) <= 2**31 - 1


def test_halves_are_rounded_away_from_zero() -> None:
    values = np.array([[0.5, -0.5, 1.5, -2.5, 0.49999997, -0.49999997, 8388609.0]], np.float32)
    assert to_integers(values, np.ones((1, 1), np.float32)).tolist() == [[1, -1, 2, -3, 0, 0, 8388609]]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 8), st.integers(-100, 100), st.integers(0, 2**32))
def test_the_error_is_below_the_bound(world: int, scale: int, seed: int) -> None:
    """Appendix C: at most n / (2 f), beside the roundings of float32 when a value is scaled and when the sum is scaled back."""
    parts = [np.ldexp(gradient(rank, 3, seed), scale // 2) for rank in range(world)]
    exact = sum(part.astype(np.float64) for part in parts)
    factor = factors(np.max([exponents(part) for part in parts], axis=0), world).astype(np.float64)
    bound = world / (2 * factor) + sum(np.abs(part.astype(np.float64)) for part in parts) * 2.0**-22
    assert (np.abs(integer_sum(parts) - exact) <= bound).all()


def test_packets_that_integers_cannot_carry_are_told_apart() -> None:
    values = np.array([[1, np.nan], [np.inf, 0], [0, -np.inf], [2.0**126, 0], [-(2.0**126), 1], [1e-45, 0], [0, 0], [3, -5]], np.float32)
    assert exponents(values).tolist() == [SPECIAL] * 5 + [-90, -90, 3]


# -- timers: which packets a worker sends again, and when


def under_way(slots: int, parts: int = 1) -> tuple[Worker, list[float]]:
    """A worker that has sent a packet of every slot, in moments one millisecond apart; the answers to its first round took 10 ms."""
    worker = Worker(slots, 4 * ELEMENTS, parts)
    worker.start(SwitchMLStream(np.zeros((slots, ELEMENTS), np.float32), slots, 1), 0.0)
    moments = [0.010 + 0.001 * slot for slot in range(slots)]
    for slot, moment in enumerate(moments):
        worker.take(bare(slot), moment)
    return worker, moments


def bare(slot: int) -> Packets:
    return Packets(slots=np.array([slot]), rounds=np.array([0]), sides=np.array([0]), values=None)


def sum_of(slots: Sequence[int]) -> Packets:
    return Packets(
        slots=np.array(slots),
        rounds=np.ones(len(slots), np.int64),
        sides=np.zeros(len(slots), np.int64),
        values=np.zeros((len(slots), 4 * ELEMENTS), np.uint8),
    )


def sent_by(packets: Sequence[Packets]) -> list[int]:
    return sorted(int(slot) for each in packets for slot in each.slots)


def test_a_packet_that_later_ones_overtook_is_sent_again_before_its_time() -> None:
    worker, moments = under_way(16)
    now = moments[-1] + 0.001
    assert sent_by(worker.tick(now)) == []
    worker.take(sum_of([slot for slot in range(16) if slot not in (2, 3)]), now)
    assert sent_by(worker.tick(now)) == [2, 3]
    assert sent_by(worker.tick(now + 0.001)) == [], "sent again a moment ago"


def test_a_packet_to_another_switch_is_not_taken_for_overtaken() -> None:
    """Switch 1 is slower than switch 0: nothing was lost."""
    worker, moments = under_way(16, parts=2)
    worker.take(sum_of(range(0, 16, 2)), now := moments[-1] + 0.001)
    assert sent_by(worker.tick(now)) == []


@pytest.mark.parametrize("lost", [1, 9, 16])
def test_all_of_a_tail_is_sent_again_at_once(lost: int) -> None:
    """The last packets of a tensor are lost, and nothing comes after them: that is no stall, however few slots are still open."""
    worker, _ = under_way(64)
    worker.take(sum_of(range(64 - lost)), 1.0)
    assert sent_by(worker.tick(10.0)) == list(range(64 - lost, 64))


def test_a_stall_is_asked_about_by_few_packets() -> None:
    """Nothing is answered, of all that is under way: somebody is slow, and must not be buried."""
    worker, _ = under_way(64)
    asked = 0
    for second in range(10):
        asked += len(sent_by(worker.tick(10.0 + second)))
    assert 0 < asked <= 10 * 8


# -- OmniReduce


@settings(max_examples=60, deadline=None)
@given(worlds, st.integers(1, 5), st.integers(1, 25), st.floats(0, 1), st.integers(0, 2**32), losses, losses)
def test_streams_of_blocks_add_up_what_any_worker_has(
    world: int, slots: int, blocks: int, density: float, seed: int, loss: float, twice: float
) -> None:
    """Section 4: only blocks that are not zero travel, and no one's next pointer may be overtaken."""
    noise = np.random.default_rng(seed)
    has = noise.random((world, blocks)) < density
    parts = noise.integers(1, 100, (world, blocks, ELEMENTS)).astype(np.float32) * has[:, :, None]  # exact in any order
    streams = [
        OmniReduceStream(blocks, np.flatnonzero(own), part[own].reshape(-1, ELEMENTS).view(np.uint8), slots)
        for own, part in zip(has, parts, strict=True)
    ]
    switch = pool(world, slots, "float32", largest=False)
    assert simulate([[stream] for stream in streams], slots, switch, Air(seed, loss, twice))
    for stream in streams:
        indices, sums = stream.sums()
        assert indices.tolist() == np.flatnonzero(has.any(0)).tolist()
        np.testing.assert_array_equal(sums.view(np.float32), parts.sum(0)[indices])


# -- FPISA


def fpisa(mode: str, values: Sequence[float]) -> tuple[float, dict[str, int]]:
    sums, counts = fpisa_sums(f"{mode}-float32", torch.tensor(values).unsqueeze(1))
    return float(sums), counts


def fpisa_sums(name: str, values: Tensor) -> tuple[Tensor, dict[str, int]]:
    """Sums over the first dimension of ``values``, of one worker each."""
    adder = ADDERS[name](1, values[0].nbytes)
    for number, each in enumerate(values):
        (adder.add if number else adder.store)(np.array([0]), each.view(torch.uint8).numpy()[None])
    return torch.from_numpy(adder.read(np.array([0]))).view(values.dtype)[0], adder.counts


FORMATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("name", FORMATS)
@given(
    values=st.lists(st.floats(-(2.0**9), 2.0**9, width=16) | st.floats(-(2.0**-9), 2.0**-9, width=16), min_size=1, max_size=64),
    mode=st.sampled_from(["fpisa", "fpisa-a"]),
)
def test_fpisa_stays_within_its_bound(name: str, mode: str, values: list[float]) -> None:
    """Half a unit in the last place of the sum, and per addition half a unit of the registers, which have guard bits below the largest."""
    given = torch.tensor(values).to(FORMATS[name]).unsqueeze(1)
    total, counts = fpisa_sums(f"{mode}-{name}", given)
    exact, eps = given.double().sum(), torch.finfo(given.dtype).eps
    if counts["overwritten"] or counts["overflowed"] or exact.abs() > torch.finfo(given.dtype).max:
        return
    guards = {"float32": 1, "float16": 14, "bfloat16": 17}[name] if mode == "fpisa" else 0
    least = torch.finfo(given.dtype).tiny
    per_addition = 2.0**-guards / 2 * eps * given.double().abs().max().clamp(min=least)
    assert (total.double() - exact).abs() <= (len(values) - 1) * per_addition + eps / 2 * exact.abs().clamp(min=least) * (1 + eps)


@pytest.mark.parametrize("mode", ["fpisa", "fpisa-a"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_fpisa_has_no_bias(mode: str, name: str, ranks: int) -> None:
    """Neither downwards, as by shifts that round down, nor towards zero, as by cutting the fraction."""
    values = torch.randn(ranks, 20_000, generator=torch.Generator().manual_seed(ranks))
    if mode == "fpisa-a":
        values[0] = 2 * values[0].sign()  # its exponent leaves room for the others
    values = values.to(FORMATS[name])
    sums, counts = fpisa_sums(f"{mode}-{name}", values)
    assert not any(counts.values())
    exact = values.double().sum(0)
    errors = sums.double() - exact
    for signed in (errors, errors * exact.sign()):
        assert abs(float(signed.mean())) <= 5 * float(signed.std()) / len(signed) ** 0.5


def test_fpisa_is_not_moved_by_next_to_nothing() -> None:
    for name, dtype in FORMATS.items():
        for least in (1e-30, -1e-30, torch.finfo(dtype).tiny, -torch.finfo(dtype).tiny):
            for values in ([1.0, least], [least, 1.0], [-1.0, least]):
                total, _ = fpisa_sums(f"fpisa-{name}", torch.tensor(values).to(dtype).unsqueeze(1))
                assert float(total) == round(sum(values)), (name, values)


def test_sums_that_are_no_numbers_are_beyond_the_bound_and_spoil_no_mean() -> None:
    accuracy = Accuracy()
    bound = torch.full((4,), 1e-6, dtype=torch.float64)
    for _ in range(2):
        accuracy.note(torch.tensor([0.0, math.nan, -2e-6, math.inf], dtype=torch.float64), bound)
    assert (accuracy.values, accuracy.beyond, accuracy.lost, accuracy.worst) == (8, 6, 4, math.inf)
    assert accuracy.mean == -accuracy.bias == pytest.approx(1e-6)
    assert "-1.0e-06 with signs" in str(accuracy)
    assert "4 of them no numbers" in str(accuracy)
    nothing = Accuracy()
    nothing.note(torch.tensor([math.nan], dtype=torch.float64), bound[:1])
    assert (nothing.values, nothing.beyond, nothing.mean) == (1, 1, 0.0)


def test_fpisa_has_room_for_as_many_workers_as_a_job_may_have() -> None:
    for dtype, name in ((dtype, name) for name, dtype in FORMATS.items()):
        most = torch.nextafter(torch.tensor(2.0, dtype=dtype), torch.tensor(0.0, dtype=dtype))
        for value in (most, -most):
            assert fpisa_sums(f"fpisa-{name}", value.expand(64, 1).contiguous())[0] == 64 * value
    assert fpisa("fpisa", [2 - 2.0**-23] * 65)[0] != 65 * (2 - 2.0**-23), "one more than fits in 32 bits"


def test_registers_without_head_room_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of 16 bits, whose mantissas are shorter and leave more of it."""
    for name, width in (("float32", 24), ("float16", 11), ("bfloat16", 8)):
        for mode in ("fpisa", "fpisa-a"):
            monkeypatch.setattr(switch_adders, "MOST_RANKS", 2 ** (31 - width))
            ADDERS[f"{mode}-{name}"](1, 8)
            monkeypatch.setattr(switch_adders, "MOST_RANKS", 2 ** (31 - width) + 1)
            with pytest.raises(AssertionError, match="could overflow"):
                ADDERS[f"{mode}-{name}"](1, 8)


def test_fpisa_a_shifts_left_in_its_room_and_overwrites_beyond() -> None:
    assert fpisa("fpisa-a", [1.0, 128.0]) == (129.0, {"overwritten": 0, "overflowed": 0})
    assert fpisa("fpisa-a", [1.0, 256.0]) == (256.0, {"overwritten": 1, "overflowed": 0})
    assert fpisa("fpisa-a", [1.0, 255.0, 255.0])[1]["overflowed"] == 1
    assert fpisa("fpisa", [1.0, 256.0])[0] == 257.0


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_fpisa_gives_single_values_back_as_they_were(name: str) -> None:
    width = np.uint32 if name == "float32" else np.uint16
    fraction = {"float32": 23, "float16": 10, "bfloat16": 7}[name]
    bits = np.arange(2**16, dtype=width) if name != "float32" else np.arange(0, 2**32, 65521, dtype=np.uint64).astype(np.uint32)
    size = 8 * np.dtype(width).itemsize
    infinite = (bits >> fraction) & ((1 << (size - 1 - fraction)) - 1) == (1 << (size - 1 - fraction)) - 1
    bits = bits[~infinite & (bits != 1 << (size - 1))]  # a negative zero becomes a zero
    adder = ADDERS[f"fpisa-{name}"](1, bits.nbytes)
    adder.store(np.array([0]), bits[None].view(np.uint8))
    np.testing.assert_array_equal(adder.read(np.array([0])).view(width)[0], bits)
