"""Emulated hosts: groups of processes on one machine that live and die as the hosts of a job do."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch

from gemini_ft.errors import GeminiError
from gemini_ft.events import read_events
from gemini_ft.hosts import is_readable
from gemini_ft.launch.endings import LEFT
from gemini_ft.testing.network import DEVICE, END_SECONDS, HUB, Network, end_all

T = TypeVar("T")

_GEMINI = (sys.executable, "-m", "gemini_ft.cli.main")
_POLL = 0.05  # seconds
_START_SECONDS = 120.0  # for importing torch on a busy machine
# Whatever happens to this process, the kernel ends its children: the launcher, and with it the workers.
_MORTAL = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"


class DrillError(GeminiError):
    """Emulated hosts did not do what was expected of them; the text has the ends of their logs."""

    __str__ = Exception.__str__  # of several lines: the ends of the logs of this machine


class EmulatedHosts:
    """Hosts of one job as groups of processes on loopback, each with its own host id, launcher, workers and agent.

    With a network each is in a namespace of its own, behind a link that can be slowed down and cut (`Network`).

    The store of the rendezvous is outside of them, so that any may be lost. A context manager: afterwards nothing is left.
    Host ids are host0, host1, ... in the order of their start; an id is never used again. Each host's output is in
    ``folder/<host>.log``, the agents' logs are beside it, and ``events()`` has what the workers report (gemini_ft.events).

    Args:
        count: hosts that the job needs; those started beyond that wait as spares.
        program: script and arguments, or ``-m``, module and arguments.
        folder: for logs and events; exists.
        workers: per host.
        env: environment for all hosts, beside the present one without its GEMINI_* variables.
        launcher: the command that takes torchrun's arguments.
        network: where the hosts are; those that it lacks are added to it. It is closed by its maker, after these hosts.
        stores: of the rendezvous, in the order in which launchers prefer them: how many, on the network's hub, or the names of the
            places in the network that serve one each.
        store_name: by which launchers know the stores, in place of their addresses.

    Raises:
        DrillError: the store did not start.
    """

    def __init__(
        self,
        count: int,
        program: Sequence[str],
        folder: Path,
        *,
        workers: int = 1,
        env: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (*_GEMINI, "run"),
        network: Network | None = None,
        stores: int | Sequence[str] = 1,
        store_name: str | None = None,
    ) -> None:
        self.count, self.folder, self.network = count, folder, network
        self.run = f"emulated-{secrets.token_hex(6)}"
        self._program, self._workers, self._launcher = list(program), workers, list(launcher)
        self._launchers: dict[str, subprocess.Popen[bytes]] = {}
        self._env = _without_settings(os.environ) | self._settings() | dict(env or {})
        self._store_places = [HUB] * stores if isinstance(stores, int) else list(stores)
        self._stores = [self._start_store(place, "0") for place in self._store_places]
        endpoints = (endpoint for _, endpoint in self._stores)
        endpoint = ",".join(f"{store_name}:{each.rpartition(':')[2]}" if store_name is not None else each for each in endpoints)
        self._rendezvous = [f"--nnodes={count}", f"--nproc-per-node={workers}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
        self._rendezvous += ["--rdzv-conf=is_host=0", f"--rdzv-id={self.run}", "--max-restarts=100"]
        self._rendezvous += [f"--log-dir={folder / 'torchelastic'}"]  # else killed launchers leave their temporary folders behind

    def __enter__(self) -> EmulatedHosts:
        for _ in range(self.count):
            self.add()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    # -- actions on the hosts

    def add(self) -> str:
        """Starts one more host, with nothing in its memory; returns its id. It replaces a lost one, or waits as a spare."""
        return self._start(f"host{len(self._launchers)}")

    def restart(self, host: str) -> None:
        """Starts a host that was killed once more, under its id and with the files that it had: containers that come back on their node."""
        self._start(host)

    def _start(self, name: str) -> str:
        if self.network is not None and name not in self.network.hosts:
            self.network.add(name)
        arguments = [*self._rendezvous, f"--local-addr={self._address(name)}", *self._program]
        command = [sys.executable, "-c", _MORTAL, *self._launcher, *arguments]
        with open(self.folder / f"{name}.log", "ab") as log, self._inside(name):
            env = self._env | {"GEMINI_HOST_ID": name}
            process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self._launchers[name] = process
        return name

    def _start_store(self, place: str, port: str) -> tuple[subprocess.Popen[bytes], str]:
        if self.network is not None and place not in (HUB, *self.network.hosts):
            self.network.add(place)
        with self._inside(place):
            return _start_store(self._env, self._address(place), port)

    def launcher_pid(self, host: str) -> int:
        """The process that starts the host's workers; to stop or kill it alone."""
        return self._launchers[host].pid

    def kill(self, host: str) -> None:
        """Kills all processes of a host at once: launcher, workers, agent."""
        launcher = self._launchers[host]
        launcher.kill()
        self._end([f"GEMINI_HOST_ID={host}"])
        if self.network is not None:
            self.network.kill(host)
        launcher.wait(END_SECONDS)

    def replace(self, host: str) -> str:
        """Kills a host and starts another; returns the other's id."""
        self.kill(host)
        return self.add()

    def store_pid(self, number: int = 0) -> int:
        """The process that serves a store of the rendezvous."""
        return self._stores[number][0].pid

    def kill_store(self, number: int = 0) -> None:
        """Kills a store of the rendezvous, with all that it has."""
        process, _ = self._stores[number]
        process.kill()
        process.wait(END_SECONDS)

    def restart_store(self, number: int = 0) -> None:
        """Starts a store that was killed at its address again; it is empty."""
        self._stores[number] = self._start_store(self._store_places[number], self._stores[number][1].rpartition(":")[2])

    def stop(self) -> None:
        """Kills all that is left of the hosts, and the stores."""
        for launcher in self._launchers.values():
            launcher.kill()
        for store, _ in self._stores:
            store.kill()
        self._end([])
        for process in (*self._launchers.values(), *(store for store, _ in self._stores)):
            process.wait(END_SECONDS)

    # -- how they are

    @property
    def alive(self) -> list[str]:
        """Hosts whose launcher is running, in the order of their start."""
        return [name for name, launcher in self._launchers.items() if launcher.poll() is None]

    @property
    def lost(self) -> list[str]:
        """Hosts whose launcher was killed."""
        return [name for name, launcher in self._launchers.items() if launcher.poll() == -signal.SIGKILL]

    @property
    def drained(self) -> list[str]:
        """Hosts that have left the job after a step that is committed."""
        return [name for name, launcher in self._launchers.items() if launcher.poll() == LEFT]

    def status(self, host: str) -> int | None:
        """The exit status of a host's launcher; None: it is running."""
        return self._launchers[host].poll()

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """The events that workers have reported so far, of these kinds, or all."""
        return [event for event in read_events(self.folder / "events") if not kinds or event["event"] in kinds]

    def wait_for(self, reached: Callable[[], T], timeout: float = 120.0) -> T:
        """Polls until ``reached`` returns something true, and returns that.

        Raises DrillError: it did not within ``timeout`` seconds, or no host is left.
        """
        until = time.monotonic() + timeout
        while not (found := reached()):
            if not self.alive and not (found := reached()):
                raise DrillError(f"all hosts have ended before the awaited event{self._tails()}")
            if time.monotonic() > until:
                raise DrillError(f"the awaited event did not happen within {timeout:g} s{self._tails()}")
            time.sleep(_POLL)
        return found

    def finish(self, timeout: float = 300.0) -> None:
        """Waits until the job is done. Raises DrillError: a launcher ended with an error, or is still running after ``timeout`` seconds."""
        until = time.monotonic() + timeout
        while self.alive:
            if time.monotonic() > until:
                raise DrillError(f"{', '.join(self.alive)} did not end within {timeout:g} s{self._tails()}")
            time.sleep(_POLL)
        failed = {
            name: status for name, launcher in self._launchers.items() if (status := launcher.returncode) not in (0, LEFT, -signal.SIGKILL)
        }
        if failed or len(self.lost) == len(self._launchers):
            raise DrillError(f"the job failed: {failed or 'all hosts were killed'}{self._tails()}")

    # -- inside

    def _inside(self, host: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.network is None else self.network.inside(host)

    def _address(self, host: str) -> str:
        return "127.0.0.1" if self.network is None else self.network.address(host)

    def _settings(self) -> dict[str, str]:
        folder = self.folder.resolve()
        return {
            "GEMINI_RUN_ID": self.run,
            "GEMINI_EVENTS": str(folder / "events"),
            "GEMINI_LOG_DIR": str(folder),
            "GEMINI_FAULTS_DIR": str(folder / "faults"),
            "GEMINI_LINGER": "60",  # agents that were missed do not stay for long
            "GLOO_SOCKET_IFNAME": "lo" if self.network is None else DEVICE,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def _end(self, marks: Sequence[str]) -> None:
        """Kills all processes of this run that have ``marks`` in their environment, until none is left."""
        wanted = {mark.encode() for mark in [f"GEMINI_RUN_ID={self.run}", *marks]}
        end_all(lambda pid: wanted <= environment(pid))

    def _tails(self) -> str:
        logs = [self.folder / f"{name}.log" for name in self._launchers]
        return "".join(f"\n--- {log.stem}:\n{log.read_text(errors='replace')[-2000:]}" for log in logs)


def _without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    ours = ("GEMINI_", "TORCHELASTIC_", "PET_")
    return {name: value for name, value in environ.items() if not name.startswith(ours)}


def _start_store(env: Mapping[str, str], address: str, port: str) -> tuple[subprocess.Popen[bytes], str]:
    command = [sys.executable, "-c", _MORTAL, *_GEMINI, "store", "--host", address, "--port", port]
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with process.stdout as output:
        line = output.readline().decode() if is_readable(output.fileno(), _START_SECONDS) else ""
    if not line.startswith("store ready on "):
        process.kill()
        process.wait(END_SECONDS)
        raise DrillError(f"the rendezvous store did not start; it said {line!r}")
    return process, line.split()[-1]


def environment(pid: int) -> set[bytes]:
    """The variables in a process's environment at its start; a zombie has none, a forked worker its server's."""
    return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


# -- states, to the last bit ----------------------------------------------------------------------


def first_difference(one: Any, other: Any, name: str = "") -> str | None:
    """The first difference of two nested states, in hexadecimal: ``model.0.weight[3, 1]: 0x3f800000 and 0x3f800001``.

    Dicts (in whatever order), lists and tuples are walked; tensors, arrays and floats are compared by their bytes, so that
    NaN equals itself and 0.0 does not equal -0.0. None: there is no difference.
    """
    where = name or "the state"
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            only = [[key for key in a if key not in b] for a, b in ((one, other), (other, one))]
            return f"{where}: keys {_shown(only[0])} only in one, {_shown(only[1])} only in the other"
        return _first(first_difference(one[key], other[key], f"{name}.{key}" if name else str(key)) for key in one)
    if type(one) is not type(other):
        return f"{where}: {type(one).__name__} and {type(other).__name__}"
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return f"{where}: {len(one)} and {len(other)} entries"
        return _first(first_difference(a, b, f"{name}[{index}]") for index, (a, b) in enumerate(zip(one, other, strict=True)))
    if isinstance(one, (torch.Tensor, np.ndarray, np.generic)):
        return _array_difference(_array(one), _array(other), str(one.dtype), str(other.dtype), where)
    if isinstance(one, float):
        return None if struct.pack("d", one) == struct.pack("d", other) else f"{where}: {one.hex()} and {other.hex()}"
    return None if one == other else f"{where}: {_shown(one)} and {_shown(other)}"


def assert_identical(one: Any, other: Any) -> None:
    """Raises AssertionError with the first difference of two states."""
    difference = first_difference(one, other)
    assert difference is None, difference


def digest(state: Any) -> str:
    """SHA-256 in hex of all that ``first_difference`` would compare: equal exactly when there is no difference."""
    found = hashlib.sha256()
    _feed(found.update, state)
    return found.hexdigest()


def _feed(take: Callable[[bytes], None], value: Any) -> None:
    take(type(value).__name__.encode())
    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            take(repr(key).encode())
            _feed(take, value[key])
    elif isinstance(value, (list, tuple)):
        take(str(len(value)).encode())
        for item in value:
            _feed(take, item)
    elif isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        take(f"{value.dtype}{list(value.shape)}".encode())
        take(_array(value).tobytes())
    else:
        take(struct.pack("d", value) if isinstance(value, float) else repr(value).encode())


def _array(value: Any) -> np.ndarray[Any, Any]:
    """The value as unsigned integers of the same width: numpy knows no bfloat16, and compares floats by value."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        return plain.view(-1).view(torch.uint8).numpy().reshape(*plain.shape, plain.element_size())
    plain_array = np.ascontiguousarray(value)
    return plain_array.reshape(-1).view(np.uint8).reshape(*np.shape(value), plain_array.itemsize)


def _array_difference(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any], dtype: str, other_dtype: str, where: str) -> str | None:
    if dtype != other_dtype or one.shape != other.shape:
        return f"{where}: {dtype}{list(one.shape[:-1])} and {other_dtype}{list(other.shape[:-1])}"
    if np.array_equal(one, other):
        return None
    index = tuple(int(i) for i in np.argwhere((one != other).any(axis=-1))[0])
    hexes = ["0x" + array[index].tobytes()[::-1].hex() for array in (one, other)]  # most significant byte first
    count = int((one != other).any(axis=-1).sum())
    place = f"[{', '.join(map(str, index))}]" if index else ""
    return f"{where}{place}: {hexes[0]} and {hexes[1]} ({count} of {one[..., 0].size} elements differ)"


def _first(differences: Iterator[str | None]) -> str | None:
    return next((difference for difference in differences if difference is not None), None)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."
