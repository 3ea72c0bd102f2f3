"""A slot gives its memory back whatever has become of the device that it was pinned for."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gemini_ft.state.copy_plan import MappedSlot

SIZE = 4096  # bytes


def test_a_slot_is_closed_though_its_device_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error that stays, CUDA refuses everything; the first error is the one to be seen."""

    def refused(_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 700)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    fd = os.memfd_create("slot")
    os.ftruncate(fd, SIZE)
    slot = MappedSlot(fd, 0, SIZE, torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device", refused)
    slot.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
