"""What transformers' Trainer keeps in no state of its own: where its batches come from, and the attributes of subclasses and callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler, get_sampler
from torch.utils.data import DataLoader
from transformers import Trainer

from gemini_ft.loaders.bookmark import Bookmark
from gemini_ft.loaders.loader import bookmark_of, make_resumable
from gemini_ft.state.modes import Modes, set_by
from gemini_ft.state.rng import randomness, set_randomness

_THEIRS = ("transformers", "accelerate")


class TrainingData:
    """The position in the batches of a Trainer when a step begins.

    By then the batches of that step have been fetched, and accelerate has fetched the one that follows. So the position is noted before
    each batch that may be the first of a step, and so are the random numbers that it was made with.

    Where rank 0 fetches the batches of all ranks (accelerate's ``dispatch_batches``), those of the epoch are fetched again: accelerate
    fills up the last one with samples of the first.

    Args:
        loader: the Trainer's own, which iterates a DataLoader or is one.
        accumulated: the most batches that a step has.
    """

    def __init__(self, loader: Any, accumulated: int) -> None:
        self.is_fetched_again = isinstance(loader, DataLoaderDispatcher)
        self._per_step = accumulated * (ranks() if self.is_fetched_again and not loader.split_batches else 1)
        self._positions: dict[int, dict[str, Any]] = {}  # number of a batch in its epoch -> the position before it
        self._random: dict[int, Any] = {}  # the same -> the state of the generators before it
        self._then: dict[int, Any] = {}  # as `_random`, of batches to come that had been fetched when the snapshot was taken
        self._follow(loader)

    def before_step(self, steps: int) -> dict[str, Any] | None:
        """The position after so many steps of this epoch; None: this rank has fetched none of the batches that follow."""
        first = steps * self._per_step
        position = self._positions.get(0 if self.is_fetched_again else first)
        if position is None:
            return None
        return {"position": position, "random": {number: state for number, state in self._random.items() if number >= first}}

    def rest_of(self, loader: Any, found: Mapping[str, Any], skip: Callable[[Any], Any] | None) -> Any:
        """Gives a loader whose next iteration begins after the result of `before_step`, with the batches that had been fetched.

        Args:
            loader: the Trainer's.
            found: the result, of as many ranks.
            skip: makes a loader that leaves out the batches that are done; None: there are none.
        """
        if self.is_fetched_again and skip is not None:
            loader = skip(loader)
            self._follow(loader)
        bookmark = bookmark_of(_base(loader))
        assert bookmark is not None
        bookmark.load_state_dict(found["position"])
        self._then = dict(found["random"])
        return loader

    def _follow(self, loader: Any) -> None:
        base = _base(loader)
        sampler = get_sampler(base) if isinstance(base, DataLoader) else None
        if isinstance(sampler, SeedableRandomSampler) and sampler.generator is None:  # else the first iteration makes it
            sampler.generator = torch.Generator(device=torch.get_default_device())
        make_resumable(base, before_next=self._before, epoch=_no_epoch, owner=self)

    def _before(self, bookmark: Bookmark) -> None:
        _, number = bookmark.place
        if number in self._then:
            set_randomness(self._then.pop(number))
        if number == 0:
            self._positions.clear()
            self._random.clear()
        if number == 0 or not (self.is_fetched_again or number % self._per_step):
            self._positions[number] = bookmark.state_dict()
        self._random[number] = randomness()
        for old in [at for at in self._random if at < number - 2 * self._per_step]:
            del self._random[old]
            if not self.is_fetched_again:
                self._positions.pop(old, None)


class OwnAttributes:
    """Plain attributes that subclasses of the Trainer, and callbacks of the script or of other libraries, change while they train.

    Args:
        trainer: the Trainer, before its training begins.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._views: dict[str, SimpleNamespace] = {}
        self._look()
        self._modes = Modes({}, self._views, lambda _: frozenset())

    def collect(self) -> dict[str, Any]:
        """The values that have changed, as plain data; what cannot be kept is named in a warning."""
        self._look()
        return self._modes.collect(_NO_MODULES)

    def restore(self, found: Mapping[str, Any]) -> None:
        """Puts back the result of `collect`."""
        self._look()
        self._modes.restore(found, _NO_MODULES)
        for name, item in self._items():
            vars(item).update(vars(self._views[name]))

    def _look(self) -> None:
        """Brings the views up to date: of each object the attributes that are its own and are no part of the Trainer."""
        for name, item in self._items():
            view = self._views.setdefault(name, SimpleNamespace())
            base = {attribute for kind in type(item).__mro__ if kind.__module__.startswith(_THEIRS) for attribute in set_by(kind)}
            vars(view).clear()
            vars(view).update({key: value for key, value in vars(item).items() if key not in base and not _is_theirs(value)})

    def _items(self) -> Iterator[tuple[str, Any]]:
        yield "trainer", self._trainer
        for index, callback in enumerate(self._trainer.callback_handler.callbacks):
            if not type(callback).__module__.startswith((*_THEIRS, "gemini_ft.")):
                yield f"callbacks.{index}.{type(callback).__name__}", callback


_NO_MODULES: dict[str, Any] = {}


def _is_theirs(value: Any) -> bool:
    return isinstance(value, Trainer) or type(value).__module__.startswith(_THEIRS)


def _base(loader: Any) -> Any:
    """The DataLoader that accelerate's loader iterates, or the loader that a Trainer iterates itself."""
    return getattr(loader, "base_dataloader", loader)


def _no_epoch() -> Any:
    """Returns nothing: samplers hear their epoch from the Trainer, before and after a failure."""
    return None


def ranks() -> int:
    """The number of ranks that train."""
    return dist.get_world_size() if dist.is_initialized() else 1
