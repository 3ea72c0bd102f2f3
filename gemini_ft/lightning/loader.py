"""DataLoaders that go on, after a restart, with the batch that would have come next, bit for bit.

Lightning starts a resumed epoch at its first batch again. Two ways lead further, and each loader gets one of them:

skip    the sampler is advanced and no sample is loaded; the generators are put where they were, those of the worker
        processes included. For map-style datasets.
replay  the batches of the epoch are loaded again and dropped. For iterable datasets, loaders with an iteration of
        their own, and map-style datasets that hold private generators in worker processes.

Whatever happens on the way to the next batch leaves the random state of this process as it was.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset

from gemini_ft.errors import StateError
from gemini_ft.lightning.randomness import generator_states, private_generators, set_generator_states, unchanged_randomness
from gemini_ft.lightning.workers import RestoringInit, StampingCollate, WorkerStates
from gemini_ft.rng import Randomness, randomness, set_randomness

log = logging.getLogger(__name__)

DataResume = Literal["auto", "skip", "replay"]


def make_resumable(
    loader: Any,
    method: DataResume = "auto",
    ahead: Callable[[], int] | None = None,
    epoch: Callable[[], int] | None = None,
    active: Callable[[], bool] | None = None,
) -> Any:
    """Give ``loader`` the methods ``state_dict`` and ``load_state_dict``, and an iteration that heeds them.

    A DataLoader stays the same object: its class is exchanged for a subclass of it, so that all that Lightning and
    users ask of a DataLoader still holds. Any other iterable is wrapped. What has a ``state_dict`` of its own already
    (torchdata's StatefulDataLoader) is left alone.

    Args:
        loader: DataLoader, or any iterable of batches.
        method: "skip" or "replay" where both are possible; "auto" takes "skip" where it is known to be exact.
        ahead: how many batches were taken but not yet used. Lightning takes one in advance if the length is unknown.
        epoch: the epoch, for samplers that do not tell theirs. None: the number of iterations before is the epoch,
            and the samplers are told (Fabric, which would start at 0 again after a restart).
        active: whether an iteration that starts now is to be watched; the same loader may also serve validation.
    """
    if isinstance(loader, ResumableIterable):
        loader = loader.iterable
    if hasattr(_plain_class(loader), "state_dict"):
        return loader
    bookmark = Bookmark(loader, method, ahead, epoch, active)
    if not isinstance(loader, DataLoader):
        return ResumableIterable(loader, bookmark)
    loader.__class__ = _resumable_class(_plain_class(loader))
    loader._gemini = bookmark
    return loader


def bookmark_of(loader: Any) -> Bookmark | None:
    """The bookmark of a loader that was made resumable."""
    return getattr(loader, "_gemini", None)


def is_position(state: Any) -> bool:
    """Whether ``state`` comes from a loader that was made resumable here."""
    return isinstance(state, dict) and "gemini" in state


class Bookmark:
    """Where one loader stands, and how its next iteration gets there. Arguments as of :func:`make_resumable`."""

    def __init__(
        self,
        loader: Any,
        method: DataResume,
        ahead: Callable[[], int] | None,
        epoch: Callable[[], int] | None,
        active: Callable[[], bool] | None,
    ) -> None:
        self.starting = False  # the loader is being asked for an iterator that is watched
        self._loader, self._ahead, self._epoch, self._active = loader, ahead, epoch, active
        self._num_workers: int = getattr(loader, "num_workers", 0)
        self._workers = WorkerStates(self._num_workers, loader.persistent_workers) if self._num_workers else None
        self._generators = private_generators(
            dataset=getattr(loader, "dataset", loader),
            collate=getattr(loader, "collate_fn", None),
            sampler=_samplers(loader),
            generator=getattr(loader, "generator", None),
        )
        self._skips = _can_skip(loader, method, self._generators)
        # The random state before a batch that was taken in advance matters only where this process made that batch.
        self._notes_randomness = ahead is not None and not self._num_workers and not _is_sized(loader)
        self._resume: dict[str, Any] | None = None
        self._iterations = 0
        # Of the iteration under way:
        self._running = False
        self._position: dict[str, Any] | None = None  # where it is to start; None: at its beginning
        self._begin: dict[str, Any] = {}  # the moment it was started
        self._sampler: dict[str, Any] | None = None  # the moment the sampler was first asked
        self._taken = 0  # batches that came out of it, skipped ones included
        self._before_last: Randomness | None = None

    def state_dict(self) -> dict[str, Any]:
        """The position before the first batch that was not used, as plain data."""
        if self._resume is not None:
            return self._resume
        state: dict[str, Any] = {"gemini": 1, "iterations": self._iterations}
        if not self._running:
            return state
        ahead = self._ahead() if self._ahead else 0
        batches = self._taken - ahead
        return state | {
            "batches": batches,
            "begin": self._begin,
            "sampler": self._sampler,
            "generators": generator_states(self._generators) if self._skips and not self._num_workers else {},
            "before_last": self._before_last if ahead else None,
            "workers": self._workers.before(self._start_of(batches)) if self._workers else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration start at the position ``state``."""
        under_way = "batches" in state
        self._running = False
        self._iterations = state["iterations"] - under_way
        self._resume = state if under_way else None

    def iterate(self, start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The batches of the iterator that ``start`` gives, from the position on.

        ``start`` is called here and not with the first batch: it starts the worker processes and draws their seeds.
        """
        if self._active is not None and not self._active():
            return start()
        position, self._resume = self._resume, None
        if self._epoch is None:
            _set_sampler_epoch(self._loader, self._iterations)
        self._iterations += 1
        self._running = True
        if position is None:
            self._begin, self._sampler, self._taken = self._moment(), None, 0
            return self._batches(self._started(start))
        with unchanged_randomness():
            self._begin, self._sampler = position["begin"], position["sampler"]
            self._taken = self._start_of(position["batches"])
            self._go_back_to(self._begin)
            batches = self._batches(self._started(start, position))
            self._load_again(batches, position["batches"])
        return self._batches_after(position["before_last"], batches)

    def _started(self, start: Callable[[], Iterator[Any]], position: dict[str, Any] | None = None) -> Iterator[Any]:
        self._position = position
        if self._workers:
            self._workers.start(self._taken, position["workers"] if position else {})
        self.starting = True
        try:
            return start()
        finally:
            self.starting = False

    def _batches(self, inner: Iterator[Any]) -> Iterator[Any]:
        while True:
            if self._notes_randomness:
                self._before_last = randomness()
            try:
                item = next(inner)
            except StopIteration:
                # For Fabric the epoch is over. Lightning may be cycling through other, longer loaders.
                self._running = self._running and self._epoch is not None
                return
            batch = self._workers.unpack(self._taken, item) if self._workers else item
            self._taken += 1
            yield batch

    def _load_again(self, batches: Iterator[Any], used: int) -> None:
        if self._taken < used:
            log.info("loading %d batches again, to go on with the data where it stood", used - self._taken)
        while self._taken < used:
            if next(batches, _END) is _END:
                raise StateError(
                    f"the training data ended after {self._taken} batches, but {used} had been used before the restart; "
                    "give the run the same data, or start it anew (resume='never')"
                )

    def _batches_after(self, before_last: Randomness | None, batches: Iterator[Any]) -> Iterator[Any]:
        if before_last is not None:
            set_randomness(before_last)
        yield from batches

    def indices(self, inner: Iterator[Any]) -> Iterator[Any]:
        """The sampler's indices from the position on; remembers from which moment they can be drawn again."""
        position, self._position = self._position, None
        if position is None or position["sampler"] is None:
            self._sampler = self._moment()
            yield from inner
            return
        with unchanged_randomness():
            self._go_back_to(position["sampler"])
            drawn = [next(inner, None) for _ in range(max(self._start_of(position["batches"]), 1))]
        set_generator_states(self._generators, position["generators"])
        if self._start_of(position["batches"]) == 0:
            yield from drawn  # nothing to skip, but the first index belongs to that moment
        yield from inner

    def for_workers(self) -> dict[str, Any]:
        """The loader's collate_fn and worker_init_fn, extended by what keeps the workers' random states."""
        if self._workers is None:
            return {}
        init = RestoringInit(self._loader.worker_init_fn, self._workers.at_start())
        changes = {"collate_fn": StampingCollate(self._loader.collate_fn), "worker_init_fn": init}
        if self._workers.take_revived():
            changes["generator"] = torch.Generator()  # their seed was drawn when they were first started
        return changes

    @property
    def resting_workers(self) -> dict[int, Randomness] | None:
        """States of persistent workers that wait for the next iteration; None if there are none."""
        started = getattr(self._loader, "persistent_workers", False) and self._loader._iterator is not None
        return self._workers.resting() if started and self._workers else None

    def revive_workers(self, states: dict[int, Randomness]) -> None:
        """Let the next iteration start workers in the place of those that were resting before a restart."""
        if self._workers:
            self._workers.revive(states)

    def _start_of(self, batches: int) -> int:
        """The batch that an iteration starts with so as to reach position ``batches``; those between are loaded."""
        if not self._skips:
            return 0
        return self._workers.whole_rounds(batches) if self._workers else batches

    def _moment(self) -> dict[str, Any]:
        epoch = _sampler_epoch(self._loader)
        if epoch is None and self._epoch is not None:
            epoch = self._epoch()
        return {"random": randomness(), "generators": generator_states(self._generators), "epoch": epoch}

    def _go_back_to(self, moment: dict[str, Any]) -> None:
        set_randomness(moment["random"])
        set_generator_states(self._generators, moment["generators"])
        if moment["epoch"] is not None:
            _set_sampler_epoch(self._loader, moment["epoch"])


_END = object()


class ResumableIterable:
    """Any iterable of batches that is no DataLoader; gets back to a position by replay."""

    def __init__(self, iterable: Iterable[Any], bookmark: Bookmark) -> None:
        self.iterable = iterable
        self.state_dict = bookmark.state_dict
        self.load_state_dict = bookmark.load_state_dict
        self._gemini = bookmark

    def __iter__(self) -> Iterator[Any]:
        return self._gemini.iterate(lambda: iter(self.iterable))

    def __len__(self) -> int:
        return len(self.iterable)  # type: ignore[arg-type]  # the TypeError of an iterable without a length is right

    def __getattr__(self, name: str) -> Any:
        return getattr(self.iterable, name)


class _Sampler:
    """A loader's sampler as its iterators see it."""

    def __init__(self, inner: Any, bookmark: Bookmark) -> None:
        self._inner, self._gemini = inner, bookmark

    def __iter__(self) -> Iterator[Any]:
        # Samplers that draw when asked for an iterator, not when asked for the first index, must draw right here.
        return self._gemini.indices(iter(self._inner))

    def __len__(self) -> int:
        return len(self._inner)


@functools.cache
def _resumable_class(base: Any) -> Any:
    # A mixin beside `base` would be neater, but then `loader.__class__ = ...` fails: "object layout differs".
    class Resumable(base):  # type: ignore[misc]
        _gemini: Bookmark | None = None

        def __iter__(self) -> Iterator[Any]:
            start = super().__iter__
            return self._gemini.iterate(start) if self._gemini else start()

        @property
        def _index_sampler(self) -> Any:
            sampler = super()._index_sampler
            return _Sampler(sampler, self._gemini) if self._gemini and self._gemini.starting else sampler

        def _get_iterator(self) -> Any:
            if self._gemini is None or not self._gemini.starting:
                return super()._get_iterator()
            changes = self._gemini.for_workers()
            saved = {name: getattr(self, name) for name in changes}
            self.__dict__.update(changes)
            try:
                return super()._get_iterator()
            finally:
                self.__dict__.update(saved)

        def state_dict(self) -> dict[str, Any]:
            return self._gemini.state_dict() if self._gemini else {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self._gemini:
                self._gemini.load_state_dict(state)

    Resumable.__name__ = Resumable.__qualname__ = f"Resumable{base.__name__}"
    return Resumable


def _plain_class(loader: Any) -> Any:
    """The class the loader had before it was made resumable."""
    kind = type(loader)
    return kind.__base__ if "_gemini" in vars(kind) else kind


def _can_skip(loader: Any, method: DataResume, generators: Iterable[str]) -> bool:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or method == "replay":
        return False
    if _plain_class(loader).__iter__ is not DataLoader.__iter__:
        return False  # nobody knows what that iteration makes of the sampler
    in_workers = loader.num_workers > 0 and any(path.startswith(("dataset", "collate")) for path in generators)
    return method == "skip" or (loader.in_order and not in_workers)


def _is_sized(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True


def _samplers(loader: Any) -> list[Any]:
    """Whatever has a part in drawing indices."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    candidates = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return [sampler for sampler in candidates if sampler is not None]


def _sampler_epoch(loader: Any) -> int | None:
    for sampler in _samplers(loader):
        if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int):
            return int(sampler.epoch)
    return None


def _set_sampler_epoch(loader: Any, epoch: int) -> None:
    for sampler in _samplers(loader):
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
