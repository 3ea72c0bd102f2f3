"""Joining, and the start after hosts were lost: the workers' own code, one rank at a time, among the words of all others.

A rank that joins takes part in nine exchanges. Here one process plays single ranks: the words of all others are made beforehand, by the
same code where they differ from host to host. Measured is the processor time of rank 0, which also places, of one other rank, and of their
agent, which takes the session from all ranks of its host. The training's collectives themselves are not in it, nor is the hashing of the
copies that are resumed.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import pickle
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import Mock

from gemini_ft.agent.commit.leader import Leader
from gemini_ft.agent.workers import unpack_long
from gemini_ft.config import GeminiConfig
from gemini_ft.core.effects import Copies, Gathered
from gemini_ft.core.gathering import Bundles, Gathering
from gemini_ft.core.ledger import Ledger
from gemini_ft.core.placement import part_sizes, survival_probability
from gemini_ft.core.protocol import Host
from gemini_ft.core.tree import FAN_IN, ways_up
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.wire.messages import pack
from gemini_ft.wire.trust import fingerprint
from gemini_ft.wire.worker_messages import (
    GetInventory,
    HostInfo,
    Inventory,
    Opened,
    OpenSession,
    SessionSpec,
    SlotInfo,
    Verified,
    Verify,
    Welcome,
)
from gemini_ft.worker import introductions, rendezvous, session
from scale_simulation import RANKS, REPLICAS, SECRET, held, holders_of, root, version

RUN = "of-this-benchmark"
BEFORE = Incarnation(1, "0123abcd")
STEPS = (41, 42)  # iterations of the copies that every host has: the committed one, and one that was under way
_CONFIG = GeminiConfig.model_validate({"run_id": RUN})
_COMMITS = 20  # of which a leader keeps the roots of the last ones
_BRIEF, _ALIKE = 2, 3  # exchanges, counted from 0, in which hosts say different things


def slot(owner: int, iteration: int, world_size: int, age: float) -> SlotInfo:
    version = Version(BEFORE, iteration)
    is_committed = iteration == STEPS[0]
    return SlotInfo(
        owner=owner,
        version=version,
        age=age,
        world_size=world_size,
        data_bytes=10**9,
        extras_bytes=3000,
        layout_hash="1" * 16,
        root=root(owner, iteration),
        committed=is_committed,
    )


class Machine:
    """One host of the job, as its agent answers a rank that joins."""

    def __init__(self, name: str, owners: Sequence[int], world_size: int, is_new: bool) -> None:
        iterations = () if is_new else STEPS
        self._slots = [slot(owner, iteration, world_size, 0.5 + owner % 7) for iteration in iterations for owner in owners]
        self.owners = [] if is_new else list(owners)
        number = int(name.split("-")[1])
        address = (f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 40000)
        known = None if is_new else BEFORE
        secret = fingerprint(SECRET)
        info = HostInfo(host=name, machine=name, address=address, known=known, fingerprint=secret, memory_limit=2**40, memory_used=2**35)
        self.welcome = Welcome(info=info, secret=SECRET, pid=1, resumed=None, attempts=0, finished=False, incarnation=known)
        self.opened: list[bytes] = []  # frames in which a rank has opened the session

    def call(self, message: object, *_: object, **__: object) -> list[object]:
        match message:
            case GetInventory():
                return [Inventory(slots=self._slots)]
            case Verify(version=version):
                return [Verified(version=version, sound=self.owners)]
            case OpenSession():
                self.opened.append(pack(message))
                return [Opened()]
        raise AssertionError(message)

    def close(self) -> None:
        """Nothing is open."""


class _Cut(Exception):
    """The end of what is wanted of a rank, with what it has said."""


class Cast:
    """The ranks of a job of which some hosts were replaced since their copies were made."""

    def __init__(self, hosts: int, replaced: Collection[str] = ()) -> None:
        self.holders = holders_of(hosts)
        self.world = [hosts[0] for _, hosts in sorted(self.holders.items())]  # rank -> its host
        copies = held(self.holders)
        self.machines = {name: Machine(name, owners, len(self.world), name in replaced) for name, owners in sorted(copies.items())}
        self.heard: dict[int, list[bytes]] = {}  # exchange -> what each rank says in it
        self._result: Any = None  # what stands for the outcome of one rank
        self._common = list[bytes]()  # what the rank that is played has in common with others
        first = {name: rank for rank, name in reversed(list(enumerate(self.world)))}
        introductions = {name: self._introduction(rank) for name, rank in first.items()}
        self.heard[_BRIEF] = [introductions[name][0] for name in self.world]
        self.heard[_ALIKE] = list(self._parts({name: common for name, (_, common) in introductions.items()}))

    def _introduction(self, rank: int) -> tuple[bytes, list[bytes]]:
        """The first words of a host's ranks, and those that they say together with others."""

        def cut(number: int, blob: bytes) -> list[bytes]:
            if number == _BRIEF:
                raise _Cut(blob)
            return self._say(number, blob)

        self._common.clear()
        try:
            self._join(rank, cut)
        except _Cut as end:
            return end.args[0], list(self._common)
        raise AssertionError("the exchanges of a rank that joins have changed")

    def _parts(self, common: Mapping[str, list[bytes]]) -> Iterator[bytes]:
        """The part of each rank in what is said together."""
        alike: list[dict[bytes, list[int]]] = [{}, {}, {}]
        for rank, name in enumerate(self.world):
            for ranks, blob in zip(alike, common[name], strict=True):
                ranks.setdefault(blob, []).append(rank)
        for rank, name in enumerate(self.world):
            yield pickle.dumps([rendezvous.part_of(blob, ranks[blob], rank) for blob, ranks in zip(common[name], alike, strict=True)])

    def _say(self, number: int, blob: bytes) -> list[bytes]:
        """The words of all ranks in an exchange. Rank 0 is played first, and where it has the word the others say nothing."""
        if number not in self.heard:
            said = pickle.loads(blob)
            value = getattr(said, "value", said)
            self._result = self._result or (type(said) if value is None else None)
            if isinstance(value, list):  # of copies that are sound
                self.heard[number] = [pickle.dumps(self._result(self.machines[name].owners)) for name in self.world]
            elif value is None or isinstance(value, tuple | frozenset | Opened):
                self.heard[number] = [blob] * len(self.world)
            else:
                self.heard[number] = [blob] + [pickle.dumps(self._result(None))] * (len(self.world) - 1)
        return self.heard[number]

    def join(self, rank: int) -> tuple[session.WorkerSession, float]:
        """Lets a rank join; returns its session and its processor seconds."""
        gc.collect()
        begin = time.thread_time()
        found = self._join(rank, self._say)
        return found, time.thread_time() - begin

    def _join(self, rank: int, exchange: Callable[[int, bytes], list[bytes]]) -> session.WorkerSession:
        numbers, mark_of = itertools.count(), rendezvous.mark_of
        world = SimpleNamespace(get_rank=lambda: rank, get_world_size=lambda: len(self.world))
        world.is_available = world.is_initialized = lambda: True
        of_process = SimpleNamespace(set_oom_score=_nothing, write_stacks_on_request=_nothing, shares_fate=_nothing)

        def marked(blob: bytes) -> bytes:
            self._common.append(blob)
            return mark_of(blob)

        with (
            mock.patch.multiple(rendezvous, dist=world, exchange_bytes=lambda blob, timeout: exchange(next(numbers), blob)),
            mock.patch.multiple(session, dist=world, lifecycle=of_process, AgentClient=lambda *_: self.machines[self.world[rank]]),
            mock.patch.object(introductions, "mark_of", marked),
        ):
            return session.join(_CONFIG, "main", _nothing)

    @property
    def bytes_said(self) -> int:
        """Bytes of all ranks' words in all exchanges, all of which each of them hears."""
        return sum(len(blob) for said in self.heard.values() for blob in said)


def _nothing(*_: object) -> None:
    """Stands for what a process does to itself."""


def opened(frame: bytes, name: str) -> tuple[SessionSpec, Host]:
    """The session that an agent keeps, and its part in the protocol."""
    message = unpack_long(frame[4:])
    assert isinstance(message, OpenSession)
    spec, host = message.spec, Host(name=name)
    host.open(spec.holders, spec.resumed, spec.roots, spec.incarnation)
    return spec, host


def agent_seconds(frame: bytes, name: str) -> float:
    """Processor seconds of the leader's agent: takes the session from each of its ranks, and begins it."""
    gc.collect()
    unpack_long.cache_clear()
    begin = time.thread_time()
    for _ in range(RANKS - 1):
        unpack_long(frame[4:])
    spec, host = opened(frame, name)
    ways_up(spec.hosts, spec.leader, spec.fan_in)
    Ledger(host.holders, host.committed, spec.replica_timeout)
    return time.thread_time() - begin


async def memory(frame: bytes) -> dict[str, float]:
    """MiB that the agents of a leader, a collector and any other host keep of a session in the middle of a step."""
    found = dict[str, float]()
    for who in ("member", "collector", "leader"):
        gc.collect()
        unpack_long.cache_clear()
        tracemalloc.start()
        spec, host = opened(frame, "host-00000")
        bundles, parts = Bundles(host.name, host.holders), list[object]()
        if who == "collector":
            gathering = Gathering(host.name, host.holders)
            copies = held(host.holders)
            for host_below in sorted(copies)[: spec.fan_in]:
                gathering.add(
                    Copies(
                        host=host_below,
                        version=version(1),
                        layout="l" * 16,
                        digest="",
                        roots={owner: root(owner, 1) for owner in copies[host_below]},
                    )
                )
            parts.append(gathering)
        if who == "leader":
            leader = Leader(host.name, Ledger(host.holders, host.committed, spec.replica_timeout), spec.world_size, None, Mock())
            for step in range(1, _COMMITS + 2):
                for gathered in _gathered(held(host.holders), step, but_one=step > _COMMITS):
                    leader.take(gathered)
            leader.close()
            parts.append(leader)
        parts.append(bundles)
        found[f"{who}_mib"] = tracemalloc.get_traced_memory()[0] / 2**20
        tracemalloc.stop()
    return found


def _gathered(copies: Mapping[str, Sequence[int]], step: int, but_one: bool) -> Iterator[Gathered]:
    """The messages of the collectors in a step; ``but_one``: without the last host's copies."""
    names = sorted(copies)[: len(copies) - but_one]
    for at in range(0, len(names), FAN_IN):
        roots = {name: "".join(root(owner, step) for owner in copies[name]) for name in names[at : at + FAN_IN]}
        yield Gathered(version=version(step, BEFORE.number + 1), layout="l" * 16, digest="", roots=roots)


def one_of_each_group(hosts: int, count: int) -> list[str]:
    """Hosts that can be lost together, so that a copy of every shard is left, drawn by chance."""
    groups = sorted({tuple(sorted(each)) for each in holders_of(hosts).values()})
    return [min(group) for group in random.Random(hosts).sample(groups, min(count, len(groups)))]


def joining(hosts: int, lost: int = 0) -> dict[str, float]:
    """Figures of the busiest host, that of rank 0, when a job starts in which so many hosts are new."""
    cast = Cast(hosts, one_of_each_group(hosts, lost))
    first, busiest = cast.join(0)
    _, other = cast.join(1)
    frame = cast.machines[cast.world[0]].opened[0]
    agent = agent_seconds(frame, cast.world[0])
    sources = {owner: set(held_by) for owner, held_by in first.plan.sources.items()}
    missing = [(owner, name) for owner, names in cast.holders.items() for name in names if name not in sources[owner]]
    sent = Counter(min(sources[owner]) for owner, _ in missing)
    assert first.plan.version is not None
    return {
        "rank_0_s": busiest,
        "other_rank_s": other,
        "agent_s": agent,
        "busiest_host_s": busiest + (RANKS - 1) * other + agent,
        "exchanges": len(cast.heard),
        "heard_per_rank_mb": cast.bytes_said / 1e6,
        "session_mb": len(frame) / 1e6,
        "resumed": first.plan.version.iteration,
        "copies_missing": len(missing),
        "sent_by_busiest_host": max(sent.values(), default=0),
        "survived": float(survival_probability(part_sizes(len(cast.machines), REPLICAS), REPLICAS, lost)),
        **asyncio.run(memory(frame)),
    }
