"""The process that imports torch once, and from which ``gemini run`` forks the workers of every attempt (docs/decisions/025).

In all that a script can see, a forked worker is what ``python -u script.py`` would have been: a child of the launcher in a session of its
own, standard streams, signals, environment, ``__main__``, ``sys.argv``, ``sys.path``, exit handlers, exit status. That is why this is not
multiprocessing's fork server, whose children have another start method and a parent process, run no exit handlers, and have torch's
launcher wait for ever when they end by ``os._exit(0)``.

It is called with ``CHANNEL MODULES [-m] SCRIPT [ARGUMENTS]`` (`gemini_ft.launch.script.starter`), imports the comma-separated
``MODULES``, says on ``CHANNEL`` whether children can be forked safely (``{"number": 0, "refused": why or null}``), and answers
``{"number": n, "fork": [[-m,] SCRIPT, ARGUMENTS...], "copy": file or null, "environ": {...}, "parent": pid}`` by
``{"number": n, "pid": ..., "failed": why or null}``.

The launcher is a worker's parent: the process that forks it hands it over by ending. A worker begins when the launcher writes to its
starting gun, the fourth descriptor after three standard streams, and ends unseen when the launcher closes that: none runs that the launcher
does not know. When the launcher dies, the kernel kills its workers (`gemini_ft.launch.script.die_with`), and this process what they have
started, and ends.

Only the standard library is imported here: the requested modules must see the environment as a script would.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from gemini_ft.hosts import began, is_readable
from gemini_ft.launch import reserve
from gemini_ft.launch.replaced import take_rank
from gemini_ft.launch.script import die_with, import_root, run
from gemini_ft.wire import channel as messages

OPTIONAL = "?"  # ends the name of a module that may be missing, or fail
GO = b"!"  # the launcher's word to a worker that it may begin
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_TRIAL_SECONDS = 20.0  # after which a forked child counts as hanging; it needs milliseconds
SIGNAL_GROUP = 4  # flag of pidfd_send_signal, since Linux 6.9: to the process group that this process leads or has led
# A signal to all processes of a job is meant for its workers. This one ends when the launcher does.
_NOT_MEANT_HERE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Serves requests; in a forked child, runs the script and ends as it ends."""
    dispositions: dict[int, Any] = {signum: signal.signal(signum, signal.SIG_IGN) for signum in _NOT_MEANT_HERE}
    modules, program = sys.argv[2].split(","), sys.argv[3:]
    if not sys.flags.safe_path:
        sys.path.insert(0, import_root(program))
    renewal, left_behind = Renewal(), dict[str, str]()
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        with renewal.watching_imports():
            refusal = _preload([name for name in modules if name], left_behind)
        gc.collect()
        gc.freeze()  # the children share these pages: their collector must not touch them
        job = _serve(channel, refusal, dispositions)
    if job is not None:
        _become_worker({**left_behind, **job["environ"]})
        renewal.draw_anew()
        reserve.begin()
        run(job["fork"], job["copy"])


def _preload(modules: Sequence[str], left_behind: dict[str, str]) -> str | None:
    """Imports ``modules``; returns why children must not be forked after that, or None if they can.

    Args:
        modules: their names; one that ends with `OPTIONAL` may be missing, or fail.
        left_behind: takes the variables that imports set which the script makes itself. What torch sets while it is imported ahead,
            such as the folder of its compiler's cache, is not for the worker: the script may want to set it first.
    """
    if "torch" in modules and _NVML_CHECK not in os.environ:
        # Being asked whether there is a GPU, torch then asks the driver's monitor: that does not spoil forks, CUDA does.
        os.environ[_NVML_CHECK] = "1"
    for entry in modules:
        before, name = dict(os.environ), entry.removesuffix(OPTIONAL)
        try:
            importlib.import_module(name)
        except Exception as error:  # if the script needs it, it will fail by itself
            if entry == name and not isinstance(error, ModuleNotFoundError):
                return f"import {name} failed: {type(error).__name__}: {error}"
            if entry == name:
                print(f"gemini run: {name} is not imported ahead: {error}", file=sys.stderr)
        if name.partition(".")[0] not in ("torch", "gemini_ft"):
            left_behind.update({key: value for key, value in os.environ.items() if before.get(key) != value})
    if not sys.modules.keys().isdisjoint(("lightning.fabric", "lightning_fabric")):
        left_behind[_NVML_CHECK] = "1"  # as these do
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
    """Makes a child do what fails if an import has started a pool of OpenMP threads or has asked CUDA for its devices."""
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
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(0.005)


def _serve(channel: socket.socket, refusal: str | None, dispositions: Mapping[int, Any]) -> dict[str, Any] | None:
    """Answers requests until the channel closes, and returns None; in a worker that may begin, returns the request it is made for."""
    forked: dict[int, int] = {}  # pid -> descriptor of the worker, which no later process of the same number is mistaken for
    with contextlib.suppress(ConnectionError):  # the launcher did not wait for the answer
        messages.send(channel, {"number": 0, "refused": refusal})
        while received := messages.receive(channel):
            request, (*streams, gun) = received
            for known in [pid for pid, worker in forked.items() if is_readable(worker)]:
                os.close(forked.pop(known))

            def prepare(streams: Sequence[int] = streams) -> None:
                channel.close()
                for other in forked.values():
                    os.close(other)
                for target, stream in enumerate(streams):
                    os.dup2(stream, target)
                for signum, disposition in dispositions.items():
                    if signal.getsignal(signum) is signal.SIG_IGN:  # else an import has asked for it
                        signal.signal(signum, disposition)

            try:
                pid, failed = _fork_worker(prepare), None
                if pid:
                    forked[pid] = os.pidfd_open(pid)
            except OSError as error:
                pid, failed = -1, str(error)
            for stream in streams:
                os.close(stream)
            if pid == 0:
                _await_start(gun, request["parent"])
                return request
            os.close(gun)
            messages.send(channel, {"number": request["number"], "pid": pid, "failed": failed})
    see_off(forked)
    return None


def _fork_worker(prepare: Callable[[], None]) -> int:
    """Forks a worker that is the launcher's child and leads its own session; returns its pid, 0 in the worker.

    It has called ``prepare`` when this returns in the server.
    """
    ready, done = os.pipe()
    try:
        middle = _fork()
        if middle == 0:
            with _ending_on_error():
                if worker := _fork():
                    os.write(done, b"%d" % worker)
                    os._exit(0)  # and so hands the worker over to the launcher
                os.setsid()
                prepare()
            return 0
        os.close(done)
        done = -1
        pid = b"".join(iter(partial(os.read, ready, 32), b""))  # to the end: until the worker has closed it too
        os.waitpid(middle, 0)
    finally:
        for descriptor in {ready, done} - {-1}:
            os.close(descriptor)
    if not pid:
        raise OSError("no second process can be forked")
    return int(pid)


@contextlib.contextmanager
def _ending_on_error() -> Iterator[None]:
    """Inside, an error of a forked child ends it: it must not go on as if it were the server."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _await_start(gun: int, launcher: int) -> None:
    with _ending_on_error():
        if os.read(gun, 1) != GO:
            os._exit(0)
        os.close(gun)
        die_with(launcher)


def see_off(forked: Mapping[int, int]) -> None:
    """Kills the sessions of workers that are left without a launcher."""
    for pid, worker in forked.items():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            _kill_session(pid, worker)


def _kill_session(pid: int, worker: int) -> None:
    """Kills a worker and all it has started, but no process that was given its number after it ended."""
    try:
        signal.pidfd_send_signal(worker, signal.SIGKILL, None, SIGNAL_GROUP)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        if not (is_readable(worker) and began(pid) is not None):  # an older kernel
            os.killpg(pid, signal.SIGKILL)


def _become_worker(environ: Mapping[str, str]) -> None:
    """Takes over the worker's environment, and corrects what imported modules have already taken from the server's."""
    os.environ.clear()
    os.environ.update(environ)
    take_rank(environ)


_DRAWN_BITS = 64  # numpy draws 128 bits for a generator without a seed; no user writes a seed that long


class Renewal:
    """The random state that imports have made in the server, renewed in each worker: else all ranks and restarts would share it.

    Operating system, OpenSSL, ``secrets``, ``uuid4`` and Python's global generator see to themselves after a fork. Not so the global
    generators of torch and numpy, generators that a library makes for itself when it is imported (sympy has three), and the key that
    ``multiprocessing`` proves its identity with. A generator that a library has seeded with a number of its own stays as it is.
    """

    def __init__(self) -> None:
        self._unseeded: weakref.WeakSet[random.Random] = weakref.WeakSet()
        self._bit_generators: list[Any] = []

    @contextmanager
    def watching_imports(self) -> Iterator[None]:
        """Inside, notes which of Python's generators are made without a seed; afterwards finds those of numpy."""
        seed = random.Random.seed

        def noting(this: random.Random, a: Any = None, version: int = 2) -> None:
            (self._unseeded.add if a is None else self._unseeded.discard)(this)
            seed(this, a, version)

        random.Random.seed = noting  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            random.Random.seed = seed  # type: ignore[method-assign]
            self._bit_generators = _unseeded_bit_generators()

    def draw_anew(self) -> None:
        """Gives this process, a forked worker, random state of its own."""
        for generator in self._unseeded:
            generator.seed()
        for bits in self._bit_generators:
            bits.state = type(bits)().state
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.set_bit_generator(numpy_random.MT19937())  # as the import does; seed() would leave it without a seed sequence
        if torch := sys.modules.get("torch"):
            torch.default_generator.seed()  # CUDA's are made, and seeded, at first use
        if process := sys.modules.get("multiprocessing.process"):
            process.current_process().authkey = os.urandom(32)
        if "uuid" in sys.modules:
            vars(sys.modules["uuid"]).update(_node=None, _last_timestamp=None)  # the node is drawn on a host without a network card
        if "tempfile" in sys.modules:
            vars(sys.modules["tempfile"]).update(tempdir=None)  # TMPDIR is read again


def _unseeded_bit_generators() -> list[Any]:
    """numpy's bit generators, but for the global one, that were made without a seed."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return []
    everywhere = numpy_random.mtrand._rand._bit_generator
    found = [item for item in gc.get_objects() if issubclass(type(item), numpy_random.BitGenerator) and item is not everywhere]
    return [item for item in found if isinstance(entropy := getattr(item.seed_seq, "entropy", None), int) and entropy >> _DRAWN_BITS]
