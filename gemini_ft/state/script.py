"""Tells a script's own code from libraries': its modules, its frames and their variables."""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sys
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(os.__file__).parent))  # this package, and Python's, with what is installed there
_UNSHARED = 3  # references to the dict of a frame's variables: of the frame, of who looks at it, and of the count itself


def script_modules() -> list[ModuleType]:
    """The modules of the script that have been imported."""
    # By name: a forked process would copy the pages of thousands of modules, as references to them are counted.
    own = [name for name in [*sys.modules] if name != "builtins" and not is_of_library(name)]
    return [module for module in map(sys.modules.get, own) if module is not None and issubclass(type(module), ModuleType)]


def script_frames() -> Iterator[FrameType]:
    """The frames of the script's own code that are under way, the innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not is_library_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def set_later() -> Callable[[FunctionType], frozenset[str]]:
    """Looks at the script's functions that are under way; returns what says which variables of another one these are still going to set.

    That is of a function the variables that it encloses, and that are those of a function under way which sets them in what is left of it,
    or of the outermost loop that it is in. Others of the same name are not meant.
    """
    frames = [frame for frame in script_frames() if frame.f_code.co_cellvars or frame.f_code.co_freevars]
    found: list[tuple[str, Container[CodeType] | None, str]] = []  # variable; codes of the functions that share it, if known; file
    for number, frame in enumerate(frames):
        stores, jumps = _stores_and_jumps(frame.f_code)
        begin = min([frame.f_lasti, *(to for to, at in jumps if to < frame.f_lasti < at)])  # of the outermost loop that is under way
        for name in {name for name, at in stores if at > begin}:
            owners = (each.f_code for each in frames[number:] if name in each.f_code.co_cellvars)
            sharers = (_sharers(owner, name) for owner in owners if owner is frame.f_code or frame.f_code in _sharers(owner, name))
            found.append((name, next(sharers, None), frame.f_code.co_filename))

    def names(function: FunctionType) -> frozenset[str]:
        code = function.__code__
        return frozenset(
            name
            for name, sharers, file in found
            if name in code.co_freevars and (code in sharers if sharers is not None else file == code.co_filename)
        )

    return names


@functools.cache
def _stores_and_jumps(code: CodeType) -> tuple[list[tuple[str, int]], list[tuple[int, int]]]:
    """The places where a function sets variables that it shares with others, and (to, from) of its jumps."""
    steps = [*dis.get_instructions(code)]
    stores = [(each.argval, each.offset) for each in steps if each.opname == "STORE_DEREF"]
    return stores, [(each.argval, each.offset) for each in steps if "JUMP" in each.opname and isinstance(each.argval, int)]


@functools.cache
def _sharers(code: CodeType, name: str) -> frozenset[CodeType]:
    """The codes of the functions inside of one that share its variable of this name."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType) and name in each.co_freevars]
    return frozenset(inner).union(*(_sharers(each, name) for each in inner))


@functools.cache
def is_of_library(module: str | None) -> bool:
    """Whether what has been defined in a module, by its name, is not of the script's own code."""
    if module is None or module == "builtins":
        return False
    return _is_library(module.partition(".")[0]) or _is_library(module)


@functools.cache
def _is_library(module: str) -> bool:
    """Whether a module, which may be a package, is Python's or is installed as libraries are."""
    return module in sys.stdlib_module_names or is_library_file(getattr(sys.modules.get(module), "__file__", None) or "")


def is_library_file(file: str) -> bool:
    """Whether a file of code is none of the script's own."""
    return "site-packages" in file or "dist-packages" in file or file.startswith(_LIBRARIES)  # the latter are Debian's


def variables_of(frame: FrameType) -> dict[str, Any]:
    """The local variables of a frame, which does not keep them alive afterwards.

    Before Python 3.13 the dict of a function's variables stays in its frame once it was asked for. It is emptied, unless the script has
    asked for it as well (``locals()``); the variables themselves lie elsewhere.
    """
    kept = frame.f_locals
    found = dict(kept)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getrefcount(kept) == _UNSHARED:
        kept.clear()
    return found
