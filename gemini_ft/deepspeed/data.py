"""The position in an engine's data: in the loaders that DeepSpeed makes for training, and in those that the script gives.

DeepSpeed's loader makes a DataLoader whenever it is iterated. One that is followed makes it once, and that DataLoader is resumable
(`gemini_ft.loaders`): its first iteration after a failure goes on with the next batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.pipe import PipelineModule
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from torch.utils.data import DataLoader

from gemini_ft.errors import ConfigError, StateError
from gemini_ft.loaders import resumable
from gemini_ft.state.iterators import is_plain_loader


class EngineData:
    """What the position in the data consists of: objects with ``state_dict`` and ``load_state_dict``, by name.

    Args:
        found: their states in the snapshot that is resumed; empty at a first start. Each is loaded as soon as its object is there.
    """

    def __init__(self, found: Mapping[str, Any]) -> None:
        self._found = dict(found)
        self.objects: dict[str, Any] = {}
        self._loaders = 0  # of DeepSpeed's, for their names

    def follow(self, loader: DeepSpeedDataLoader) -> None:
        """Makes a loader that has not been iterated go on where it was."""
        loader.__class__ = _Followed
        loader.dataloader = resumable(_data_loader_of(loader))
        self._loaders += 1
        self.add(f"training data {self._loaders}", loader.dataloader)

    def add(self, name: str, item: Any) -> None:
        """Takes an object in, and loads its state if there is one."""
        if is_plain_loader(item) or not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
            raise ConfigError(
                f"keep({name}=...): a {type(item).__qualname__} cannot go on where it was: it needs state_dict and load_state_dict. "
                "Of a loader give gemini_ft.resumable(loader), here and to the loop"
            )
        if name in self.objects:
            raise ConfigError(f"keep({name}=...): there is a {type(self.objects[name]).__qualname__} of this name already")
        self.objects[name] = item
        if name in self._found:
            item.load_state_dict(self._found.pop(name))

    def state(self) -> dict[str, Any]:
        """The position, for a snapshot.

        Raises:
            StateError: what the resumed snapshot has a state of has not been given again.
        """
        if self._found:
            raise StateError(
                f"the snapshot has a position in the data for {sorted(self._found)}, and the script has not given that before its first "
                "step: give it to engine.gemini.keep() again, or start anew (resume='never')"
            )
        return {name: item.state_dict() for name, item in self.objects.items()}


class _Followed(DeepSpeedDataLoader):  # type: ignore[misc]
    """A loader of DeepSpeed that has its DataLoader already."""

    def _create_dataloader(self) -> Any:
        self.data = iter(self.dataloader)
        return self.dataloader


def _data_loader_of(loader: DeepSpeedDataLoader) -> DataLoader[Any]:
    """Makes the DataLoader that ``_create_dataloader`` makes, which iterates it at once."""
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        pin_memory=loader.pin_memory,
        sampler=loader.data_sampler,
        num_workers=loader.num_local_io_workers,
        drop_last=loader.dataloader_drop_last,
        collate_fn=loader.collate_fn,
    )


def initialize_protected(initialize: Callable[..., Any], protect: Callable[[Any], None], *arguments: Any, **named: Any) -> Any:
    """Calls ``deepspeed.initialize``, and ``protect`` with its engine.

    A `PipelineEngine` begins to iterate its training data when it is made, which draws the seed of its workers; so it is given them when it
    is protected.

    Returns:
        The results of ``deepspeed.initialize``.
    """
    bound = inspect.signature(initialize).bind(*arguments, **named)
    data = bound.arguments.pop("training_data", None) if isinstance(bound.arguments.get("model"), PipelineModule) else None
    engine, optimizer, loader, scheduler = initialize(*bound.args, **bound.kwargs)
    protect(engine)
    if data is not None:
        engine.training_data = data
        engine._build_data_iter(data)
        loader = engine.training_dataloader
    return engine, optimizer, loader, scheduler
