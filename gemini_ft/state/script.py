"""Tells a script's own code from libraries': its modules, its frames and their variables."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from gemini_ft.state.fields import is_a

_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(os.__file__).parent))  # this package, and Python's, with what is installed there
_UNSHARED = 3  # references to the dict of a frame's variables: of the frame, of who looks at it, and of the count itself
_imported: tuple[int, str] = (0, "")  # how many modules there were at the last look, and the one that was imported last
_known: dict[str, ModuleType] = {}  # those of the script among them, by name


def script_modules() -> list[ModuleType]:
    """The modules of the script that have been imported."""
    global _imported, _known
    now = len(sys.modules), next(reversed(sys.modules))
    if now != _imported or any(sys.modules.get(name) is not module for name, module in _known.items()):
        # By name: a forked process would copy the pages of thousands of modules, as references to them are counted.
        own = [(name, sys.modules.get(name)) for name in [*sys.modules] if name != "builtins" and not is_of_library(name)]
        _imported, _known = now, {name: module for name, module in own if module is not None and is_a(module, ModuleType)}
    return [*_known.values()]


def script_frames() -> Iterator[FrameType]:
    """The frames of the script's own code that are under way, the innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not is_library_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


@functools.cache
def is_of_library(module: str | None) -> bool:
    """Whether what has been defined in a module, by its name, is not of the script's own code."""
    if module is None or module == "builtins":
        return False
    return _is_library(module.partition(".")[0]) or _is_library(module)


def is_of_script(function: Any) -> bool:
    """Whether a function, a method or an object that is called has been defined by the script's own code."""
    while is_a(function, functools.partial):
        function = function.func
    return not is_of_library(getattr(function, "__module__", None))


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
