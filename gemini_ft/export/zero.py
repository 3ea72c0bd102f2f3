"""An engine of DeepSpeed in a checkpoint: whole parameters and their state, put together from all ranks' partitions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gemini_ft.core.layout import Read
from gemini_ft.deepspeed.reshard import Cut, Fragment, OldShards
from gemini_ft.errors import UnsupportedStateError
from gemini_ft.export.source import Checkpoint
from gemini_ft.export.state_dicts import OptimizerState, State, check_covered, tied_keys
from gemini_ft.recovery.restore import scatter
from gemini_ft.state import codec


def is_engine(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint is of a DeepSpeed engine."""
    try:
        checkpoint.extras("tensors", "cut")
    except KeyError:
        return False
    return True


class Engine:
    """The state of all ranks of an engine in one checkpoint.

    Args:
        checkpoint: where to read; it stays open.

    Raises:
        UnsupportedStateError: of a pipeline, whose stages hold different layers.
        CorruptDataError: a tensor is not whole.
        StateError: it holds a pickle that is not trusted.

    Attributes:
        about: see `gemini_ft.deepspeed.partitions.about`.
        extras: of each rank, see `gemini_ft.deepspeed.state.EngineState.extras`.
        cuts: of each rank.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._shards = checkpoint.shards
        self.extras = [checkpoint.extras_of(owner, "tensors") for owner in range(len(checkpoint.shards))]
        self.about = codec.decode(self.extras[0]["about"])
        if any(value["about"] != self.extras[0]["about"] for value in self.extras):
            raise UnsupportedStateError("the ranks hold different layers (a pipeline); only engines with one stage can be exported")
        self.cuts = [Cut.unpack(codec.decode(value["cut"])) for value in self.extras]
        layouts = {owner: shard.layout for owner, shard in enumerate(self._shards)}
        check_covered([piece for layout in layouts.values() for piece in layout.pieces])
        self._places = OldShards(layouts, dict(enumerate(self.cuts)))

    def parameters(self, with_state: bool) -> dict[str, dict[str, torch.Tensor]]:
        """Parameter -> key of its state (empty: itself) -> whole tensor; fp32 where the optimizer has fp32 masters."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        reads: list[Read] = []
        for name, (shape, _, _) in self.about["params"].items():
            of_shape, shared = self._places.state_of(name) if with_state else ({}, {})
            everything, held = Fragment("", 0, name, 0, math.prod(shape)), dict[str, torch.Tensor]()
            for key in ("", *of_shape):
                reads += self._places.reads(everything, key, f"{name}\0{key}")  # all of it is there before memory is taken for it
                held[key] = torch.empty(shape, dtype=getattr(torch, self._places.dtype(name, key)))
            for key, spec in shared.items():
                held[key] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
                reads += self._places.shared(name, key, f"{name}\0{key}")
            found[name] = held
        self._fill(reads, {f"{name}\0{key}": tensor for name, held in found.items() for key, tensor in held.items()})
        return found

    def partition(self, owner: int) -> dict[str, torch.Tensor]:
        """Every tensor that one rank had for itself, unchanged."""
        pieces = [piece for piece in self._shards[owner].layout.pieces if len(piece.group) == 1]
        tensors = {piece.name: torch.empty(piece.shape, dtype=getattr(torch, piece.dtype)) for piece in pieces}
        self._fill(
            [
                Read(owner=owner, offset=piece.offset, nbytes=piece.nbytes, name=piece.name, start=piece.start, stop=piece.stop)
                for piece in pieces
            ],
            tensors,
        )
        return tensors

    def _fill(self, reads: Iterable[Read], tensors: Mapping[str, torch.Tensor]) -> None:
        for owner, shard in enumerate(self._shards):
            own = sorted((read for read in reads if read.owner == owner and read.nbytes), key=lambda read: read.offset)
            scatter(shard, own, tensors)


def buffers_of(partition: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The buffers in what one rank had for itself, by their names in the module."""
    return {name.removeprefix("buffer."): tensor for name, tensor in partition.items() if name.startswith("buffer.")}


class EngineStates:
    """The interface of `gemini_ft.export.state_dicts.State` for an engine: one model, one optimizer.

    Args:
        checkpoint: where to read; it is closed then.
        optimizers: whether the state of the optimizer is wanted too. Then weights are the fp32 masters, else as the module has them.
    """

    def __init__(self, checkpoint: Checkpoint, optimizers: bool) -> None:
        engine = Engine(checkpoint)
        self._engine, self._params = engine, engine.parameters(optimizers)
        self._buffers = buffers_of(engine.partition(0))
        self._in_module = not optimizers
        checkpoint.close()

    def model(self, raw: bool = False) -> dict[str, torch.Tensor]:
        """Key of the state dict -> tensor; buffers are those of rank 0."""
        return {key: self._tensor(name) for key, name in self._engine.about["keys"].items()}

    def _tensor(self, name: str) -> torch.Tensor:
        if name in self._buffers:
            return self._buffers[name]
        _, dtype, _ = self._engine.about["params"][name]
        return self._params[name][""].to(getattr(torch, dtype)) if self._in_module else self._params[name][""]

    @property
    def tied(self) -> dict[str, str]:
        """Further name -> first name, of parameters and buffers that are one."""
        return tied_keys(self._engine.about["keys"])

    def extra_state(self) -> dict[str, Any]:
        """Nothing: modules' extra state is not captured of engines."""
        return {}

    def optimizers(self) -> list[OptimizerState]:
        """The engine's optimizer. Values other than tensors come from the flat partition in which a parameter begins."""
        groups, extras = self._engine.about["groups"], self._engine.extras[0]
        names = [name for group in groups for name in group]
        state = {name: {key: tensor for key, tensor in self._params[name].items() if key} | self._values(name) for name in names}
        return [OptimizerState(names=names, sizes=[len(group) for group in groups], groups=extras["groups"], state=state)]

    def _values(self, name: str) -> dict[str, Any]:
        for cut, extras in zip(self._engine.cuts, self._engine.extras, strict=True):
            for fragment in cut.fragments:
                if fragment.param == name:
                    return dict(extras["values"].get(fragment.master, {}))
        return {}


def read_states(checkpoint: Checkpoint, optimizers: bool) -> State | EngineStates:
    """Reads the states of any checkpoint, and closes it. See `State` and `EngineStates`."""
    return (EngineStates if is_engine(checkpoint) else State)(checkpoint, optimizers)
