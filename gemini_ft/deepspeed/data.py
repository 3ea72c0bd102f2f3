"""The state in a snapshot beside the engine: of the loader that DeepSpeed makes for training, and of objects that the script gives.

DeepSpeed's loader makes a DataLoader whenever it is iterated. One that is followed makes it once, and that DataLoader is resumable
(`gemini_ft.loaders`): its first iteration after a failure goes on with the next batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from deepspeed.pipe import PipelineModule
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from torch import nn
from torch.utils.data import DataLoader

from gemini_ft.errors import ConfigError, StateError
from gemini_ft.loaders import resumable
from gemini_ft.state.loop import keepable
from gemini_ft.state.rng import GivenGenerator

TRAINING = "training_data"  # the name of the state of the loader that an engine is made with


class EngineData:
    """The objects that are captured beside an engine: the loader of its training data, and those given to `Protection.keep`.

    Args:
        found: their states in the snapshot that is resumed; empty at a first start. Each is loaded as soon as its object is there.
        is_new: whether they are another rank's, whose generators this one does not share.
    """

    def __init__(self, found: Mapping[str, Any], is_new: bool) -> None:
        self._found, self._is_new = dict(found), is_new
        self.objects: dict[str, Any] = {}

    def follow(self, loader: DeepSpeedDataLoader, name: str = TRAINING, begun: bool = False) -> None:
        """Makes a loader of DeepSpeed go on where it was.

        ``begun``: an iteration of it has begun, and the caller begins it again. Raises ConfigError: it is being iterated.
        """
        if loader.data is not None and not begun:
            raise ConfigError("a loader of DeepSpeed is being iterated, so that its position cannot be kept; attach the engine before")
        loader.__class__ = _Followed
        loader.dataloader = resumable(_data_loader_of(loader))
        self._add(name, loader.dataloader)

    def add(self, name: str, item: Any) -> None:
        """Takes an object in, and loads its state if there is one. Raises ConfigError: it has no state, or its name is taken."""
        if name in self.objects:
            raise ConfigError(f"keep({name}=...): there is a {type(self.objects[name]).__qualname__} of this name already")
        if isinstance(item, DeepSpeedDataLoader):
            self.follow(item, name)
            return
        self._add(name, keepable(item, f"keep({name}=...)"))

    def _add(self, name: str, item: Any) -> None:
        self.objects[name] = item
        if name in self._found:
            state = self._found.pop(name)
            if not (self._is_new and isinstance(item, GivenGenerator)):
                item.load_state_dict(state)

    def positions(self) -> dict[str, Any]:
        """The states of what batches come from: the next one may be drawn before a snapshot is taken.

        Raises StateError: what the resumed snapshot has a state of has not been given again.
        """
        if self._found:
            raise StateError(
                f"the snapshot has a state of {sorted(self._found)}, which the script has not given before its first step: give it to "
                "engine.gemini.keep() again, or start anew (resume='never')"
            )
        return {name: item.state_dict() for name, item in self.objects.items() if _is_data(item)}

    def others(self) -> dict[str, Any]:
        """The states of all else, which a script may change after ``engine.step()``."""
        return {name: item.state_dict() for name, item in self.objects.items() if not _is_data(item)}


def _is_data(item: Any) -> bool:
    return isinstance(item, GivenGenerator) or (isinstance(item, Iterable) and not isinstance(item, Mapping | nn.Module))


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

    Returns the results of ``deepspeed.initialize``.
    """
    bound = inspect.signature(initialize).bind(*arguments, **named)
    data = bound.arguments.pop("training_data", None) if isinstance(bound.arguments.get("model"), PipelineModule) else None
    engine, optimizer, loader, scheduler = initialize(*bound.args, **bound.kwargs)
    protect(engine)
    if data:
        engine.training_data, engine.training_dataloader = data, engine.deepspeed_io(data)
        engine._build_data_iter(data)  # the middle stages keep the loader that they do not use
        loader = engine.training_dataloader
    return engine, optimizer, loader, scheduler
