"""What ranks tell each other when they join: what several of them know is said once, however many they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from plain_case import start_ranks
from rank_kit import World, on_ranks
from session_case import listening, loop

from gemini_ft.config import load_config
from gemini_ft.errors import PeerError
from gemini_ft.worker.outcomes import Stats
from gemini_ft.worker.recorder import Recorder
from gemini_ft.worker.rendezvous import exchange, exchange_alike, init_process_group, mark_of

HOSTS = ["a", "a", "b", "b"]


def join() -> tuple[bytes, dict[int, str], float]:
    """Returns the bytes that this rank said when it joined, the roots of the resumed version, and its age."""
    start_ranks()
    with listening() as said:
        plan = Recorder(load_config(), "main", Stats(), resizable=False).session.plan
    return b"".join(said), dict(plan.roots), plan.age


def say_alike(lie: bool) -> tuple[bool, int]:
    """Whether every rank got all that was said, and the bytes that this one said: of two texts, of which three of four ranks know one."""
    init_process_group("gloo")
    rank = int(os.environ["RANK"])
    texts = [b"host %d" % (each == 3) * 20_000 for each in range(4)]
    options = b"options" * 10_001
    marks = exchange([mark_of(texts[rank]), mark_of(options)])
    own = texts[rank][:-1] + b"?" if lie and rank == 2 else texts[rank]
    with listening() as said:
        heard = exchange_alike([own, options], marks)
    return heard == [[text, options] for text in texts], sum(map(len, said))


def test_a_host_s_inventory_is_told_once_and_not_by_each_of_its_ranks(tmp_path: Path) -> None:
    with World(tmp_path, hosts=HOSTS) as world:
        assert [said["committed"] for said in world.outcome(loop, 2)] == [2] * 4
        results = world.outcome(join)
    everything = b"".join(said for said, _, _ in results)
    roots = results[0][1]
    assert roots.keys() == set(range(4))
    told = {owner: everything.count(root.encode()) for owner, root in roots.items()}
    assert max(told.values()) <= 2 + 1  # by each host, which holds all of them, and once by rank 0, in the session it proposes
    assert all(age > 0 for _, _, age in results)


def test_each_says_its_part_of_what_it_has_in_common_with_others(tmp_path: Path) -> None:
    results = on_ranks(tmp_path, 4, say_alike, False)
    assert [complete for complete, _ in results] == [True] * 4
    text, options, around = 120_000, 70_007, 200
    assert [nbytes <= text / 3 + options / 4 + around for _, nbytes in results] == [True, True, True, False]
    assert results[3][1] <= text + options / 4 + around  # it alone knows this one


def test_a_rank_that_says_something_else_than_it_announced_is_named(tmp_path: Path) -> None:
    with World(tmp_path, 4) as world:
        errors = world.outcome(say_alike, True)
    assert all(isinstance(error, PeerError) for error in errors)
    with pytest.raises(PeerError, match=r"ranks 0, 1, 2 announced one thing and said another"):
        raise errors[3]
