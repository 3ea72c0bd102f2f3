"""Random generators in variables of the script's modules, of which this module is one."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler

import gemini_ft
from gemini_ft.state.rng import randomness, rng_state, script_generators, set_rng_state
from gemini_ft.state.script import is_library_file

order = torch.Generator()
numbers = np.random.default_rng(1)


class Hardware(random.Random):
    def getstate(self) -> Any:
        raise NotImplementedError("no state")


class Holding:
    numbers = random.Random(1)

    def __init__(self) -> None:
        self.own = np.random.default_rng(3)


held = Holding()


class Mixing(Dataset[torch.Tensor]):
    """Draws from a generator of its own, and has seen more than can be kept."""

    def __init__(self) -> None:
        self.rng, self.seen = np.random.default_rng(0), list[float]()

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        self.seen.append(self.rng.random())
        return torch.tensor(index + self.seen[-1])


mixing = Mixing()


def noisy(samples: list[int]) -> Any:
    """A collate function that draws from an object in a variable of the script."""
    return torch.tensor(samples) + int(held.own.integers(1000))


def with_noise(workers: int) -> Any:
    held.own = np.random.default_rng(3)
    return gemini_ft.resumable(DataLoader(range(1000), batch_size=4, collate_fn=noisy, num_workers=workers))  # type: ignore[arg-type]


class Endless(Sampler[int]):
    """Draws each index when it is asked for it, from a variable of the script."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(numbers.integers(1000))

    def __len__(self) -> int:
        return 10**6


def of_a_sampler_of_its_own(workers: int) -> Any:
    return gemini_ft.resumable(DataLoader(range(1000), batch_size=4, sampler=Endless(), num_workers=workers))  # type: ignore[arg-type]


def loader(workers: int) -> Any:
    order.manual_seed(5)
    sampler = RandomSampler(range(1000), replacement=True, num_samples=1000, generator=order)
    return gemini_ft.resumable(DataLoader(range(1000), batch_size=4, sampler=sampler, num_workers=workers))  # type: ignore[arg-type]


def take(batches: Any) -> list[Any]:
    """A batch, and a number that the loop draws."""
    return [*next(batches).tolist(), Holding.numbers.random()]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [loader, of_a_sampler_of_its_own, with_noise])
def test_a_sampler_and_the_loop_go_on_with_generators_of_the_script(make: Any, workers: int) -> None:
    first = make(workers)
    batches, expected = iter(first), []
    for count in range(12):
        expected.append(take(batches))
        if count == 4:
            state, generators = first.state_dict(), rng_state()
    del batches
    resumed = make(workers)
    set_rng_state(generators)
    resumed.load_state_dict(state)
    batches = iter(resumed)
    assert [take(batches) for _ in range(7)] == expected[5:]


def test_a_dataset_in_a_variable_of_the_script_keeps_its_own_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is none of the process's: what it has seen is loaded again with it."""

    def started() -> tuple[Any, Any]:
        monkeypatch.setitem(globals(), "mixing", Mixing())
        script_generators()
        data = gemini_ft.resumable(DataLoader(mixing, batch_size=4))
        return data, iter(data)

    first, batches = started()
    seen = [next(batches).tolist() for _ in range(20)]  # more than 64 samples
    position = first.state_dict()
    expected = [next(batches).tolist() for _ in range(3)]
    resumed, _ = started()
    resumed.load_state_dict(position)
    batches = iter(resumed)
    assert [next(batches).tolist() for _ in range(3)] == expected != seen[:3]


def test_a_variable_that_is_bound_anew_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert script_generators()[f"{__name__}.numbers"] is numbers
    monkeypatch.setitem(globals(), "numbers", np.random.default_rng(2))
    before = randomness()
    numbers.random()
    assert randomness() != before


def test_generators_have_the_names_of_their_variables() -> None:
    assert {name for name in script_generators() if name.startswith(__name__)} == {
        f"{__name__}.order",
        f"{__name__}.numbers",
        f"{__name__}.Holding.numbers",
        f"{__name__}.held.own",
        f"{__name__}.mixing.rng",
    }


@pytest.mark.parametrize("name", ["replaced", "another"])
def test_a_module_in_the_place_of_one_that_is_gone_has_its_generators_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many modules are there as before; the new one may even have the old one's name."""
    old, new = ModuleType("replaced"), ModuleType(name)
    monkeypatch.setitem(sys.modules, "replaced", old)
    script_generators()
    new.rng = random.Random(7)  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "replaced")
    monkeypatch.setitem(sys.modules, name, new)
    states = randomness()[-1]
    assert isinstance(states, dict)
    assert f"{name}.rng" in states
    assert f"{name}.rng" in script_generators()


def test_a_generator_without_a_state_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "hardware", Hardware())
    states = rng_state()["host"][3]
    assert f"{__name__}.numbers" in states
    assert f"{__name__}.hardware" not in states


def test_a_rank_without_a_past_keeps_the_generators_of_its_script() -> None:
    state, at_first = rng_state(), torch.rand(())
    following = numbers.random()
    set_rng_state(state, of_script=False)
    assert torch.equal(torch.rand(()), at_first)
    assert numbers.random() != following


def test_what_debian_has_installed_is_no_code_of_the_script() -> None:
    assert is_library_file("/usr/lib/python3/dist-packages/torch/__init__.py")
