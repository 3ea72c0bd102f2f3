"""A member that says anything, in any order and with any numbers: the agents live, take no memory for it, and commit."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import random
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union

import pytest
from agent_kit import WAIT, Job
from pydantic import BaseModel

from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import PeerError, printable
from gemini_ft.wire.frames import BlockingWire
from gemini_ft.wire.peer_messages import Autopsied, Claims, Examine, Examined, Offer, PeerMessage, Refused

SECRET = b"s" * 16  # of the kit's ranks
NUMBERS = (0, 1, 2, 7, -1, 2**31, 2**40, 2**62, 2**63 - 1, 2**64 - 1, -(2**63))
PLAIN: dict[Any, list[Any]] = {
    int: [*NUMBERS],
    str: ["", "a", "b", "test", "\x1b[2J\n", "\u202e" * 9, "x" * 10_000],
    bool: [True, False],
    float: [0.0, -1.0, 0.2, math.inf, math.nan],
    bytes: [b"", b"\xff" * 64, bytes(70_000)],
    NoneType: [None],
}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def test_a_text_of_blanks_is_made_one_line_at_once() -> None:
    """It would hold up the agent, and a member may send one after the other."""
    begun = time.process_time()
    blanks = " " * 7900
    for _ in range(50):
        assert printable(f"a{blanks}b \n\n \t c\n") == f"a{blanks}b c"
    assert time.process_time() - begun < 1.0
    assert (printable(" a "), printable("\n a\r\n  \n"), printable("\n \n")) == (" a ", "a", "")


def made(hint: Any, luck: random.Random) -> Any:
    """A value of an annotated type; versions are often those of the job."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in PLAIN:
        return luck.choice(PLAIN[hint])
    if hint is Version:
        return Version(luck.choice([Incarnation(1, "nonce1"), Incarnation(made(int, luck), "n")]), made(int, luck))
    if isinstance(hint, type) and (issubclass(hint, BaseModel) or dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")):
        hints = typing.get_type_hints(hint)
        names = hint.model_fields if issubclass(hint, BaseModel) else [name for name in hints if not name.startswith("_")]
        values = {name: made(hints[name], luck) for name in names}
        return hint.model_construct(**values) if issubclass(hint, BaseModel) else hint(**values)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return luck.choice(list(hint))
    if origin is Annotated:
        return made(inner[0], luck)
    if origin is Literal:
        return luck.choice(inner)
    if origin in (Union, UnionType):
        return made(luck.choice(inner), luck)
    if origin is tuple:
        return tuple(made(each, luck) for each in inner if each is not ...)
    many = range(luck.choice([0, 1, 3]))
    if origin is frozenset:
        return frozenset(made(inner[0], luck) for _ in many)
    if origin is dict:
        return {made(inner[0], luck): made(inner[1], luck) for _ in many}
    return [made(inner[0], luck) for _ in many]


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


OF_HANGS = [Examine, Examined, Autopsied]
OTHERS = [kind for kind in typing.get_args(PeerMessage) if kind not in (Claims, *OF_HANGS)]


@pytest.mark.parametrize(("seed", "kinds"), [(1, OTHERS), (2, OTHERS), (3, OF_HANGS)], ids=["1", "2", "of hangs"])
def test_a_member_that_says_anything_with_any_number_stops_no_agent(job: Job, seed: int, kinds: list[Any]) -> None:
    luck = random.Random(seed)
    ranks = job.join(["a", "b"], agent_timeout=0.0)
    job.open(ranks, addresses={rank.host: rank.address for rank in ranks} | {"test": ("127.0.0.1", 1)})
    job.commit(ranks, 1)
    pids = [job.pid(host) for host in "ab"]
    before = [resident(pid) for pid in pids]
    for _ in range(150):
        number, role = luck.randrange(2), luck.choice(["report", "replicate", "fetch"])
        claims = job.claims(role, to="ab"[number], incarnation=job.version(1).incarnation)
        with contextlib.suppress(PeerError), contextlib.closing(BlockingWire(ranks[number].address, claims, SECRET, WAIT)) as wire:
            for kind in luck.choices(kinds, k=3):
                with contextlib.suppress(OverflowError, UnicodeEncodeError, TypeError):  # what cannot be sent
                    wire.send(made(kind, luck))
    job.commit(ranks, 2, 3)
    assert [job.pid(host) for host in "ab"] == pids
    assert max(resident(pid) - were for pid, were in zip(pids, before, strict=True)) < 200 * 2**20
    assert "Traceback" not in job.log("a") + job.log("b")


def test_a_hosts_own_shard_is_brought_by_no_other(job: Job) -> None:
    """Its slots took the sizes of the offer, and the agent never came to the end of their chunks."""
    ranks = job.join(["a", "b"], agent_timeout=0.0)
    job.open(ranks, addresses={rank.host: rank.address for rank in ranks} | {"test": ("127.0.0.1", 1)})
    job.commit(ranks, 1)
    claims = job.claims("replicate", to="a", incarnation=job.version(1).incarnation)
    offer = Offer(owner=0, layout=b"", layout_hash="", data_bytes=2**63 - 1, extras_capacity=-(2**63))
    with contextlib.closing(BlockingWire(ranks[0].address, claims, SECRET, WAIT)) as wire:
        wire.send(offer)
        assert wire.receive() == Refused(owner=0, text="host 'a' does not hold rank 0's shard")
    job.commit(ranks, 2, 3)
