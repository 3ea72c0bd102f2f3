"""Putting chunks into idle spans: examples in prose, and what must hold of every schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.core.traffic import OVERFLOW, LinkCost, Schedule, ScheduledChunk, Transfer, arrival, schedule, steps_per_snapshot

seconds = st.floats(0, 5, allow_nan=False)
transfers = st.builds(
    lambda nbytes, copies, part, parts, gamma: Transfer(nbytes=nbytes, copies=copies, buffer_bytes=part * parts, parts=parts, gamma=gamma),
    st.integers(0, 5000),
    st.integers(0, 3),
    st.integers(1, 700),
    st.integers(1, 6),
    st.floats(0.1, 1.0),
)
links = st.builds(LinkCost, alpha=st.floats(0, 0.5), bandwidth=st.floats(1, 5000))


class TestExamples:
    def test_a_shard_is_cut_by_sub_buffers_and_by_spans(self) -> None:
        plan = schedule(
            [1.0, 0.375, 3.0], Transfer(nbytes=300, copies=1, buffer_bytes=256, parts=2, gamma=1.0), LinkCost(alpha=0.125, bandwidth=256.0)
        )
        # the first span: 128 bytes take 0.625 s, then 0.375 s carry 64; the second carries 64; the rest goes into the third
        assert plan.chunks == (
            ScheduledChunk(span=0, copy=0, offset=0, nbytes=128),
            ScheduledChunk(span=0, copy=0, offset=128, nbytes=64),
            ScheduledChunk(span=1, copy=0, offset=192, nbytes=64),
            ScheduledChunk(span=2, copy=0, offset=256, nbytes=44),
        )
        assert plan.overflow_bytes == 0

    def test_copies_follow_each_other(self) -> None:
        plan = schedule([10.0], Transfer(nbytes=30, copies=2, buffer_bytes=20, parts=1, gamma=1.0), LinkCost(alpha=0.0, bandwidth=100.0))
        assert [(chunk.copy, chunk.offset, chunk.nbytes) for chunk in plan.chunks] == [(0, 0, 20), (0, 20, 10), (1, 0, 20), (1, 20, 10)]

    def test_what_fits_nowhere_is_overflow_and_is_not_lost(self) -> None:
        plan = schedule([0.5], Transfer(nbytes=100, copies=1, buffer_bytes=40, parts=1, gamma=1.0), LinkCost(alpha=0.1, bandwidth=100.0))
        assert [chunk.span for chunk in plan.chunks] == [0, OVERFLOW, OVERFLOW]
        assert plan.overflow_bytes == 60
        assert plan.overflow_seconds == pytest.approx(0.1 + 0.4 + 0.1 + 0.2)

    def test_a_span_shorter_than_one_message_carries_nothing(self) -> None:
        plan = schedule([0.05, 0.1], Transfer(nbytes=10, gamma=1.0), LinkCost(alpha=0.1, bandwidth=1e9))
        assert {chunk.span for chunk in plan.chunks} == {OVERFLOW}

    def test_the_interval_grows_until_the_spans_carry_a_snapshot(self) -> None:
        transfer, link = Transfer(nbytes=100, buffer_bytes=10, parts=1, gamma=1.0), LinkCost(alpha=0.0, bandwidth=10.0)
        assert steps_per_snapshot([10.0], transfer, link) == 1
        assert steps_per_snapshot([4.0], transfer, link) == 3
        assert steps_per_snapshot([0.0], transfer, link, most=50) == 50

    def test_when_a_snapshot_arrives(self) -> None:
        transfer, link = Transfer(nbytes=50, buffer_bytes=10, parts=1, gamma=1.0), LinkCost(alpha=0.0, bandwidth=10.0)
        assert arrival([0.0, 5.0], [2.0, 4.0], 10.0, transfer, link) == 5.0 + 3.0
        assert arrival([0.0, 5.0], [2.0, 1.0], 10.0, transfer, link) == 10.0 + 2.0  # two in the first step, one more, two in the next
        assert arrival([0.0], [0.0], 10.0, transfer, link) is None
        assert arrival([0.0], [1.0], 10.0, Transfer(nbytes=0), link) == 0.0

    @pytest.mark.parametrize(
        "wrong",
        [{"nbytes": -1}, {"copies": -1}, {"parts": 0}, {"buffer_bytes": 3}, {"gamma": 0.0}, {"gamma": 1.5}],
    )
    def test_nonsense_is_refused(self, wrong: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Transfer(**{"nbytes": 1, **wrong})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="bandwidth"):
            LinkCost(alpha=0.1, bandwidth=0.0)


@given(st.lists(seconds, max_size=8), transfers, links)
def test_every_byte_once_in_order_and_no_span_overfilled(spans: list[float], transfer: Transfer, link: LinkCost) -> None:
    plan: Schedule = schedule(spans, transfer, link)
    sent: dict[int, int] = {}
    for chunk in plan.chunks:
        assert chunk.offset == sent.get(chunk.copy, 0)  # no gap, nothing twice, from the first byte on
        assert 0 < chunk.nbytes <= transfer.chunk_bytes  # parts of them are in the buffer at any time: that bounds the memory
        sent[chunk.copy] = chunk.offset + chunk.nbytes
    assert sent == (dict.fromkeys(range(transfer.copies), transfer.nbytes) if transfer.nbytes else {})
    order = [len(spans) if chunk.span == OVERFLOW else chunk.span for chunk in plan.chunks]
    assert order == sorted(order)
    assert [chunk.copy for chunk in plan.chunks] == sorted(chunk.copy for chunk in plan.chunks)
    for index, length in enumerate(spans):
        taken = sum(link.seconds(chunk.nbytes) for chunk in plan.chunks if chunk.span == index)
        assert taken <= transfer.gamma * length + 1e-9
        assert plan.used[index] == pytest.approx(taken, abs=1e-9)
    assert plan.overflow_bytes == sum(chunk.nbytes for chunk in plan.chunks if chunk.span == OVERFLOW)


@given(st.lists(seconds, min_size=1, max_size=5), transfers, links)
def test_overflow_means_that_the_spans_are_full(spans: list[float], transfer: Transfer, link: LinkCost) -> None:
    """Greedy is good enough: what is left of a span, when something overflows, carries no byte more."""
    plan = schedule(spans, transfer, link)
    if plan.overflow_bytes:
        for length, used in zip(spans, plan.used, strict=True):
            assert link.carries(transfer.gamma * length - used - 1e-6) == 0


@given(st.lists(seconds, min_size=1, max_size=5), transfers, links, st.floats(1.0, 3.0))
def test_longer_spans_never_carry_less(spans: list[float], transfer: Transfer, link: LinkCost, factor: float) -> None:
    longer = schedule([length * factor for length in spans], transfer, link)
    # by less than one byte per chunk: a chunk that is cut elsewhere may be rounded otherwise
    assert longer.overflow_bytes <= schedule(spans, transfer, link).overflow_bytes + len(longer.chunks)


@given(st.lists(seconds, min_size=1, max_size=4), transfers, links)
def test_the_chosen_interval_fits_or_is_the_longest(spans: list[float], transfer: Transfer, link: LinkCost) -> None:
    steps = steps_per_snapshot(spans, transfer, link, most=20)
    assert 1 <= steps <= 20
    if steps < 20:
        assert schedule([*spans] * steps, transfer, link).overflow_bytes == 0
    if 1 < steps < 20:
        assert schedule([*spans] * (steps - 1), transfer, link).overflow_bytes > 0
