"""States of all random generators that training draws from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """States of Python's, numpy's and torch's global generators, CUDA's of every device if CUDA is in use; safe to `encode`."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    # Without a context no CUDA number has been drawn yet, and asking would create one.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = {"current": torch.cuda.current_device(), "states": torch.cuda.get_rng_state_all()}
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what `rng_state` gave.

    A rank that moved to another GPU of its host finds the state of its old device on its new one.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        states = state["cuda"]["states"]
        for device, value in enumerate(states[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(value, device)
        torch.cuda.set_rng_state(states[state["cuda"]["current"]])
