"""Objects of DeepSpeed's own that its checkpoint files hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.utils.tensor_fragment import fragment_address


def loss_scaler(dynamic: bool, values: Mapping[str, Any]) -> Any:
    """A loss scaler with these attributes."""
    scaler = object.__new__(DynamicLossScaler if dynamic else LossScaler)
    vars(scaler).update(values)
    return scaler


def address(start: int, numel: int) -> Any:
    """The address of a parameter's part in a partition."""
    return fragment_address(numel=numel, start=start)
