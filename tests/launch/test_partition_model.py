"""The rendezvous on a network that falls apart, in a model: random orders of cut, heal and failure, with one to three stores and sides.

Torch's executor and decisions, `gemini_ft.launch.spares` and `gemini_ft.launch.stores` decide as in a job; sockets, stores, threads and
the clock are played. A launcher takes a step at a time: it looks, decides, and writes. The same with real processes:
benchmarks/partitions.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torch_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _Action,
    _DistributedRendezvousOpExecutor,
    _NodeDesc,
    _RendezvousExitOp,
    _RendezvousJoinOp,
    _RendezvousKeepAliveOp,
)

from gemini_ft.launch import spares, stores
from gemini_ft.launch.notes import Notes

TICK = 0.5  # seconds between two steps of a launcher
FORGETTING = 2000  # from this order on, a host may lose its memory once
REBOOTING = 3000  # and from this one its launcher with it, which is started again


class Network:
    """Who reaches whom; the clock; the stores' contents."""

    def __init__(self, count: int) -> None:
        self.now, self.actor = 1000.0, ""
        self.sides: dict[str, int] = {}
        self.stores: list[dict[str, bytes]] = [{} for _ in range(count)]

    def reaches(self, one: str, other: str) -> bool:
        return self.sides.get(one, 0) == self.sides.get(other, 0)

    def connect(self, number: int) -> None:
        if not self.reaches(self.actor, f"store{number}"):
            raise OSError("unreachable")


class Client:
    """A connection to a store."""

    def __init__(self, network: Network, number: int) -> None:
        self._network, self._number = network, number

    def set_timeout(self, timeout: timedelta) -> None: ...

    def compare_set(self, key: str, before: Any, after: Any) -> bytes:
        found = self._found()
        before, after = (each.encode() if isinstance(each, str) else each for each in (before, after))
        if found.get(key, b"") == before:
            found[key] = after
        return found.get(key, before)

    def get(self, key: str) -> bytes:
        return self._found()[key]

    def _found(self) -> dict[str, bytes]:
        try:
            self._network.connect(self._number)
        except OSError as error:
            raise RuntimeError(str(error)) from None
        return self._network.stores[self._number]


class AtOnce:
    """A thread whose work is done when it has started."""

    def __init__(self, target: Callable[..., None] | None = None, args: Any = (), **_: Any) -> None:
        self._target, self._args = target, args

    def start(self) -> None:
        assert self._target is not None
        self._target(*self._args)

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool:
        return False


@dataclass
class World:
    """Ranks that train together, from what their hosts remembered."""

    name: str
    hosts: list[str]
    formed: float
    resumes: float  # when its workers, which take their time to start, have read what they resume
    start: int = 0
    committed: int = 0
    holders: dict[int, set[str]] = field(default_factory=dict)  # owner -> hosts that hold its shard, or held what was resumed of it
    has_begun: bool = False
    is_over: bool = False


@dataclass
class Launcher:
    """One host."""

    name: str
    node: _NodeDesc
    host: spares.LaunchingHost
    backend: Any = None
    holder: Any = None
    executor: Any = None
    join: Any = None
    world: str = ""  # whose round it has found complete
    last: str = ""  # the world of which it knows that something of it is kept
    has_said: bool = False  # since its launcher has heard the others
    keeps: bool = False  # its workers have said that they have something of one
    is_failing: bool = False
    has_ended: bool = False
    lacks: int = 0
    memory: dict[int, int] = field(default_factory=dict)  # owner -> committed iteration


class Words(Notes):
    """The notes of a launcher's workers, without a file."""

    launcher: Launcher

    def __init__(self) -> None:
        pass

    def have(self, word: str) -> bool:
        return False

    def count(self, word: str) -> int:
        return self.launcher.lacks

    def keeps(self) -> bool:
        return self.launcher.keeps

    def kept(self) -> dict[str, str]:
        return {"stream": self.launcher.last} if self.launcher.last else {}

    def said(self) -> dict[str, str]:
        return self.kept() if self.launcher.has_said else {}

    def learn(self, kept: Mapping[str, str]) -> None:
        self.launcher.last, self.launcher.has_said = kept.get("stream", self.launcher.last), False


class Job:
    """A job of ``size hosts, of each of whose shards there are two copies, without storage."""

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.size = dice, dice.choice([2, 2, 3])
        self.network = Network(dice.randint(1, 3))
        self.worlds: dict[str, World] = {}
        self.starts, self.first = 0, frozenset[str]()  # hosts of the first complete round
        self.kept = 0  # committed before the first cut
        timeout, interval = RendezvousTimeout(), timedelta(seconds=1)
        self._settings = RendezvousSettings("run", self.size, self.size, timeout, interval, 3)
        names = [f"host{number}" for number in range(self.size + dice.randint(0, 2))]
        self.launchers = {name: self._launcher(name) for name in names}
        self.places = [*names, *(f"store{number}" for number in range(len(self.network.stores)))]

    def _launcher(self, name: str) -> Launcher:
        words = Words()
        words.launcher = Launcher(
            name, _NodeDesc(name, self.starts, 0), spares.LaunchingHost(patience=spares.pause(self.size) + 1.0, notes=words, name=name)
        )
        self.starts += 1
        return words.launcher

    # -- one step of one launcher

    def step(self, one: Launcher) -> None:
        self.network.actor = one.name
        if one.has_ended:
            return
        try:
            if one.backend is None:
                self._start(one)
            self._go_on(one)
        except RendezvousConnectionError:
            return  # it is tried again, as `gemini run` does

    def _start(self, one: Launcher) -> None:
        endpoints = [("store", number) for number in range(len(self.network.stores))]
        one.backend = stores.Standby("run", endpoints, patience=-1.0)
        one.holder = torch_rendezvous._BackendRendezvousStateHolder(one.backend, self._settings, cache_duration=0)
        one.executor = _DistributedRendezvousOpExecutor(one.node, one.holder, self._settings)
        one.join = self._join(one)

    def _join(self, one: Launcher) -> Any:
        return spares.PatientJoin(_RendezvousJoinOp(), one.host, lambda: self.network.now)

    def _act(self, one: Launcher, decide: Callable[[Any, float], Any]) -> Any:
        """One action of torch's executor."""
        done: list[Any] = []

        def once(ctx: Any, deadline: float) -> Any:
            if not done:
                done.append(decide(ctx, deadline))
                return _Action.FINISH if done[0] is _Action.SYNC else done[0]
            return _Action.FINISH

        one.executor.run(once, float("inf"))
        return done[0]

    def _go_on(self, one: Launcher) -> None:
        one.is_failing = one.is_failing or self._is_broken(one)
        if one.is_failing:
            if self._act(one, _RendezvousExitOp()) is _Action.FINISH:
                one.is_failing, one.world, one.join = False, "", self._join(one)
        elif not one.world:
            if self._act(one, one.join) is _Action.FINISH and one.holder.state.complete:
                one.world = spares.world_of(one.holder.state) or ""
                self.first = self.first or spares.members_of(one.holder.state)
        else:
            self._act(one, _RendezvousKeepAliveOp())
            if one.backend.overtaken:
                one.has_ended = True
            elif one.world not in self.worlds:
                self._meet(one)
            elif spares.take_part(one.holder.state, one.node, one.host):
                one.holder.mark_dirty()
                one.holder.sync()
            elif spares.is_left_out(one.holder.state, one.node, one.host.world):
                one.is_failing = True

    def _meet(self, one: Launcher) -> None:
        """Begins the world once all hosts of the round are there."""
        state = one.holder.state
        hosts = [node.addr for node in sorted(state.participants, key=lambda node: state.participants[node])]
        if spares.world_of(state) != one.world or one.name not in hosts or len(hosts) < self.size:
            one.is_failing = True
        elif all(self.launchers[name].world == one.world for name in hosts) and self._see_each_other(hosts):
            self.worlds[one.world] = World(one.world, hosts, self.network.now, self.network.now + self.dice.choice([0, 0.5, 4]))

    def _resume(self, this: World) -> None:
        hosts = this.hosts
        began = [world for world in self.worlds.values() if world.has_begun]
        took_part = self.first.union(*(world.hosts for world in began))
        assert not began or took_part & {*hosts}, f"{hosts} form a world, and none of them has taken part before: {self.worlds}"
        held = {owner: max((self.launchers[host].memory.get(owner, 0) for host in hosts), default=0) for owner in range(self.size)}
        start = min(held.values())
        committed = max((world.committed for world in began if {*world.hosts} & {*hosts}), default=self.kept)
        known = [self.worlds[last] for host in hosts if (last := self.launchers[host].last)]
        newest = max(known, key=lambda world: world.formed, default=None)
        if not start and newest is not None and {host for owner in held if not held[owner] for host in newest.holders[owner]} - {*hosts}:
            this.is_over = True
            for host in hosts:  # nothing is begun without hosts that may have the rest (`Chooser.choose`)
                self.launchers[host].is_failing = True
                self.launchers[host].lacks += host not in newest.hosts
            return
        assert start or not committed, f"{hosts} begin anew, though {committed} steps were committed: {self.worlds}"
        this.holders = {owner: {hosts[owner], hosts[(owner + 1) % self.size]} for owner in held}
        for host in hosts if start else ():
            for owner, iteration in self.launchers[host].memory.items():
                this.holders[owner] |= {host} if iteration else set()
        this.start, this.committed, this.has_begun = start, start, True

    def _note(self, world: World) -> None:
        """The workers tell their launchers that something is committed, or resumed."""
        for host in world.hosts if world.committed else ():
            one = self.launchers[host]
            one.last, one.has_said, one.keeps = world.name, True, True

    def _see_each_other(self, hosts: list[str]) -> bool:
        return all(self.network.reaches(one, other) for one in hosts for other in hosts)

    def _is_broken(self, one: Launcher) -> bool:
        """Whether the world's workers fail: a host is gone, or cannot be reached."""
        if (world := self.worlds.get(one.world)) is None:
            return False
        others = [self.launchers[name] for name in world.hosts]
        world.is_over |= not self._see_each_other(world.hosts) or any(each.world != one.world or each.is_failing for each in others)
        world.is_over |= any(each.has_ended for each in others)
        return world.is_over

    # -- time

    def tick(self) -> None:
        order = list(self.launchers.values())
        self.dice.shuffle(order)
        for one in order:
            self.step(one)
        for world in [world for world in self.worlds.values() if not (world.is_over or world.has_begun)]:
            if self.network.now >= world.resumes:
                self._resume(world)
        for world in self.training:
            self._note(world)
            world.committed += 1
            for owner in range(self.size):  # each shard at its owner and the next host
                for place in (owner, (owner + 1) % self.size):
                    self.launchers[world.hosts[place]].memory[owner] = world.committed
        self.network.now += TICK

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        end = self.network.now + seconds
        while self.network.now < end and not until():
            self.tick()

    @property
    def training(self) -> list[World]:
        return [world for world in self.worlds.values() if world.has_begun and not world.is_over]

    # -- what is done to it

    def cut(self) -> None:
        sides = self.dice.randint(2, 3)
        self.network.sides = {place: self.dice.randrange(sides) for place in self.places}

    def fail(self) -> None:
        for world in self.training:
            if self.dice.random() < 0.7:
                world.is_over = True

    def forget(self, reboots: bool) -> None:
        """One host's agent is lost together with its workers, and all its memory with them; its launcher lives, or is started again."""
        if self.training:
            world = self.dice.choice(self.training)
            name = self.dice.choice(world.hosts)
            self.launchers[name].memory.clear()
            if reboots:
                self.launchers[name] = self._launcher(name)
            world.is_over = True


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> list[Network]:
    """The last network that was put here is that of the launchers."""
    networks: list[Network] = []

    def store(host: str, port: int, **_: Any) -> Client:
        return Client(networks[-1], port)

    def connect(address: tuple[str, int], timeout: float) -> Any:
        networks[-1].connect(address[1])
        return SimpleNamespace(close=lambda: None)

    def pass_time(seconds: float) -> None: ...

    clock = SimpleNamespace(monotonic=lambda: networks[-1].now, sleep=pass_time)
    for module, name, value in (
        (stores, "TCPStore", store),
        (stores, "socket", SimpleNamespace(create_connection=connect)),
        (stores, "threading", SimpleNamespace(Thread=AtOnce)),
        (stores, "time", clock),
        (stores, "lasting_name", lambda: networks[-1].actor),
        (spares, "time", clock),
        (torch_rendezvous, "_should_keep_alive", lambda ctx: True),
        (torch_rendezvous, "get_method_name", lambda depth=2: ""),
        (torch_rendezvous, "construct_and_record_rdzv_event", lambda **_: None),
        (torch_rendezvous, "_BackendRendezvousStateHolder", spares.by_own_clock(torch_rendezvous._BackendRendezvousStateHolder)),
    ):
        monkeypatch.setattr(module, name, value)
    return networks


def scenario(seed: int, networks: list[Network]) -> None:
    dice = random.Random(seed)
    job = Job(dice)
    networks.append(job.network)
    if dice.random() < 0.8:
        job.run(60, lambda: any(world.committed > 20 for world in job.training))
    committed = job.kept = max((world.committed for world in job.worlds.values()), default=0)
    cut, forgets = job.network.now, seed >= FORGETTING
    for _ in range(dice.randint(1, 4)):
        job.cut()
        job.run(dice.choice([0.5, 2, 4, 8, 20, 60]))
        if dice.random() < 0.5:
            job.fail()
            job.run(dice.choice([0.5, 4, 20]))
        elif forgets:
            forgets = False
            job.forget(seed >= REBOOTING)
            job.run(dice.choice([0.5, 4, 20]))
        if dice.random() < 0.7:
            job.network.sides = {}
            job.run(dice.choice([0.5, 3, 10]))
    job.network.sides = {}
    job.run(120)
    ended = [name for name, one in job.launchers.items() if one.has_ended]
    told = f"seed {seed}: {job.worlds}, ended: {ended}, {[(one.name, one.world[:6], one.is_failing) for one in job.launchers.values()]}"
    (last,) = job.training or [None]
    assert last is not None, told
    assert last.formed <= cut or last.start >= committed, told
    before = last.committed
    job.run(5)
    assert job.training == [last], told
    assert last.committed > before, told


@pytest.mark.parametrize("seed", [*range(8), 1085, 1544, 2127, 3061, 3667])
def test_one_world_is_left_with_all_that_was_committed(seed: int, played: list[Network]) -> None:
    scenario(seed, played)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(30))
def test_so_it_is_in_three_thousand_orders(part: int, played: list[Network]) -> None:
    for seed in range(1000 + 100 * part, 1100 + 100 * part):
        scenario(seed, played)
