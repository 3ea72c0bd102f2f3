"""What functions of a script enclose, and the defaults of their arguments: which of it counts, and how it is put back."""

from __future__ import annotations

import dis
import random
from collections.abc import Callable
from typing import Any

import pytest

from gemini_ft.state.fields import Enclosed
from gemini_ft.state.remembered import Attributes
from gemini_ft.state.rng import private_generators
from gemini_ft.state.script import set_later


def kept(attributes: Attributes) -> dict[str, Any]:
    """The values that have changed, of all functions."""
    return {name: value for path, values in attributes.changes().kept.items() if path != "(gone)" for name, value in values.items()}


def counting() -> Callable[[Any], Any]:
    step = 0

    def collate(samples: Any) -> Any:
        nonlocal step
        step += 1
        return samples

    return collate


def test_a_count_of_its_own_is_captured_although_the_loop_sets_a_variable_of_that_name() -> None:
    collate = counting()
    attributes = Attributes({"collate": collate})
    step = 0

    def reads() -> int:
        return step

    for step in range(3):
        collate((step, reads()))
    assert kept(attributes) == {"step": 3}


def test_the_loops_variable_is_its_own_where_another_function_is_the_loop() -> None:
    epoch = 0

    def collate(samples: Any) -> Any:
        return samples * epoch

    def train() -> dict[str, Any]:
        nonlocal epoch
        attributes = Attributes({"collate": collate})
        for epoch in range(3):
            collate(epoch)
        return kept(attributes)

    assert train() == {}


def made() -> tuple[Callable[[], Any], Callable[[], Any]]:
    epoch = 0

    def collate() -> Any:
        return epoch

    def train() -> Any:
        nonlocal epoch
        found = set_later()(collate)  # type: ignore[arg-type]
        epoch += 1
        return found

    return collate, train


def test_the_loops_variable_is_its_own_where_the_function_that_made_both_is_over() -> None:
    assert made()[1]() == {"epoch"}


def test_a_function_under_way_is_taken_apart_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be long, and transformers' Trainer asks at every step."""
    epoch, taken_apart, instructions = 0, list[Any](), dis.get_instructions

    def collate() -> int:
        return epoch

    monkeypatch.setattr(dis, "get_instructions", lambda code: [taken_apart.append(code), *instructions(code)][1:])  # type: ignore[func-returns-value]
    for epoch in range(3):
        assert set_later()(collate) == {"epoch"}  # type: ignore[arg-type]
        assert collate() == epoch
    assert len(taken_apart) == len(set(taken_apart))


def test_objects_and_containers_are_left_alone() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.step, self.losses = 0, list[float]()

    trainer, seen, count = Trainer(), {"samples": 0}, 0

    def collate(samples: Any, before: list[int] = [0]) -> Any:  # noqa: B006
        nonlocal count
        count += 1
        before[0] += 1
        seen["samples"] += 1
        return samples, trainer.step

    attributes = Attributes({"collate": collate})
    collate(0)
    trainer.step, trainer.losses = 7, [0.0] * 100
    assert attributes.changes() == ({"collate.(enclosed)": {"count": 1}}, [])
    attributes.give_back({})
    assert (count, trainer.step, len(trainer.losses), seen) == (0, 7, 100, {"samples": 1})


def test_a_variable_that_is_unset_or_of_another_kind_stays_so() -> None:
    def variables() -> tuple[Callable[[], Any], Callable[[Any], None], Callable[[], None]]:
        late: Any = 1

        def read() -> Any:
            return late

        def put(value: Any) -> None:
            nonlocal late
            late = value

        def clear() -> None:
            nonlocal late
            del late

        return read, put, clear

    read, put, clear = variables()
    attributes = Attributes({"collate": read})
    clear()
    gone = attributes.changes().kept
    put(2)
    attributes.give_back(gone)
    assert not Enclosed(read).values_of_all()  # type: ignore[arg-type]
    put(large := [2])
    assert attributes.changes() == ({}, [])
    attributes.give_back({})
    assert read() is large
    clear()
    attributes = Attributes({"collate": read})
    put(3)
    swap = attributes.exchange({}, ("collate",), new=True)
    assert not Enclosed(read).values_of_all()  # type: ignore[arg-type]
    swap.end()
    assert read() == 3


def test_defaults_are_those_that_the_function_has_now() -> None:
    def collate(samples: Any, rate: float = 1.0, seen: Any = None, *, scale: float = 1.0) -> Any:
        return samples, rate, seen, scale

    fields = Enclosed(collate)  # type: ignore[arg-type]
    collate.__defaults__ = 2.0, (large := [3])
    assert dict(fields) == {"rate": 2.0, "scale": 1.0}
    fields["rate"], fields["seen"], fields["scale"] = 4.0, 5, 6.0
    assert collate(0) == (0, 4.0, large, 6.0)


def test_generators_are_found_and_nothing_behind_objects() -> None:
    class Noise:
        def __init__(self) -> None:
            self.generator = random.Random(1)

    drawing, noise = random.Random(2), Noise()

    def collate(samples: Any, other: random.Random = random.Random(3)) -> Any:  # noqa: B008
        return samples * drawing.random() * noise.generator.random() * other.random()

    assert private_generators(collate=collate).keys() == {"collate.drawing", "collate.other"}
