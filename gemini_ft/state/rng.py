"""States of all random generators that training draws from, as plain data that every codec can carry."""

from __future__ import annotations

import array
import random
from typing import Any

import numpy as np
import torch

from gemini_ft import accelerator

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
    """`randomness`, and the states of the generator of every accelerator if one is in use; safe to `encode`."""
    state: dict[str, Any] = {"host": randomness()}
    if (module := accelerator.in_use()) is not None:  # before it was used, no number has been drawn there
        state["accelerator"] = {"current": module.current_device(), "states": module.get_rng_state_all()}
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores the result of `rng_state`.

    A rank that moved to another accelerator of its host finds the state of its old device on its new one.
    """
    set_randomness(state["host"])
    if "accelerator" in state and torch.accelerator.is_available():
        module, states = torch.get_device_module(torch.accelerator.current_accelerator()), state["accelerator"]["states"]
        for device, value in enumerate(states[: module.device_count()]):
            module.set_rng_state(value, device)
        module.set_rng_state(states[state["accelerator"]["current"]])


def branch_randomness(stream: int) -> None:
    """Goes on with numbers that depend on the present state and differ from those of every other ``stream``.

    For a rank that has taken over the states of another one, because there was none of its own number.
    """
    seed = int(torch.randint(2**62, (1,)).item()) ^ stream
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
