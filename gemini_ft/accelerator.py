"""The accelerator under the training, whichever one torch has: its streams and events, and host memory that it can copy beside its work."""

from __future__ import annotations

from typing import Any

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


def module_of(device: torch.device) -> Any:
    """The module with the streams and events of a device, `torch.cuda` for example; None for the CPU, which has no queues."""
    return None if device.type == "cpu" else torch.get_device_module(device)


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

    Returns:
        Whether it has to be given back with `unpin`.

    Raises:
        RuntimeError: the driver gives no memory for that.
    """
    if device is None or device.type != "cuda":
        return False
    torch.cuda.check_error(_cudart().cudaHostRegister(address, nbytes, _PORTABLE))
    return True


def unpin(address: int) -> None:
    """Undoes `pin`."""
    _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
