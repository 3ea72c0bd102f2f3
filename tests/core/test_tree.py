"""Who reports to whom, and what counts of it (docs/design.md, section 7). Any order of events is tried in test_protocol_machine.py."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.core.effects import Copies, Gathered, GatheredSkips, Skipped
from gemini_ft.core.gathering import Gathering
from gemini_ft.core.tree import Ways, collectors, ways_up
from gemini_ft.core.versions import Incarnation, Version

HOLDERS = {0: ("a", "b"), 1: ("b", "a"), 2: ("c", "d"), 3: ("d", "c")}


def version(iteration: int) -> Version:
    return Version(Incarnation(1, "n"), iteration)


def copies(host: str, iteration: int, owners: str, digest: str = "") -> Copies:
    return Copies(
        host=host, version=version(iteration), layout="layout", digest=digest, roots={int(owner): f"root {owner}" for owner in owners}
    )


# -- who reports to whom


@given(st.integers(1, 9), st.integers(1, 120), st.integers(0, 119))
def test_no_host_has_more_than_the_fan_in_below_it_until_their_square_is_reached(fan_in: int, hosts: int, leader: int) -> None:
    names = [f"h{i}" for i in range(hosts)]
    first = names[leader % hosts]
    ways = ways_up([*names, *names], first, fan_in)
    assert ways.keys() == set(names) - {first}
    assert all(way[-1] == first and host not in way for host, way in ways.items())
    assert all(ways[collector] == (first,) for collector in collectors(ways))
    below = Counter(way[0] for way in ways.values())
    assert below[first] <= fan_in
    if hosts - 1 <= fan_in * (fan_in + 1):
        assert all(count <= fan_in for count in below.values())


def test_a_host_whose_collector_is_gone_turns_to_the_next_one_and_then_to_the_leader() -> None:
    assert ways_up("abcdefg", "a", 2) == {
        "b": ("a",),
        "c": ("b", "e", "a"),
        "d": ("b", "e", "a"),
        "e": ("a",),
        "f": ("e", "b", "a"),
        "g": ("e", "b", "a"),
    }
    assert ways_up("abc", "a", 2) == {"b": ("a",), "c": ("a",)}


# -- what counts


def test_nothing_counts_but_what_comes_by_the_way_of_the_newest_greeting() -> None:
    ways = Ways[str]()
    assert not ways.counts("h", "one")
    assert ways.greet("h", 1, "one")
    assert ways.greet("h", 2, "two")
    assert not ways.greet("h", 1, "one"), "it was late"
    assert (ways.counts("h", "one"), ways.counts("h", "two")) == (False, True)
    assert ways.lose("one") == set()
    assert ways.lose("two") == {"h"}
    assert not ways.counts("h", "two")
    assert not ways.greet("h", 1, "one"), "it was very late"


def test_the_greetings_of_a_host_that_cannot_be_reached_can_be_forgotten_and_no_others() -> None:
    ways = Ways[str]()
    assert ways.greet("h", 9, "one")
    ways.forget_lost("h")
    assert ways.counts("h", "one")
    assert not ways.greet("h", 1, "two")
    ways.lose("one")
    ways.forget_lost("h")
    assert ways.greet("h", 1, "two")


def test_hosts_that_must_hear_something_else_are_told_apart() -> None:
    ways = Ways[str]()
    for attempt, (host, way) in enumerate(["ax", "bx", "cx", "dy", "ez"]):
        ways.greet(host, attempt, way)
    assert list(ways.audiences({"b", "e"})) == [("x", {"a", "c"}), ("x", {"b"}), ("y", None), ("z", {"e"})]


# -- a collector


def gathering(*hosts: str) -> Gathering:
    found = Gathering("a", HOLDERS)
    for host in hosts:
        found.greet(host, 1)
    return found


def test_copies_go_up_in_one_message_when_the_last_host_has_all_of_its_own() -> None:
    found = gathering("b", "c")
    assert [found.add(copies(host, 1, owners)) for host, owners in (("a", "01"), ("c", "23"), ("b", "10"))] == [False, False, True]
    roots = {"a": "root 0root 1", "c": "root 2root 3", "b": "root 0root 1"}
    assert found.take() == [Gathered(version=version(1), layout="layout", digest="", roots=roots)]
    assert not found.waiting


def test_a_host_that_has_left_is_not_waited_for_nor_a_copy_that_does_not_count() -> None:
    found = gathering("b", "c")
    found.leave("c")
    found.exclude([(1, "b"), (0, "c")])
    assert not found.add(copies("a", 1, "01"))
    assert found.add(copies("b", 1, "0"))
    assert found.take() == [Gathered(version=version(1), layout="layout", digest="", roots={"a": "root 0root 1"}), copies("b", 1, "0")]


@pytest.mark.parametrize(
    "several", [[copies("b", 1, "01", digest="d")], [copies("b", 1, "0"), copies("b", 1, "1")], [copies("b", 1, "0"), copies("b", 1, "01")]]
)
def test_what_is_said_in_parts_or_otherwise_than_by_others_keeps_its_order(several: list[Copies]) -> None:
    found = gathering("b")
    for each in [copies("a", 1, "01"), *several]:
        found.add(each)
    told = found.take()
    held = {"a": [0, 1], "b": [0, 1]}
    assert [each for one in told for each in (one.each(held) if isinstance(one, Gathered) else [one])] == [copies("a", 1, "01"), *several]


def test_the_first_rank_without_a_snapshot_is_told_at_once_and_all_others_together() -> None:
    found = gathering("b", "c")
    skips = {"b": [0, 1], "c": [2]}
    told = [found.skip(host, Skipped(owner, version(2), "late")) for host, owners in skips.items() for owner in owners]
    assert told == [False, True, True]
    assert not found.skip("c", Skipped(2, version(3), "late"))
    found.add(copies("a", 1, "01"))
    assert found.take() == [
        Gathered(version=version(1), layout="layout", digest="", roots={"a": "root 0root 1"}),
        GatheredSkips(version(2), "late", {"b": [1], "c": [2]}),
    ]
    assert not found.waiting
    assert found.skip("b", Skipped(0, version(2), "late"))


def test_older_versions_go_up_first() -> None:
    found = gathering("b")
    for each in [copies("a", 2, "01"), copies("b", 1, "01")]:
        found.add(each)
    assert [one.version.iteration for one in found.take()] == [1, 2]


def test_the_answer_to_an_earlier_greeting_admits_nobody() -> None:
    """Messages after it are for an agent that is gone: for example a commit without roots, of copies that this one may not have."""
    found = gathering("b")
    assert found.admit("b", 1)
    found.greet("b", 2)
    assert not found.admitted
    assert not found.admit("b", 1)
    assert found.admit("b", 2)
    assert found.admitted == {"b"}


def test_after_the_leader_was_lost_every_host_must_greet_again() -> None:
    found = gathering("b")
    found.admit("b", 1)
    found.add(copies("b", 1, "01"))
    found.begin()
    assert (found.greeted, found.admitted, found.waiting) == ({}, set(), False)
    assert not found.admit("b", 1)
