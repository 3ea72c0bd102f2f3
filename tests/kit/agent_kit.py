"""Real agents for tests: ranks without torch that talk to them, and the certainty that all are gone at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, TypeVar
from unittest.mock import Mock

import numpy as np
import pytest
from warm_python import preloaded

from gemini_ft.agent import lifecycle
from gemini_ft.agent.client import AgentClient
from gemini_ft.agent.memory.budget import Budget
from gemini_ft.agent.memory.slot_files import SlotFiles
from gemini_ft.agent.memory.slot_memory import SlotShape
from gemini_ft.agent.memory.slot_store import SlotStore
from gemini_ft.core.decisions import Abort, Commit
from gemini_ft.core.layout import Layout, TensorSpec, build_layout
from gemini_ft.core.protocol import Host
from gemini_ft.core.roots import checksum, layout_digest, shard_root
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import GeminiError
from gemini_ft.wire.handshake import dial, listen
from gemini_ft.wire.messages import Chunk, kind_of
from gemini_ft.wire.peer_messages import Claims, Data, PeerMessage
from gemini_ft.wire.tcp import Connection, Handler
from gemini_ft.wire.worker_messages import (
    Adopt,
    Copied,
    Ended,
    GetInventory,
    GiveUp,
    Goodbye,
    Hello,
    Inject,
    Inventory,
    Landed,
    Opened,
    OpenSession,
    Progress,
    Request,
    Reserve,
    Reserved,
    SessionSpec,
    SlotInfo,
    ToWorker,
    Verified,
    Verify,
)

T = TypeVar("T")
context = multiprocessing.get_context("forkserver")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
_GIVEN = frozenset(os.environ)  # before any test has set an option
_PRELOAD = [*preloaded("deepspeed"), "agent_kit", "pytest", "s3_client"]

WAIT = 30.0  # seconds until something that must happen is given up
CHUNK = 2**16
EXTRAS = b"extras"


def preload(*modules: str) -> None:
    """Ranks find these imported already, if this is called while tests are being collected."""
    _PRELOAD.extend(modules)
    context.set_forkserver_preload([*_PRELOAD, "frozen"])


preload()


def forked(function: Callable[..., object], *arguments: object) -> ForkServerProcess:
    """Returns a process, not yet started, that is forked from one which has imported what `preload` names.

    The server is shown this folder: Python up to 3.13 does not hand it the path, and it passes over what it does not find. It does not see
    options that the test which is the first to need it has set: all that follow would have them.
    """
    resource_tracker.ensure_running()  # it would be started in the same way
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        for name in {name for name in os.environ if name.startswith("GEMINI_")} - _GIVEN:
            patch.delenv(name)
        patch.setattr(util, "spawnv_passfds", _spawn_warm)
        forkserver.ensure_running()
    return context.Process(target=function, args=arguments)


def _spawn_warm(path: str, args: Sequence[str], descriptors: Sequence[int]) -> int:
    """Starts multiprocessing's server as it does, but forked from one that has torch loaded, where launchers are (warm_python).

    That one takes few descriptors: the listener, which has the lower number, comes as standard input.
    """
    listener, alive = descriptors
    executable, *flags, _, command = map(os.fsdecode, args)
    command = f"import os; os.dup2(0, {listener}); os.dup2(os.open(os.devnull, os.O_RDONLY), 0); {command}"
    warm = flags or ["-X", "warm"]  # another way to run Python begins anew
    process = subprocess.Popen([executable, *warm, "-c", command], stdin=listener, pass_fds=[alive])
    process.returncode = 0  # multiprocessing sees to its end
    return process.pid


def stream_context(log: Callable[[str], None] = print, *, run: Mapping[str, object] | None = None, **fields: object) -> Any:
    """As much of a stream's context as parts of an agent need that are tested alone."""
    of_run = SimpleNamespace(**{"run_id": "run", "secret": b"", "files": None} | dict(run or {}))
    parts = {"custodians": Mock(), "note_damage": lambda *_: None, "measures": SimpleNamespace(kept=lambda: None)}
    return SimpleNamespace(**{"name": "main", "run": of_run, "log": log} | parts | fields)


def slot_store(host: Host, budget: Budget, log: Callable[[str], None] = print, files: SlotFiles | None = None) -> SlotStore:
    return SlotStore(stream_context(log, host=host, run={"budget": budget, "files": files}))


def connection(tell: Callable[[Any], None], lost: Callable[[], bool] = lambda: False) -> Any:
    """A snapshotter's connection to an agent that is told all, and is never too slow."""

    class Connected:
        lost = property(lambda self: is_lost())

        def tell(self, message: Any) -> None:
            tell(message)

        def judge(self, diligence: object) -> None:
            """Finds nothing wrong."""

    is_lost, connected = lost, Connected()
    return lambda: connected


def eventually(condition: Callable[[], Any], what: str = "it") -> Any:
    """The first true value of ``condition``; an error after half a minute."""
    begin = time.monotonic()
    while not (value := condition()):
        assert time.monotonic() < begin + WAIT, f"{what} did not happen within {WAIT:g} s"
        pause(begin)
    return value


def pause(begin: float) -> None:
    """Sleeps until a condition is looked at again: for longer the longer it has been waited for, since a look may cost an agent's time."""
    time.sleep(min(0.05, 0.005 + (time.monotonic() - begin) / 10))


def slots_of_this_process() -> set[int]:
    """Descriptors of agents' memory; others come and go with threads of other tests."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return {number for number, link in found.items() if "memfd:gemini:" in link}


def agent_pid(run: str, host: str) -> int | None:
    """Who listens on the agent's socket; known even of an agent that does not answer."""
    sock = lifecycle.try_connect(run, host)
    if sock is None:
        return None
    with sock:
        return int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def end_agent(run: str, host: str) -> None:
    """Kill an agent, if it is there, and wait until its socket is gone."""
    while (pid := agent_pid(run, host)) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def content(rank: int, iteration: int, nbytes: int, frozen: int = 0) -> bytes:
    """What a rank's shard holds after an iteration; the first ``frozen`` bytes are the same after all of them."""
    changing = np.random.default_rng([rank, iteration]).bytes(nbytes)
    return content(rank, 0, nbytes)[:frozen] + changing[frozen:] if frozen else changing


def shape_of(layout: Layout, **fields: Any) -> SlotShape:
    """The shape of a slot for the only shard of a job; ``fields`` replace those that follow from the layout or are usual."""
    usual: dict[str, Any] = {"run": "run", "stream": "main", "owner": 0, "world_size": 1, "layout_hash": layout.logical_hash}
    usual |= {"layout": layout.to_bytes(), "data_bytes": layout.nbytes, "extras_capacity": 64, "chunk_bytes": 2**20}
    return SlotShape(**usual | fields)


def _fits(message: ToWorker, kind: str, fields: dict[str, Any]) -> bool:
    """Whether a message is of this kind and has these values; an iteration may be that of its version."""
    about = message.version if isinstance(message, Commit | Abort) and "iteration" in fields else message
    return kind_of(message) == kind and all(getattr(about, name) == value for name, value in fields.items())


class Rank:
    """One rank's worker, on threads of this process: it does what a worker does, with bytes instead of tensors."""

    def __init__(self, run: str, host: str, rank: int, timeout: float = 10.0, **hello: Any) -> None:
        self.run, self.rank, self.host, self.events = run, rank, host, list[ToWorker]()
        self._heard = threading.Condition()
        usual: dict[str, Any] = {"stream": "main", "secret": b"s" * 16, "bind": "127.0.0.1", "linger": 60.0}
        self.hello = Hello(run=run, rank=rank, **usual | hello)
        self.client = AgentClient(run, host, self.hello, self._hear, timeout)
        self.address = self.client.welcome.info.address
        self.layout: Layout | None = None
        self.maps: dict[int, memoryview] = {}
        self.fds: list[int] = []
        self.reached: int | None = None  # the newest iteration that a slot was asked for
        self.frozen = 0  # bytes at the beginning of the shard that never change

    def _hear(self, message: ToWorker) -> None:
        with self._heard:
            self.events.append(message)
            self._heard.notify_all()

    def wait_for(self, kind: str, timeout: float = WAIT, **fields: Any) -> Any:
        """The first message of this kind with these values, sent at any time since the last ``forget``."""

        def found() -> ToWorker | None:
            return next((m for m in self.events if _fits(m, kind, fields)), None)

        with self._heard:
            assert self._heard.wait_for(found, timeout), (
                f"rank {self.rank}: no {kind} {fields} within {timeout:g} s, only {self.events[-9:]}"
            )
            return found()

    def heard(self, kind: str, **fields: Any) -> bool:
        with self._heard:
            return any(_fits(m, kind, fields) for m in self.events)

    def forget(self) -> None:
        with self._heard:
            self.events.clear()

    def inventory(self) -> list[SlotInfo]:
        return list(self.client.call(GetInventory(), Inventory)[0].slots)

    def open(self, spec: SessionSpec, **fields: Any) -> None:
        self.client.call(OpenSession(spec=spec, secret=self.hello.secret, **fields), Opened)
        self.spec = spec

    def reserve(self, nbytes: int = 4 * CHUNK, name: str = "weight", extras_capacity: int = 4096) -> None:
        """Get slots for this rank's half (third, ...) of one tensor, of ``nbytes`` per rank."""
        world = self.spec.world_size
        specs = [TensorSpec(name=name, dtype="uint8", shape=(nbytes * world,), group=tuple(range(world)))]
        self.layout = build_layout(specs, self.rank, world)
        layout = self.layout
        message = Reserve(
            layout=layout.to_bytes(), layout_hash=layout.logical_hash, data_bytes=layout.nbytes, extras_capacity=extras_capacity
        )
        reserved, self.fds = self.client.call(message, Reserved)
        size = reserved.data_offset + reserved.capacity
        self.maps = {s: memoryview(mmap.mmap(fd, size))[reserved.data_offset :] for s, fd in zip(reserved.slots, self.fds, strict=True)}

    def request(self, iteration: int) -> None:
        self.reached = iteration
        self.client.tell(Request(iteration=iteration))

    def granted(self, iteration: int) -> memoryview:
        return self.maps[self.wait_for("granted", iteration=iteration).slot]

    def copy(self, iteration: int, chunks: slice = slice(None), digest: str = "") -> None:
        """Lay the shard down in the slot that was granted, and announce it; all of it, or some chunks of it without the end."""
        assert self.layout is not None
        slot, nbytes = self.granted(iteration), self.layout.nbytes
        slot[:nbytes] = content(self.rank, iteration, nbytes, self.frozen)
        slot[nbytes : nbytes + len(EXTRAS)] = EXTRAS
        cuts = [(at, min(CHUNK, nbytes - at)) for at in range(0, nbytes, CHUNK)] + [(nbytes, len(EXTRAS))]
        checksums = [checksum(slot[at : at + size]) for at, size in cuts]
        for index, (at, size) in list(enumerate(cuts))[chunks]:
            self.client.tell(Chunk(owner=self.rank, iteration=iteration, index=index, offset=at, nbytes=size, digest=checksums[index]))
        if chunks == slice(None):
            version, sizes = Version(self.spec.incarnation, iteration), (nbytes, len(EXTRAS), CHUNK)
            self.finish_copy(iteration, shard_root(self.rank, version, layout_digest(self.layout.to_bytes()), sizes, checksums), digest)

    def land(self, iteration: int, upto: int | None = None) -> None:
        """Do as `copy` does, from a device: the agent forms the checksums; ``upto``: so far, without the end."""
        assert self.layout is not None
        slot, nbytes = self.granted(iteration), self.layout.nbytes
        slot[:nbytes] = content(self.rank, iteration, nbytes, self.frozen)
        slot[nbytes : nbytes + len(EXTRAS)] = EXTRAS
        for end in (CHUNK // 2, nbytes // 2, nbytes) if upto is None else (upto,):
            self.client.tell(Landed(iteration=iteration, upto=end))
        if upto is None:
            index, digest = -(-nbytes // CHUNK), checksum(EXTRAS)
            self.client.tell(Chunk(owner=self.rank, iteration=iteration, index=index, offset=nbytes, nbytes=len(EXTRAS), digest=digest))
            self.finish_copy(iteration, "")

    def finish_copy(self, iteration: int, root: str, digest: str = "") -> None:
        """Declare that all chunks are in the slot, and what they come to."""
        self.client.tell(Copied(iteration=iteration, extras_bytes=len(EXTRAS), digest=digest, root=root))

    def snapshot(self, iteration: int, digest: str = "") -> None:
        """Take a snapshot; returns when it is copied."""
        self.request(iteration)
        self.copy(iteration, digest=digest)

    def give_up(self, iteration: int) -> None:
        self.client.tell(GiveUp(iteration=iteration, reason="of the test"))

    def reconnect(self, committed: Version | None, nbytes: int = 4 * CHUNK, **hello_fields: Any) -> None:
        """As a worker does whose agent has died: start another, hand it what is held for it, and go on."""
        old = self.client
        kept = [*self.fds, *old.custody.values()]
        hello = self.hello.model_copy(update={"preferred_port": self.spec.addresses[self.host][1]} | hello_fields)
        self.client = AgentClient(self.run, self.host, hello, self._hear, 10.0)
        self.client.tell(Adopt(count=len(kept), incarnation=self.spec.incarnation), kept)
        self.open(self.spec, readopt=True, committed=committed, reached=self.reached)
        old.close()
        for fd in self.fds:
            os.close(fd)
        self.reserve(nbytes)

    def progress(self, iteration: int, suspended: bool = False) -> None:
        self.client.tell(Progress(iteration=iteration, suspended=suspended))

    def verify(self, version: Version) -> list[int]:
        """Owners whose copies on this host are sound."""
        return list(self.client.call(Verify(version=version), Verified)[0].sound)

    def corrupt(self, owner: int) -> None:
        self.client.tell(Inject(fault="corrupt", owner=owner))

    def scribble(self) -> None:
        """Write rubbish into every slot that was ever given to this worker."""
        for memory in self.maps.values():
            memory[:] = b"\xaa" * len(memory)

    def inodes(self) -> set[int]:
        """Which memory this worker was given."""
        return {os.fstat(fd).st_ino for fd in self.fds}

    def write_stacks(self) -> None:
        """As a worker does when it joins."""
        lifecycle.write_stacks_on_request()

    def leave_orphan(self) -> int:
        """Fork a child that lives on and keeps the socket open; its pid."""
        self.kept = os.dup(self.client.sock.fileno())  # as a child does that was not forked by Python
        if (pid := os.fork()) == 0:
            time.sleep(600)
            os._exit(0)
        return pid

    def say_rubbish(self) -> None:
        self.client.sock.sendall(bytes(4))

    def ask_and_hang_up(self) -> None:
        """So that the agent finds nobody to answer."""
        os.kill(agent := agent_pid(self.run, self.host) or 0, signal.SIGSTOP)
        try:
            self.client.tell(GetInventory())
            self.client.sock.shutdown(socket.SHUT_RDWR)
        finally:
            os.kill(agent, signal.SIGCONT)

    def goodbye(self, finished: bool = True) -> None:
        self.client.tell(Goodbye(finished=finished))

    def end_well(self) -> None:
        """The word of this process that it is about to end."""
        lifecycle.ask(self.run, self.host, Ended())

    def close(self) -> None:
        self.client.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []


class RankProcess:
    """A rank in a process of its own, so that it can die. Calls go to its `Rank`."""

    def __init__(self, run: str, host: str, rank: int, **hello: Any) -> None:
        self.rank, self.host = rank, host
        self._pipe, theirs = context.Pipe()
        environ = {name: value for name, value in os.environ.items() if name.startswith("GEMINI_")}
        self._process = forked(_serve_rank, theirs, environ, run, host, rank, hello)
        self._process.start()
        theirs.close()
        self.hello, self.address = self._answer()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._pipe.send((name, args, kwargs))
            return self._answer()

        return call

    def _answer(self) -> Any:
        assert self._pipe.poll(WAIT), f"rank {self.rank} did not answer"
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.join(WAIT)

    close = kill


def _serve_rank(pipe: Any, environ: dict[str, str], run: str, host: str, number: int, hello: dict[str, Any]) -> None:
    os.environ.update(environ)
    rank = Rank(run, host, number, **hello)
    pipe.send((rank.hello, rank.address))
    while True:
        name, args, kwargs = pipe.recv()
        try:
            pipe.send(getattr(rank, name)(*args, **kwargs))
        except Exception as error:
            pipe.send(error)


AnyRank = Rank | RankProcess


class Job:
    """A run of some ranks, each on a host of its own unless said otherwise. Ends all its agents at the end."""

    def __init__(self, log_folder: Path) -> None:
        self.run = f"test-{os.getpid()}-{time.monotonic_ns()}"
        self._environ = {name: os.environ.get(name) for name in ("GEMINI_LOG_DIR",)}
        os.environ["GEMINI_LOG_DIR"] = str(log_folder)
        self.ranks: list[Rank | RankProcess] = []
        self._hosts: set[str] = set()
        self.spec: SessionSpec | None = None

    def __enter__(self) -> Job:
        self._others = set(lifecycle.started)  # agents of other tests of this process, which may still linger
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for rank in self.ranks:
            rank.close()
        eventually(self._all_gone, "the end of all agents")
        for host in self._hosts:
            if kind is not None:
                print(f"--- agent of host {host}\n{self.log(host)}")
        for name, value in self._environ.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})

    def _all_gone(self) -> bool:
        """Several agents may have been started for one host; the next would take the place of the one that is ended."""
        for host in self._hosts:
            end_agent(self.run, host)
        return all(child.poll() is not None for child in lifecycle.started if child not in self._others)

    def rank(self, host: str, number: int, **hello: Any) -> Rank:
        self._hosts.add(host)
        rank = Rank(self.run, host, number, **hello)
        self.ranks.append(rank)
        return rank

    def process(self, host: str, number: int, **hello: Any) -> RankProcess:
        """A rank that can be killed."""
        self._hosts.add(host)
        rank = RankProcess(self.run, host, number, **hello)
        self.ranks.append(rank)
        return rank

    def join(self, hosts: Sequence[str], **hello: Any) -> list[Rank]:
        """Connect one rank per entry, in order."""
        for host in set(hosts):
            if agent_pid(self.run, host) is None:
                lifecycle.spawn(self.run, host)  # all at once
        return [self.rank(host, number, **hello) for number, host in enumerate(hosts)]

    def make_spec(self, ranks: Sequence[AnyRank], **fields: Any) -> SessionSpec:
        """The next incarnation, every shard on all hosts."""
        number = self.spec.incarnation.number + 1 if self.spec is not None else 1
        hosts = [rank.host for rank in ranks]
        names = list(dict.fromkeys(hosts))
        base: Mapping[str, Any] = {
            "stream": "main",
            "incarnation": Incarnation(number, f"nonce{number}"),
            "world_size": len(ranks),
            "hosts": hosts,
            "addresses": {rank.host: rank.address for rank in ranks},
            "holders": {n: [host, *(other for other in names if other != host)] for n, host in enumerate(hosts)},
            "leader": hosts[0],
            "resumed": None,
            "chunk_bytes": CHUNK,
        }
        self.spec = SessionSpec(**(dict(base) | fields))
        return self.spec

    def start(self, *on: str, hello: Mapping[str, Any] | None = None, **fields: Any) -> list[Rank]:
        """Ranks, one per host named, that have joined, opened an incarnation and reserved their memory."""
        ranks = self.join(on or ("a", "b"), **(hello or {}))
        self.open(ranks, **fields)
        return ranks

    def open(self, ranks: Sequence[AnyRank], **fields: Any) -> SessionSpec:
        spec = self.make_spec(ranks, **fields)
        for rank in ranks:
            rank.open(spec)
        for rank in ranks:
            rank.reserve()
        return spec

    def version(self, iteration: int) -> Version:
        assert self.spec is not None
        return Version(self.spec.incarnation, iteration)

    def commit(self, ranks: Sequence[AnyRank], *iterations: int) -> None:
        """Take snapshots on all ranks, one after the other, each once the one before is committed."""
        for iteration in iterations:
            for rank in ranks:
                rank.request(iteration)
            for rank in ranks:
                rank.copy(iteration)
            for rank in ranks:
                rank.wait_for("commit", iteration=iteration)

    def claims(self, role: str = "fetch", **fields: Any) -> Claims:
        base = {"run": self.run, "stream": "main", "host": "test", "to": "a", "role": role, "incarnation": None}
        return Claims(**(base | fields))

    def status(self, host: str) -> Any:
        text = lifecycle.status(self.run, host)
        return json.loads(text) if text is not None else None

    def stream(self, host: str) -> Any:
        return self.status(host)["streams"]["main"]

    def pid(self, host: str) -> int:
        pid = agent_pid(self.run, host)
        assert pid is not None, f"no agent of host {host}"
        return pid

    def log(self, host: str) -> str:
        return lifecycle.log_path(self.run, host).read_text()

    def gone(self, *hosts: str) -> None:
        """Wait until the agents have left."""
        for host in hosts:
            eventually(partial(self._has_left, host), f"the leaving of {host}'s agent")

    def _has_left(self, host: str) -> bool:
        return agent_pid(self.run, host) is None


class Proxy:
    """A host that stands between a dialling agent and a listening one and knows the secret: it withholds, cuts, damages and rewrites.

    What an attacker without the secret can do is in test_relay.py; this is a network card, or memory, that fails.
    """

    def __init__(self, target: tuple[str, int], secret: bytes = b"s" * 16) -> None:
        self._target, self._secret = target, secret
        self.damage = 0  # payloads still to be damaged
        self.forge = False  # whether payloads are exchanged together with their checksums
        self.rewrite: Callable[[PeerMessage], PeerMessage] = lambda message: message  # of what passes on the way there
        self.connections = 0
        self._sides: list[_Side] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._listener = self._on_loop(listen("127.0.0.1", None, lambda: secret, self._accept, print, encrypt=lambda stream: True))
        self.address = self._listener.address

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._on_loop(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT)
        self._loop.close()

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT)

    def withhold(self) -> None:
        """From now on nothing passes, and nobody is told."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def let_pass(self) -> None:
        self._loop.call_soon_threadsafe(self._open.set)

    def cut(self) -> None:
        """Close every connection."""

        async def work() -> None:
            for side in self._sides:
                if side.connection is not None:
                    side.connection.abort("cut")

        self._on_loop(work())

    async def _end(self) -> None:
        self._listener.close()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:  # a connection may be accepted while others end
            for side in self._sides:
                if side.connection is not None:
                    side.connection.abort("the end")
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)  # connections hear that they are closed

    def _accept(self, connection: Connection, claims: Claims) -> Handler:
        self.connections += 1
        near, far = _Side(self._open, self._alter), _Side(self._open, lambda message, payload: message)
        near.connection = connection
        near.other, far.other = far, near
        self._sides += [near, far]
        near.there.set()
        self._tasks = [*self._tasks, self._loop.create_task(near.forward()), self._loop.create_task(self._dial(claims, near, far))]
        return near

    async def _dial(self, claims: Claims, near: _Side, far: _Side) -> None:
        try:
            far.connection = await dial(self._target, claims, self._secret, far)
        except GeminiError as error:
            connection = near.connection
            assert connection is not None
            connection.abort(str(error))
            return
        far.there.set()
        await far.forward()

    def _alter(self, message: PeerMessage, payload: bytearray) -> PeerMessage:
        if payload and self.damage:
            self.damage -= 1
            payload[len(payload) // 2] ^= 1
        if payload and self.forge:
            assert isinstance(message, Chunk)
            payload[0] ^= 1
            message = message.model_copy(update={"digest": checksum(payload)})
        return self.rewrite(message)


class _Side:
    """One end of a proxied connection; what it hears goes to the other one."""

    other: _Side

    def __init__(self, open_: asyncio.Event, alter: Callable[[PeerMessage, bytearray], PeerMessage]) -> None:
        self._open, self._alter = open_, alter
        self._heard: asyncio.Queue[tuple[PeerMessage, bytearray]] = asyncio.Queue()
        self._payloads: dict[int, bytearray] = {}  # id of the message that announces it -> what comes; several travel at a time
        self.connection: Connection | None = None
        self.there = asyncio.Event()

    def on_message(self, message: PeerMessage) -> memoryview | None:
        if not isinstance(message, Chunk | Data):
            self._heard.put_nowait((message, bytearray()))
            return None
        payload = self._payloads[id(message)] = bytearray(message.nbytes)
        return memoryview(payload)

    def on_bytes(self, message: PeerMessage, digest: int) -> None:
        self._heard.put_nowait((message, self._payloads.pop(id(message))))

    def on_lost(self, reason: str) -> None:
        if self.other.connection is not None:
            self.other.connection.abort(reason)

    async def forward(self) -> None:
        await self.other.there.wait()
        connection = self.other.connection
        assert connection is not None
        while True:
            message, payload = await self._heard.get()
            await self._open.wait()
            message = self._alter(message, payload)
            connection.send(message, memoryview(payload) if payload else None)


def exactly(sock: socket.socket, count: int) -> bytearray:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that hangs."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def open_fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def versions(slots: Iterable[SlotInfo]) -> set[tuple[int, int]]:
    """(owner, iteration) of an inventory."""
    return {(slot.owner, slot.version.iteration) for slot in slots}
