"""Random states that a data pipeline or a module draws from, as plain data that every codec can carry.

Those of the process (`gemini_ft.state.rng.randomness`), and those of generators that it keeps for itself.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import numpy as np
import torch

from gemini_ft.state.rng import randomness, set_randomness


@contextmanager
def unchanged_randomness() -> Iterator[None]:
    """Restores the process's generators afterwards, whatever is drawn inside."""
    before = randomness()
    try:
        yield
    finally:
        set_randomness(before)


def private_generators(**roots: Any) -> dict[str, Any]:
    """Generators that objects hold for themselves, by the path that leads to them from ``roots``.

    Looks into attributes, lists, tuples, mappings and partials, six levels and two thousand objects beside the roots deep: enough for
    datasets and chains of transforms. A generator that is created later, or hidden deeper, is not found.
    """
    found: dict[str, Any] = {}
    seen = {id(torch.default_generator)}
    level = list(roots.items())
    for _ in range(6):
        below: list[tuple[str, Any]] = []
        for path, item in level:
            if id(item) in seen or len(seen) > 2000 + len(roots):
                continue
            seen.add(id(item))
            if isinstance(item, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
                found[path] = item
            else:
                below += [(f"{path}.{name}", inner) for name, inner in _parts(item)]
        level = below
    return found


def _parts(item: Any) -> list[tuple[Any, Any]]:
    """The parts of ``item``, as far as generators may be among them. The first 64 of a collection stand for all."""
    if isinstance(item, (str, bytes, int, float, type, torch.Tensor, np.ndarray)):
        return []
    if isinstance(item, functools.partial):
        return [*enumerate(item.args), *item.keywords.items(), ("func", item.func)]
    if isinstance(item, dict):  # any other mapping may read a file for every item
        return list(itertools.islice(item.items(), 64))
    if isinstance(item, (list, tuple)):
        return list(enumerate(item[:64]))
    if isinstance(item, MethodType):  # for example a collate function of the dataset
        return [("self", item.__self__)]
    return list(getattr(item, "__dict__", {}).items())


def generator_states(generators: Mapping[str, Any]) -> dict[str, Any]:
    """The states of generators that :func:`private_generators` found, by path."""
    return {path: _state_of(generator) for path, generator in generators.items()}


def set_generator_states(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Sets the states of those generators that are still at the same path."""
    for path in generators.keys() & states.keys():
        _set_state_of(generators[path], states[path])


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _set_state_of(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(_tuples(state))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _tuples(state: Any) -> Any:
    return tuple(_tuples(part) for part in state) if isinstance(state, Sequence) else state
