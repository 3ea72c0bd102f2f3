"""Every sampler of torch, loaders with a state of their own, and data that remembers: gone on with exactly, or refused by name."""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loader_kit import BATCH, EPOCHS, SAMPLES, Job, Noisy, OwnEpochs, Stream, check_going_on, shuffled
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import gemini_ft
from gemini_ft.errors import StateError, UnsupportedStateError
from gemini_ft.loaders.loader import make_resumable
from gemini_ft.state import codec

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
except ImportError:
    StatefulDataLoader = None

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # by torchdata 0.11
MIDDLE = (1, 3)  # of the second epoch: what the first has left behind counts
Maker = Callable[[], Any]


def sampled(sampler: Any, **options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Noisy(), BATCH, sampler=sampler, **options)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(11)


class Lengths(Sampler[list[int]]):
    """Batches of indices of like length, in an order drawn from Python's generator: what users write for texts."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = [list(range(start, min(start + BATCH, SAMPLES))) for start in range(0, SAMPLES, BATCH)]
        random.shuffle(batches)
        yield from batches

    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)


SAMPLERS: dict[str, Maker] = {
    "sequential": lambda: sampled(SequentialSampler(range(SAMPLES))),
    "random": lambda: sampled(RandomSampler(range(SAMPLES))),
    "random-replacement": lambda: sampled(RandomSampler(range(SAMPLES), replacement=True, num_samples=90)),
    "random-generator": lambda: sampled(RandomSampler(range(SAMPLES), replacement=True, num_samples=50, generator=seeded())),
    "subset": lambda: sampled(SubsetRandomSampler(range(3, 19))),
    "subset-generator": lambda: sampled(SubsetRandomSampler(range(3, 19), generator=seeded())),
    "weighted": lambda: sampled(WeightedRandomSampler([1.0 + index for index in range(SAMPLES)], 31)),
    "weighted-generator": lambda: sampled(WeightedRandomSampler([1.0] * SAMPLES, 21, replacement=False, generator=seeded())),
    "batches": lambda: DataLoader(Noisy(), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES)), 3, drop_last=True)),
    "one-by-one": lambda: DataLoader(
        Noisy(), None, sampler=RandomSampler(range(SAMPLES)), collate_fn=lambda sample: sample + torch.rand(())
    ),
    "batches-of-users": lambda: DataLoader(Noisy(), batch_sampler=Lengths()),
    "distributed": lambda: sampled(DistributedSampler(Noisy(), 2, 1, shuffle=True, seed=4)),
    "distributed-drop-last": lambda: sampled(DistributedSampler(Noisy(), 2, 0, shuffle=False, drop_last=True)),
    "own-epochs": lambda: sampled(OwnEpochs()),
    "own-epochs-workers": lambda: sampled(OwnEpochs(), num_workers=2),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_all_samplers(name: str) -> None:
    check_going_on(SAMPLERS[name], MIDDLE)


def table() -> TensorDataset:
    return TensorDataset(torch.arange(SAMPLES, dtype=torch.float64))


DATASETS: dict[str, Maker] = {
    "subset": lambda: shuffled(Subset(Noisy(), range(4, 17))),
    "split": lambda: shuffled(random_split(Noisy(), [0.8, 0.2], generator=seeded())[0]),
    "concatenated": lambda: shuffled(ConcatDataset([Noisy(), Noisy()])),
    "stacked": lambda: shuffled(StackDataset(Noisy(), Noisy()), collate_fn=lambda pairs: torch.stack([a + b for a, b in pairs])),
    "table": lambda: shuffled(table(), collate_fn=lambda rows: torch.stack([row[0] for row in rows])),
    "chained": lambda: DataLoader(ChainDataset([Stream(), Stream()]), BATCH),
    "plain-list": lambda: DataLoader([torch.tensor([float(index)]) for index in range(SAMPLES)], BATCH, shuffle=True),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", DATASETS)
def test_all_datasets_of_torch(name: str) -> None:
    check_going_on(DATASETS[name], MIDDLE, in_advance=name == "chained")


# --- data that remembers


class Mixup(Noisy):
    """Mixes each sample with the one before."""

    def __init__(self) -> None:
        self.before = torch.zeros(4, dtype=torch.float64)

    def __getitem__(self, index: int) -> torch.Tensor:
        mixed = 0.7 * super().__getitem__(index) + 0.3 * self.before
        self.before = mixed
        return mixed


class Told(Noisy):
    """Is told the epoch, by a hook that Lightning leaves out after a restart in mid-epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + 100 * self.epoch


class ToldStream(IterableDataset[torch.Tensor]):
    """Draws its order from a generator seeded by the epoch that it was told."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist():
            yield torch.tensor([float(index)], dtype=torch.float64)


class Endless:
    """Goes on in each epoch where the one before has ended."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(7):
            self.position += 1
            yield torch.tensor([float(self.position)])


class Lazy(Noisy):
    """Makes its generator when it is first needed, in each worker its own."""

    def __init__(self) -> None:
        self.generator: np.random.Generator | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.generator is None:
            self.generator = np.random.default_rng(torch.initial_seed() % 2**32)
        return torch.tensor([float(index), self.generator.random()], dtype=torch.float64)


class Private(Noisy):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = random.Random(5)

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) * self.generator.random()


class OldFashioned(Private):
    """The same with numpy's older generator."""

    def __init__(self) -> None:
        self.generator = np.random.RandomState(5)  # type: ignore[assignment]

    def __getitem__(self, index: int) -> torch.Tensor:
        return Noisy.__getitem__(self, index) * float(self.generator.random())


OURS = np.random.default_rng(5)


class Scripted(Noisy):
    """Draws from a generator of its module, and from one of its class."""

    shared = np.random.RandomState(6)

    def __init__(self) -> None:
        OURS.bit_generator.state = np.random.default_rng(5).bit_generator.state
        self.shared.seed(6)

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) * OURS.random() * self.shared.random_sample()


class Buffer(Noisy):
    """Mixes with what it has of the last samples, which is too much to be kept."""

    def __init__(self) -> None:
        self.buffer: list[torch.Tensor] = []

    def __getitem__(self, index: int) -> torch.Tensor:
        self.buffer = [*self.buffer, *(torch.full((4,), float(index + number)) for number in range(50))][-100:]
        return self.buffer[0] + self.buffer[-1]


class Timed(Noisy):
    """Notes when it has loaded each sample, several times."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __getitem__(self, index: int) -> torch.Tensor:
        self.times += [time.perf_counter() for _ in range(10)]
        return torch.tensor(float(index))


class Cached(Noisy):
    """Keeps every sample it has read once."""

    def __init__(self) -> None:
        self.samples: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples.setdefault(index, torch.full((200, 200), float(index)))[0, :2]


class Filled(Noisy):
    """Keeps every sample in a place, of a list or an array too large to be kept, that held what stands for nothing, or a file's name."""

    def __init__(self, places: Any) -> None:
        self.places = places

    def __getitem__(self, index: int) -> torch.Tensor:
        if (kept := self.places[index]) in (None, "file", 0, -1, "") or kept != kept:
            self.places[index] = index + 1.0 if kept in (None, "file") else type(kept)(index + 1)
        return super().__getitem__(index) * float(self.places[index])


class Scratch(Noisy):
    """Computes every sample in the same array."""

    def __init__(self) -> None:
        self.array = np.ones(40_000)

    def __getitem__(self, index: int) -> torch.Tensor:
        np.multiply(index + 1.0, random.random(), out=self.array)
        return super().__getitem__(index) * self.array[7]


class Shuffled(IterableDataset[torch.Tensor]):
    """Shuffles the names of its files whenever it is iterated, in place: too many to be kept."""

    def __init__(self) -> None:
        self.files = [str(index) for index in range(100)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        random.shuffle(self.files)
        yield from (torch.tensor([float(name)]) for name in self.files[:SAMPLES])


class ShuffledSampler(Sampler[int]):
    """The same of an array of indices."""

    def __init__(self) -> None:
        self.order = np.arange(40_000)

    def __iter__(self) -> Iterator[int]:
        np.random.shuffle(self.order)
        yield from (self.order[:SAMPLES] % SAMPLES).tolist()

    def __len__(self) -> int:
        return SAMPLES


class OrderedSampler(ShuffledSampler):
    """Draws an order anew when it is asked for the first index, and keeps it."""

    def __iter__(self) -> Iterator[int]:
        self.order = torch.randperm(40_000).numpy()
        yield from (self.order[:SAMPLES] % SAMPLES).tolist()


class ToldSampler(OwnEpochs):
    """Makes an order when it is told the epoch, and keeps it. Another list may lie where the one before was."""

    def __init__(self) -> None:
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.order = torch.randperm(40_000, generator=torch.Generator().manual_seed(epoch)).tolist()

    def __iter__(self) -> Iterator[int]:
        yield from (index % SAMPLES for index in self.order[:SAMPLES])


class RefiningSampler(OwnEpochs):
    """Makes its order out of the one of the epoch before."""

    def __init__(self) -> None:
        self.order = list(range(1000))

    def __iter__(self) -> Iterator[int]:
        self.order = [self.order[index] for index in torch.randperm(1000).tolist()]
        yield from (index % SAMPLES for index in self.order[:SAMPLES])


class Beside(Noisy):
    """Data beside which the training keeps a buffer."""

    seen: list[Any] = []  # noqa: RUF012  # replaced, never changed

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class Ring(Noisy):
    """Gives out the last hundred samples, the oldest of which a new one replaces."""

    def __init__(self) -> None:
        self.ring = deque(range(100), 100)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.ring.append(index)
        return torch.tensor([float(self.ring[0]), float(self.ring[index])])


class Once:
    """An iterator: the second epoch takes what the first has left."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def __iter__(self) -> Once:
        return self

    def __next__(self) -> torch.Tensor:
        return torch.tensor([float(next(self._numbers))])


REMEMBERING: dict[str, tuple[Maker, dict[str, Any]]] = {
    "mixup": (lambda: shuffled(Mixup()), {}),
    "mixup-workers": (lambda: shuffled(Mixup(), num_workers=2), {}),
    "mixup-persistent": (lambda: shuffled(Mixup(), num_workers=2, persistent_workers=True), {}),
    "told": (lambda: shuffled(Told()), {}),
    "told-workers": (lambda: shuffled(Told(), num_workers=2), {}),
    "told-persistent": (lambda: shuffled(Told(), num_workers=2, persistent_workers=True), {}),
    "told-stream": (lambda: DataLoader(ToldStream(), BATCH), {"in_advance": True}),
    "told-stream-workers": (lambda: DataLoader(ToldStream(), BATCH, num_workers=2), {"in_advance": True}),
    "endless": (Endless, {}),
    "endless-in-advance": (Endless, {"in_advance": True}),
    "lazy-generator-in-workers": (lambda: shuffled(Lazy(), num_workers=2), {}),
    "private-generator-persistent": (lambda: shuffled(Private(), num_workers=2, persistent_workers=True), {}),
    "old-generator-in-workers": (lambda: shuffled(OldFashioned(), num_workers=2), {}),
    "scripted": (lambda: shuffled(Scripted()), {}),
    "scripted-workers": (lambda: shuffled(Scripted(), num_workers=2), {}),
    "scripted-persistent": (lambda: shuffled(Scripted(), num_workers=2, persistent_workers=True), {}),
    "cached": (lambda: shuffled(Cached()), {}),
    "iterator": (Once, {"limit": 6}),
    "stream-persistent": (lambda: DataLoader(Stream(), BATCH, num_workers=2, persistent_workers=True), {}),
    "limited-persistent": (lambda: shuffled(Noisy(), num_workers=2, persistent_workers=True), {"limit": 4}),
    "shuffled-at-construction": (lambda: shuffled(Subset(Noisy(), torch.randperm(SAMPLES, generator=seeded()).tolist())), {}),
}


@pytest.mark.parametrize("name", REMEMBERING)
@pytest.mark.parametrize("stop", [(0, 3), MIDDLE])
def test_data_that_remembers(name: str, stop: tuple[int, int]) -> None:
    make, options = REMEMBERING[name]
    check_going_on(make, stop, **options)


LOADED_AGAIN: dict[str, Maker] = {
    "lazy-generator": lambda: shuffled(Lazy()),
    "large-buffer": lambda: shuffled(Buffer()),
    "times": lambda: shuffled(Timed()),  # which are others when the batches are loaded again
}


@pytest.mark.parametrize("make", LOADED_AGAIN.values(), ids=LOADED_AGAIN)
def test_what_cannot_be_kept_is_loaded_again(make: Maker) -> None:
    """In the first epoch; for the second it is refused, because nobody goes through all epochs again."""
    check_going_on_in_one_epoch(make)
    with pytest.raises(
        UnsupportedStateError, match=r"keeps what cannot be kept with a snapshot: dataset\.(generator|buffer|times) changed"
    ):
        Job(make, resumable=True).run(range(EPOCHS))
    Job(make, resumable=True, method="skip").run(range(EPOCHS))  # the user has said that it does not matter


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sampler", [OrderedSampler, ToldSampler])
def test_an_order_that_a_sampler_draws_for_each_epoch_is_drawn_again(sampler: Any, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    for stop in (MIDDLE, (2, 0), (1, 6)):
        check_going_on(lambda: DataLoader(Noisy(), BATCH, sampler=sampler(), num_workers=workers), stop)
        assert named(caplog) == []


def test_an_order_that_comes_from_the_one_before_is_refused_when_it_is_resumed() -> None:
    def make() -> Any:
        return DataLoader(Noisy(), BATCH, sampler=RefiningSampler())

    Job(make, resumable=True).run(range(EPOCHS))
    state = Job(make, resumable=True).run(range(EPOCHS), MIDDLE)
    with pytest.raises(UnsupportedStateError, match=r"the training had changed sampler\.0\.order in its data when the snapshot was taken"):
        Job(make, resumable=True).run(range(1, EPOCHS), first=state)


def test_what_the_training_gives_a_sampler_and_cannot_be_kept_is_refused_when_the_next_epoch_begins() -> None:
    def weigh(loader: Any, at: tuple[int, int]) -> None:
        loader.sampler.order = [1.0 + at[1]] * 100

    with pytest.raises(UnsupportedStateError, match=r"keeps what cannot be kept with a snapshot: sampler\.0\.order changed"):
        Job(lambda: DataLoader(Noisy(), BATCH, sampler=OrderedSampler()), resumable=True, meanwhile=weigh).run(range(EPOCHS))


def remember(loader: Any, at: tuple[int, int]) -> None:
    loader.dataset.seen = [*loader.dataset.seen, *[at] * 40]


@pytest.mark.parametrize("is_under_way", [True, False], ids=["in its middle", "at its end"])
def test_what_the_training_leaves_in_the_data_is_refused_in_a_process_that_has_other_of_it(is_under_way: bool) -> None:
    """A replay buffer that hooks have filled anew is not the one that was; between two epochs the snapshot says what there was."""

    def make() -> Any:
        return gemini_ft.resumable(DataLoader(Beside(), BATCH))

    before = make()
    batches = iter(before)  # which stays
    for number, _ in zip(range(2 if is_under_way else 99), batches, strict=False):
        remember(before, (0, number))
    state = before.state_dict()
    for filled in (0, 100):
        after = make()
        after.load_state_dict(state)
        after.dataset.seen = [(0, 0)] * filled
        with pytest.raises(UnsupportedStateError, match=r"dataset\.seen (in its data|changed)"):
            list(after)


def named(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings about large lists and arrays that were changed in place."""
    return [text for record in caplog.records if "other elements" in (text := record.getMessage())]


class Worded(Noisy):
    """Numbers the words that it meets in the order in which it meets them."""

    def __init__(self, known: int) -> None:
        self.words = {f"word {index}": index for index in range(known)}

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + sum(self.words.setdefault(f"{index} {part}", len(self.words)) for part in range(4))


IN_PLACE: dict[str, tuple[Maker, str]] = {
    "vocabulary": (lambda: shuffled(Worded(100)), "the loader of a Worded has other elements in dataset.words than"),
    "small vocabulary": (lambda: shuffled(Worded(0)), "the loader of a Worded has other elements in dataset.words than"),
    "ring": (lambda: shuffled(Ring()), "the loader of a Ring has other elements in dataset.ring than"),
    "files": (lambda: DataLoader(Shuffled(), BATCH), "the loader of a Shuffled has other elements in dataset.files than"),
    "order": (lambda: DataLoader(Noisy(), BATCH, sampler=ShuffledSampler()), "the loader of a Noisy has other elements in sampler.0.order"),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_shuffled_in_place_is_named_once_in_a_job_and_not_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, text = IN_PLACE[name]
    Job(make, resumable=True, method="skip").run(range(EPOCHS))  # the user has said that it does not matter
    Job(make, resumable=True).run(range(1))
    assert named(caplog) == []
    state = codec.decode(codec.encode(Job(make, resumable=True).run(range(EPOCHS), MIDDLE)))
    Job(make, resumable=True).run(range(1, EPOCHS), first=state)
    assert [said[: len(text)] for said in named(caplog)] == [text]


def test_a_position_of_an_older_snapshot_knows_nothing_of_what_was_named_and_of_digests() -> None:
    def make() -> Any:
        return DataLoader(Noisy(), BATCH, sampler=OrderedSampler())

    plain = Job(make, resumable=False)
    plain.run(range(EPOCHS))
    state = (before := Job(make, resumable=True)).run(range(EPOCHS), MIDDLE)
    del state["loader"]["named"], state["loader"]["order"]
    state["loader"]["lost_here"] = ["sampler.0.order"]
    (after := Job(make, resumable=True, seed=99)).run(range(1, EPOCHS), first=state)
    assert before.seen + after.seen == plain.seen


class Playing(nn.Module):
    """A model that plays a game, of which its training data is made; ``is_still``: it changes nothing of its own."""

    def __init__(self, is_still: bool) -> None:
        super().__init__()
        self.is_still, self.place = is_still, [0.0]

    def play(self) -> Iterator[float]:
        for turn in range(9):
            self.place = self.place if self.is_still else [*self.place[-2:], random.random()]
            yield turn + self.place[-1]


class Settings(dict[str, float]):
    """Entries that are read as attributes, as many scripts have it; there is no other attribute."""

    __getattr__ = dict.__getitem__


class Experience(IterableDataset[float]):
    def __init__(self, generate: Callable[[], Iterator[float]]) -> None:
        self.generate, self.settings = generate, Settings(gamma=0.9)

    def __iter__(self) -> Iterator[float]:
        return self.generate()


@pytest.mark.parametrize("is_still", [False, True])
def test_batches_that_the_model_makes_are_named_if_that_changes_it(is_still: bool, caplog: pytest.LogCaptureFixture) -> None:
    loader = make_resumable(DataLoader(Experience(Playing(is_still).play), 3))
    for _ in range(3):
        list(loader)
    named = [text for text in caplog.messages if "are made by the model, whose attributes Playing.place change" in text]
    assert len(named) == (not is_still)


def test_what_is_shuffled_before_the_first_epoch_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(lambda: shuffled(Filled([float(index) for index in range(1, 200)])), resumable=True)
    random.shuffle(job.loader.dataset.places)
    job.run(range(EPOCHS))
    assert named(caplog) == []


@pytest.mark.parametrize("view", [lambda table: table, lambda table: np.asarray(table)[5:]], ids=["file", "view"])
def test_a_file_that_is_mapped_is_named_if_the_training_writes_to_it(view: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = np.memmap(tmp_path / "table", np.int64, "w+", shape=40_000)
    file[:] = range(40_000)
    for mode, name in (("r", None), ("r+", "the loader of a Noisy has other elements in dataset.table than")):

        def make(mode: Any = mode) -> Any:
            dataset = Noisy()
            dataset.table = view(np.memmap(tmp_path / "table", np.int64, mode, shape=40_000))  # type: ignore[attr-defined]
            return shuffled(dataset)

        Job(make, resumable=True, meanwhile=lambda loader, _: np.random.shuffle(file)).run(range(EPOCHS))
        assert [text[: len(name or "")] for text in named(caplog)] == [name] * (name is not None)


PLACES: dict[str, Callable[[], Any]] = {
    "none": lambda: [None] * 200,
    "false": lambda: [False] * 200,
    "zero": lambda: [0] * 200,
    "minus-one": lambda: [-1] * 200,
    "nan": lambda: [float("nan")] * 200,
    "empty-text": lambda: [""] * 200,
    "file": lambda: ["file"] * 200,
    "array-of-zeros": lambda: np.zeros(40_000),
    "array-of-minus-one": lambda: np.full(40_000, -1),
    "array-of-nan": lambda: np.full(40_000, np.nan),
}


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "persistent_workers": True}], ids=["here", "persistent"])
@pytest.mark.parametrize("name", [*PLACES, "scratch"])
def test_caches_and_arrays_that_are_written_over_are_not_refused(
    name: str, workers: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    check_going_on(lambda: shuffled(Filled(PLACES[name]()) if name in PLACES else Scratch(), **workers), MIDDLE)
    assert name == "scratch" or named(caplog) == []


def test_what_cannot_be_kept_and_was_drawn_is_refused() -> None:
    """Loaded again it would be something else: dropout and the like have drawn from the same generators in between."""

    class Drawn(Buffer):
        def __getitem__(self, index: int) -> torch.Tensor:
            return super().__getitem__(index) + torch.rand(())

    with pytest.raises(UnsupportedStateError, match=r"dataset\.buffer .* draws from the process's generators"):
        Job(lambda: shuffled(Drawn()), resumable=True).run(range(1), (0, 3))


def check_going_on_in_one_epoch(make: Maker) -> None:
    plain = Job(make, resumable=False)
    plain.run(range(1))
    before = Job(make, resumable=True)
    state = before.run(range(1), (0, 3))
    after = Job(make, resumable=True, seed=99)
    after.run(range(1), first=state)
    assert before.seen + after.seen == plain.seen


def test_what_cannot_be_kept_in_workers_that_live_on_is_refused() -> None:
    job = Job(lambda: shuffled(Lazy(), num_workers=2, persistent_workers=True), resumable=True)
    with pytest.raises(
        UnsupportedStateError, match=r"changes dataset\.generator in worker processes that live on .* persistent_workers=False"
    ):
        job.run(range(EPOCHS))


# --- a position is one in the same data


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: shuffled(Subset(Noisy(), range(12))), "the number of batches was 6 and is 3; the length of the dataset was 23 and is 12"),
        (lambda: DataLoader(Noisy(), 2, shuffle=True), "batch_size was 4 and is 2; the number of batches was 6 and is 12"),
        (lambda: shuffled(Noisy(), num_workers=2), "num_workers was 0 and is 2"),
    ],
    ids=["length", "batch-size", "workers"],
)
def test_a_position_in_other_data_is_refused(other: Maker, named: str) -> None:
    state = Job(lambda: shuffled(Noisy()), resumable=True).run(range(EPOCHS), MIDDLE)
    with pytest.raises(StateError, match=f"after 3 batches, is of another loader: {named}"):
        Job(other, resumable=True).run(range(1, EPOCHS), first=state)


def test_a_batch_size_that_training_has_changed_comes_back() -> None:
    """On the batch sampler itself, between two epochs."""

    class Growing(BatchSampler):
        def set_epoch(self, epoch: int) -> None:
            self.batch_size = BATCH + epoch

    def make() -> DataLoader[torch.Tensor]:
        return DataLoader(Noisy(), batch_sampler=Growing(RandomSampler(range(SAMPLES)), BATCH, drop_last=False))

    def run(job: Job, epochs: range, stop: tuple[int, int] | None = None, first: Any = None) -> Any:
        for epoch in epochs:
            if first is None:
                job.loader.batch_sampler.set_epoch(epoch)
            if (state := job.run(range(epoch, epoch + 1), stop, first)) is not None:
                return state
            first = None
        return None

    run(plain := Job(make, resumable=False), range(EPOCHS))
    state = run(before := Job(make, resumable=True), range(EPOCHS), MIDDLE)
    run(after := Job(make, resumable=True, seed=99), range(1, EPOCHS), first=state)
    assert before.seen + after.seen == plain.seen


# --- loaders with a state of their own


class Counting:
    """The least that a loader with a state of its own must do; of a length that nobody knows."""

    def __init__(self) -> None:
        self.epochs = self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = np.random.default_rng(self.epochs).permutation(7)
        while self.position < 7:
            self.position += 1
            yield torch.tensor([float(order[self.position - 1]), random.random()], dtype=torch.float64)
        self.position, self.epochs = 0, self.epochs + 1

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.epochs = state["position"], state["epochs"]


class Sized(Counting):
    def __len__(self) -> int:
        return 7


class Drawing(Counting):
    """Draws its order when an iteration begins, from the process's generator."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.order = torch.randperm(7).tolist()
        return self._rest()

    def _rest(self) -> Iterator[torch.Tensor]:
        while self.position < 7:
            self.position += 1
            yield torch.tensor([float(self.order[self.position - 1])])
        self.position = 0


class OwnLoader(DataLoader[torch.Tensor]):
    """A DataLoader that passes over the batches of before, by itself."""

    done = 0
    to_pass = 0

    def __iter__(self) -> Iterator[Any]:
        inner = super().__iter__()
        self.done, self.to_pass = self.to_pass, 0
        state = torch.get_rng_state()
        for _ in range(self.done):
            next(inner)
        torch.set_rng_state(state)
        for batch in inner:
            self.done += 1
            yield batch
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.to_pass = state["done"]


OWN: dict[str, tuple[Maker, dict[str, Any]]] = {
    "unsized": (Counting, {"in_advance": True}),
    "sized": (Sized, {}),
    "drawing": (Drawing, {"in_advance": True}),
    "loader": (lambda: OwnLoader(table(), BATCH, shuffle=True, collate_fn=lambda rows: torch.stack([row[0] for row in rows])), {}),
    "loader-replayed": (Sized, {"method": "replay"}),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("stop", [(0, 3), (1, 0), MIDDLE])
def test_loaders_with_a_state_of_their_own(name: str, stop: tuple[int, int]) -> None:
    make, options = OWN[name]
    check_going_on(make, stop, **options)


def test_a_loader_that_saves_but_does_not_load_is_like_any_other() -> None:
    class Half(Endless):
        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

    check_going_on(Half, MIDDLE)


class Remembering(Mixup):
    """A dataset with a state of its own, as StatefulDataLoader understands it."""

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before = state["before"]


class RememberingStream(Stream):
    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        samples = list(itertools.islice(super().__iter__(), SAMPLES))
        while self.position < len(samples):
            self.position += 1
            yield samples[self.position - 1] + random.random()
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Ordered(RememberingStream):
    """The same with nothing drawn before the position."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        while self.position < 9:
            self.position += 1
            yield torch.tensor([float(self.position), float(info.id if info else 0), random.random()], dtype=torch.float64)
        self.position = 0


class BufferShuffledExamplesIterable:
    """Stands for the one of Hugging Face's ``datasets``, by whose name it is known: each iteration makes an object of the shards' own."""

    _interleaved: Any = None


class Mapped:
    """Stands for another step of such a pipeline."""

    def __init__(self, ex_iterable: Any) -> None:
        self.ex_iterable = ex_iterable


class Refilling(RememberingStream):
    """Shuffles by a buffer that its own state does not have, as an ``IterableDataset`` of Hugging Face's ``datasets``."""

    def __init__(self) -> None:
        super().__init__()
        self._ex_iterable = Mapped(BufferShuffledExamplesIterable())

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer, order = list[int](), random.Random(3)
        self._ex_iterable.ex_iterable._interleaved = Mapped(object())
        while self.position < SAMPLES:
            buffer.append(self.position)
            self.position += 1
            if len(buffer) > 5:
                yield torch.tensor([float(buffer.pop(order.randrange(6)))])
        self.position = 0
        yield from torch.tensor(buffer).float()[:, None]


def torchdata(dataset: Any, **options: Any) -> Any:
    return StatefulDataLoader(dataset, BATCH, **options)


TORCHDATA: dict[str, tuple[Maker, dict[str, Any]]] = {
    "shuffled": (lambda: torchdata(Noisy(), shuffle=True), {}),
    "shuffled-workers": (lambda: torchdata(Noisy(), shuffle=True, num_workers=2), {}),
    "shuffled-persistent": (lambda: torchdata(Noisy(), shuffle=True, num_workers=2, persistent_workers=True), {}),
    "distributed": (lambda: torchdata(Noisy(), sampler=StatefulDistributedSampler(Noisy(), 2, 1)), {}),
    "plainly-distributed": (lambda: torchdata(Noisy(), sampler=DistributedSampler(Noisy(), 2, 1), num_workers=2), {}),
    "stream": (lambda: torchdata(Stream()), {"in_advance": True}),
    "stream-workers": (lambda: torchdata(Stream(), num_workers=2), {"in_advance": True}),
    "stateful-dataset": (lambda: torchdata(Remembering(), shuffle=True), {}),
    "stateful-dataset-workers": (lambda: torchdata(Remembering(), shuffle=True, num_workers=2), {}),
    "stateful-dataset-rare": (lambda: torchdata(Remembering(), shuffle=True, num_workers=2, snapshot_every_n_steps=3), {}),
    "stateful-stream": (lambda: torchdata(Ordered()), {"in_advance": True}),
    "stateful-stream-workers": (lambda: torchdata(Ordered(), num_workers=2), {"in_advance": True}),
    "buffered": (lambda: torchdata(Refilling()), {"in_advance": True}),
    "buffered-workers": (lambda: torchdata(Refilling(), num_workers=2), {"in_advance": True}),
}


@pytest.mark.skipif(StatefulDataLoader is None, reason="needs torchdata: pip install torchdata")
@pytest.mark.parametrize("name", TORCHDATA)
@pytest.mark.parametrize("stop", [pytest.param((0, 3), marks=pytest.mark.soak), MIDDLE])
def test_stateful_data_loader(name: str, stop: tuple[int, int]) -> None:
    make, options = TORCHDATA[name]
    check_going_on(make, stop, **options)


class Leveled(Remembering):
    """The loop sets its level, and draws from its generator, when it likes; neither is in its own state."""

    def __init__(self) -> None:
        super().__init__()
        self.level, self.generator = 1.0, random.Random(8)

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) * self.level + self.generator.random()


class LeveledStream(Ordered):
    def __init__(self) -> None:
        super().__init__()
        self.level, self.generator = 1.0, random.Random(8)

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (sample * self.level + self.generator.random() for sample in super().__iter__())


@pytest.mark.skipif(StatefulDataLoader is None, reason="needs torchdata: pip install torchdata")
@pytest.mark.parametrize(("data", "in_advance"), [(Leveled, False), (LeveledStream, False), (LeveledStream, True)])
def test_beside_the_own_state_of_a_dataset_there_is_what_the_loop_has_set_and_drawn(data: Any, in_advance: bool) -> None:
    def meanwhile(loader: Any, place: tuple[int, int]) -> None:
        loader.dataset.level += place[1]
        loader.dataset.generator.random()

    for stop in ((0, 2), (1, 1)):
        check_going_on(lambda: torchdata(data()), stop, in_advance=in_advance, meanwhile=meanwhile)


def test_states_of_files_go_to_the_loader_itself() -> None:
    loader = make_resumable(Sized(), epoch=int)
    loader.load_state_dict({"position": 5, "epochs": 2})
    assert loader.iterable.state_dict() == {"position": 5, "epochs": 2}
