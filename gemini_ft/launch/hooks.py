"""Hooks into other packages, called as soon as those are imported, and into the end of the script. Standard library only."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

DEEPSPEED_SECTIONS = ("gemini", "gradient_pipeline")  # our sections of DeepSpeed's configuration

_extensions: dict[str, tuple[str, Callable[..., Any]]] = {}  # module -> the function in it that is extended, and its extension
at_end: dict[Callable[[], None], None] = {}  # called when the script has ended well, in this order, before the process leaves in haste
has_ended_well = False  # whether the script of a worker has come to its end with status 0; elsewhere nobody knows the status at the exit


def extend(module: str, function: str, extension: Callable[..., Any]) -> None:
    """Has calls of a function go to ``extension``, whose first argument is the original: as soon as the module is loaded.

    Args:
        module: its full name.
        function: the function's name in it, as ``name`` or ``Class.name``; one that is not there is not extended.
        extension: the function that is called.
    """
    if os.environ.get("GEMINI_WRAP") == "0":
        return
    _extensions[module] = function, extension
    if (loaded := sys.modules.get(module)) is not None:
        _extend(loaded)
    else:
        after_import((module,), _extend)


def _extend(module: ModuleType) -> None:
    path, extension = _extensions[module.__name__]
    kind, _, name = path.rpartition(".")
    owner = getattr(module, kind, None) if kind else module
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "_gemini_original"):
        return

    @functools.wraps(original)
    def extended(*arguments: Any, **named: Any) -> Any:
        return extension(original, *arguments, **named)

    extended._gemini_original = original  # type: ignore[attr-defined]
    setattr(owner, name, extended)


def after_import(names: Collection[str], then: Callable[[ModuleType], None]) -> None:
    """Calls ``then`` with each of the modules as soon as it has been loaded. Asked again for the same, this does nothing.

    Modules that are loaded already are the caller's business.
    """
    if not any(isinstance(finder, Finder) and finder.then is then and set(names) <= set(finder.names) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(names, then))


class Finder(MetaPathFinder):
    """Lets the other finders find the modules, and has their loader followed by ``then``."""

    def __init__(self, names: Collection[str], then: Callable[[ModuleType], None]) -> None:
        self.names, self.then = names, then

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.names:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _FollowedLoader(spec.loader, self.then)
                return spec
        return None


class _FollowedLoader(Loader):
    def __init__(self, inner: Loader, then: Callable[[ModuleType], None]) -> None:
        self._inner, self._then = inner, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # resource readers and debuggers ask loaders for more than import does

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        self._then(module)
