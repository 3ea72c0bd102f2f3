"""Data goes on after a restart with the very batch that would have come next."""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from logging.handlers import QueueListener
from multiprocessing import Value
from typing import Any, cast

import numpy as np
import pytest
import torch
from loader_kit import BATCH, EPOCHS, SAMPLES, Job, Noisy, OwnEpochs, Stream, check_going_on, shuffled
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler
from torchdata import nodes

from gemini_ft.errors import StateError, UnsupportedStateError
from gemini_ft.loaders.loader import ResumableIterable, make_resumable
from gemini_ft.loaders.order import DrawnOrder, digest_of
from gemini_ft.loaders.parts import LoaderParts
from gemini_ft.state import codec

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


class Background:
    """A thread fetches batches in advance, so many of them."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._queue = queue.Queue[Any](2)
        threading.Thread(target=lambda: [self._queue.put(each) for each in (*batches, None)], daemon=True).start()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._queue.get, None)


class InBackground(DataLoader[torch.Tensor]):
    """As scripts have it that fetch in a thread."""

    def __iter__(self) -> Any:
        return iter(Background(super().__iter__()))


class Indices(Dataset[torch.Tensor]):
    """Augments from a generator of its own, and so late that a thread does not come to an end before the loop."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(5)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.tensor([float(index), self.own.random()], dtype=torch.float64)


def of_nodes() -> Any:
    """A pipeline of torchdata's nodes, so deep that the sampler's generator is its eighth level."""
    sampler = RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(5))
    node = nodes.Mapper(nodes.Mapper(nodes.SamplerWrapper(sampler), float), lambda number: torch.tensor([number]))
    return nodes.Loader(nodes.Prefetcher(nodes.Mapper(nodes.Batcher(node, BATCH, drop_last=False), torch.stack), 2))


class Fast:
    """Is its own iterator, as scripts have it that keep all data in one tensor, and shuffles that itself."""

    def __init__(self) -> None:
        self.data = torch.arange(float(SAMPLES))

    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)

    def __iter__(self) -> Fast:
        self.begin()
        return self

    def begin(self) -> None:
        self.data, self.at = self.data[torch.randperm(SAMPLES)], 0

    def __next__(self) -> torch.Tensor:
        if self.at >= SAMPLES:
            raise StopIteration
        self.at += BATCH
        return self.data[self.at - BATCH : self.at]


class Ordered(Fast):
    """Draws an order in each epoch, and keeps it, which is too large for a snapshot."""

    def begin(self) -> None:
        self.order, self.at = torch.randperm(40_000), 0

    def __next__(self) -> torch.Tensor:
        if self.at >= SAMPLES:
            raise StopIteration
        self.at += BATCH
        return self.order[self.at - BATCH : self.at]


class Once:
    """Is its own iterator, which all epochs share, and counts them."""

    def __init__(self) -> None:
        self.batches = iter(DataLoader(Noisy(), BATCH))
        self.epochs = 0

    def __iter__(self) -> Once:
        self.epochs += 1
        return self

    def __next__(self) -> torch.Tensor:
        batch: torch.Tensor = next(self.batches) + self.epochs
        return batch


class Logging(IterableDataset[torch.Tensor]):
    """Starts a thread that writes a log, and makes no batches."""

    def __init__(self) -> None:
        self.level = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        listener = QueueListener(queue.SimpleQueue())
        listener.start()
        try:
            for index in range(SAMPLES):
                yield torch.tensor([float(index), float(self.level)])
        finally:
            listener.stop()


class Counting(Noisy):
    """Counts its samples under a name that DataLoaders have for something else."""

    _iterator = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self._iterator += 1
        return super().__getitem__(index) + self._iterator


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


def mixing() -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """A collate function that draws from generators, in what it encloses and in the defaults of its arguments."""
    drawing = random.Random(5)

    def collate(samples: list[torch.Tensor], *, noise: np.random.Generator = np.random.default_rng(7)) -> torch.Tensor:  # noqa: B008
        return torch.stack(samples) * drawing.random() + noise.random()

    return collate


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
    "background": lambda: InBackground(Indices(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "background-workers": lambda: InBackground(Indices(), BATCH, shuffle=True, num_workers=2),
    "nodes": of_nodes,
    "fast": Fast,
    "ordered": Ordered,
    "counting-workers": lambda: DataLoader(Counting(), BATCH, num_workers=2),
    "enclosed": lambda: shuffled(Noisy(), collate_fn=mixing()),
    "enclosed-workers": lambda: shuffled(Noisy(), collate_fn=mixing(), num_workers=2),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("stop", [(0, 3), (1, 0), (1, 5), (1, 6)])
def test_goes_on_with_the_next_batch(name: str, stop: tuple[int, int]) -> None:
    check_going_on(MAKERS[name], stop)


@pytest.mark.parametrize("stop", [(0, 1), (1, 1)])
def test_an_iterator_that_all_epochs_share_goes_on(stop: tuple[int, int]) -> None:
    check_going_on(Once, stop, limit=2)


def test_what_the_loop_sets_is_put_back_though_a_thread_beside_the_data_was_started() -> None:
    def set_level(loader: Any, at: tuple[int, int]) -> None:
        loader.dataset.level = sum(at)

    check_going_on(lambda: DataLoader(Logging(), BATCH), (0, 3), meanwhile=set_level)


def test_a_variable_of_the_loop_that_a_collate_function_reads_stays_the_loops_own() -> None:
    """The loop sets it again, to what it knows by itself; what is in a container is the script's, too."""

    def first_batches(position: Any) -> tuple[list[int], Any]:
        step, base = 0, {"now": 10}
        loader = make_resumable(DataLoader(range(8), 2, collate_fn=lambda samples: 100 * step + base["now"] + samples[0]), "auto")
        if position is not None:
            loader.load_state_dict(position)
            step = 5
        found = []
        for batch in loader:
            found.append(batch)
            step += 1
            base["now"] += 1
            if len(found) == 2:
                return found, loader.state_dict()
        raise AssertionError("there are four batches")

    found, position = first_batches(None)
    assert found == [10, 113]
    assert first_batches(position)[0] == [514, 617]


class OfLoop:
    """A loop whose collate function encloses it."""

    def __init__(self) -> None:
        self.step, self.losses = 0, list[float]()
        self.loader = make_resumable(DataLoader(range(400), 4, collate_fn=lambda samples: self.step + 1000 * samples[0]), "auto")

    def run(self, batches: int) -> Any:
        """Goes on for so many batches; returns the position after the last."""
        left = batches
        while left:
            for batch in self.loader:
                assert batch % 1000 == self.step % 1000
                position = self.loader.state_dict()
                self.step += 1
                self.losses.append(0.5)
                left -= 1
                if not left:
                    break
        return position


def test_an_object_of_the_script_that_a_collate_function_encloses_stays_as_the_script_has_made_it() -> None:
    """Nothing of it is put back, and a list of it that grows beyond what could be kept is no reason to refuse the next epoch."""
    position = OfLoop().run(3)
    again = OfLoop()
    again.loader.load_state_dict(position)
    again.step = 3
    again.run(300)
    assert (again.step, len(again.losses)) == (303, 300)


class Leveled(Noisy):
    """Samples that get harder as the training goes on, in an order that does, too: the loop sets the levels when it likes."""

    def __init__(self) -> None:
        self.level = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + 100 * self.level


class Shifted(Sampler[int]):
    """Draws from a generator that others draw from, too."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator, self.shift = generator, 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SAMPLES, generator=self.generator).tolist()
        shift = self.shift
        yield from ((index + shift) % SAMPLES for index in order)

    def __len__(self) -> int:
        return SAMPLES


class LeveledStream(Stream):
    def __init__(self) -> None:
        self.level, self.generator = 0, torch.Generator().manual_seed(4)

    def __iter__(self) -> Iterator[torch.Tensor]:
        draw = torch.rand((), generator=self.generator).item()
        yield from (sample + 100 * self.level + draw for sample in super().__iter__())


def leveled(**options: Any) -> DataLoader[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return DataLoader(Leveled(), BATCH, sampler=Shifted(generator), generator=generator, **options)


LEVELED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "here": (leveled, {}),
    "workers": (lambda: leveled(num_workers=2), {}),
    "persistent": (lambda: leveled(num_workers=2, persistent_workers=True), {}),
    "replay": (leveled, {"method": "replay"}),
    "replay-workers": (lambda: leveled(num_workers=2), {"method": "replay"}),
    "in-advance": (lambda: DataLoader(LeveledStream(), BATCH), {"in_advance": True}),
    "in-advance-workers": (lambda: DataLoader(LeveledStream(), BATCH, num_workers=2), {"in_advance": True}),
}


@pytest.mark.parametrize("name", LEVELED)
@pytest.mark.parametrize("stop", [(0, 4), (1, 3)])
def test_the_next_epoch_finds_what_the_loop_has_set_and_drawn_in_this_one(name: str, stop: tuple[int, int]) -> None:
    """In the loader's parts, after a batch before the snapshot: attributes of dataset and sampler, and a generator that it shares."""

    def meanwhile(loader: Any, place: tuple[int, int]) -> None:
        if place in ((0, 2), (1, 1)):
            torch.rand(1 + place[1], generator=getattr(loader, "generator", None) or loader.dataset.generator)
            loader.dataset.level += 1
            loader.sampler.shift = 5 + place[0]

    make, options = LEVELED[name]
    check_going_on(make, stop, meanwhile=meanwhile, **options)


def test_workers_see_what_another_loader_had_left_in_the_dataset_before_theirs_was_made() -> None:
    """As a sanity check does, which a resumed fit leaves out."""

    class Counted(Leveled):
        def __getitem__(self, index: int) -> torch.Tensor:
            self.level += torch.utils.data.get_worker_info() is None
            return super().__getitem__(index)

    def loaders(is_resumed: bool) -> tuple[Any, Any]:
        dataset = Counted()
        beside = make_resumable(DataLoader(dataset, BATCH), epoch=int, rests=True)
        if not is_resumed:
            next(iter(beside))
        torch.manual_seed(5)
        return beside, make_resumable(DataLoader(dataset, BATCH, num_workers=1), epoch=int)

    def rest(loader: Any) -> list[Any]:
        return [batch.tolist() for batch in loader]

    beside, loader = loaders(is_resumed=False)
    batches = iter(loader)
    next(batches)
    states = beside.state_dict(), loader.state_dict()
    expected = rest(batches)
    for one, state in zip(resumed := loaders(is_resumed=True), states, strict=True):
        one.load_state_dict(state)
    assert rest(resumed[1]) == expected


class Told(Dataset[torch.Tensor]):
    """Is told the epoch, which workers that live on do not hear of."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        if epoch:
            self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(self.epoch)])


class ToldByData(Sampler[int]):
    """An order that depends on the epoch which the dataset was told; it may be drawn as late as index by index."""

    is_broken = False

    def __init__(self, data: Told) -> None:
        self.data = data

    def __iter__(self) -> Iterator[int]:
        if self.is_broken:
            raise ValueError("no order")
        yield from ((index * 5 + self.data.epoch) % SAMPLES for index in range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


class ToldAtOnce(ToldByData):
    """The same, drawn when it is asked."""

    def __iter__(self) -> Iterator[int]:
        return iter([*super().__iter__()])


def told(kind: type[ToldByData] = ToldByData) -> DataLoader[torch.Tensor]:
    data = Told()
    return DataLoader(data, BATCH, sampler=kind(data), num_workers=2, persistent_workers=True)


@pytest.mark.parametrize("kind", [ToldByData, ToldAtOnce])
@pytest.mark.parametrize("stop", [(0, 3), (1, 0), (1, 3)])
def test_a_sampler_sees_the_dataset_of_its_own_process_while_workers_are_started_anew(kind: Any, stop: tuple[int, int]) -> None:
    check_going_on(lambda: told(kind), stop)


@pytest.mark.parametrize("is_broken", [False, True])
def test_what_a_restarted_script_gives_its_data_stays_while_workers_are_started_anew(is_broken: bool) -> None:
    first: Any = make_resumable(told(), epoch=int)
    assert len(list(first)) == len(first)
    first.dataset.flag = Value("i", 1)
    batches = iter(first)
    next(batches)
    again: Any = make_resumable(told(), epoch=int)
    again.load_state_dict(first.state_dict())
    data = again.dataset
    data.flag, data.resumed_at, data.table = Value("i", 1), [3], torch.zeros(2)
    data.table.share_memory_()
    given = {**vars(data)}
    again.sampler.is_broken = is_broken
    if is_broken:
        with pytest.raises(ValueError, match="no order"):
            iter(again)
    else:
        assert len(list(again)) == len(again) - 1
    assert {name: id(value) for name, value in vars(data).items()} == {name: id(value) for name, value in given.items()}


class Toldable(OwnEpochs):
    """Counts its epochs, and can be told one."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.generator = generator

    def set_epoch(self, epoch: int) -> None:
        self.rounds = 10 * epoch


class HoldsSampler(Dataset[int]):
    """A dataset over a sampler, such as Lightning puts into torch's own sampler."""

    def __init__(self, sampler: Toldable) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)


class Forwards(Sampler[int]):
    """A sampler over such a dataset, which tells nothing to what is in it."""

    def __init__(self, inner: Toldable) -> None:
        self.dataset = HoldsSampler(inner)

    def __iter__(self) -> Iterator[int]:
        return iter(self.dataset._sampler)

    def __len__(self) -> int:
        return len(self.dataset)


class Endless(Sampler[int]):
    """Draws an order whenever the one before has come to its end, from the process's generators or from its own."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(SAMPLES, generator=self.generator).tolist()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("own", [False, True])
def test_a_sampler_that_goes_on_drawing_from_the_process_is_named_once(workers: int, own: bool, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> DataLoader[torch.Tensor]:
        return DataLoader(Noisy(), BATCH, sampler=Endless(torch.Generator() if own else None), num_workers=workers)

    if own:
        check_going_on(make, (1, 8), limit=9)
    else:
        Job(make, resumable=True, limit=9).run(range(EPOCHS))
    named = [line for line in caplog.messages if "draws from the process's generators with later batches too" in line]
    assert len(named) == (not own and workers > 0)


class Keeping(DataLoader[int]):
    """As timm's MultiEpochsDataLoader."""

    def __init__(self, workers: int) -> None:
        super().__init__(range(8), num_workers=workers)  # type: ignore[arg-type]
        self.iterator = super().__iter__()

    def __iter__(self) -> Any:
        return (next(self.iterator) for _ in range(len(self)))


def test_a_loader_that_keeps_an_iteration_of_its_workers_is_refused() -> None:
    make_resumable(Keeping(0))
    with pytest.raises(UnsupportedStateError, match="a Keeping keeps one iteration of its workers for all epochs, `iterator`"):
        make_resumable(Keeping(1))


@pytest.mark.parametrize("options", [{"rests": True}, {"method": "skip"}])
def test_a_loader_that_keeps_an_iteration_may_validate_or_be_insisted_on(options: dict[str, Any]) -> None:
    assert [int(index) for index in make_resumable(Keeping(1), **options)] == [*range(8)]


def test_a_sampler_inside_of_another_is_told_no_epoch() -> None:
    """Lightning's own does not tell it either, and without gemini-ft nothing would."""

    def orders(is_resumable: bool) -> list[list[int]]:
        loader: Any = DataLoader(cast(Any, range(SAMPLES)), None, sampler=Forwards(Toldable()))
        watched = make_resumable(loader) if is_resumable else loader
        return [[int(index) for index in watched] for _ in range(EPOCHS)]

    assert orders(is_resumable=True) == orders(is_resumable=False)


def test_a_generator_of_a_sampler_inside_of_another_is_kept_where_snapshots_have_it() -> None:
    """Older ones too: generators are put back by their paths."""
    sampler = Forwards(Toldable(torch.Generator().manual_seed(3)))
    loader: Any = DataLoader(cast(Any, range(SAMPLES)), None, sampler=sampler)
    parts = LoaderParts(loader, DataLoader, None)
    assert [*parts.generators] == ["sampler.0.dataset._sampler.generator"]
    sampler.dataset._sampler.rounds = 7
    assert parts.present()["attributes"] == {"sampler.0.dataset._sampler": {"rounds": 7}}


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


class Growing(Sampler[list[int]]):
    """Batches of a size that the training may raise in the middle of an epoch."""

    def __init__(self) -> None:
        self.size = 2

    def __iter__(self) -> Iterator[list[int]]:
        left = torch.randperm(SAMPLES).tolist()
        while left:
            yield left[: self.size]
            left = left[self.size :]


@pytest.mark.parametrize("workers", [0, 2])  # with workers it changes for batches that were drawn ahead of those that have been used
@pytest.mark.parametrize("kinder", [{"lenient": True}, {"method": "skip"}, {}], ids=["named", "insisted on", "refused"])
@pytest.mark.parametrize("changed_at", [(1, 0), (1, 2)], ids=["before the epoch", "within it"])
def test_an_order_that_the_training_changes_within_an_epoch_is_not_gone_on_with_as_if_it_were_the_same(
    changed_at: tuple[int, int], kinder: dict[str, Any], workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    def grow(loader: Any, moment: tuple[int, int]) -> None:
        if moment == changed_at or (changed_at[1] == 0 and moment == (0, 12)):
            loader.batch_sampler.size = 3

    def job() -> Job:
        make = partial(DataLoader, Noisy(), batch_sampler=Growing(), num_workers=workers)
        return Job(make, resumable=True, meanwhile=grow, **kinder)

    state = codec.decode(codec.encode(job().run(range(2), (1, 4))))
    after = job()
    is_refused = changed_at[1] > 0 and not kinder
    with pytest.raises(StateError, match="draws other indices than before the failure") if is_refused else nullcontext():
        after.run(range(1, 2), first=state)
    assert ("draws other indices than before the failure" in caplog.text) is (changed_at[1] > 0 and "lenient" in kinder)


class Chosen(Sampler[list[int]]):
    """Each batch is drawn when it is asked for, from generators that the samples draw from too, by weights that the training sets."""

    def __init__(self) -> None:
        self.weights = torch.ones(SAMPLES)

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(6):
            yield torch.multinomial(self.weights, BATCH).tolist()


@pytest.mark.parametrize("stop", [(0, 4), (1, 1), (1, 5)])
def test_a_sampler_that_draws_each_batch_when_it_is_asked_goes_on_as_it_was(stop: tuple[int, int]) -> None:
    def weigh(loader: Any, moment: tuple[int, int]) -> None:
        loader.batch_sampler.weights[moment[1]] += 3

    check_going_on(lambda: DataLoader(Noisy(), batch_sampler=Chosen()), stop, meanwhile=weigh)


class Unsized(Sampler[int]):
    """Draws the order of an epoch, of unknown length, from the process's generators."""

    def __iter__(self) -> Iterator[int]:
        yield from np.random.permutation(torch.randperm(SAMPLES).tolist()).tolist()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [(1, 0), (1, 1)])
def test_a_first_batch_that_was_taken_in_advance_finds_what_its_order_has_left_of_the_generators(
    workers: int, stop: tuple[int, int]
) -> None:
    """As where Lightning iterates a short loader again beside a longer one whose length is unknown."""
    check_going_on(lambda: DataLoader(Noisy(), BATCH, sampler=Unsized(), num_workers=workers), stop, in_advance=True)


def test_digests_of_an_order_are_few_and_those_of_the_same_numbers_are_the_same() -> None:
    batches: list[Any] = [[1, 2], np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), np.int64(2)]]
    assert len({digest_of([batch]) for batch in batches}) == 1
    assert len({digest_of([batch]) for batch in ([1, 2], [2, 1], [12], ["1", "2"], [(0, 1), (0, 2)])}) == 5
    assert digest_of([[1, object()]]) is None
    order = DrawnOrder()
    for index in range(10_000):
        order.add(index)
    assert order.at(9_990) == digest_of([*range(9_990)])
    assert (order.at(1), order.at(10_001)) == (None, None)


def test_a_position_of_an_older_version_has_nothing_to_compare_the_order_with() -> None:
    def make() -> DataLoader[torch.Tensor]:
        return DataLoader(Noisy(), batch_sampler=Growing())

    state = Job(make, resumable=True).run(range(2), (1, 4))
    assert state["loader"].pop("drawn") is not None
    del state["loader"]["drawn_ahead"]
    Job(make, resumable=True).run(range(1, 2), first=state)
