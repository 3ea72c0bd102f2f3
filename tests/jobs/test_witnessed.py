"""The rules by which histories of real jobs are judged, on a history that is right and on ones in which something is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from witnessed import violations

Event = dict[str, Any]
ONE, TWO = "1-aa", "2-bb"  # incarnations
HOLDERS = {0: ["a", "b"], 1: ["b", "a"]}


def opened(host: str, incarnation: str, version: str | None) -> Event:
    return {"event": "opened", "host": host, "of": incarnation, "resumed": version, "hosts": ["a", "b"], "agent": ord(host)}


def copies(version: str) -> list[Event]:
    return [
        {"event": "copy", "host": host, "owner": owner, "version": version, "root": f"{owner}{version}"}
        for owner, hosts in HOLDERS.items()
        for host in hosts
    ]


def commit(version: str, host: str = "a") -> Event:
    led = {"epoch": 0, "leads_in": 0, "excluded": [], "holders": HOLDERS} if host == "a" else {}
    incarnation = version.rpartition(":")[0]
    return {"event": "commit", "host": host, "version": version, "leads": host == "a", "of": incarnation, "resumed": None, **led}


def dropped(host: str, owner: int, version: str) -> Event:
    facts = {"host": host, "owner": owner, "version": version, "of": version.rpartition(":")[0]}
    return {"event": "dropped", **facts, "sound": True, "sealed": False}


def heard(rank: int, version: str) -> Event:
    return {"event": "heard", "rank": rank, "version": version, "of": ONE}


def resumed(rank: int, incarnation: str, version: str | None) -> Event:
    return {"event": "resumed", "rank": rank, "of": incarnation, "version": version, "given_up": [], "hosts": ["a", "b"]}


def job() -> list[Event]:
    """Two ranks on two hosts make two steps, fail, and go on after the second one."""
    return [
        *({"event": "agent began", "host": host} for host in "ab"),
        *(opened(host, ONE, None) for host in "ab"),
        *(resumed(rank, ONE, None) for rank in range(2)),
        *copies(f"{ONE}:1"),
        commit(f"{ONE}:1"),
        commit(f"{ONE}:1", "b"),
        heard(0, f"{ONE}:1"),
        *copies(f"{ONE}:2"),
        commit(f"{ONE}:2"),
        dropped("a", 0, f"{ONE}:1"),
        *(opened(host, TWO, f"{ONE}:2") for host in "ab"),
        *(resumed(rank, TWO, f"{ONE}:2") for rank in range(2)),
    ]


def judged(history: list[Event]) -> list[str]:
    return violations([{"at": float(number), **event} for number, event in enumerate(history)])


def test_a_history_that_is_right_has_nothing_that_must_not_be() -> None:
    assert judged(job()) == []


@pytest.mark.parametrize(
    ("place", "event", "said"),
    [
        (9, None, "a has never had rank 1's shard"),
        (9, {**copies(f"{ONE}:1")[3], "root": "other"}, "with another root than elsewhere"),
        (10, dropped("a", 1, f"{ONE}:1"), "nothing newer is safe"),
        (10, dropped("a", 1, f"{ONE}:1"), "a has rank 1's shard of it no more"),
        (10, commit(f"{ONE}:1", "b"), "which no leader has decided"),
        (10, heard(1, f"{ONE}:1"), "rank 1 hears of a commit"),
        (18, commit(f"{ONE}:1"), "commits 1-aa:1 after iteration 2"),
        (18, {"event": "abort", "host": "b", "version": f"{ONE}:2"}, "was committed, and is aborted"),
        (21, resumed(0, TWO, f"{ONE}:1"), "1-aa:2 is committed and whole on"),
        (22, resumed(1, TWO, f"{ONE}:1"), "rank 1 resumes 1-aa:1, and another one 1-aa:2"),
        (22, {"event": "led", "host": "a", "of": TWO, "epoch": -1, "agent": 1}, "obeys in epoch -1 after -1"),
    ],
)
def test_whatever_is_wrong_is_found(place: int, event: Event | None, said: str) -> None:
    """``event`` comes at a place of the history that is right; None: the one there is left out."""
    history = job()
    history[place : place + (event is None)] = [] if event is None else [event]
    assert any(said in found for found in judged(history)), judged(history)


def test_of_what_an_agent_had_before_it_began_anew_nothing_is_known() -> None:
    history = job()
    history[19:] = [*({"event": "agent began", "host": host} for host in "ab"), *(opened(host, TWO, f"{ONE}:1") for host in "ab")]
    history += [resumed(rank, TWO, f"{ONE}:1") for rank in range(2)]
    assert judged(history) == []
