"""The verdict on a job that hangs: the rank to blame is named, whatever else the ranks are doing, and nothing that hosts say breaks it."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.core.autopsy import (
    ENTRIES,
    GROUPS,
    MISMATCH,
    NETWORK,
    REPORT,
    STACK,
    UNKNOWN,
    Doing,
    Entered,
    GroupTrail,
    RankFound,
    judge,
    printable_line,
    report,
)

Drawn = tuple[int, int, list[str], list[int]]
OPERATIONS = st.sampled_from(
    ["allreduce_ float32[4]", "allreduce_ bfloat16[4]", "allreduce_ float32[8]", "broadcast_ float32[4]", "barrier"]
)
AWAKE = st.sampled_from([Doing.ASLEEP, Doing.AT_WORK])


def entered(number: int, text: str, is_over: bool) -> Entered:
    return Entered(number=number, is_over=is_over, mark=zlib.crc32(text.encode()), text=text)


def trail(texts: list[str], over: int, group: str = "0", size: int = 2) -> GroupTrail:
    """All collectives of a rank, of which ``over`` are over."""
    entries = [entered(number, text, number <= over) for number, text in enumerate(texts, start=1)]
    return GroupTrail(group=group, size=size, entered=tuple(entries[-ENTRIES:]))


def rank(number: int, *trails: GroupTrail, doing: Doing = Doing.ASLEEP, stack: str = "") -> RankFound:
    return RankFound(rank=number, host=f"h{number}", pid=100 + number, doing=doing, trails=trails, stack=stack)


@st.composite
def jobs(draw: st.DrawFn, least: int = 2) -> Drawn:
    """The number of ranks, one of them, the collectives of all, and how many of them each rank has begun beyond that in which it waits."""
    size = draw(st.integers(least, 6))
    texts = draw(st.lists(OPERATIONS, min_size=2, max_size=3 * ENTRIES))
    return size, draw(st.integers(0, size - 1)), texts, draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))


@given(jobs(), st.sampled_from(list(Doing)), st.data())
def test_a_rank_that_does_not_enter_is_named_with_its_state(job: Drawn, doing: Doing, data: st.DataObject) -> None:
    size, culprit, texts, ahead = job
    over = data.draw(st.integers(1, len(texts) - 1))
    found = [rank(each, trail(texts[: over + 1 + ahead[each]], over, size=size), doing=data.draw(AWAKE)) for each in range(size)]
    found[culprit] = rank(culprit, trail(texts[:over], over, size=size), doing=doing)
    if doing in (Doing.LEFT, Doing.ENDED, Doing.SILENT):  # nothing more is known
        found[culprit] = RankFound(rank=culprit, host="h", doing=doing)
    verdict = judge(found)
    assert (verdict.cause, verdict.ranks) == (doing, (culprit,))
    assert f"rank {culprit} (host h" in verdict.text
    assert f"wait{'s' * (size == 2)} in {texts[over]}, number {over + 1} of group '0'" in verdict.text


@given(jobs(), OPERATIONS, st.data())
def test_a_rank_that_enters_another_collective_is_named(job: Drawn, other: str, data: st.DataObject) -> None:
    """With two ranks it cannot be told which one is wrong."""
    size, culprit, texts, ahead = job
    over = data.draw(st.integers(0, len(texts) - 1))
    texts[over] = f"not {other}"
    goes_on = data.draw(st.booleans())  # as a root does whose broadcast nobody needs to receive
    found = [rank(each, trail(texts[: over + 1 + ahead[each]], over, size=size), doing=data.draw(AWAKE)) for each in range(size)]
    wrong = [*texts[:over], other, *texts[over + 1 :]][: over + 1 + ahead[culprit]]
    found[culprit] = rank(culprit, trail(wrong, over + goes_on, size=size))
    verdict = judge(found)
    assert (verdict.cause, verdict.ranks) == (MISMATCH, (culprit,) if size > 2 else (0, 1))
    assert f"collective {over + 1} of group '0' is not the same on all ranks" in verdict.text
    assert other in verdict.text


@given(jobs(), st.data())
def test_where_all_wait_in_the_same_nobody_is_blamed_but_the_network(job: Drawn, data: st.DataObject) -> None:
    size, _, texts, ahead = job
    over = data.draw(st.integers(0, len(texts) - 1))
    found = [rank(each, trail(texts[: over + 1 + ahead[each]], over, size=size), doing=data.draw(AWAKE)) for each in range(size)]
    verdict = judge(found)
    assert (verdict.cause, verdict.ranks) == (NETWORK, tuple(range(size)))


def test_a_collective_that_is_over_on_all_ranks_was_the_same() -> None:
    """Sizes of sparse gradients, for example, may differ."""
    same = ["broadcast_ float32[4]"]
    found = [rank(0, trail(["allreduce_ 3", *same], 1)), rank(1, trail(["allreduce_ 5", *same], 1))]
    assert judge(found).cause == NETWORK
    found[1] = rank(1, trail(["allreduce_ 5"], 1))
    assert (judge(found).cause, judge(found).ranks) == (Doing.ASLEEP, (1,))
    found = [rank(0, trail(["allreduce_ 3", *same], 1)), rank(1, trail(["allreduce_ 5", *same], 0))]
    assert judge(found).cause == MISMATCH


class TestGroups:
    ONE = ("allreduce_ float32[4]",)

    def test_the_rank_at_the_end_of_a_chain_is_named(self) -> None:
        """Rank 0 waits for rank 1 in one group, which waits in another for rank 2."""
        first = trail([*self.ONE], 0, "a")
        found = [rank(0, first), rank(1, trail([*self.ONE], 0, "b")), rank(2, trail([*self.ONE], 1, "c"))]
        verdict = judge(found)
        assert (verdict.cause, verdict.ranks) == (Doing.ASLEEP, (2,))

    def test_two_orders_of_two_groups_are_a_mismatch(self) -> None:
        over = ["barrier"]
        found = [
            rank(0, trail([*over, *self.ONE], 1, "a"), trail(over, 1, "b")),
            rank(1, trail(over, 1, "a"), trail([*over, *self.ONE], 1, "b")),
            rank(2, trail([*self.ONE] * 3, 3, "c", size=1)),
        ]
        verdict = judge(found)
        assert (verdict.cause, verdict.ranks) == (MISMATCH, (0, 1))
        assert "ranks wait for each other in different process groups" in verdict.text

    def test_numbers_of_transfers_are_not_compared(self) -> None:
        """Rank 0 has sent five pieces that two ranks have received."""
        found = [
            rank(0, trail(["send uint8[4] to 1"] * 5, 5, "0, point to point", size=0)),
            rank(1, trail(["recv_ uint8[4] from 0"] * 3, 2, "0, point to point", size=0)),
            rank(2, trail(["recv_ uint8[4] from 0"] * 2, 2, "0, point to point", size=0), doing=Doing.KERNEL),
        ]
        verdict = judge(found)
        assert (verdict.cause, verdict.ranks) == (Doing.KERNEL, (2,))
        assert "rank 1 waits in recv_ uint8[4] from 0" in verdict.text

    def test_whoever_is_asleep_outside_is_named_where_nobody_waits(self) -> None:
        verdict = judge([rank(0, trail([*self.ONE], 1)), rank(1, trail([*self.ONE], 1), doing=Doing.AT_WORK)])
        assert (verdict.cause, verdict.ranks) == (Doing.ASLEEP, (0,))

    def test_a_rank_that_is_not_observed_is_not_blamed(self) -> None:
        unseen = RankFound(rank=1, host="h1", pid=7, doing=Doing.AT_WORK)
        verdict = judge([rank(0, trail([*self.ONE], 0)), unseen])
        assert (verdict.cause, verdict.ranks) == (UNKNOWN, (1,))

    def test_ranks_that_have_left_long_ago_are_not_blamed(self) -> None:
        left = RankFound(rank=0, host="h0", doing=Doing.LEFT)
        assert judge([left, rank(1)]).ranks == (1,)
        assert (judge([left]).cause, judge([left]).ranks) == (UNKNOWN, ())


TEXT = st.text(max_size=80)
ANYTHING = st.builds(
    RankFound,
    rank=st.integers(0, 3),
    host=TEXT,
    pid=st.integers(0, 2**31),
    doing=st.sampled_from(list(Doing)),
    trails=st.none()
    | st.lists(
        st.builds(
            GroupTrail,
            group=st.sampled_from(["0", "1", "\x1b[2J"]),
            size=st.integers(-3, 5),
            entered=st.lists(
                st.builds(Entered, number=st.integers(-5, 20), is_over=st.booleans(), mark=st.integers(0, 2), text=TEXT), max_size=20
            ).map(tuple),
        ),
        max_size=20,
    ).map(tuple),
    stack=st.text(max_size=200),
)


@given(st.lists(ANYTHING, min_size=1, max_size=5))
def test_whatever_hosts_say_makes_a_report_of_bounded_size_that_moves_no_cursor(said: list[RankFound]) -> None:
    found = [each.cut() for each in said]
    verdict = judge(found)
    assert {*verdict.ranks} <= {each.rank for each in found}
    assert verdict.text.isprintable()
    text = report("the head", found, verdict)
    assert len(text) <= REPORT + 1
    assert all(line.isprintable() for line in text.split("\n"))


def test_a_host_that_says_more_than_an_honest_one_is_cut() -> None:
    whole = GroupTrail(group="0", size=2, entered=tuple(entered(number, "barrier" * 50, False) for number in range(50)))
    most = rank(0, *(replace(whole, group=str(number)) for number in range(50)), stack="x\n" * STACK).cut()
    assert len(most.stack) == STACK
    assert [len(each.entered) for each in most.trails or ()] == [ENTRIES] * GROUPS


def test_the_stacks_of_those_to_blame_come_first_and_are_kept_where_not_all_fit() -> None:
    found = [rank(each, trail(["barrier"], 0, size=40), stack=f"of {each}\n" + "x" * (STACK - 100)) for each in range(40)]
    found[30] = rank(30, doing=Doing.STOPPED, stack="where it was stopped")
    text = report("the head", found, judge(found))
    assert "where it was stopped" in text
    assert text.index("where it was stopped") < text.index("of 0\n")
    assert "of 39\n" not in text


@pytest.mark.parametrize(("text", "shown"), [("  File \t x\x1b[2J", "  File \\t x\\x1b[2J"), ("", ""), ("   ", "   ")])
def test_the_blanks_before_a_line_stay(text: str, shown: str) -> None:
    assert printable_line(text) == shown
