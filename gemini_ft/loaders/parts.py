"""The parts of a loader that its batches come from: which they are, what they hold, and which way to a position they allow."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gemini_ft.errors import UnsupportedStateError
from gemini_ft.state.fields import is_a
from gemini_ft.state.remembered import OF_LOADERS, Attributes
from gemini_ft.state.rng import generator_states, private_generators, randomness, set_generator_states, set_randomness
from gemini_ft.state.values import fills, sample_of
from gemini_ft.worker.attempt import watch, watch_changed

DataResume = Literal["auto", "skip", "replay"]
Way = Literal["skip", "replay", "own"]


class LoaderParts:
    """Dataset, collate function, generator and samplers of a loader, with the state that the next batches depend on.

    ``epoch``: the epoch, for samplers that do not tell theirs.

    Attributes:
        born: attributes of all parts, compared with those at the beginning. Those that another loader had changed by then count as
            changed: a resumed script may not iterate that one first (a sanity check).
        data: attributes of the parts but samplers, compared with the iteration's start; changes of samplers are made again.
    """

    _made: ClassVar[weakref.WeakSet[LoaderParts]] = weakref.WeakSet()

    def __init__(self, loader: Any, base: Any, epoch: Callable[[], int] | None) -> None:
        self._reference, self._base, self._epoch = reference(loader), base, epoch
        parts = {
            "dataset": getattr(loader, "dataset", loader),
            "collate": getattr(loader, "collate_fn", None),
            "generator": getattr(loader, "generator", None),
        }
        self.generators = private_generators(**parts, sampler=_samplers(loader))  # the private generators of the parts, by path
        self.born = Attributes({**parts, "sampler": _with_inner(_samplers(loader))}, lambda _: OF_LOADERS)
        self.data = Attributes(parts, lambda _: OF_LOADERS)
        for other in self._made:
            self.born.count_from(other.born)
        self._made.add(self)
        self._samples: dict[str, Any] | None = None
        watch(self.generators.values())
        watch_changed(self, self.born.changed)

    @property
    def loader(self) -> Any:
        """The loader, as long as there is one: see `reference`."""
        return self._reference()

    def way(self, method: DataResume, *, rests: bool = False) -> Way:
        """The way that the loader gets to a position, where the user has chosen ``method``; see `gemini_ft.loaders.loader`.

        ``rests``: whether it is a validation's.
        """
        loader = self.loader
        if method == "replay":
            return "replay"
        if is_stateful(self._base) and not is_torchdata(self._base):
            return "own"
        if not isinstance(loader, DataLoader):
            return "replay"
        if is_torchdata(self._base) and is_stateful(loader.dataset) and not _refills(loader.dataset):
            # With rarer snapshots it takes the workers back to the last one, whose random states are not known.
            return "own" if not loader.num_workers or getattr(loader, "snapshot_every_n_steps", 0) == 1 else "replay"
        kept = [name for name, value in vars(loader).items() if name != "_iterator" and is_a(value, _BaseDataLoaderIter)]
        if kept and loader.num_workers and not (rests or method == "skip"):
            raise UnsupportedStateError(
                f"a {type(loader).__name__} keeps one iteration of its workers for all epochs, `{kept[0]}`: they load batches of an epoch "
                "before it begins, and no snapshot can have these. Give a DataLoader with persistent_workers=True: its workers live on, too"
            )
        if isinstance(loader.dataset, IterableDataset):
            return "replay"
        theirs = next(kind for kind in self._base.__mro__ if "__iter__" in vars(kind))
        if theirs is not DataLoader and not theirs.__module__.startswith("torchdata."):
            return "replay"  # the sampler's state after that iteration is unknown
        in_workers = loader.num_workers > 0 and any(path.startswith(("dataset", "collate")) for path in self.generators)
        return "skip" if method == "skip" or (loader.in_order and not in_workers) else "replay"

    def present(self) -> dict[str, Any]:
        """Generators and attributes as they are, with all that others than the loader have drawn from them and set in them."""
        return {"generators": generator_states(self.generators), "attributes": self.born.changes().kept}

    def put(self, then: dict[str, Any], below: str | tuple[str, ...] = "") -> None:
        """Puts the result of `present` back, beside what loading batches again has made of attributes that cannot be kept.

        ``below``: the parts, as beginnings of paths.
        """
        set_generator_states({path: one for path, one in self.generators.items() if path.startswith(below)}, then["generators"])
        self.born.give_back(then["attributes"], below, lost=False)

    def doubtful(self) -> list[str]:
        """Paths of large lists and arrays whose elements have changed since the first call, and of vocabularies that have grown large.

        What fills places that were empty, as a cache does, is not among them (`gemini_ft.state.values.fills`).
        """
        now = {path: sample for path, value in self.born.not_plain() if (sample := sample_of(value)) is not None}
        if self._samples is None:
            self._samples = now
        return [path for path, then in self._samples.items() if path in now and not fills(then, now[path])]

    def tell_epoch(self, epoch: int) -> None:
        """Tells the epoch to all samplers that want to know it."""
        for sampler in _samplers(self.loader):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)

    def moment(self) -> dict[str, Any]:
        """The present state, to be gone back to; it becomes part of snapshots."""
        epoch = _sampler_epoch(self.loader)
        if epoch is None and self._epoch is not None:
            epoch = self._epoch()
        return self.present() | {"random": randomness(), "epoch": epoch}

    def go_back_to(self, moment: dict[str, Any], samplers_only: bool = False) -> None:
        """Puts everything back as it was at ``moment``; of attributes, with ``samplers_only``, only those of samplers."""
        set_randomness(moment["random"])
        set_generator_states(self.generators, moment["generators"])
        if moment["epoch"] is not None:
            self.tell_epoch(moment["epoch"])
        self.born.give_back(moment["attributes"], "sampler" if samplers_only else "")


def reference(loader: Any) -> Callable[[], Any]:
    """A reference to the loader for those that the loader refers to itself; it keeps no DataLoader alive.

    Workers end when the last reference to their iterator goes, and a persistent iterator belongs to its loader. In a circle of references
    it is left to the garbage collector, which closes the workers' queues before torch can tell them to end: torch then waits for five
    seconds for each of them, wherever the training is.
    """
    return weakref.ref(loader) if isinstance(loader, DataLoader) else lambda: loader


def facts(loader: Any) -> dict[str, Any]:
    """The data that a position refers to."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return {
        "batch_size": getattr(loader, "batch_size", None) or getattr(batch_sampler, "batch_size", None),
        "the number of batches": _length(loader),
        "the length of the dataset": _length(getattr(loader, "dataset", None)),
        "num_workers": getattr(loader, "num_workers", 0),
    }


def _length(item: Any) -> int | None:
    try:
        return len(item)
    except (TypeError, NotImplementedError):
        return None


def split(lost: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Digests of lost attributes by their paths, those of samplers apart; an older snapshot has paths alone, and digests are empty."""
    known = lost if isinstance(lost, Mapping) else dict.fromkeys(lost, "")
    of_data = {path: known[path] for path in known if not of_sampler(path)}
    return of_data, {path: known[path] for path in known if path not in of_data}


def of_sampler(path: str) -> bool:
    """Whether an attribute, by its path, is one of a sampler or of a part of one."""
    return path.startswith("sampler")


def refuse_gone(then: Mapping[str, str], now: Mapping[str, str], *, only_there: bool = False) -> None:
    """Refuses a snapshot of which attributes of the data are gone, or are others, that had changed.

    Args:
        then: their digests, by path.
        now: digests of those that have changed in this process.
        only_there: whether they need not be the same, as batches have been loaded ahead meanwhile.
    """
    if paths := [path for path, one in then.items() if path not in now or (one and not only_there and one != now[path])]:
        raise UnsupportedStateError(
            f"the training had changed {', '.join(sorted(paths)[:5])} in its data when the snapshot was taken, and no snapshot can have "
            "that: what follows would be other batches. Keep it in small plain attributes (numbers, lists, small tensors), give the loader "
            "state_dict and load_state_dict, or say with data_resume='skip' that batches do not depend on it; and start anew "
            "(resume='never')"
        )


def is_sized(loader: Any) -> bool:
    """Whether the number of batches is known."""
    return _length(loader) is not None


def is_stateful(item: Any) -> bool:
    """Whether ``item``, an object or a class, has a state of its own to save and to load."""
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))


def is_torchdata(base: Any) -> bool:
    """Whether a class is torchdata's StatefulDataLoader."""
    return any(kind.__module__.startswith("torchdata.") and kind.__name__ == "StatefulDataLoader" for kind in base.__mro__)


@contextmanager
def goes_on_at_end(loader: Any, *, is_resumed: bool) -> Iterator[None]:
    """Lets a Loader of torchdata's nodes, which is given the state of an epoch's end, go on there, and not with the next epoch."""
    restarts = is_resumed and getattr(loader, "restart_on_stop_iteration", False) is True
    if restarts:
        loader.restart_on_stop_iteration = False
    try:
        yield
    finally:
        if restarts:
            loader.restart_on_stop_iteration = True


def _refills(dataset: Any) -> bool:
    """Whether an iterable dataset of Hugging Face's ``datasets`` has a shuffle buffer, which its own state does not."""
    level: list[Any] = [getattr(dataset, "_ex_iterable", None)]
    while level:
        part = level.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        level += [*getattr(part, "ex_iterables", ()), *([part.ex_iterable] if hasattr(part, "ex_iterable") else [])]
    return False


def _samplers(loader: Any) -> list[Any]:
    """The objects that take part in drawing indices."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    candidates = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return [sampler for sampler in candidates if sampler is not None]


def _with_inner(samplers: list[Any]) -> list[Any]:
    """The same, with a script's sampler that Lightning has put into one of its own, as a dataset, whose attributes are not searched.

    It lies so deep that one which is found by a search of the parts has its path from there, as in older snapshots.
    """
    inner = (getattr(getattr(sampler, "dataset", None), "_sampler", None) for sampler in samplers)
    return [*samplers, *([[sampler]] for sampler in inner if sampler is not None)]


def _sampler_epoch(loader: Any) -> int | None:
    for sampler in _samplers(loader):
        if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int):
            return int(sampler.epoch)
    return None
