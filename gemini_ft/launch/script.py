"""Runs a program in this process as ``python SCRIPT`` or ``python -m MODULE`` would, in a new ``__main__``.

Both kinds of workers of ``gemini run`` come here: those that are forked (`gemini_ft.launch.forkserver`) and those that are started cold,
by `cold_command`. They differ from ``python -u SCRIPT`` in three points only: ``deepspeed.initialize`` knows the "gemini" section
(`gemini_ft.launch.autoprotect`), torch's launcher learns of an exception, and the worker dies with it.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import importlib.machinery
import io
import os
import runpy
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gemini_ft
from gemini_ft.errors import FINAL
from gemini_ft.launch import autoprotect, build_locks, hooks, notes
from gemini_ft.launch.failures import frames_of_script, raise_own, record, refusal_behind

_COPY = "--copy="
_PR_SET_PDEATHSIG = 1
STREAM: Any = io.IOBase.__base__  # of which all streams are subclasses; that class itself looks at registrations, too
_USAGE = 2  # status with which argparse, and all that is built on it, refuse what they are given


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

    ``line``: as torch's launcher would run it. ``copy``: file with the text of a script that came through a pipe.
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


def run(program: Sequence[str], copy: str | None = None) -> None:
    """Runs ``[-m] name arguments...`` as Python itself does, in a new ``__main__``; plus the hooks for DeepSpeed and transformers.

    Args:
        program: script and arguments, or ``-m``, module name and arguments; the script ``-`` came through standard input.
        copy: file with the text of a script that came through a pipe.
    """
    autoprotect.install()
    build_locks.install()
    sys.orig_argv = [sys.executable, "-u", *program]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    if "__mp_main__" in sys.modules:  # multiprocessing has been imported already, and has set it to the __main__ of that time
        sys.modules["__mp_main__"] = main
    try:
        try:
            if program[0] == "-m":
                sys.argv = list(program[1:])
                runpy._run_module_as_main(program[1])  # type: ignore[attr-defined]  # what `python -m` itself calls
            else:
                sys.argv = list(program)
                _run_script(program[0], copy, main)
        except BaseException as error:
            raise_own(error)
            raise
    except SystemExit as end:
        refused = bool(end.code) and refusal_behind(end) is not None  # a script that shows its errors by itself
        if end.code == _USAGE or isinstance(end.code, str) or refused:  # any other number is a word between the script and who starts it
            record(end)
        if refused:
            notes.say(notes.REFUSED)
        if end.code or not hooks.at_end:
            if not end.code:
                _end_well()
            raise
    except (Exception, KeyboardInterrupt) as error:
        record(error)
        sys.excepthook = partial(_show, sys.excepthook)
        status = getattr(error, "exit_status", 1)  # of this package's errors, where the launcher has to know which one it was
        if refusal_behind(error) is not None:
            status = FINAL
            notes.say(notes.REFUSED)  # ahead of the end, at which the other workers fail, too
        if isinstance(error, KeyboardInterrupt):
            raise  # Python ends by the signal then
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__  # for exit handlers
        sys.last_exc = error  # type: ignore[attr-defined]  # from Python 3.12 on
        sys.excepthook(type(error), error, error.__traceback__)
        _leave(status if isinstance(status, int) else 1)
    if hooks.at_end:
        _leave(0)
    _end_well()


def _end_well() -> None:
    hooks.has_ended_well = True
    notes.say_ended()


def _leave(status: int) -> None:
    """Ends a process as Python does, but without taking the interpreter apart.

    After an exception that takes half a second for torch and what is built on it, and the other ranks wait for it. With DeepSpeed's process
    groups it ends in ``terminate called without an active exception`` now and then, and torch's launcher takes it for a failure of the job.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's own threads
    if not status:
        try:
            for end in hooks.at_end:
                end()
        except Exception as error:
            record(error)
            raise
        _end_well()
    spare_operators()
    atexit._run_exitfuncs()
    for stream in [item for item in gc.get_objects() if issubclass(type(item), STREAM)]:  # no proxy is asked
        try:
            if not stream.closed:  # of one that is detached, as a script's sys.stdout may be, that is an error, too
                stream.flush()
        except Exception:
            status = 120 if stream is sys.stdout and not status else status  # as Python itself ends then
    os._exit(status)


def spare_operators() -> None:
    """Keeps exit handlers from unregistering torch's operators one by one, which takes longer than all that they do else."""
    registry: dict[Any, Any] = getattr(weakref.finalize, "_registry", {})
    for finalizer, call in registry.copy().items():  # threads of the script may still add to it, or take away
        if type(call.func) is types.FunctionType and call.func.__module__ == "torch.library":  # no proxy is asked
            registry.pop(finalizer, None)


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


def _show(show: Callable[..., object], kind: type[BaseException], error: BaseException, frames: types.TracebackType | None) -> None:
    frames = frames_of_script(frames)
    show(kind, error.with_traceback(frames), frames)
