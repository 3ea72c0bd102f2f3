"""Runs a program in this process as ``python SCRIPT`` or ``python -m MODULE`` would, in a new ``__main__``.

Both kinds of workers of ``gemini run`` come here: those that are forked (`gemini_ft.launch.forkserver`) and those that are started cold,
by `cold_command`. They differ from ``python -u SCRIPT`` in three points only: ``deepspeed.initialize`` knows the "gemini" section
(`gemini_ft.launch.autoprotect`), torch's launcher learns of an exception, and the worker dies with it.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib.machinery
import io
import json
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import gemini_ft
from gemini_ft.errors import is_refusal
from gemini_ft.launch import autoprotect, build_locks, notes

_STARTERS = (
    __file__,
    os.path.join(os.path.dirname(__file__), "forkserver.py"),
    runpy.__file__,
    "<frozen runpy>",
    "<string>",  # of `starter`
)
_COPY = "--copy="
_PR_SET_PDEATHSIG = 1
_USAGE = 2  # status with which argparse, and all that is built on it, refuse what they are given
# Bases of exceptions that come from outside of the script, and go away as they have come.
_PASSING = {"OSError", "DistError", "AgentError", "PeerError", "StorageError", "CorruptDataError", "BotoCoreError", "ClientError"}
_PASSING |= {"AcceleratorError", "KeyboardInterrupt"}
_LASTING = {"FileNotFoundError", "NotADirectoryError", "IsADirectoryError", "PermissionError"}  # of the OSErrors
_OF_PEERS = re.compile(
    # Data loaders' processes may be told to end before the rank that is stopped with them, because another has failed.
    r"nccl|gloo|connection|timed? ?out|socket|broken pipe|cuda error|another rank|killed by signal: (terminated|killed)",
    re.IGNORECASE,
)
_REPORTED = 4000  # characters of an exception that the launcher's report repeats; the worker's own stderr has all


has_ended_well = False  # whether the script of `run` has come to its end with status 0; elsewhere nobody knows the status at the exit


def starter(module: str) -> tuple[str, str]:
    """Arguments with which Python calls ``module.main()``.

    Not ``-m``, which looks in the working directory first, even for the standard library: that may be a folder like /tmp,
    and ``python script.py`` would not look there. The script's own folder is put in front by ``main``.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(gemini_ft.__file__)))
    find = f"sys.path.append({root!r}); import {module} as starter; sys.path.pop()"
    return "-c", f"import sys; sys.flags.safe_path or sys.path.pop(0); {find}; starter.main()"


def cold_command(line: Sequence[str], copy: Path | None = None) -> tuple[str, ...]:
    """The command line that runs the program of ``line`` through this module: ``python -u``, then [-m] script or module, and its arguments.

    Args:
        line: as torch's launcher would run it.
        copy: file with the text of a script that came through a pipe.
    """
    return (*line[:2], *starter(__name__), str(os.getpid()), *([f"{_COPY}{copy}"] if copy else []), *line[2:])


def main() -> None:
    """Runs, in a worker that is started cold, what the command line names: ``LAUNCHER [--copy=FILE] [-m] SCRIPT ARGUMENTS...``."""
    copy, program = None, sys.argv[2:]
    die_with(int(sys.argv[1]))
    if program[0].startswith(_COPY):
        copy = program.pop(0).removeprefix(_COPY)
    if not sys.flags.safe_path:
        sys.path.insert(0, import_root(program))
    run(program, copy)


def import_root(program: Sequence[str]) -> str:
    """The first entry of ``sys.path`` as Python sets it: the working directory for a module, else the script's folder."""
    if program[0] == "-":
        return ""
    return os.getcwd() if program[0] == "-m" else os.path.dirname(os.path.realpath(program[0]))


def die_with(launcher: int) -> None:
    """Makes the kernel kill this worker when its parent, the ``launcher``, dies: to the other hosts this one is lost then.

    Not by SIGTERM, which scripts take for the end of the whole job: Lightning's rank 0 makes all ranks stop at it, with status 0.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)  # it has died before


def take_rank(environ: Mapping[str, str]) -> None:
    """Corrects the rank in modules that have read it while they were imported, for the sake of another process or attempt."""
    for module, variable in (("lightning_utilities.core.rank_zero", "RANK"), ("torchmetrics.utilities.prints", "LOCAL_RANK")):
        if module in sys.modules and variable in environ:
            sys.modules[module].rank_zero_only.rank = int(environ[variable])


def run(program: Sequence[str], copy: str | None = None) -> None:
    """Runs ``[-m] name arguments...`` as Python itself does, in a new ``__main__``; plus the hooks for DeepSpeed and transformers.

    Args:
        program: script and arguments, or ``-m``, module name and arguments; the script ``-`` came through standard input.
        copy: file with the text of a script that came through a pipe.
    """
    global has_ended_well
    autoprotect.install()
    build_locks.install()
    sys.orig_argv = [sys.executable, "-u", *program]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    if "__mp_main__" in sys.modules:  # multiprocessing has been imported already, and has set it to the __main__ of that time
        sys.modules["__mp_main__"] = main
    try:
        if program[0] == "-m":
            sys.argv = list(program[1:])
            runpy._run_module_as_main(program[1])  # type: ignore[attr-defined]  # what `python -m` itself calls
        else:
            sys.argv = list(program)
            _run_script(program[0], copy, main)
    except SystemExit as end:
        refused = bool(end.code) and is_refusal(end.__context__)  # a script that shows its errors by itself
        if end.code == _USAGE or isinstance(end.code, str) or refused:  # any other number is a word between the script and who starts it
            record(end)
        if refused:
            notes.say(notes.REFUSED)
        if end.code or not autoprotect.at_end:
            has_ended_well = not end.code
            raise
    except (Exception, KeyboardInterrupt) as error:
        record(error)
        sys.excepthook = partial(_show, sys.excepthook)
        status = getattr(error, "exit_status", 1)  # of this package's errors, where the launcher has to know which one it was
        if is_refusal(error):
            notes.say(notes.REFUSED)  # ahead of the end, at which the other workers fail, too
        if status == 1 or not isinstance(status, int):
            raise
        sys.last_value = error  # as Python leaves it for exit handlers
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(status) from None
    has_ended_well = True
    if autoprotect.at_end:
        _leave()


def _leave() -> None:
    """Ends a finished process as Python does, but without taking the interpreter apart.

    With DeepSpeed's process groups that ends in ``terminate called without an active exception`` now and then, and torch's
    launcher takes it for a failure of the job.
    """
    global has_ended_well
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's own threads
    try:
        for end in autoprotect.at_end:
            end()
    except Exception as error:
        record(error)
        raise
    has_ended_well = True
    atexit._run_exitfuncs()
    status = 0
    for stream in [item for item in gc.get_objects() if isinstance(item, io.IOBase) and not item.closed]:
        try:
            stream.flush()
        except Exception:
            status = 120 if stream is sys.stdout else status  # as Python itself ends then
    os._exit(status)


def _run_script(script: str, copy: str | None, main: types.ModuleType) -> None:
    path = "<stdin>" if script == "-" else os.path.abspath(script)
    if script == "-":
        main.__loader__ = importlib.machinery.BuiltinImporter
    else:
        main.__file__ = path
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        main.__dict__["__cached__"] = None
    # Under a pipe's own name Python would open it again to show a line of a traceback, and wait for a writer without an end.
    name = path if script == "-" or not copy else f"<{path}>"
    with io.open_code(copy or path) as file:
        code = compile(file.read(), name, "exec", dont_inherit=True)  # not with this module's __future__ imports
    exec(code, main.__dict__)


def record(error: BaseException) -> None:
    """Writes the exception where torch's launcher looks for its report, in the form it expects.

    Whole or not at all: the launcher itself fails on a file whose writer it has killed half-way. Torch's own
    ``record`` writes such files.
    """
    error.__traceback__ = _frames_of_script(error.__traceback__)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or isinstance(error, KeyboardInterrupt):
        return
    is_exit = isinstance(error, SystemExit)
    errors = [error, error.__context__] if is_exit and error.__context__ is not None else [error]  # why the script has ended itself
    message = _shortened(", after ".join("".join(traceback.format_exception_only(each)).rstrip("\n") for each in errors))
    *_, innermost = [("?", 0), *((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))]
    if isinstance(error, SyntaxError):  # of a file that no frame is in
        innermost = (error.filename or "?", error.lineno or 0)
    extra = {
        "py_callstack": message if is_exit else _shortened("".join(traceback.format_exception(error))),
        "timestamp": str(int(time.time())),
        # The entries below are read by `gemini_ft.launch.endings`, not by torch.
        "kinds": [kind.__name__ for each in errors for kind in type(each).__mro__],
        "place": "{}:{}".format(*innermost),
        "step": notes.step,
    }
    with contextlib.suppress(OSError), open(f"{path}.part", "w") as file:  # a full disk must not hide the exception
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)
        file.close()
        os.replace(f"{path}.part", path)


def may_go_away(kinds: Collection[str], text: str) -> bool:
    """Whether an exception, by the names of its bases and its text, comes from a host, network, store or another rank."""
    return bool(_PASSING & {*kinds} and not _LASTING & {*kinds}) or _OF_PEERS.search(text) is not None


def _shortened(text: str) -> str:
    """The text for a report, without its middle if it is long."""
    left_out = len(text) - _REPORTED
    if left_out <= 0:
        return text
    return f"{text[: _REPORTED // 2]}\n... {left_out} characters, which the worker has written to its stderr ...\n{text[-_REPORTED // 2 :]}"


def _show(show: Callable[..., object], kind: type[BaseException], error: BaseException, frames: types.TracebackType | None) -> None:
    frames = _frames_of_script(frames)
    show(kind, error.with_traceback(frames), frames)


def _frames_of_script(frames: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the frames between the interpreter and the script."""
    while frames is not None and frames.tb_frame.f_code.co_filename in _STARTERS:
        frames = frames.tb_next
    return frames
