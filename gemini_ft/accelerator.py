"""The accelerator under the training, whichever one torch has: its streams and events, and host memory that it can copy beside its work."""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from typing import Any, Protocol, Self

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: only this thread's own captures count


class Event(Protocol):
    """A place in a stream's queue."""

    def query(self) -> bool:
        """Whether the device has come to it."""

    def synchronize(self) -> None:
        """Returns when it has."""

    def elapsed_time(self, end_event: Self) -> float:
        """Milliseconds of the device from here to a later event; both must be timed, and over."""


class DeviceStream(Protocol):
    """A queue of the device."""

    def wait_event(self, event: Event) -> None:
        """Holds back what is queued from now on until ``event`` is over."""

    def record_event(self, event: Event | None = None) -> Event:
        """Puts an event behind what has been queued."""

    def synchronize(self) -> None:
        """Returns when all that has been queued is done."""


_Event = Event


class DeviceModule(Protocol):
    """The module of a kind of device, `torch.cuda` for example."""

    def Event(self, **options: bool) -> _Event:
        """Makes an event, which no stream has yet."""

    def Stream(self, device: torch.device | None = None) -> DeviceStream:
        """Makes a queue, of the current device unless another is given."""

    def current_stream(self, device: torch.device | None = None) -> DeviceStream:
        """The queue into which this thread's work goes."""

    def stream(self, stream: DeviceStream) -> contextlib.AbstractContextManager[object]:
        """Lets this thread's work go into another queue meanwhile."""

    def set_device(self, device: torch.device) -> None:
        """Makes a device this thread's current one."""

    def synchronize(self, device: torch.device) -> None:
        """Returns when all queues of a device are empty."""


def module_of(device: torch.device) -> DeviceModule | None:
    """The module with the streams and events of a device; None for the CPU, which has no queues."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def _module(device: torch.device) -> DeviceModule:
    module = module_of(device)
    assert module is not None
    return module


def enter(device: torch.device) -> None:
    """Lets a new thread use a device. It begins on device 0, whatever the rank's is, where its first call would take memory.

    CUDA refuses a thread questions about events while another one captures a graph, whose capture ends with that; not after this.
    """
    _module(device).set_device(device)
    if device.type == "cuda":
        with contextlib.suppress(OSError, AttributeError):  # ROCm
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


def own_stream(device: torch.device) -> DeviceStream:
    """A queue for a new thread."""
    enter(device)
    return _module(device).Stream()


def on_stream(stream: DeviceStream, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Lets this thread's work go into another queue meanwhile."""
    return _module(device).stream(stream)


def stream_of(device: torch.device) -> DeviceStream:
    """The queue into which this thread's work on an accelerator goes."""
    return _module(device).current_stream(device)


def event_on(stream: DeviceStream, device: torch.device, *, timed: bool = False, sleeps: bool = False) -> Event:
    """An event behind what ``stream`` has been given; ``sleeps``: who waits for it gives its core away, where the device can do that."""
    options = {"enable_timing": timed} | ({"blocking": sleeps} if device.type == "cuda" else {})
    return stream.record_event(_module(device).Event(**options))


def give_way(stream: DeviceStream, device: torch.device) -> None:
    """Lets copies of other queues go before those that ``stream`` is given next, where the device's driver can be told.

    The engine that copies to the host works a queue off to its end. A loss of four bytes that a loop reads would wait for all of a snapshot
    (74 ms of 4 GB on an H200; with this between 64 MiB each, 0.7 at most).
    """
    if device.type == "cuda" and (write := _stream_writer()) is not None:
        write(ctypes.c_void_p(stream.cuda_stream))  # type: ignore[attr-defined]


@cache
def _stream_writer() -> Any:
    """A function that queues the write of a word of host memory, which lets the engine serve other queues; None: there is none (ROCm)."""
    with contextlib.suppress(OSError, AttributeError, RuntimeError):
        function, word = ctypes.CDLL("libcuda.so.1").cuStreamWriteValue32_v2, torch.zeros(1, dtype=torch.int32, pin_memory=True)
        return lambda stream: function(stream, ctypes.c_void_p(word.data_ptr()), ctypes.c_uint32(0), ctypes.c_uint(0))
    return None


def is_capturing(device: torch.device) -> bool:
    """Whether this thread's work is being captured into a graph: it is not done now, and events of it can never be asked."""
    try:
        asked = getattr(module_of(device), "is_current_stream_capturing", None)
    except RuntimeError:  # no module belongs to it (meta)
        return False
    return asked is not None and bool(asked())


def holds(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies on an accelerator."""
    return tensor.device.type != "cpu"


def in_use() -> Any:
    """The accelerator's module, if this process has begun to use it, else None; asking does not begin it."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    module = torch.get_device_module(device)
    return module if module.is_initialized() else None


def current_device() -> torch.device:
    """The accelerator on which this thread makes new tensors."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return torch.device(device.type, torch.accelerator.current_device_index())


def pin(device: torch.device | None, address: int, nbytes: int) -> bool:
    """Registers host memory with the driver, so that copies run beside computation; CUDA alone lets memory that is there be registered.

    Returns whether it has to be given back with `unpin`. Raises RuntimeError: the driver gives no memory for that.
    """
    if device is None or device.type != "cuda":
        return False
    with torch.cuda.device(device):  # the caller may be a thread that has not used one
        torch.cuda.check_error(_cudart().cudaHostRegister(address, nbytes, _PORTABLE))
    return True


def unpin(device: torch.device, address: int) -> None:
    """Undoes `pin`, unless the device has failed: its driver refuses everything then."""
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):
        _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
