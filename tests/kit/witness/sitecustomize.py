"""Makes agents and workers of a real job write their history: PYTHONPATH names this folder, and WITNESS the file."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from typing import Any

_WATCHED = {"gemini_ft.agent.stream": "watch_agent", "gemini_ft.worker.recorder": "watch_worker"}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function of `witnessing` when one of the modules has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _WATCHED:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_watch(module: Any) -> None:
                run(module)
                _watch(name)

            spec.loader.exec_module = run_and_watch  # type: ignore[method-assign]
        return spec


def _watch(name: str) -> None:
    getattr(importlib.import_module("witnessing"), _WATCHED[name])(sys.modules[name])


if "WITNESS" in os.environ:
    sys.meta_path.insert(0, _AfterImport())
    for loaded in _WATCHED.keys() & sys.modules.keys():
        _watch(loaded)
