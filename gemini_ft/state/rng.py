"""States of all random generators that training draws from, as plain data that every codec can carry."""

from __future__ import annotations

import array
import random
from typing import Any

import numpy as np
import torch

# (torch's bytes, (version, words, gauss) of `random`, numpy's: (name, words, position, has_gauss, gauss) of its usual generator)
Randomness = tuple[bytes, tuple[int, bytes, float | None], tuple[str, bytes, int, int, float] | dict[str, Any]]


def randomness() -> Randomness:
    """The state of this process's global generators: about 10 KB, as few objects, for it is taken at every step."""
    version, words, gauss = random.getstate()
    return torch.get_rng_state().numpy().tobytes(), (version, array.array("I", words).tobytes(), gauss), _numpy_state()


def _numpy_state() -> tuple[str, bytes, int, int, float] | dict[str, Any]:
    state = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":  # np.random.set_bit_generator
        return state
    return state["bit_generator"], state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"], state["gauss"]


def set_randomness(state: Randomness) -> None:
    """Restores the result of :func:`randomness`."""
    torch_state, (version, words, gauss), numpy_state = state
    torch.set_rng_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))
    random.setstate((version, tuple(array.array("I", words)), gauss))
    if isinstance(numpy_state, dict):
        np.random.set_state(numpy_state)
    else:
        name, key, position, has_gauss, cached = numpy_state
        np.random.set_state((name, np.frombuffer(key, dtype=np.uint32), position, has_gauss, cached))


def rng_state() -> dict[str, Any]:
    """`randomness`, and the states of every CUDA device's generator if CUDA is in use; safe to `encode`."""
    state: dict[str, Any] = {"host": randomness()}
    # Without a context no CUDA number has been drawn yet, and asking would create one.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = {"current": torch.cuda.current_device(), "states": torch.cuda.get_rng_state_all()}
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores the result of `rng_state`.

    A rank that moved to another GPU of its host finds the state of its old device on its new one.
    """
    set_randomness(state["host"])
    if "cuda" in state and torch.cuda.is_available():
        states = state["cuda"]["states"]
        for device, value in enumerate(states[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(value, device)
        torch.cuda.set_rng_state(states[state["cuda"]["current"]])


def branch_randomness(stream: int) -> None:
    """Goes on with numbers that depend on the present state and differ from those of every other ``stream``.

    For a rank that has taken over the states of another one, because there was none of its own number.
    """
    seed = int(torch.randint(2**62, (1,)).item()) ^ stream
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
