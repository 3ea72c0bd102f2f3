"""Failures on purpose: GEMINI_FAULTS names them, and the Checkpointer makes them happen.

    GEMINI_FAULTS="step=20:rank=1:sigkill; step=40:host=2:kill" gemini run ... train.py

A fault says what, who and when (`gemini_ft.core.faults` has all words):

    sigkill | sigstop | exception | exit | delay  happen to workers: rank=1, rank=all, all of host=2, all of group=0
    agent | kill | corrupt | slow | storage_full  happen to hosts: host=2, host=some-id, the host of rank=1, all of group=0
    step=20, step=20:moment=in_copy               at the end of step 20, or at the first such moment from then on
    moment=agent_copied, moment=launcher_starts   inside agents, workers and launchers (`gemini_ft.failpoints`): host=ID or rank=1
    probability=0.01:seed=7                       at random; without rank, host or group a rank is drawn too

`host=2` is the third of the hosts in the order of their ids; a group is a set of hosts that hold copies of each other.

A fault happens once in a run, although the job restarts and comes to its step again: what has happened is kept in files
(GEMINI_FAULTS_DIR, by default a folder of this user and run under the temporary directory), and the ranks tell each other
when they come together, so that a host that joins later knows too. A run that starts from the beginning removes these files;
those of faults at moments inside processes stay, as does whatever else lies in the folder.

A training loop of your own around the Checkpointer needs nothing more; ``at_step`` is for integrations.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from gemini_ft.agent.client import AgentClient
from gemini_ft.config import parse_bytes
from gemini_ft.core.faults import OCCURRENCE, PROCESS_MOMENTS, Fault, World, parse
from gemini_ft.errors import AgentError, ConfigError
from gemini_ft.events import EventLog
from gemini_ft.failpoints import InjectedFault, notes_folder, strike
from gemini_ft.faults.slowing import slow_down
from gemini_ft.launch.failures import error_at_end
from gemini_ft.wire.worker_messages import Inject

__all__ = ["Fault", "InjectedFault", "at_step", "from_environment"]

Live = Callable[[str], Any]  # place of a flip -> a tensor there, or None
_log = logging.getLogger("gemini_ft")
_GATHER_SECONDS = 2.0  # a rank that never comes to the moment delays the fault by this much
_FILL_LIMIT = "256MiB"  # that storage_full may write; GEMINI_FAULTS_FILL_LIMIT
_FILLER = ".gemini-fault-filler"


def from_environment() -> tuple[Fault, ...]:
    """The faults that GEMINI_FAULTS asks for. Raises ConfigError: an entry cannot be understood; it says what is allowed."""
    return parse(os.environ.get("GEMINI_FAULTS", ""))


def at_step(iteration: int, moment: str = "end_of_step", live: Live | None = None) -> None:
    """Carries out the faults that are due at this moment of this iteration. Without GEMINI_FAULTS this is one comparison.

    ``moment``: a key of ``gemini_ft.core.faults.MOMENTS``. ``live``: gives a tensor of this rank's training, for a fault of kind ``flip``.

    Raises InjectedFault: asked for by a fault of kind ``exception``.
    """
    if drill is not None:
        drill.at(iteration, moment, live)


# -- before the first step ------------------------------------------------------------------------


@dataclass(frozen=True)
class Orders:
    """All that one rank knows of the faults; the ranks tell each other when they join."""

    text: str
    happened: frozenset[str] = frozenset()
    restarted: bool = False  # by its launcher

    @classmethod
    def read(cls, run: str) -> Orders:
        """Reads the orders from this process's environment and this host's disk. Raises ConfigError: GEMINI_FAULTS cannot be understood."""
        if not from_environment():
            return cls("")
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        return cls(os.environ["GEMINI_FAULTS"], frozenset(path.name for path in _files(notes_folder(run))), restarted)

    @classmethod
    def agree(cls, everyone: Sequence[Orders]) -> Orders:
        """Combines all that the ranks know. Raises ConfigError: they were not given the same faults."""
        for rank, orders in enumerate(everyone):
            if orders.text != everyone[0].text:
                raise ConfigError(
                    f"rank {rank} has GEMINI_FAULTS={orders.text!r}, rank 0 {everyone[0].text!r}; give all hosts the same, or none"
                )
        happened = frozenset[str]().union(*(orders.happened for orders in everyone))
        return cls(everyone[0].text, happened, any(orders.restarted for orders in everyone))


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The job that the faults happen to, as one worker sees it."""

    run: str
    has_past: bool  # there are copies, or were; without, a run forgets what an earlier one of its name has left behind
    rank: int
    world: World
    storage: str | None  # URL of the slow tier
    client: Callable[[], AgentClient]  # the connection to this host's agent, a new one after the agent's death
    events: EventLog

    @property
    def host(self) -> str:
        return self.world.hosts[self.rank]


def arm(orders: Orders, scene: Scene) -> None:
    """Prepares for ``at_step``; the Checkpointer calls it once the ranks have come together.

    Raises ConfigError: a fault names what this job does not have, or would do harm.
    """
    global drill
    faults = parse(orders.text)
    for fault in faults:
        fault.check(scene.world)
        if fault.kind == "storage_full":
            check_room(scene.storage)
    folder, happened = notes_folder(scene.run), set(orders.happened)
    if not (scene.has_past or orders.restarted):
        inside = {fault.name for fault in faults if fault.moment in PROCESS_MOMENTS}  # may have happened before the ranks met
        _forget(folder, inside)
        happened &= inside
    if scene.rank == 0:
        _log.warning("fault injection: %s", "; ".join(f.text for f in faults if f.name not in happened) or "no fault is left to happen")
        if happened:
            _log.warning("fault injection: %d of the faults will not happen again (see %s)", len(happened), folder)
    if drill is None and scene.rank == 0:
        atexit.register(_report_the_rest)
    drill = Drill(faults, happened, folder, scene)


def _report_the_rest() -> None:
    """Warns, at the end of a script that has ended well, of the planned faults whose moment never came."""
    if drill is not None and error_at_end() is None and (rest := drill.rest()):
        _log.warning("fault injection: the job has ended, and these have never happened: %s", "; ".join(rest))


drill: Drill | None = None


def _files(folder: Path) -> Iterable[Path]:
    return folder.iterdir() if folder.is_dir() else ()


def _forget(folder: Path, but: Collection[str]) -> None:
    """Removes the notes of earlier runs, except those named in ``but``; the folder is the user's, so everything else in it stays."""
    for path in _files(folder):
        if OCCURRENCE.fullmatch(path.name) and path.name not in but and (path.is_file() or path.is_symlink()):
            path.unlink(missing_ok=True)  # another rank of this host may have been quicker


# -- at a moment ----------------------------------------------------------------------------------


class Drill:
    """The faults of one worker's life. All ranks follow all faults: each must know which have happened."""

    def __init__(self, faults: Sequence[Fault], happened: set[str], folder: Path, scene: Scene) -> None:
        self._faults, self._happened, self._folder, self._scene = faults, happened, folder, scene
        self._launcher = own_launcher()

    def at(self, iteration: int, moment: str, live: Live | None) -> None:
        """Carries out the faults that are due, in the order of the list."""
        for fault in self._faults:
            self._end(fault, iteration)
            name = fault.occurrence(iteration)
            if name in self._happened or not fault.is_due(iteration, moment):
                continue
            self._happened.add(name)
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._folder / name).write_text(f"{fault.text}\n")
            scene = self._scene
            mine = scene.rank in fault.doers(scene.world, iteration)
            # Whoever dies before the others are here would take from them that it has happened, and the partners of a
            # group would die one restart after the other instead of together.
            _gather(name, scene.rank, len(scene.world.hosts), wait=mine)
            if mine:
                scene.events.write("fault", fault=fault.text, iteration=iteration, moment=moment)
                _log.warning("fault injection at iteration %d, %s: %s", iteration, moment, fault.text)
                _do(fault, scene, self._launcher, live)

    def rest(self) -> list[str]:
        """The planned faults that have not happened."""
        happened = {*self._happened, *(path.name for path in _files(self._folder))}
        return [fault.text for fault in self._faults if fault.probability is None and fault.name not in happened]

    def _end(self, fault: Fault, iteration: int) -> None:
        if fault.kind == "storage_full" and fault.until is not None and iteration >= fault.until:
            (_storage_folder(self._scene.storage) / _FILLER).unlink(missing_ok=True)


def _gather(name: str, rank: int, world_size: int, wait: bool) -> None:
    """Announces that this rank has come to a fault; with ``wait``, waits a short time for the others to do so too.

    Not a collective: its last steps would fail on the ranks that are still in it when the first one dies.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    store = dist.distributed_c10d._get_default_store()
    with contextlib.suppress(dist.DistError, RuntimeError):  # too late, or the store's host is gone already
        store.set(f"gemini/fault/{name}/{rank}", "")
        if wait:
            store.wait([f"gemini/fault/{name}/{other}" for other in range(world_size)], timedelta(seconds=_GATHER_SECONDS))


# -- deeds ----------------------------------------------------------------------------------------


def _do(fault: Fault, scene: Scene, launcher: psutil.Process | None, live: Live | None) -> None:
    match fault.kind:
        case "agent":
            _kill([*_process(scene.client().welcome.pid)])
        case "kill":
            _kill_host(scene.client().welcome.pid, launcher)
        case "corrupt":
            with contextlib.suppress(AgentError):  # it is dead itself, and so are its copies
                for owner in fault.owners(scene.world, scene.host):
                    scene.client().tell(Inject(fault="corrupt", owner=owner))
        case "slow":
            for process in _process(scene.client().welcome.pid):
                with contextlib.suppress(ProcessLookupError):
                    slow_down(process.pid, fault.share, fault.seconds)
        case "flip":
            if live is not None and (tensor := live(fault.of)) is not None:
                _flip(tensor)
        case "storage_full":
            check_room(scene.storage)
            _fill(_storage_folder(scene.storage) / _FILLER)
        case _:
            strike(fault)


def _kill_host(agent: int, launcher: psutil.Process | None) -> None:
    """Kills the launcher before its workers: it must not see them die, nor sign them off.

    Under `gemini run` this process dies with it, torchrun's workers do not. The agent goes first, because no other process would kill it.
    A launcher that has ended in the meantime has left this process to init, or to a service manager, whose children are none of ours.
    """
    own = psutil.Process()
    family = [launcher, *launcher.children(recursive=True)] if launcher is not None and launcher in own.parents() else []
    _kill([*_process(agent), *(process for process in family if process != own), own])


def _flip(tensor: Any) -> None:
    """Flips a bit, as faulty memory does: no version counter shows it."""
    import torch

    part = getattr(tensor, "_local_tensor", tensor).data
    part.as_strided((1,), (1,)).view(torch.uint8)[-2:-1].bitwise_xor_(16)


def _fill(path: Path) -> None:
    """Takes all the room of a file system, down to the last byte."""
    with open(path, "ab", buffering=0) as filler:
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):
                while True:
                    filler.write(bytes(size))


def own_launcher() -> psutil.Process | None:
    """The process that started the workers of this host, unless it has ended: `gemini run` says so, torchrun is the parent.

    No other program than this worker's is torchrun: the parent of an orphan is init.
    """
    said, own = os.environ.get("GEMINI_LAUNCHER_PID"), psutil.Process()
    if said is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(int(said) if said is not None else os.getppid())
        if found in own.parents() and (said is not None or found.exe() == own.exe()):
            return found
    return None


def _process(pid: int) -> Iterator[psutil.Process]:
    """The process of that number, if there is one; 0 is no process of this pid namespace."""
    with contextlib.suppress(psutil.NoSuchProcess):
        yield psutil.Process(pid)


def _kill(processes: Iterable[psutil.Process]) -> None:
    """Kills these processes, but none that was given the number of one in the meantime: psutil compares when they began."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _storage_folder(url: str | None) -> Path:
    """The local folder that holds the checkpoints. Raises ConfigError: there is no storage, or not a local one."""
    if url is None or not url.startswith("file://"):
        raise ConfigError(f"storage_full: storage.url={url!r}; only a local folder (file:///...) can be filled")
    return Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path))


def check_room(url: str | None) -> None:
    """Limits how much a drill may write: it must not write a terabyte, least of all into a shared file system.

    Raises ConfigError: filling it would take more than the limit.
    """
    folder = _storage_folder(url)
    folder.mkdir(parents=True, exist_ok=True)
    room = shutil.disk_usage(folder).free
    given = os.environ.get("GEMINI_FAULTS_FILL_LIMIT", _FILL_LIMIT)
    try:
        limit = parse_bytes(given)
    except ValueError as error:
        raise ConfigError(f"GEMINI_FAULTS_FILL_LIMIT={given!r}: {error}; give a size, for example {_FILL_LIMIT}") from None
    assert isinstance(limit, int)
    if room > limit:
        raise ConfigError(
            f"storage_full: the file system of {folder} has room for {room:,} bytes, and at most {limit:,} are written for a drill "
            "(GEMINI_FAULTS_FILL_LIMIT). Give the drill a small one: mount -t tmpfs -o size=64m drill FOLDER"
        )
