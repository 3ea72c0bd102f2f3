"""Keeps warnings that other packages give while they are imported from being errors: they depend on what else is installed."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

_FOREIGN = {"site-packages", "dist-packages"}  # one of the folders that hold a package which is not ours


class Quiet(MetaPathFinder):
    """Lets the other finders find modules, and has those of other packages loaded without warnings."""

    def __init__(self) -> None:
        self._lock, self._loading, self._stack = threading.Lock(), 0, ExitStack()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if self._loading or fullname.partition(".")[0] == "gemini_ft":  # what a foreign module imports is as quiet as it is
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find else None
            if spec is not None:
                if isinstance(spec.loader, SourceFileLoader | ExtensionFileLoader) and _FOREIGN & set(Path(spec.loader.path).parts):
                    self._silence(spec.loader)
                return spec
        return None

    def _silence(self, loader: SourceFileLoader | ExtensionFileLoader) -> None:
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with self._quiet():
                load(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]  # each module has a loader of its own

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        # Filters belong to the process: the first import that begins changes them, the last one that ends changes them back.
        with self._lock:
            if self._loading == 0:
                self._stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
            self._loading += 1
        try:
            yield
        finally:
            with self._lock:
                self._loading -= 1
                if self._loading == 0:
                    self._stack.close()
