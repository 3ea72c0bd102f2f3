"""Makes torch know two devices of the kind ``private`` (private_device.cpp, compiled once for each torch); import it before any use."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import cpp_extension
from torch.utils.backend_registration import rename_privateuse1_backend


class Event:
    """A place in the queue of a device that has none: all is done."""

    def __init__(self, **_: Any) -> None:
        self.when = 0.0

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.when - self.when)


class Stream:
    """The only queue, in which nothing ever waits."""

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.when = time.monotonic()
        return event

    def synchronize(self) -> None:
        pass


def _begin() -> None:
    built = cpp_extension.load("private_device", [str(Path(__file__).with_suffix(".cpp"))], extra_cflags=["-O0", "-w"])
    rename_privateuse1_backend("private")
    module, stream = ModuleType("torch.private"), Stream()
    vars(module).update(
        Event=Event,
        Stream=Stream,
        current_stream=lambda device=None: stream,
        stream=lambda stream: contextlib.nullcontext(),
        set_device=lambda device: built.set_device(torch.device(device).index or 0),
        current_device=built.current_device,
        device_count=lambda: 2,
        is_available=lambda: True,
        is_initialized=lambda: True,
        synchronize=lambda device=None: None,
        get_rng_state_all=lambda: [torch.zeros(1, dtype=torch.uint8)] * 2,  # work that draws numbers is the CPU's, with its generator
        set_rng_state=lambda state, device=None: None,
        manual_seed_all=lambda seed: None,
        _is_in_bad_fork=lambda: False,
    )
    torch._register_device_module("private", module)  # type: ignore[no-untyped-call]
    built.begin()


_begin()
