"""Data goes on after a restart with the very batch that would have come next."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from loader_kit import BATCH, SAMPLES, Job, Noisy, Stream, check_going_on, shuffled
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

from gemini_ft.errors import StateError
from gemini_ft.lightning.loader import ResumableIterable, make_resumable

# Three workers are what the arithmetic of rounds needs, whatever the machine has.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")


class Private(Dataset[torch.Tensor]):
    """Augments from a generator of its own."""

    def __init__(self) -> None:
        self.transforms = [np.random.default_rng(5)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), self.transforms[0].random()], dtype=torch.float64)


class Own(DataLoader[torch.Tensor]):
    """An iteration of its own: every batch twice."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch
            yield -batch


class Batches:
    """No DataLoader at all."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(6):
            yield torch.tensor([float(index)])


def with_generator() -> DataLoader[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return DataLoader(Noisy(), BATCH, sampler=RandomSampler(range(SAMPLES), generator=generator), generator=generator)


def distributed(**options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Noisy(), BATCH, sampler=DistributedSampler(Noisy(), num_replicas=1, rank=0, seed=3), **options)


MAKERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: shuffled(Noisy()),
    "generator": with_generator,
    "distributed": distributed,
    "distributed-workers": lambda: distributed(num_workers=2),
    "workers": lambda: shuffled(Noisy(), num_workers=2),
    "three-workers": lambda: shuffled(Noisy(), num_workers=3, prefetch_factor=1),
    "persistent": lambda: shuffled(Noisy(), num_workers=2, persistent_workers=True),
    "no-batching": lambda: DataLoader(Noisy(), None, shuffle=True),
    "private": lambda: shuffled(Private()),
    "private-workers": lambda: shuffled(Private(), num_workers=2),
    "stream-workers": lambda: DataLoader(Stream(), BATCH, num_workers=2),
    "own-iteration": lambda: Own(Noisy(), BATCH, shuffle=True, num_workers=2),
    "iterable": Batches,
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("stop", [(0, 3), (1, 0), (1, 5)])
def test_goes_on_with_the_next_batch(name: str, stop: tuple[int, int]) -> None:
    check_going_on(MAKERS[name], stop)


@pytest.mark.parametrize("seed", range(3))
def test_a_second_restart_right_after_the_first(seed: int) -> None:
    """The workers' states must also be known while no whole round of batches has come since the first restart."""
    plain = Job(MAKERS["three-workers"], resumable=False)
    plain.run(range(1))
    seen: list[str] = []
    state: Any = None
    for stop in (*range(1, 6), None):
        life = Job(MAKERS["three-workers"], resumable=True, seed=1 if state is None else seed + 50)
        state = life.run(range(1), None if stop is None else (0, stop), first=state)
        seen += life.seen
    assert seen == plain.seen


def test_skipping_loads_nothing_again() -> None:
    class Counting(Noisy):
        loaded = 0

        def __getitem__(self, index: int) -> torch.Tensor:
            Counting.loaded += 1
            return super().__getitem__(index)

    state = Job(lambda: shuffled(Counting()), resumable=True).run(range(1), (0, 5))
    Counting.loaded = 0
    after = Job(lambda: shuffled(Counting()), resumable=True)
    after.run(range(1), first=state)
    assert (len(after.seen), Counting.loaded) == (1, SAMPLES - 5 * BATCH)


def test_a_loader_stays_the_object_and_the_kind_it_was() -> None:
    loader = Own(Noisy(), BATCH)
    assert make_resumable(loader) is loader
    assert isinstance(loader, Own)
    assert type(make_resumable(loader)) is type(loader)  # made resumable twice: no tower of classes
    wrapped = make_resumable(make_resumable(Batches()))
    assert isinstance(wrapped, ResumableIterable)
    assert isinstance(wrapped.iterable, Batches)


@pytest.mark.parametrize("name", ["persistent", "persistent-stream"])
def test_workers_end_with_their_loader(name: str) -> None:
    """In the middle of an epoch too. In a circle of references they would be ended by the garbage collector, which takes 5 s for each."""
    dataset = {"persistent": Noisy, "persistent-stream": Stream}[name]()
    loader = make_resumable(DataLoader(dataset, BATCH, num_workers=2, persistent_workers=True), epoch=int)
    assert len(list(loader)) == len(list(loader))
    next(iter(loader))
    iterator = weakref.ref(loader._iterator)
    del loader
    assert iterator() is None


class Stateful(DataLoader[torch.Tensor]):
    def state_dict(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == self.state_dict()


def test_an_iteration_needs_nobody_else_to_keep_the_loader() -> None:
    """Which is asked for its state before each batch, where its length is unknown."""
    batches = iter(make_resumable(Stateful(Stream(), BATCH), ahead=int, epoch=int))
    assert len(list(batches)) == len(list(DataLoader(Stream(), BATCH)))


def test_less_data_than_before_the_restart() -> None:
    state = Job(lambda: DataLoader(Stream(), BATCH), resumable=True).run(range(1), (0, 5))

    class Short(Stream):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from itertools.islice(super().__iter__(), 12)

    short = make_resumable(DataLoader(Short(), BATCH), epoch=int)
    short.load_state_dict(state["loader"])
    with pytest.raises(StateError, match="ended after 3 batches, but 5 had been used"):
        iter(short)
