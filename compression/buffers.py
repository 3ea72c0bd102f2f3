"""Large buffers in host memory that are used again as soon as nobody holds them.

The C library gives large blocks back to the kernel when they are freed, and the kernel zeroes every page of a fresh one: for a group
of 128 MB that took more processor time than compression itself. Buffers are lent here instead. A buffer is free again when the last
tensor or array that shares its memory is gone, and goes back to the system when it has not been lent for a while, whether or not
another one is asked for: as long as there are any, a thread looks now and then.
"""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGN = 64  # bytes


@dataclass
class _Buffer:
    memory: np.ndarray[Any, np.dtype[np.uint8]]
    lent: weakref.ref[Any]  # dead: nobody holds it
    used: float  # time.monotonic() of the last loan


class Buffers:
    """Lends memory. Safe to use from several threads.

    Attributes:
        large: bytes from which on memory is lent; smaller blocks stay in the C library's own lists.
        idle: seconds since the last loan after which a buffer that nobody holds is given back, within as many seconds more.
    """

    def __init__(self, large: int = 2**20, idle: float = 10.0) -> None:
        self.large, self.idle = large, idle
        self._lock = threading.Lock()
        self._buffers: list[_Buffer] = []
        self._timer: threading.Timer | None = None

    def empty(self, count: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
        """A tensor of ``count`` elements whose values are undefined; on an accelerator, whose allocator does all this, a plain one."""
        nbytes = count * dtype.itemsize
        if nbytes < self.large or (device is not None and device.type != "cpu"):
            return torch.empty(count, dtype=dtype, device=device)
        return torch.from_numpy(self.lend(nbytes)).view(dtype)

    def zeros(self, count: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
        return self.empty(count, dtype, device).zero_()

    def copy(self, tensor: Tensor) -> Tensor:
        return self.empty(tensor.numel(), tensor.dtype, tensor.device).copy_(tensor)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, lent and free."""
        with self._lock:
            return sum(buffer.memory.nbytes for buffer in self._buffers)

    def clear(self) -> None:
        """Forgets all buffers: nothing that is lent now is used again."""
        with self._lock:
            self._buffers = []

    def lend(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """``nbytes`` bytes, which are lent as long as anything shares their memory."""
        now = time.monotonic()
        with self._lock:
            self._give_back(now)
            fitting = [buffer for buffer in self._buffers if buffer.lent() is None and nbytes <= buffer.memory.nbytes <= 2 * nbytes]
            buffer = min(fitting, key=lambda each: each.memory.nbytes, default=None) or self._made(nbytes, now)
            # Whatever shares its memory must hold this very object. An array's views hold the array at the bottom instead, whose weak
            # reference would say nothing; with a memoryview in between they stop here.
            part = np.frombuffer(buffer.memory.data[:nbytes], dtype=np.uint8)
            buffer.lent, buffer.used = weakref.ref(part), now
            self._look_later()
            return part

    def _give_back(self, now: float) -> None:
        self._buffers = [buffer for buffer in self._buffers if buffer.lent() is not None or now - buffer.used < self.idle]

    def _look_later(self) -> None:
        """Starts the timer, unless it runs or there is no buffer. A forked process inherits the timer without its thread."""
        if self._buffers and (self._timer is None or not self._timer.is_alive()):
            self._timer = threading.Timer(self.idle, self._look)
            self._timer.daemon = True
            with suppress(RuntimeError):  # no thread starts while the interpreter ends; the next loan looks too
                self._timer.start()

    def _look(self) -> None:
        with self._lock:
            self._give_back(time.monotonic())
            self._timer = None
            self._look_later()

    def _made(self, nbytes: int, now: float) -> _Buffer:
        raw = np.empty(nbytes + _ALIGN, dtype=np.uint8)
        begin = -raw.ctypes.data % _ALIGN
        buffer = _Buffer(raw[begin : begin + nbytes], weakref.ref(raw), now)
        self._buffers.append(buffer)
        return buffer


BUFFERS = Buffers()
"""The process's own."""
