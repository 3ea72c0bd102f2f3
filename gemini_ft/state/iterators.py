"""Loaders that a plain loop takes its batches from, while no snapshot has their positions."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data import dataloader as torch_loaders

from gemini_ft.errors import StateError
from gemini_ft.state.left_out import instances

_log = logging.getLogger("gemini_ft")


def is_plain_loader(value: Any) -> bool:
    """Whether a value is a DataLoader that is not resumable (`gemini_ft.loaders`)."""
    return isinstance(value, DataLoader) and getattr(value, "_gemini", None) is None


def unkept(state: Iterable[Any], *, generators: bool = False) -> list[str]:
    """The datasets, by their types, of DataLoaders that are being iterated and are not in ``state``.

    Args:
        state: what is kept.
        generators: also name those with a generator of their own: what they draw is no concern of the process's generators, and a loop that
            makes them sees to it.
    """
    known = {id(dataset) for value in state if (dataset := getattr(value, "dataset", None)) is not None}
    iterators = instances(torch_loaders._SingleProcessDataLoaderIter, torch_loaders._MultiProcessingDataLoaderIter)
    strangers = [each for each in iterators if id(each._dataset) not in known and (generators or not _has_generator(each))]
    return sorted({type(each._dataset).__qualname__ for each in strangers})


def check_epochs(state: Iterable[Any], *, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compares the epoch that a resumed loop counts, at its first step, with the one in which its loaders have gone on.

    Args:
        state: what the loop has given as ``state=``, its loaders among it.
        then: the scalars of the snapshot.
        now: those of the first step after it.

    Raises:
        StateError: the loop has gone through an epoch again that was over.
    """
    marks = [mark for value in state if (mark := getattr(value, "_gemini", None)) is not None]
    epochs = [name for name in ("epoch", "current_epoch") if name in then]
    if any(mark.began_anew for mark in marks) and (same := [name for name in epochs if name in now and now[name] == then[name]]):
        raise StateError(
            f"the snapshot was taken after a whole epoch, by step({same[0]}={then[same[0]]!r}), and the resumed loop has gone through that "
            f"epoch again; where step() comes once after each epoch, give it the next one's number, step({same[0]}=epoch + 1)"
        )
    if any(mark.was_empty for mark in marks) and not epochs:
        _log.warning(
            "the snapshot was taken at the last batch of an epoch, so that the first iteration of the data had no batches, for what a loop "
            "does after an epoch. A loop that counts its epochs from the number of steps has an epoch less now: give step(epoch=epoch), "
            "and begin with range(checkpointer.scalars.get('epoch', 0), epochs)"
        )


def _has_generator(iterator: Any) -> bool:
    indices = iterator._index_sampler
    while (inner := getattr(indices, "batch_sampler", None) or getattr(indices, "sampler", None)) is not None:
        indices = inner  # a library's shard of a batch sampler has one inside
    return getattr(indices, "generator", None) is not None
