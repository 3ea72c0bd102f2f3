"""How the launcher starts workers: forked from a server that has imported what they need, or cold."""

from __future__ import annotations

import ast
import contextlib
import inspect
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from torch.distributed.elastic.multiprocessing import api as torch_api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from gemini_ft import cold, forkserver
from gemini_ft.errors import GeminiError

logger = logging.getLogger(__name__)

# torch._dynamo (a second) is what torch imports when a script creates its first optimizer.
_ALWAYS = ("torch", "torch._dynamo", "gemini_ft", "gemini_ft.rendezvous", "gemini_ft.checkpointer")
# What a script imports -> what is imported ahead for it.
_VENDORS = {
    "lightning": ("lightning", "gemini_ft.lightning"),
    "pytorch_lightning": ("pytorch_lightning", "gemini_ft.pytorch_lightning"),
    # The first engine imports the last of these, and with it torch._inductor: most of the time of a restart.
    "deepspeed": ("deepspeed", "gemini_ft.deepspeed.engine", "deepspeed.runtime.zero.muon.original_muon"),
    "accelerate": ("accelerate",),
    "transformers": ("transformers.trainer", "accelerate"),
}

_READY_SECONDS = 600.0  # for the imports, which a shared file system can make slow
_ANSWER_SECONDS = 30.0  # for anything else, which takes milliseconds
_STOP_SECONDS = 30.0  # for workers to end after a signal, as torch's launcher gives them


class ForkServerError(GeminiError):
    """The fork server cannot serve (any more); its workers, if there were any, are dead."""


def modules_to_preload(program: Sequence[str], extra: Sequence[str] = ()) -> list[str]:
    """What the fork server imports for ``program``: torch, this package, and what the script's source says it needs of the rest.

    Args:
        program: script and arguments, or ``-m``, module name and arguments.
        extra: names of further modules.
    """
    text = _text(_source(program))
    imported = _imported_by(text)
    if imported & {"accelerate", "transformers"} and ("deepspeed" in text or any("deepspeed" in argument for argument in program)):
        imported.add("deepspeed")  # by them, later
    vendors = [name for vendor, names in _VENDORS.items() if vendor in imported for name in names]
    return list(dict.fromkeys([*_ALWAYS, *vendors, *extra]))


def _source(program: Sequence[str]) -> Path | None:
    if program[0] != "-m":
        return Path(program[0])
    base = Path(forkserver.import_root(program), *program[1].split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__main__.py") if path.is_file()), None)


def _text(source: Path | None) -> str:
    """What is in the file; nothing if it cannot be read."""
    try:
        return source.read_text(errors="replace") if source else ""
    except OSError:
        return ""


def _imported_by(text: str) -> set[str]:
    """Top-level names of all packages that a script imports anywhere; nothing if it cannot be parsed."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return set()
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]
    return {name.partition(".")[0] for name in names}


class ForkServer:
    """A :mod:`gemini_ft.forkserver` process that belongs to this one. Not for use by several threads at once."""

    def __init__(self, program: Sequence[str], modules: Sequence[str]) -> None:
        """Start it; it imports in the background until :meth:`wait_ready`."""
        self._channel, theirs = socket.socketpair()
        with theirs:
            # Script and arguments are there for ps, which shows this command line for the workers too.
            command = [sys.executable, "-u", "-m", "gemini_ft.forkserver", str(theirs.fileno()), ",".join(modules), *program]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        self._refusal: str | None = None
        self._ready = False
        self.lost = False  # never served again after that

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def wait_ready(self) -> str | None:
        """Wait for the imports; return why no worker must be forked after them, or None if all is well.

        Raises:
            ForkServerError: the server has died or takes longer than 10 minutes.
        """
        if not self._ready:
            self._refusal = self._receive(_READY_SECONDS)["refused"]
            self._ready = True
        return self._refusal

    def fork(self, program: Sequence[str], environ: Mapping[str, str], streams: Sequence[int]) -> Worker:
        """Start a worker that runs ``program`` with ``streams`` as its standard input, output and error.

        Raises:
            ForkServerError: the server has died or does not answer.
        """
        return Worker(self, self._ask({"fork": list(program), "environ": dict(environ)}, streams)["pid"])

    def poll(self, pid: int) -> int | None:
        """Exit status of a worker as ``subprocess`` counts it, None while it runs. To be asked no more once it is known."""
        try:
            status: int | None = self._ask({"poll": pid})["status"]
        except ForkServerError:
            return -signal.SIGKILL  # by the kernel: it was bound to the server's life
        return status

    def close(self, signum: int = signal.SIGTERM) -> None:
        """Pass ``signum`` to the workers that still run, kill those that stay for 30 s, and end the server."""
        with contextlib.suppress(OSError):  # it is lost already
            forkserver.send(self._channel, {"stop": signum, "seconds": _STOP_SECONDS})
        self._channel.close()
        try:
            self._process.wait(_STOP_SECONDS + _ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        try:
            self._channel.settimeout(_ANSWER_SECONDS)
            forkserver.send(self._channel, message, descriptors)
        except OSError as error:
            raise self._lost(str(error)) from error
        return self._receive(_ANSWER_SECONDS)

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            self._channel.settimeout(seconds)
            received = forkserver.receive(self._channel)
        except OSError as error:
            raise self._lost(str(error)) from error
        if received is None:
            raise self._lost(f"it has died with status {self._process.wait()}")
        return received[0]

    def _lost(self, reason: str) -> ForkServerError:
        self.lost = True
        self._process.kill()  # an answer that comes later would be taken for that of another question
        self._channel.close()
        return ForkServerError(f"the fork server (pid {self.pid}) no longer serves: {reason}")


class Worker:
    """A forked worker, in the shape of ``subprocess.Popen`` as far as torch's launcher uses it."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.poll(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As Popen's: wait for the end; TimeoutExpired after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("forked worker", timeout or 0.0)
            time.sleep(0.01)
        return status


class WarmStart:
    """Where the workers come from: the fork server, a new one if that has died, or none once it has refused."""

    def __init__(self, program: Sequence[str], modules: Sequence[str]) -> None:
        """Start the server, which imports in the background.

        Args:
            program: script and arguments, or ``-m``, module name and arguments.
            modules: what the server imports.
        """
        self._start_server = partial(ForkServer, program, modules)
        self._server: ForkServer | None = self._start_server()

    def start_worker(self, program: Sequence[str], environ: Mapping[str, str], streams: Sequence[int]) -> Worker | None:
        """A forked worker, or None if it must be started cold; then the log says why."""
        if self._server is not None and self._server.lost:
            logger.warning("the fork server has died; starting a new one")
            self._server = self._start_server()
        if self._server is None:
            return None
        try:
            if refusal := self._server.wait_ready():
                logger.warning("starting workers cold: %s", refusal)
                self.close()
                return None
            return self._server.fork(program, environ, streams)
        except ForkServerError as error:
            logger.warning("starting a worker cold: %s", error)
            return None

    def close(self, signum: int = signal.SIGTERM) -> None:
        """End the server, as :meth:`ForkServer.close`."""
        if self._server is not None:
            self._server.close(signum)
            self._server = None


class _Handler(SubprocessHandler):
    """Torch's handler of a worker process, with a forked one inside where that is possible."""

    def __init__(self, warm: WarmStart | None, **arguments: Any) -> None:
        self._warm = warm
        super().__init__(**arguments)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        if args[:2] == (sys.executable, "-u"):  # else it is wrapped in something, such as numactl
            streams = [0, _descriptor(self._stdout, 1), _descriptor(self._stderr, 2)]
            worker = self._warm.start_worker(args[2:], env, streams) if self._warm is not None else None
            if worker is not None:
                return worker
            args = cold.command(args[:2], args[2:])
        return super()._popen(args, env)


def _descriptor(redirect: IO[str] | None, default: int) -> int:
    return redirect.fileno() if redirect else default


_STARTER = "get_subprocess_handler"  # torch's function that starts one worker process
_ARGUMENTS = ["entrypoint", "args", "env", "stdout", "stderr", "local_rank_id", "numa_options"]


@contextlib.contextmanager
def forked_workers(program: Sequence[str], modules: Sequence[str]) -> Iterator[None]:
    """Inside, torch's launcher forks the workers of ``program`` from a server that has imported ``modules``."""
    if not _is_known():
        logger.warning("starting workers cold: this version of torch starts them in a way not known here")
        yield
        return
    warm = WarmStart(program, modules)
    try:
        with _started_by(warm):
            yield
    except torch_api.SignalException as error:
        # Torch's launcher ends its workers itself, but does not yet know those that it is just starting.
        warm.close(error.sigval)
        raise
    finally:
        warm.close()


@contextlib.contextmanager
def cold_workers() -> Iterator[None]:
    """Inside, torch's launcher starts workers from nothing, by way of `gemini_ft.cold`."""
    if not _is_known():
        logger.warning('a "gemini" section is not seen by itself: this version of torch starts workers in a way not known here')
        yield
        return
    with _started_by(None):
        yield


def _is_known() -> bool:
    original = getattr(torch_api, _STARTER, None)
    return original is not None and list(inspect.signature(original).parameters) == _ARGUMENTS


@contextlib.contextmanager
def _started_by(warm: WarmStart | None) -> Iterator[None]:
    """Torch has no setting for the way a worker process is started, so its function for that is replaced."""
    original = getattr(torch_api, _STARTER)
    setattr(torch_api, _STARTER, partial(_Handler, warm))
    try:
        yield
    finally:
        setattr(torch_api, _STARTER, original)
