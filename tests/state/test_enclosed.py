"""What functions of a script enclose, and the defaults of their arguments: generators count, all else is the script's."""

from __future__ import annotations

import random
from typing import Any

from gemini_ft.state.remembered import Attributes
from gemini_ft.state.rng import private_generators


def test_counts_objects_and_containers_are_left_alone() -> None:
    """A handle and whether it is open begin anew together, and what the loop shares with a function stays as the loop has it."""

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
    assert attributes.changes() == ({}, [])
    attributes.give_back({})
    assert (count, trainer.step, len(trainer.losses), seen) == (1, 7, 100, {"samples": 1})


def test_generators_are_found_and_nothing_behind_objects() -> None:
    class Noise:
        def __init__(self) -> None:
            self.generator = random.Random(1)

    drawing, noise = random.Random(2), Noise()

    def collate(samples: Any, other: random.Random = random.Random(3)) -> Any:  # noqa: B008
        return samples * drawing.random() * noise.generator.random() * other.random()

    assert private_generators(collate=collate).keys() == {"collate.drawing", "collate.other"}
