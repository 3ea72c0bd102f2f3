"""What a checkpointer captures and puts back: torch modules and optimizers, or what an engine has made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gemini_ft.errors import WorldSizeError
from gemini_ft.layout import Layout, Read, TensorSpec
from gemini_ft.sources import Live, Source, describe, survey
from gemini_ft.state import Extras, Models, apply_extras, collect_extras, destinations


class TrainingState(Protocol):
    """The state of one rank; all calls come from the training thread."""

    def survey(self) -> list[Live]:
        """Where each tensor is now; cheap enough for every step."""
        ...

    def describe(self, live: Sequence[Live], rank: int, world_size: int) -> list[Source]:
        """What to capture of it; raises UnsupportedStateError for what cannot be captured exactly."""
        ...

    def extras(self, live: Sequence[Live]) -> Extras:
        """What is no tensor; it may hold live objects. ``live`` is of the survey just made."""
        ...

    def check(self, extras: Extras) -> None:
        """Before anything is changed: raise LayoutMismatchError if what ``extras`` gave belongs to another kind of state."""
        ...

    def destinations(self, stored: Iterable[TensorSpec], rank: int, world_size: int) -> list[Source]:
        """Tensors to fill with what a snapshot has; those that do not exist yet are made."""
        ...

    def apply_extras(self, extras: Extras) -> None:
        """Put back what ``extras`` gave, after the tensors have been filled on all ranks: it may be collective."""
        ...

    def resized(
        self, layouts: Mapping[int, Layout], extras: Mapping[int, Extras], rank: int, world_size: int
    ) -> tuple[Sequence[Read], Mapping[str, torch.Tensor], Extras]:
        """Instead of ``destinations``, for a snapshot that another number of ranks has made.

        Args:
            layouts: rank of that job -> layout of its shard.
            extras: rank of that job -> its extras.
            rank: this rank.
            world_size: ranks of this job.

        Returns:
            What to read, by owner and ascending offset; name -> tensor to fill; what to give to ``apply_extras``.
        """
        ...


@dataclass
class PlainState:
    """Modules and optimizers as their owner sees them; see `gemini_ft.state`.

    Attributes:
        models: name -> module.
        optimizers: torch optimizers, wrapped by Lightning or Fabric or not.
        replicated: whether plain parameters hold the same bytes on all ranks; None: whether a model is a DDP one.
    """

    models: Models
    optimizers: Sequence[Any]
    replicated: bool | None = None

    def survey(self) -> list[Live]:
        return survey(self.models, self.optimizers)

    def describe(self, live: Sequence[Live], rank: int, world_size: int) -> list[Source]:
        return describe(live, rank, world_size, self.is_replicated)

    def extras(self, live: Sequence[Live]) -> Extras:
        return collect_extras(self.models, self.optimizers, live)

    def check(self, extras: Extras) -> None:
        """Whatever differs is found when it is put back."""

    def destinations(self, stored: Iterable[TensorSpec], rank: int, world_size: int) -> list[Source]:
        return destinations(self.models, self.optimizers, stored, rank, world_size, self.is_replicated)

    def apply_extras(self, extras: Extras) -> None:
        apply_extras(self.models, self.optimizers, extras)

    def resized(
        self, layouts: Mapping[int, Layout], extras: Mapping[int, Extras], rank: int, world_size: int
    ) -> tuple[Sequence[Read], Mapping[str, torch.Tensor], Extras]:
        raise WorldSizeError(f"plain modules and optimizers of {len(layouts)} ranks cannot be loaded by {world_size}")

    @property
    def is_replicated(self) -> bool:
        """Whether plain parameters hold the same bytes on all ranks."""
        if self.replicated is not None:
            return self.replicated
        return any(isinstance(model, DistributedDataParallel) for model in self.models.values())

    @classmethod
    def of(cls, models: nn.Module | Models, optimizers: Any, replicated: bool | None) -> PlainState:
        """Of one module or several, one optimizer or several."""
        named = {"model": models} if isinstance(models, nn.Module) else dict(models)
        return cls(named, list(optimizers) if isinstance(optimizers, Sequence) else [optimizers], replicated)
