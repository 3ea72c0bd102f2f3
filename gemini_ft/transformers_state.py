"""State of transformers' Trainer that it does not save itself: the position in its batches, and attributes of subclasses and callbacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from accelerate.data_loader import DataLoaderDispatcher
from transformers import Trainer

from gemini_ft.loaders.ahead import FetchedAhead, base_of, no_epoch
from gemini_ft.loaders.loader import bookmark_of, make_resumable
from gemini_ft.state.methods import set_by
from gemini_ft.state.modes import Modes

_THEIRS = ("transformers", "accelerate")


class TrainingData:
    """The position in the batches of a Trainer when a step begins.

    By then the batches of that step have been fetched, and accelerate has fetched the one that follows. Where rank 0 fetches the batches
    of all ranks (accelerate's ``dispatch_batches``), those of the epoch are fetched again: accelerate fills up the last one with samples of
    the first.

    Args:
        loader: the Trainer's own, which iterates a DataLoader or is one.
        accumulated: the most batches that a step has.
    """

    def __init__(self, loader: Any, accumulated: int) -> None:
        self.is_fetched_again = isinstance(loader, DataLoaderDispatcher)
        self._per_step = accumulated * (ranks() if self.is_fetched_again and not loader.split_batches else 1)
        self._ahead = FetchedAhead(loader, self._per_step, only_first=self.is_fetched_again, lenient=True)

    def before_step(self, steps: int) -> dict[str, Any] | None:
        """The position after ``steps`` steps of this epoch; None: this rank has fetched none of the batches that follow."""
        return self._ahead.before(steps * self._per_step)

    def rest_of(self, loader: Any, found: Mapping[str, Any], skip: Callable[[Any], Any] | None) -> Any:
        """Gives a loader whose next iteration begins after the result of `before_step`, with the batches that had been fetched.

        Args:
            loader: the Trainer's.
            found: the result, of as many ranks.
            skip: makes a loader that leaves out the batches that are done; None: there are none.
        """
        if self.is_fetched_again and skip is not None:
            loader = skip(loader)
            self._ahead.follow(loader)
        self._ahead.go_to(loader, found)
        return loader

    def settle(self) -> None:
        """Ends what `rest_of` has begun, once a step begins."""
        self._ahead.settle()


class EvaluationData:
    """The loaders of evaluations whose worker processes live from one to the next, which the Trainer keeps for that.

    Args:
        trainer: the Trainer, before its training begins.
    """

    def __init__(self, trainer: Any) -> None:
        arguments, data = trainer.args, trainer.eval_dataset
        lives_on = data is not None and arguments.dataloader_persistent_workers and arguments.dataloader_num_workers > 0
        names = (data if isinstance(data, dict) else [None]) if lives_on else []
        loaders = {name or "": base_of(trainer.get_eval_dataloader(name)) for name in names}
        for loader in loaders.values():
            make_resumable(loader, epoch=no_epoch, rests=True, owner=self)
        self._loaders = {name: loader for name, loader in loaders.items() if bookmark_of(loader) is not None}

    def states(self) -> dict[str, Any]:
        """The states in which the evaluations so far have left their loaders."""
        return {name: loader.state_dict() for name, loader in self._loaders.items()}

    def restore(self, found: Mapping[str, Any]) -> None:
        """Puts back the result of `states`."""
        for name in self._loaders.keys() & found.keys():
            self._loaders[name].load_state_dict(found[name])


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
        self._known = len(self._views)

    def collect(self) -> dict[str, Any]:
        """The values that have changed, as plain data; what cannot be kept is named in a warning."""
        self._look_again()
        return self._modes.collect(_NO_MODULES)

    def restore(self, found: Mapping[str, Any]) -> None:
        """Puts back the result of `collect`."""
        self._look_again()
        self._modes.restore(found, _NO_MODULES)
        for name, item in self._items():
            vars(item).update(vars(self._views[name]))

    def _look_again(self) -> None:
        self._look()
        if len(self._views) > self._known:  # a callback was added
            self._modes.follow(self._views)
            self._known = len(self._views)

    def _look(self) -> None:
        """Brings the views up to date: of each object the attributes that are its own and are no part of the Trainer."""
        for name, item in self._items():
            view = self._views.setdefault(name, SimpleNamespace())
            base = {attribute for kind in type(item).__mro__ if _is_of(kind, *_THEIRS) for attribute in set_by(kind)}
            vars(view).clear()
            vars(view).update({key: value for key, value in vars(item).items() if key not in base and not _is_theirs(value)})

    def _items(self) -> Iterator[tuple[str, Any]]:
        yield "trainer", self._trainer
        count = Counter[str]()
        for callback in self._trainer.callback_handler.callbacks:
            kind = type(callback)
            if not _is_of(kind, *_THEIRS, "gemini_ft"):
                yield f"callbacks.{kind.__name__}.{count[kind.__name__]}", callback
                count[kind.__name__] += 1


_NO_MODULES: dict[str, Any] = {}


def _is_theirs(value: Any) -> bool:
    return isinstance(value, Trainer) or _is_of(type(value), *_THEIRS)


def _is_of(kind: type, *packages: str) -> bool:
    return kind.__module__.partition(".")[0] in packages


def ranks() -> int:
    """The number of ranks that train."""
    return dist.get_world_size() if dist.is_initialized() else 1
