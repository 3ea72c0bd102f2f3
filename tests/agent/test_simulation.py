"""Agents on simulated time (tests/kit/simulation): a seed gives the same history again, and nothing is in it that must not be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from simulation.history import violations
from simulation.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]


# Plays what each line asks for, as the program does; addresses, which order some sets, are others each time, as in another process.
_PLAYER = """
import random, sys, simulate
kept = []
for line in sys.stdin:
    kept.append([bytearray(random.randrange(600)) for _ in range(random.randrange(10_000, 50_000))])
    sys.argv = ["simulate.py", "--no-report", *line.split()]
    simulate.main()
"""


@pytest.fixture(scope="module")
def simulate() -> Iterator[Callable[..., dict[str, Any]]]:
    """Plays seeds in one process, as the package of which a rank's side is imports torch for longer than a seed takes."""
    environ = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT / "benchmarks")}
    command = [sys.executable, "-u", "-c", _PLAYER]
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as player:

        def play(*arguments: str) -> dict[str, Any]:
            print(*arguments, file=player.stdin, flush=True)
            found: dict[str, Any] = json.loads(player.stdout.readline())["results"]
            assert found["violations"] == {}
            return found

        yield play
        _, said = player.communicate(timeout=60)
    assert (player.returncode, said) == (0, "")


@pytest.mark.timeout(200)
def test_a_seed_is_a_history_without_anything_that_must_not_be(simulate: Callable[..., dict[str, Any]]) -> None:
    once, again = (simulate("--first", "3", "--seeds", "1", "--hours", "0.005", "--spells", "2", "--gap", "90") for _ in range(2))
    assert once["digests"] == again["digests"]
    assert once["commits_heard"]
    assert once["resumed"] > 1
    assert once["simulated_hours"] > once["of_these_step_by_step"] + 1


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "seed",
    ["6014", "6053", *(pytest.param(seed, marks=pytest.mark.soak) for seed in ("16", "4010 --spells 6 --gap 1500 --hours 0.03"))],
)
def test_a_seed_in_which_something_was_wrong_once_is_well(simulate: Callable[..., dict[str, Any]], seed: str) -> None:
    assert simulate("--first", seed, "--seeds", "1")["commits_heard"]


@pytest.mark.soak
def test_many_seeds(simulate: Callable[..., dict[str, Any]]) -> None:
    found = simulate("--first", "100000", "--seeds", "100000", "--seconds", "900", "--spells", "4")
    assert found["of_these_step_by_step"] > 1


def test_an_agent_hears_that_a_rank_is_dead_which_it_has_not_welcomed_yet() -> None:
    command = [sys.executable, "-m", "simulation.unwelcomed_case"]
    run = subprocess.run(command, cwd=ROOT / "tests" / "kit", capture_output=True, text=True, timeout=60)
    assert run.stdout == "rank 0 is there: True, False\n", run.stderr[-4000:]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.breaks)
def test_what_is_broken_on_purpose_is_still_there(mutation: Mutation) -> None:
    compile(mutation.broken(), mutation.where, "exec")


# -- the checker


def _commit(version: str = "1-a:1", *, host: str = "h0", **facts: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"leads": True, "epoch": 0, "excluded": [], "holders": {0: ["h0", "h1"]}, "copies": {0: ["h0", "h1"]}}
    return {"event": "commit", "at": 5.0, "version": version, "host": host} | usual | facts


def _copies(version: str = "1-a:1", *hosts: str) -> list[dict[str, Any]]:
    return [{"event": "copy", "at": 1.0, "host": host, "owner": 0, "version": version} for host in hosts or ("h0", "h1")]


def _chosen(version: str | None, **facts: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"given_up": [], "hosts": ["h0", "h1"], "ranks": 1, "copies": {"1-a:1": {0: ["h1"]}}}
    return {"event": "chosen", "at": 9.0, "version": version} | usual | facts


def _put(key: str, version: str = "") -> dict[str, Any]:
    manifest = {"version": version, "shards": [f"{key.partition('/')[0]}/shard"]} if version else {}
    return {"event": "put", "at": 6.0, "key": key} | manifest


def _seen(event: str, **facts: Any) -> dict[str, Any]:
    return {"event": event, "at": 6.5} | facts


def _dropped(**facts: Any) -> dict[str, Any]:
    return _seen("dropped", host="h0", owner=0, version="1-a:1") | {"sealed": False, "sound": True, "of": "1-a"} | facts


def _granted(**facts: Any) -> dict[str, Any]:
    return _seen("granted", host="h0", owner=0, version="1-a:1") | {"readers": [], "frozen": False, "written": False} | facts


def _opened(host: str, **facts: Any) -> dict[str, Any]:
    return _seen("opened", host=host, of="2-b", resumed=None, hosts=["h0", "h1"]) | facts


def _left_behind(*after: dict[str, Any]) -> list[dict[str, Any]]:
    """The leader on h0 commits when h1 and h2 have begun a newer incarnation, and h1 has no copy any more."""
    begun = [_opened(host, hosts=["h1", "h2"], resumed="1-a:1") for host in ("h1", "h2")]
    copies = [*_copies(), _commit(), *_copies("1-a:2")]
    return [*copies, *begun, _dropped(host="h1", version="1-a:2", of="2-b"), _commit("1-a:2", copies={0: ["h0"]}), *after]


def _led(epoch: int, agent: float = 1.0) -> dict[str, Any]:
    return _seen("led", host="h0", of="1-a", epoch=epoch, agent=agent)


def _unsound() -> dict[str, Any]:
    return _seen("unsound", host="h1", owner=0, version="1-a:1")


def _newer() -> list[dict[str, Any]]:
    return [*_copies("1-a:2"), _commit("1-a:2"), _put("new/shard"), _put("new/manifest.json", "1-a:2")]


def _read(where: str) -> dict[str, Any]:
    return {"event": "read", "at": 9.5, "rank": 0, "host": "h1", "version": "1-a:1", "where": where}


def _cruise(steps: int = 0, **facts: Any) -> list[dict[str, Any]]:
    begun = [_seen("begin", version=f"1-a:{number + 1}") for number in range(steps)]
    return [_seen("cruise"), *begun, _seen("cruise end") | {"lines": [], "slots": []} | facts]


def _probe(fault: str, *events: dict[str, Any]) -> list[dict[str, Any]]:
    return [_seen("probe", fault=fault), *events, _seen("probe end", fault=fault)]


def _finished(last: int, **facts: Any) -> dict[str, Any]:
    return _seen("finished", last=last) | {"at_work": [], "waiting": [], "stores": False} | facts


def _visited(version: str) -> dict[str, Any]:
    return _seen("visited", version=version, committed="1-a:2")


DELETED = {"event": "delete", "at": 7.0, "key": "old/shard", "by": "h0"}
GONE = DELETED | {"key": "old/manifest.json"}
NOTED = {"event": "put", "at": 6.7, "key": "reading", "holds": "old"}
LOOKED = {"event": "looked", "at": 6.8, "key": "reading", "seen": ["reading"], "by": "h0"}
UPLOADED = [*_copies(), _commit(), _put("old/shard"), _put("old/manifest.json", "1-a:1")]
STORED = [*UPLOADED, _put("stored.json") | {"stored": "1-a:1"}]
WELL = {
    "a commit with its copies": [*_copies(), _commit()],
    "a copy that is left out": [*_copies("1-a:1", "h0"), _commit(excluded=[[0, "h1"]])],
    "a copy that was lost after it was made": [*_copies(), {"event": "agent killed", "at": 2.0, "host": "h1"}, _commit(copies={0: ["h0"]})],
    "a commit that is said again": [*_copies(), _commit(), _commit(host="h1", epoch=1), _commit(host="h1", leads=False)],
    "what was committed is resumed": [*_copies(), _commit(), _chosen("1-a:1"), {"event": "read", "at": 9.5, "rank": 0, "version": "1-a:1"}],
    "what was committed is gone": [*_copies(), _commit(), _chosen(None, copies={})],
    "what was committed has failed again and again": [*_copies(), _commit(), _chosen(None, given_up=["1-a:1"])],
    "a checkpoint that is superseded goes": [
        *STORED, *_copies("1-a:2"), _commit("1-a:2"), _put("new/shard"), _put("new/manifest.json", "1-a:2"),
        GONE, DELETED,
    ],
    "a checkpoint that is damaged goes": [*STORED, _seen("rot", key="old/shard"), GONE, DELETED],
    "what a failed upload has left goes": [*UPLOADED, {"event": "delete", "at": 7.0, "key": "old/shard"}],
    "a job that comes up again": [{"event": "calm", "at": 1.0}, *_copies(), _commit(), {"event": "end", "at": 9.0}],
    "a single fault": [_seen("probe", fault="stop"), *_copies(), _commit(), _seen("probe end", fault="stop")],
    "a copy of what is superseded goes": [*_copies(), _commit(), *_copies("1-a:2"), _commit("1-a:2"), _dropped()],
    "a copy of what was aborted goes": [*_copies(), {"event": "abort", "at": 2.0, "version": "1-a:1"}, _dropped()],
    "a damaged copy goes": [*_copies(), _commit(), _dropped(sound=False, sealed=True)],
    "a copy that all hosts have left behind goes": [*_copies(), _commit(), _opened("h0"), _opened("h1"), _dropped(of="2-b")],
    "a leader that was left behind commits, for its own hosts": _left_behind(
        _commit("1-a:2", host="h3", leads=False, of="1-a"),
        _seen("heard", rank=0, version="1-a:2", of="1-a"),
        _dropped(of="1-a"),
    ),
    "what a leader that was left behind uploads goes": [
        *_left_behind()[:-1], _commit("1-a:2", copies={0: ["h0"]}, freeze=True, folder="old"), _put("old/shard"), DELETED,
    ],
    "what a leader that was left behind has committed is whole, and resumed": _left_behind(
        _opened("h0", of="3-c", hosts=["h0"], resumed="1-a:2"), _seen("heard", rank=0, version="1-a:2", of="3-c"),
    ),
    "a checkpoint that no list has yet, and that was not reported, is passed over": [*UPLOADED, _chosen(None, copies={}, hidden=["old"])],
    "a checkpoint that is made good when ranks have found it damaged is passed over, and goes": [
        *STORED, _seen("rot", key="old/shard"), _seen("attempt"), _seen("mended", key="old/shard"), _chosen(None, copies={}), GONE,
    ],
    "a job that finds a checkpoint which no list had, and says why it cannot store its last": [
        *UPLOADED, _chosen(None, copies={}, hidden=["old"]), _seen("thaw", folder="old", error="another job"), _finished(1, stores=True),
    ],
    "a checkpoint that rots is passed over": [*STORED, _seen("rot", key="old/shard"), _chosen(None, copies={})],
    "a copy that was damaged where it lay": [*_copies("1-a:1", "h0"), _seen("flip", host="h1", owner=0, version="1-a:1"), _commit()],
    "a checkpoint that nobody reads any more goes": [
        *STORED, *_newer(), NOTED, LOOKED, {"event": "delete", "at": 6.9, "key": "reading"}, GONE, DELETED,
    ],
    "a host that has lost its copy reads a peer's": [
        *_copies(), _commit(), _chosen("1-a:1"), _seen("agent killed", host="h1") | {"at": 9.2}, _read("peer h0"),
    ],
    "what was resumed is said to be committed, before its copies are made anew": [
        *_copies("1-a:1", "h0"), _opened("h0", resumed="1-a:1"), _commit(of="2-b", resumed="1-a:1", copies={0: ["h0"]}),
    ],
    "copies that come back after ranks have asked for them are passed over": [
        *_copies(), _commit(), _seen("sealing", host="h1", held=True), _seen("reconnected", host="h1"), _chosen(None),
    ],
    "a job that is stored, and ends": [*STORED, _finished(1, stores=True)],
    "a half that is written again": [
        *UPLOADED, _seen("halved", key="old/shard"), _put("old/shard"), _put("stored.json") | {"stored": "1-a:1"},
    ],
    "a copy that was damaged while it was written": [_seen("flip", host="h0", owner=0, version="1-a:1"), _unsound()],
    "another leader, and another agent": [
        _led(1), _led(2), _led(1, agent=2.0), _opened("h0", agent=1.0), _opened("h0", agent=2.0, of="1-a"),
    ],
    "two steps that are still under way": _cruise(2, slots=[["h0", 0, 3, 2]]),
    "what is committed is exported": _probe("visit", *_copies("1-a:2"), _commit("1-a:2"), _visited("1-a:2")),
    "a leftover of an upload that is begun again goes": [
        *_copies(), _commit(freeze=True, folder="old"), _put("old/shard"),
        _seen("thaw", folder="old"), _commit(freeze=True, folder="old"), DELETED,
    ],
}  # fmt: skip
WRONG = {
    "with another root than its writer has formed": [
        _seen("copied", rank=0, version="1-a:1", root="aa"),
        _seen("copy", host="h0", owner=0, version="1-a:1", root="ab"),
    ],
    "whose roots are not the committed ones": [*_copies(), _commit(), _seen("kept", host="h1", owners=[0], version="1-a:1")],
    "4 attempts follow a single fault (ruin)": _probe("ruin", *[_seen("attempt")] * 4, *_copies(), _commit()),
    "has never had": [*_copies("1-a:1", "h0"), _commit()],
    "has rank 0's shard of it no more": [*_copies(), _commit(copies={0: ["h0"]})],
    "1-a:1 is committed, and h1 has rank 0's": [*_copies(), _opened("h1", hosts=["h1", "h2"]), _commit(copies={0: ["h0"]})],
    "1-a:1 is committed, and h1 has never": [*_copies("1-a:1", "h0"), _opened("h1", hosts=["h1"]), _commit(copies={0: ["h0"]})],
    "and h0 has rank 0's": [*_copies(), _opened("h1", hosts=["h1"]), _commit(copies={})],
    "h0 has rank 0's shard of it no more": [*_copies(), _opened("h0"), _opened("h1"), _commit(copies={0: ["h1"]})],
    "host h1 is at 2-b and hears of a commit of 1-a:2": _left_behind(_commit("1-a:2", host="h1", leads=False, of="2-b")),
    "rank 1 is at 2-b and hears of a commit of 1-a:2": _left_behind(_seen("heard", rank=1, version="1-a:2", of="2-b")),
    "h1 gives rank 0's shard of 1-a:1 up, and nothing newer": _left_behind(_dropped(host="h1", of="2-b")),
    "nothing is committed any more after": _left_behind()[:-1] + _probe("kill_worker", _commit("1-a:2", copies={0: ["h0"]})),
    "without rank 0's own copy": [*_copies(), _commit(excluded=[[0, "h0"]])],
    "was aborted, and is committed": [*_copies(), {"event": "abort", "at": 2.0, "version": "1-a:1"}, _commit()],
    "was committed, and is aborted": [*_copies(), _commit(), {"event": "abort", "at": 6.0, "version": "1-a:1"}],
    "after iteration 2": [*_copies("1-a:2"), *_copies(), _commit("1-a:2"), _commit()],
    "which no leader has decided": [{"event": "heard", "at": 2.0, "rank": 0, "version": "1-a:1"}],
    "committed and whole on": [*_copies(), _commit(), _chosen(None)],
    "is committed and whole on": [
        *_copies(),
        _commit(),
        *(_seen("flip", host=host, owner=0, version="1-a:1") for host in ("h0", "h1")),
        *_copies(),
        _chosen(None),
    ],
    "was chosen": [*_copies(), _commit(), _chosen("1-a:1"), {"event": "read", "at": 9.5, "rank": 0, "version": "1-a:0"}],
    "other bytes": [{"event": "wrong bytes", "at": 9.5, "rank": 0, "version": "1-a:1", "where": "own memory"}],
    "is whole in storage": [*STORED, _chosen(None, copies={})],
    "is whole in storage, and None is": [*STORED, _chosen(None, copies={}, hidden=["old"])],
    "which is not committed": [_put("old/shard"), _put("old/manifest.json", "1-a:1")],
    "shards of it are not there": [*_copies(), _commit(), _put("old/manifest.json", "1-a:1")],
    "nothing newer": [*STORED, GONE],
    "before its manifest": [*STORED, *_newer(), DELETED],
    "is at 2-b and commits 1-a:1": [*_copies(), _commit(of="2-b")],
    "was by another leader": [*_copies("1-a:2"), *_copies(), _commit("1-a:2"), _commit(host="h1")],
    "up while ranks choose": [*_copies(), _commit(), *_copies("1-a:2"), _commit("1-a:2"), _dropped(sealed=True)],
    "nothing newer is safe": [*_copies(), _commit(), _dropped()],
    "1-a:1 up, and nothing newer is safe": [*_copies(), _commit(), _opened("h0"), _dropped(of="2-b")],
    "slots of ranks [0] know nothing": [_opened("h0", behind=[0])],
    "and knew of 1-a:2 before": [_seen("moved back", version="1-a:2", now="1-a:1")],
    "h0 counts 1-a:1 as aborted": [_seen("taken back", host="h0", version="1-a:1")],
    "and does not hold it": [_seen("unheld", host="h0", owner=0, version="1-a:1", reader="upload")],
    "['upload'] read it": [_granted(readers=["upload"])],
    "and it is uploaded": [_granted(frozen=True)],
    "and a worker writes it": [_granted(written=True)],
    "complete on h0 while ranks choose": [_seen("whole", host="h0", owner=0, version="1-a:1", sealed=True)],
    "and it is not whole": [_seen("report", host="h0", owner=0, version="1-a:1", whole=False)],
    "h0 promises copies": [_seen("promised", host="h0", lost=["0 of 1-a:1"])],
    "and h0 goes on": [_seen("sealing", host="h0", held=False)],
    "nothing is heard of its owner's host": [_seen("left out", pairs=[[0, "h1"]], owners={0: "h0"}, silent=["h0"])],
    "and 1 newer than 1-a:1 is stored": [_seen("settings", keep_last=2), *STORED, *_newer(), GONE],
    "says that it is read": [*STORED, *_newer(), NOTED, LOOKED, GONE],
    "which an upload under way has written": [*_copies(), _commit(freeze=True, folder="old"), _put("old/shard"), DELETED],
    "and commits 1-a:1 in 0": [*_copies(), _commit(epoch=1, leads_in=0)],
    "in epoch 1 after 2": [_led(1), _led(2), _led(1)],
    "begins 1-a after 2-b": [_opened("h0", agent=1.0), _opened("h0", agent=1.0, of="1-a")],
    "with other bytes than were made": [_unsound()],
    "as a payload arrived damaged once": _probe(
        "garble", *_copies(), _commit(), _seen("left out", pairs=[[0, "h1"]], owners={0: "h0"}, silent=[])
    ),
    "and does not lead": [_seen("putting", key="old/manifest.json", by="h0", leads=False)],
    "['old/shard'] have other bytes": [
        *_copies(),
        _commit(),
        _put("old/shard"),
        _put("old/manifest.json", "1-a:1") | {"unsound": ["old/shard"]},
    ],
    "has kept a half": [*UPLOADED, _seen("halved", key="old/shard"), _put("stored.json") | {"stored": "1-a:1"}],
    "is whole in storage, and None": [
        *STORED,
        _seen("rot", key="old/shard"),
        _seen("mended", key="old/shard"),
        _seen("attempt"),
        _chosen(None, copies={}),
    ],
    "are left out": [_seen("calm"), *_copies(), _commit(), _seen("end", excluded=[[0, "h1"]])],
    "nothing is stored": [_seen("calm"), *_copies(), _commit(), _seen("end", stores=True)],
    "h0 counts 2 bytes": [_seen("calm"), *_copies(), _commit(), _seen("end", memory=[["h0", 2, 1]])],
    "and its own host has it": [*_copies(), _commit(), _chosen("1-a:1"), _read("peer h0")],
    "of 3 steps 0 are committed": _cruise(3),
    "an agent says: oh": _cruise(lines=["oh"]),
    "4 slots for rank 0, and 2 are due": _cruise(slots=[["h0", 0, 4, 2]]),
    "1 slots for rank 0, and 0 are due": _cruise(slots=[["h0", 0, 1, 0]]),
    "h1 are still there": [*_copies(), _commit(), _finished(1, waiting=["h1"])],
    "has ended after 2 steps": [*_copies(), _commit(), _finished(2)],
    "1-a:1 is not stored": [*UPLOADED, _seen("thaw", folder="old", error="another job"), _finished(1, stores=True)],
    "is lost by a single fault": _probe("restart_all", *_copies(), _commit(), _chosen(None, copies={})),
    "1 attempts follow": _probe("kill_agent", *_copies(), _commit(), _seen("attempt")),
    "which was never committed": [*_copies("1-a:2"), _commit("1-a:2"), _visited("1-a:1")],
    "1-a:1 is exported, and 1-a:2": _probe("visit", *UPLOADED, *_copies("1-a:2"), _commit("1-a:2"), _visited("1-a:1")),
    "nothing can be exported": _probe("visit", *_copies(), _commit(), _seen("visit failed", error="of the test", begun=6.5)),
    "after a single fault (stop)": [*_copies(), _commit(), _seen("probe", fault="stop"), _seen("probe end", fault="stop")],
    "nothing is committed": [*_copies(), _commit(), {"event": "calm", "at": 6.0}, {"event": "end", "at": 9.0}],
}


@pytest.mark.parametrize("what", WELL)
def test_nothing_is_found_in_a_history_in_which_all_is_well(what: str) -> None:
    assert violations(WELL[what]) == []


@pytest.mark.parametrize("text", WRONG)
def test_each_violation_is_found(text: str) -> None:
    (found,) = violations(WRONG[text])
    assert text in found
