"""Loaders that a plain loop takes its batches from, while no snapshot has their positions."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data import dataloader as torch_loaders


def is_plain_loader(value: Any) -> bool:
    """Whether a value is a DataLoader that is not resumable (`gemini_ft.loaders`)."""
    return isinstance(value, DataLoader) and getattr(value, "_gemini", None) is None


def unkept(state: Iterable[Any]) -> list[str]:
    """The datasets, by their types, of DataLoaders that are being iterated and are not in ``state``.

    Those with a generator of their own are left out: what they draw is no concern of the process's generators, and the loop sees to it.
    """
    known = {id(dataset) for value in state if (dataset := getattr(value, "dataset", None)) is not None}
    kinds = torch_loaders._SingleProcessDataLoaderIter, torch_loaders._MultiProcessingDataLoaderIter
    iterators: list[Any] = [item for item in gc.get_referrers(*kinds) if isinstance(item, kinds)]
    return sorted({type(each._dataset).__qualname__ for each in iterators if id(each._dataset) not in known and not _has_generator(each)})


def _has_generator(iterator: Any) -> bool:
    indices = iterator._index_sampler
    return getattr(getattr(indices, "sampler", indices), "generator", None) is not None
