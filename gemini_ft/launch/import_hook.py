"""Runs a function right after a module has been imported, whatever imports it. Standard library only."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(names: Collection[str], then: Callable[[ModuleType], None]) -> None:
    """Calls ``then`` with each of the modules as soon as it has been loaded. Asked again for the same, this does nothing.

    Modules that are loaded already are the caller's business.
    """
    if not any(isinstance(finder, Finder) and finder.then is then and set(names) <= set(finder.names) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(names, then))


def once_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Calls ``then`` with the module: now if it is loaded, else as soon as it is. ``GEMINI_WRAP=0`` keeps it from doing so."""
    if os.environ.get("GEMINI_WRAP") == "0":
        return
    if (module := sys.modules.get(name)) is not None:
        then(module)
    else:
        after_import((name,), then)


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
