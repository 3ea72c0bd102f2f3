"""Every wait between host and device, and between streams, that the package has; and how a process is made to lack one of them."""

from __future__ import annotations

import importlib
import inspect
import types
from pathlib import Path
from typing import Any

# Scenario of tests/state/test_accelerator.py that must fail, a wait as the source has it, and what stands in its place in the mutant.
WAITS: list[tuple[str, str, str]] = [
    ("snapshot", "accelerator.stream_of(device).wait_event(job.copied)", "pass"),
    ("one after the other", "if self._job is not None:\n            self._let_write(self._job)", "pass"),
    (
        "snapshot",
        "            if job.copied is not None:\n                self._judge(job)\n",
        "",
    ),  # no wait, but asked when the wait is queued
    ("snapshot", "stream.wait_event(job.ready)", "pass"),
    ("snapshot", "with accelerator.on_stream(stream, device):", "if True:"),
    ("several batches", "        event.synchronize()\n", ""),
    ("lateness", "        now.synchronize()\n", ""),
    ("events", "return stream.record_event(_module(device).Event(**options))", "return _module(device).Event(**options)"),
    (
        "readiness",
        "accelerator.event_on(accelerator.stream_of(self.device), self.device, timed=True)",
        "accelerator.module_of(self.device).Event()",
    ),
    ("staging", "torch._foreach_copy_(self._staged, [copy.view for copy in self._mutable])", "self._staged = self._staged"),
    ("agent dies", "self._stream.synchronize()", "pass"),
    ("lanes", "accelerator.stream_of(self._device).record_event()", "accelerator.module_of(self._device).Event()"),
    ("lanes", "self._stream.wait_event(job.ready)", "pass"),
    ("lanes", "self._stream.record_event()", "accelerator.module_of(self._device).Event()"),
    ("lanes", "accelerator.stream_of(self._device).wait_event(job.finished)", "pass"),
    ("turns", "stream.synchronize()", "pass"),
    ("turns", "with module.stream(stream):", "if True:"),
    ("measuring", "module.synchronize(device)", "pass"),
    ("courier", "module.current_stream(self._device).synchronize()", "pass"),
    ("courier", "accelerator.on_stream(accelerator.own_stream(device), device)", "contextlib.nullcontext()"),
]


def source_without(module: Any, wait: str, instead: str) -> str:
    """The source of a module that lacks one wait."""
    source = Path(module.__file__).read_text()
    assert source.count(wait) == 1
    return source.replace(wait, instead)


def take_away(name: str, wait: str, instead: str) -> None:
    """Lets this process go on without one wait of a module, whoever has imported from it."""
    module, mutant = importlib.import_module(name), types.ModuleType(name)
    exec(compile(source_without(module, wait, instead), name, "exec"), mutant.__dict__)
    _recode(vars(module), vars(mutant), name)


def _recode(real: Any, mutant: Any, name: str) -> None:
    for key, value in list(real.items()):
        other = mutant.get(key)
        if isinstance(value, type) and value.__module__ == name:
            _recode(vars(value), vars(other), name)
        elif isinstance(value, types.FunctionType) and value.__module__ == name:
            inspect.unwrap(value).__code__ = inspect.unwrap(other).__code__
