"""Launchers of tests, and their fork servers, forked from an interpreter that has torch loaded: a new one would load it for seconds.

Agents that a test starts itself are forked as well, from another one, which never loads torch, as an agent never does.

Where `launchers` are forked a ``Popen`` of ``gemini run``, ``gemini store``, torchrun, an agent, of the server from which ``gemini run``
forks its workers, or of a program under ``python -X warm``, an option that means nothing to Python, is as it always was to the caller and
to the process: its child and nobody else's, with its own descriptors, environment (in /proc too), working directory, session and network
namespace, ``sys.argv``, ``sys.path`` and ``__main__``. It shares the seed of string hashes with the others, and what was read from the
environment while torch was loaded: where such a variable differs, it is started anew.
At its end exit handlers run, and the interpreter is not taken apart, which would take longer than most jobs do. That of rank 0 is where a
test is marked as ``taken_apart``: one test of each kind of job, so that what goes wrong there is seen.

Each launcher has a server of its own, forked before it has done anything, so that the server of workers that it starts is forked as well,
and torchrun's workers are, and the agent that waits for the first worker; that one has torch in its memory, and cannot import it. What
workers start, agents for example, is not forked.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import faulthandler
import functools
import gc
import importlib.machinery
import inspect
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gemini_ft.hosts import began
from gemini_ft.launch.forkserver import OPTIONAL, Renewal
from gemini_ft.launch.preload import ALWAYS, VENDORS
from gemini_ft.launch.script import STREAM, die_with, spare_operators, starter
from gemini_ft.wire import channel as messages

_LAUNCHERS = ("torch.distributed.run", "gemini_ft.cli.commands", "gemini_ft.cli.store", "gemini_ft.launch.launcher")
_FORK_SERVER = starter("gemini_ft.launch.forkserver")
_WARM = [
    ("-m", "gemini_ft.cli.main", "run"),
    ("-m", "gemini_ft.cli.main", "store"),
    ("-m", "torch.distributed.run"),
    _FORK_SERVER,
    ("-X", "warm"),
]
_AGENT = ("-m", "gemini_ft.agent.main")
_ON_LOADING = (
    "CUDA_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "TORCH_",
)  # variables that are read by then
_AS_ALWAYS = {
    "PYTHONFAULTHANDLER",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}  # read later, or seen to here
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_ROOM = "x" * 2**16  # for the arguments and the environment of a process, where /proc shows them
_MOST_DESCRIPTORS = 4  # that one message takes along, beside itself

_HOME = os.open("/proc/self/ns/net", os.O_RDONLY)  # the first one to be asked for may be meant for another network namespace

_libc = ctypes.CDLL(None, use_errno=True)
_python = ctypes.PyDLL(None)
_CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID, _CLONE_PARENT, _CLONE_NEWNET = 0x00200000, 0x01000000, 0x00008000, 0x40000000
_PR_GET_TID_ADDRESS = 40
_MADV_COLLAPSE, _HUGE = 25, 2**21
_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)


# -- in the process that starts others


class _Server:
    """The process that forks: a child of this one, as the forked ones are."""

    def __init__(self, channel: socket.socket, loaded: Mapping[str, str] | None = None) -> None:
        self._channel, self._lock, self._owner = channel, threading.Lock(), os.getpid()
        self._loaded = _on_loading(os.environ | _THREADS) if loaded is None else loaded

    def takes(self, given: Mapping[str, Any]) -> bool:
        """Whether a process sees the environment in which the server has loaded, as far as that was read."""
        return self._owner == os.getpid() and _on_loading(os.environ if given["env"] is None else given["env"]) == self._loaded

    def fork(self, args: Sequence[str], streams: Sequence[int], given: Mapping[str, Any]) -> int:
        """The process id of a new child of this process."""
        environ = os.environ if given["env"] is None else given["env"]
        question: dict[str, Any] = {
            "args": list(map(os.fspath, args)),
            "environ": dict(environ),
            "cwd": os.fspath(given["cwd"] or os.getcwd()),
        }
        question |= {"session": given["start_new_session"], "targets": [0, 1, 2, *given["pass_fds"]], "taken_apart": _takes_apart}
        descriptors, space = [*streams, *given["pass_fds"]], None
        with self._lock:
            if len(descriptors) < _MOST_DESCRIPTORS:
                space = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
                descriptors.append(space)
            messages.send(self._channel, question, descriptors)
            if space is not None:
                os.close(space)
            answer = messages.receive(self._channel)
        assert answer is not None, "the server that forks launchers has died"
        return int(answer[0]["pid"])

    def with_more(self, modules: Sequence[str]) -> _Server:
        """A server that is forked from this one, and has loaded these modules beside; it ends with this process."""
        ours, theirs = messages.pair()
        with self._lock, theirs:
            messages.send(self._channel, {"modules": [*modules]}, [theirs.fileno()])
            answer = messages.receive(self._channel)
        assert answer is not None, "the server that forks launchers has died"
        pid = int(answer[0]["pid"])
        atexit.register(os.waitpid, pid, 0)
        atexit.register(ours.close)
        assert messages.receive(ours) is not None, "the server that forks launchers has died while it was loading"
        return _Server(ours, self._loaded)


def _on_loading(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are read while Python starts and torch is loaded; without a number of threads it is one."""
    return _THREADS | {name: value for name, value in environ.items() if name.startswith(_ON_LOADING) and name not in _AS_ALWAYS}


def _is_simple(given: Mapping[str, Any]) -> bool:
    """Whether ``Popen`` is asked in these words for a process that can be forked."""
    args = given["args"]
    if isinstance(args, str) or given["executable"] not in (None, args[0]) or given["preexec_fn"] or given["shell"]:
        return False
    other = [given["gid"], given["gids"], given["uid"]] != [None] * 3 or given["umask"] != -1 or given["process_group"] != -1
    return not other and len(given["pass_fds"]) + 3 <= _MOST_DESCRIPTORS


_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_parameters = inspect.signature(_execute_child)
_asking = threading.RLock()  # two threads may want the first process at once; a server is started with the same Popen
_takes_apart = False  # of this process, and of those that it starts: whether interpreters of workers end as Python's do


def _use(
    launchers: Callable[[], _Server | None], agents: Callable[[], _Server | None] = lambda: None, *, of_torchrun: bool = False
) -> None:
    def execute_child(self: Any, *arguments: Any, **more: Any) -> None:
        given, server = _parameters.bind(self, *arguments, **more).arguments, None
        if _is_simple(given):
            args = [*map(os.fspath, given["args"])]
            with _asking:
                server = agents() if _is_agent(args) else launchers() if is_warm(args) or (of_torchrun and _is_worker(args)) else None
        if server is None or not server.takes(given):
            _execute_child(self, *arguments, **more)
            return
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        self.pid = server.fork(given["args"], [number if stream == -1 else stream for number, stream in enumerate(streams)], given)
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


def preloaded(*names: str) -> list[str]:
    """Returns the modules that the fork server of ``gemini run`` imports for a script with these packages; other names stay as they are."""
    found = [*ALWAYS, *(module for name in names for module in VENDORS.get(name, (name,)))]
    return [module.removesuffix(OPTIONAL) for module in found]


def is_warm(args: Sequence[str]) -> bool:
    """Whether a command line is that of a process which begins by loading torch for the launcher."""
    if args[1:2] == ["-c"] and "os.execvp(sys.argv[1], sys.argv[1:])" in "".join(args[2:3]):
        args = args[3:]
    options = args[2:] if args[1:2] == ["-u"] else args[1:]
    return bool(args) and args[0] == sys.executable and any(tuple(options[: len(known)]) == known for known in _WARM)


def _is_agent(args: Sequence[str]) -> bool:
    return args[0] == sys.executable and tuple(args[1:3]) == _AGENT


def _is_worker(args: Sequence[str]) -> bool:
    """Whether torchrun starts a worker so, from a script."""
    return args[0] == sys.executable and args[1] == "-u" and args[2].endswith(".py")


@functools.cache
def _with_more(*modules: str) -> _Server | None:
    """The server of this process for launchers whose workers have these modules."""
    first = _server(*_LAUNCHERS, *preloaded())
    return first.with_more(modules) if first is not None and modules else first


@functools.cache
def _server(*modules: str) -> _Server | None:
    """The server of this process that has loaded these modules, beside an agent's, and ends with it."""
    if _CLONE is None:
        return None
    ours, theirs = messages.pair()
    with theirs:
        # As the start of a program is not shown in tracebacks: `gemini_ft.launch.script` leaves out what came by ``-c``.
        code = f"exec(compile(open({__file__!r}).read(), '<string>', 'exec', dont_inherit=True))"
        command = [sys.executable, "-c", code, str(theirs.fileno()), str(_HOME), ",".join(modules), _ROOM]
        environ = os.environ | _THREADS | {"DS_ACCELERATOR": "cpu", "ROOM": _ROOM}
        process = subprocess.Popen(command, env=environ, cwd="/", stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno(), _HOME])
    atexit.register(process.wait, 30)
    atexit.register(ours.close)
    if messages.receive(ours) is None:
        raise RuntimeError(f"the server that forks launchers has ended with status {process.wait(30)}")
    return _Server(ours)


@contextlib.contextmanager
def launchers(*also: str, forked: bool, taken_apart: bool = False) -> Iterator[None]:
    """Inside, launchers that this process starts are forked from a server that has loaded what they need, or are started anew.

    Args:
        also: packages or modules that the server loads beside torch, since the launchers' workers do (`preloaded`).
        forked: or started anew.
        taken_apart: whether the interpreter of a forked rank 0 is taken apart at its end.
    """
    global _takes_apart
    before, apart = subprocess.Popen._execute_child, _takes_apart  # type: ignore[attr-defined]
    _takes_apart = taken_apart
    if forked:
        _use(functools.partial(_with_more, *preloaded(*also)[len(preloaded()) :]), _server)
    else:
        subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = before  # type: ignore[attr-defined]
        _takes_apart = apart


# -- in the server


class _Program(BaseException):
    """Raised in a forked process that is to run another command line: it unwinds the stack, so that nothing of the caller is left on it."""

    def __init__(self, args: Sequence[str]) -> None:
        self.args = tuple(args)


def _serve(channel: socket.socket) -> dict[str, Any] | None:
    """Answers questions until the other side is gone, and returns None; in a forked process, the question that it is to answer for."""
    while received := messages.receive(channel):
        question, descriptors = received
        if (pid := _clone()) == 0:
            channel.close()
            return question | {"descriptors": descriptors}
        for descriptor in descriptors:
            os.close(descriptor)
        messages.send(channel, {"pid": pid})
    return None


def _clone() -> int:
    """Forks a child of this process's parent, as `os.fork` forks one of its own: 0 in the child.

    The server has one thread and has run no parallel code, so that handlers of C libraries for a fork have nothing to do. The number
    of the thread, which the C library keeps, is put right by the kernel.
    """
    address = ctypes.c_void_p()
    flags = signal.SIGCHLD | _CLONE_PARENT
    if _libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) == 0:
        flags |= _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
    arguments = [ctypes.c_long(flags), ctypes.c_long(0), ctypes.c_long(0)]  # then, in an order that depends on the processor
    rest = [address, ctypes.c_long(0)] if _CLONE == 56 else [ctypes.c_long(0), address]
    _python.PyOS_BeforeFork()
    pid = int(_python.syscall(ctypes.c_long(_CLONE or 0), *arguments, *rest))
    if pid == 0:
        _python.PyOS_AfterFork_Child()
    else:
        _python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError("the server cannot fork")
    return pid


def _become(question: Mapping[str, Any]) -> None:
    """Makes of this process, which was just forked, the one that was asked for; one that starts others gets a server of its own."""
    global _takes_apart
    _takes_apart = question["taken_apart"]
    *passed, last = question["descriptors"]
    targets = question["targets"]
    if len(question["descriptors"]) > len(targets):
        _enter(last)
    else:
        passed.append(last)
    if question["session"]:
        os.setsid()
    os.chdir(question["cwd"])
    _show(question["args"], question["environ"])
    held = [os.open(os.devnull, os.O_RDWR)]  # no number is free below those that follow
    while held[-1] < max(targets):
        held.append(os.dup(held[-1]))
    high = [os.dup(each) for each in passed]
    args = question["args"]
    following = None if _is_agent(args) or _is_worker(args) or tuple(args[2:4]) == _FORK_SERVER else _following(held[0])
    for target, each in zip(targets, high, strict=True):
        os.dup2(each, target)
    kept = {*targets, *([] if following is None else [following.fileno()])}
    for number in range(3, max(high) + 1):
        if number not in kept:
            with contextlib.suppress(OSError):
                os.close(number)
    server = None if following is None else _Server(following)
    _use(lambda: server, lambda: server, of_torchrun=args[1:3] == ["-m", "torch.distributed.run"])


def _following(null: int) -> socket.socket:
    """The channel to a new server, which is a child of this process, and whose standard streams are a null file's descriptor."""
    ours, theirs = messages.pair()
    if os.fork() == 0:
        kept = theirs.detach()
        for target in range(3):
            os.dup2(null, target)
        for low, top in ((3, kept), (kept + 1, os.sysconf("SC_OPEN_MAX"))):
            os.closerange(low, top)
        die_with(os.getppid())
        raise _Again(kept)
    theirs.close()
    return ours


def _enter(space: int) -> None:
    """Moves this process to a network namespace, unless it is there, and closes the descriptor of that."""
    if os.fstat(space).st_ino != os.stat("/proc/self/ns/net").st_ino:
        assert _libc.setns(space, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    os.close(space)


class _Again(BaseException):
    """The server of a forked process begins to serve."""

    def __init__(self, channel: int) -> None:
        self.channel = channel


def _show(args: Sequence[str], environ: Mapping[str, str]) -> None:
    """Takes over arguments and environment, also where the kernel shows them to others."""
    os.environ.clear()
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    starts = {int(fields[45]): int(fields[46]), int(fields[47]): int(fields[48])}
    texts = ["\0".join(args), "\0".join(f"{name}={value}" for name, value in environ.items())]
    for (start, end), text in zip(starts.items(), texts, strict=True):
        shown = os.fsencode(text)[: end - start - 1]
        ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)
    os.environ.update(environ)


def _run(args: Sequence[str], path: Sequence[str]) -> None:
    """Runs a command line of Python as a new interpreter does."""
    sys.orig_argv = list(args)
    options = list(args[1:])
    if options[0] == "-u" or os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    if options[0] == "-u":
        options.pop(0)
    if options[0] == "-X":
        options = options[2:]
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    first = {"-m": os.getcwd(), "-c": ""}.get(options[0], os.path.dirname(os.path.realpath(options[0])))
    sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = main
    sys.argv = [options[0], *options[2:]] if options[0] in ("-m", "-c") else options
    if "WITNESS" in os.environ:  # tests/kit/witness: what the interpreter's own site would import
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    if options[0] == "-m":
        runpy._run_module_as_main(options[1])  # type: ignore[attr-defined]
    elif options[0] == "-c":
        exec(compile(options[1], "<string>", "exec", dont_inherit=True), main.__dict__)
    else:
        script = os.path.abspath(options[0])
        main.__dict__.update(__file__=script, __cached__=None, __loader__=importlib.machinery.SourceFileLoader("__main__", script))
        exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), main.__dict__)


def _agent_aside() -> Callable[[], None]:
    """Imports what an agent does, and puts it aside: launchers import of this package what they need.

    Returns:
        What leaves a forked process with an agent's modules.
    """
    before = set(sys.modules)
    importlib.import_module(_AGENT[1])
    make_s3_client()
    aside = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "gemini_ft"}
    for name in aside.keys() - before:
        del sys.modules[name]

    def become_agent() -> None:
        _hidden.update(sys.modules)
        for name in _hidden:
            if name.partition(".")[0] in ("gemini_ft", "torch", *VENDORS):
                del sys.modules[name]
        sys.modules.update(aside)
        for name, module in aside.items():
            package, _, own = name.rpartition(".")
            if package:
                setattr(aside[package], own, module)

    return become_agent


_hidden: dict[str, types.ModuleType] = {}  # from an agent; they must not be destroyed


def make_s3_client() -> None:
    """Makes a client of boto3, as the first one of a process imports, and reads descriptions of AWS's services, for half a second."""
    before = dict(os.environ)
    os.environ.update(AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none", AWS_DEFAULT_REGION="us-east-1")  # else it looks for them
    try:
        with contextlib.suppress(ImportError):  # who needs boto3 will say so
            importlib.import_module("gemini_ft.storage.s3").S3Storage("bucket", endpoint_url="http://127.0.0.1:1")
    finally:
        os.environ.clear()
        os.environ.update(before)


def _replace(file: str, args: Sequence[str]) -> NoReturn:
    if file == sys.executable and is_warm(args):
        raise _Program(args)
    _execvp(file, list(args))


_execvp = os.execvp


def _load(modules: Iterable[str]) -> None:
    for name in modules:
        with contextlib.suppress(ImportError):  # who needs it will say so
            importlib.import_module(name)


def _settle() -> None:
    """Prepares the first fork: keeps the collector from writing to loaded objects, and checks that no other thread runs."""
    gc.collect()
    gc.freeze()
    use_huge_pages()
    assert threading.active_count() == 1


def use_huge_pages() -> None:
    """Moves this process's memory to pages of 2 MiB, where the kernel can (Linux 6.1): a fork, and the end of what is forked, takes a third
    of the time, as most of it goes into tables of pages that nobody writes to."""
    regions = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(?:\[heap\])?$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    for start, end in ((int(start, 16), int(end, 16)) for start, end in regions):
        for address in range(-(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE, _HUGE):
            if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_HUGE), _MADV_COLLAPSE) and ctypes.get_errno() == errno.ENOMEM:
                return  # the machine's memory is in small pieces: to make room would take longer than is won


def main() -> None:
    """Loads, serves, and becomes what it is asked for."""
    sys.path.pop(0)  # this folder
    _enter(int(sys.argv[2]))
    channel, renewal = socket.socket(fileno=int(sys.argv[1])), Renewal()
    with renewal.watching_imports():
        become_agent = _agent_aside()
        _load(filter(None, sys.argv[3].split(",")))
    if (rendezvous := sys.modules.get("torch.distributed.elastic.rendezvous.dynamic_rendezvous")) is not None:
        # Under torchrun too each look at the rendezvous is named cheaply (gemini_ft.launch.spares).
        rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name  # type: ignore[attr-defined]
    entries = {entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    path = [entry for entry in sys.path if entry not in entries]
    assert began(os.getpid())
    _settle()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at the terminal it is meant for who has started this
    messages.send(channel, {})
    while True:
        question = _serve(channel)
        if question is None:
            os._exit(0)
        if "modules" in question:
            (descriptor,) = question["descriptors"]
            channel = socket.socket(fileno=descriptor)
            gc.unfreeze()  # numpy's generators are looked for among all objects
            with renewal.watching_imports():
                _load(question["modules"])
            _settle()
            messages.send(channel, {})
            continue
        try:
            _become(question)
        except _Again as again:
            channel = socket.socket(fileno=again.channel)
            continue
        break
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in a shell's background, whose processes ignore it
    if _is_agent(question["args"]):
        become_agent()
    os.execvp = _replace  # type: ignore[assignment]
    renewal.draw_anew()
    program = _Program(question["args"])
    own, status = os.getpid(), 0
    while True:
        try:
            _run(program.args, path)
        except _Program as another:
            program = another
            continue
        except SystemExit as end:
            if not isinstance(end.code, int):
                raise
            status = end.code
        break
    if (os.getpid() != own or _is_worker(program.args)) and os.environ.get("RANK", "0") == "0" and _takes_apart:
        sys.exit(status)
    _leave(status)


def _leave(status: int) -> NoReturn:
    """Ends this process as Python does, but without taking apart what its server has loaded: that takes longer than all that a job does."""
    threading._shutdown()  # type: ignore[attr-defined]
    spare_operators()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr, *(item for item in gc.get_objects() if issubclass(type(item), STREAM) and not item.closed)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
