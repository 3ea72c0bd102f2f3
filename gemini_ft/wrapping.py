"""In workers of ``gemini run``, ``deepspeed.initialize`` protects every engine whose configuration has a "gemini" section.

So a script that is not changed at all is protected: whatever calls ``deepspeed.initialize`` (the script, accelerate,
transformers' Trainer) finds the function that is put in its place as soon as deepspeed has been imported. For an engine
without the section it does nothing but call the original. ``GEMINI_WRAP=0`` leaves deepspeed as it is.

Standard library only: every worker runs this before its script, whatever the script is.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "deepspeed"

protected = False  # whether this process has a protected engine; `gemini_ft.deepspeed.attach` says so


def install() -> None:
    """Replace ``deepspeed.initialize``: now if deepspeed is loaded, else as soon as it is. May be called any number of times."""
    if os.environ.get("GEMINI_WRAP") == "0":
        return
    if (module := sys.modules.get(_MODULE)) is not None:
        _wrap(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _wrap(module: ModuleType) -> None:
    original = getattr(module, "initialize", None)
    if original is not None and not hasattr(original, "_gemini_original"):
        module.initialize = _protecting(original)  # type: ignore[attr-defined]


def _protecting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize(*arguments: Any, **named: Any) -> Any:
        results = original(*arguments, **named)
        engine = results[0]
        config = getattr(engine, "config", None)
        # Engines without an optimizer only infer: ZeRO 3 evaluates with the configuration of the training.
        if isinstance(config, dict) and "gemini" in config and getattr(engine, "basic_optimizer", None) is not None:
            importlib.import_module("gemini_ft.deepspeed").attach(engine)
        return results

    initialize._gemini_original = original  # type: ignore[attr-defined]
    return initialize


class _Finder(MetaPathFinder):
    """Lets the other finders find deepspeed, and replaces its function once it has been loaded."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        for finder in sys.meta_path:
            find = None if isinstance(finder, _Finder) else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _WrappingLoader(spec.loader)
                return spec
        return None


class _WrappingLoader(Loader):
    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # resource readers and debuggers ask loaders for more than import does

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        _wrap(module)
