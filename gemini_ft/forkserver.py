"""The process that has imported torch once, and from which ``gemini run`` forks the workers of every attempt.

Most of a restart is Python importing torch. A worker forked from here is ready in milliseconds, and in all that a
script can see it is what ``python -u script.py`` would have been: a session of its own, standard streams, signals,
environment, ``__main__``, ``sys.argv``, ``sys.path``, exit handlers, exit status. That is why this is not
multiprocessing's fork server, whose children have another default start method and a parent process, run no exit
handlers, and have torch's launcher wait for ever when they end by ``os._exit(0)``.

``python -m gemini_ft.forkserver CHANNEL MODULES [-m] SCRIPT [ARGUMENTS]`` serves requests on the socket ``CHANNEL``:
it imports the comma-separated ``MODULES`` and says whether children can be forked safely, then

- ``{"fork": [[-m,] SCRIPT, ARGUMENTS...], "environ": {...}}`` with three descriptors for the standard streams:
  answers ``{"pid": ...}``;
- ``{"poll": pid}``: answers ``{"status": ...}``, null while the worker runs, else as ``subprocess`` counts it. The
  worker stays a zombie until it is asked for, so that its pid cannot come to mean another process;
- ``{"stop": signal, "seconds": ...}``: passes the signal to all workers, gives them that long, and ends.

When the channel closes, because the launcher is dead, it ends its workers and itself. When it dies itself, the kernel
kills the workers: none outlives the one that would report its end.

Only the standard library is imported here: the requested modules must see the environment as a script would.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import io
import json
import os
import runpy
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gemini_ft import wrapping

_LENGTH = struct.Struct("!I")
_PR_SET_PDEATHSIG = 1
_TRIAL_SECONDS = 20.0  # after which a forked child counts as hanging; it needs milliseconds
_LEAVE_SECONDS = 5.0  # between SIGTERM and SIGKILL for workers whose launcher is dead
_STARTERS = (__file__, os.path.join(os.path.dirname(__file__), "cold.py"), runpy.__file__, "<frozen runpy>")


def send(channel: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one JSON message, with open file descriptors attached."""
    body = json.dumps(message).encode()
    socket.send_fds(channel, [_LENGTH.pack(len(body))], list(descriptors))
    channel.sendall(body)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one message and the descriptors attached to it; None when the other side has closed the channel."""
    head, descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, 3)
    if not head:
        return None
    (left,) = _LENGTH.unpack(head)  # four bytes sent in one piece into an empty stream arrive in one piece
    body = bytearray()
    while len(body) < left:
        part = channel.recv(left - len(body))
        if not part:
            return None
        body += part
    message: dict[str, Any] = json.loads(body)
    return message, descriptors


def import_root(program: Sequence[str]) -> str:
    """What Python puts first on ``sys.path`` for this program: the working directory for a module, else the script's own."""
    return os.getcwd() if program[0] == "-m" else os.path.dirname(os.path.realpath(program[0]))


def main() -> None:
    """Serve; in a forked child, run the script and end as it ends."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    modules, program = sys.argv[2].split(","), sys.argv[3:]
    if not sys.flags.safe_path:
        sys.path[0] = import_root(program)
    before = dict(os.environ)
    refusal = _preload([name for name in modules if name])
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}  # by the imports
    gc.collect()
    gc.freeze()  # the children share these pages: their collector must not touch them
    job = _serve(channel, refusal)
    if job is not None:
        _become_worker({**job["environ"], **changed})
        run(job["fork"])


def _preload(modules: Sequence[str]) -> str | None:
    """Import ``modules``; return why children must not be forked after that, or None if they can."""
    if "torch" in modules:
        # Being asked whether there is a GPU, torch then asks the driver's monitor: that does not spoil forks, CUDA does.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:  # if the script needs it, it will fail by itself
            print(f"gemini run: {name} is not imported ahead: {error}", file=sys.stderr)
        except Exception as error:
            return f"import {name} failed: {type(error).__name__}: {error}"
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        return f"the imports have started threads, which a fork does not take along: {', '.join(threads)}"
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if torch.cuda.is_initialized():
        return "the imports have initialised CUDA, which cannot be used after a fork"
    return _trial(torch)


def _trial(torch: Any) -> str | None:
    """Let a child do what breaks if an import has started a pool of OpenMP threads or has asked CUDA for its devices."""
    pid = _fork()
    if pid == 0:
        bad_fork = torch.cuda._is_in_bad_fork()
        big = torch.ones(1 << 20).exp()  # long enough for torch to spread it over its threads
        _ = (big.sum(), big[: 1 << 16].view(256, 256) @ big[: 1 << 16].view(256, 256))
        os._exit(2 if bad_fork else 0)
    status = _wait(pid, _TRIAL_SECONDS)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return f"a child forked after the imports hung for {_TRIAL_SECONDS:g} s in a tensor operation"
    if status == 2:
        return "the imports have asked CUDA for its devices, so that it cannot be used after a fork"
    return f"a child forked after the imports failed in a tensor operation (status {status})" if status else None


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of OpenBLAS's thread, which knows how to fork
        return os.fork()


def _wait(pid: int, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while (status := _poll(pid)) is None and time.monotonic() < end:
        time.sleep(0.005)
    return status


def _poll(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def _serve(channel: socket.socket, refusal: str | None) -> dict[str, Any] | None:
    """Answer requests until the channel closes, and return None; in a forked child, return the request it is made for."""
    running: set[int] = set()
    with contextlib.suppress(ConnectionError):  # the launcher did not wait for the answer
        send(channel, {"refused": refusal})
        while received := receive(channel):
            message, streams = received
            if "stop" in message:
                _end(running, message["stop"], message["seconds"])
                return None
            if "poll" in message:
                status = _poll(message["poll"])
                if status is not None:
                    running.discard(message["poll"])
                send(channel, {"status": status})
            else:
                pid = _fork_worker(streams)
                if pid == 0:
                    channel.close()
                    return message
                running.add(pid)
                send(channel, {"pid": pid})
    _end(running, signal.SIGTERM, _LEAVE_SECONDS)
    return None


def _fork_worker(streams: Sequence[int]) -> int:
    """Fork a child that leads a session of its own, has ``streams`` as 0, 1 and 2, and dies with this process."""
    server = os.getpid()
    ready, alive = os.pipe()
    pid = _fork()
    if pid == 0:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)  # it died before prctl
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
        os.close(ready)
    os.close(alive)
    for stream in streams:
        os.close(stream)
    if pid:
        os.read(ready, 1)  # ends when the child has closed `alive`: from now on the launcher can signal its group
        os.close(ready)
    return pid


def _end(pids: set[int], signum: int, seconds: float) -> None:
    for pid in pids:
        os.killpg(pid, signum)
    end = time.monotonic() + seconds
    for pid in pids:
        if _wait(pid, max(0.0, end - time.monotonic())) is None:
            os.killpg(pid, signal.SIGKILL)


def _become_worker(environ: Mapping[str, str]) -> None:
    """Take over the worker's environment, and correct what imported modules have already taken from the server's."""
    os.environ.clear()
    os.environ.update(environ)
    if random := sys.modules.get("numpy.random"):
        random.seed()  # drawn once, in the server: all workers would share it. Python's own random sees to that itself
    # These read the rank of the process while they are imported.
    for module, variable in (("lightning_utilities.core.rank_zero", "RANK"), ("torchmetrics.utilities.prints", "LOCAL_RANK")):
        if module in sys.modules and variable in environ:
            sys.modules[module].rank_zero_only.rank = int(environ[variable])


def run(program: Sequence[str]) -> None:
    """Run ``[-m] name arguments...`` as Python itself does, in a new ``__main__``; see `gemini_ft.wrapping` for what is added."""
    wrapping.install()
    sys.orig_argv = [sys.executable, "-u", *program]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    try:
        if program[0] == "-m":
            sys.argv = list(program[1:])
            runpy._run_module_as_main(program[1])  # type: ignore[attr-defined]  # what `python -m` itself calls
        else:
            sys.argv = list(program)
            _run_script(os.path.abspath(program[0]), main)
    except SystemExit as end:
        if end.code or not wrapping.protected:
            raise
    except (Exception, KeyboardInterrupt) as error:
        _record(error)
        sys.excepthook = partial(_show, sys.excepthook)
        raise
    if wrapping.protected:
        _leave()


def _leave() -> None:
    """End a finished process as Python does, but without taking the interpreter apart.

    With DeepSpeed's process groups that ends in ``terminate called without an active exception`` now and then, and torch's
    launcher takes it for a failure of the job.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's own threads
    if (engines := sys.modules.get("gemini_ft.deepspeed.engine")) is not None:
        engines.finish()
    atexit._run_exitfuncs()
    status = 0
    for stream in [item for item in gc.get_objects() if isinstance(item, io.IOBase) and not item.closed]:
        try:
            stream.flush()
        except Exception:
            status = 120 if stream is sys.stdout else status  # as Python itself ends then
    os._exit(status)


def _run_script(path: str, main: types.ModuleType) -> None:
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)  # not with this module's __future__ imports
    exec(code, main.__dict__)


def _record(error: BaseException) -> None:
    """Leave the exception where torch's launcher looks for what to show in its report, in the form it expects.

    Whole or not at all: the launcher itself fails on a file whose writer it has killed half-way. Torch's own
    ``record`` writes such files.
    """
    error.__traceback__ = _frames_of_script(error.__traceback__)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and isinstance(error, Exception):
        extra = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
        with open(f"{path}.part", "w") as file:
            json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)
        os.replace(f"{path}.part", path)


def _show(show: Callable[..., object], kind: type[BaseException], error: BaseException, frames: types.TracebackType | None) -> None:
    frames = _frames_of_script(frames)
    show(kind, error.with_traceback(frames), frames)


def _frames_of_script(frames: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without what lies between the interpreter and the script."""
    while frames is not None and frames.tb_frame.f_code.co_filename in _STARTERS:
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    main()
