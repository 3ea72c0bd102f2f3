"""An engine of DeepSpeed in a checkpoint: whole parameters and their state, put together from all ranks' partitions.

`write` makes a folder that ``engine.load_checkpoint`` continues from, without gemini-ft, as ``save_checkpoint`` would have: with the number
of ranks that wrote it; for others DeepSpeed's own ``ds_to_universal`` converts it.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from gemini_ft.core.layout import Read
from gemini_ft.deepspeed.reshard import Cut, Fragment, OldShards
from gemini_ft.errors import ConfigError, UnsupportedStateError
from gemini_ft.export.source import Checkpoint
from gemini_ft.export.state_dicts import OptimizerState, State, checked_aliases, numbered_groups, on_cpu, save_file, tied_keys
from gemini_ft.export.whole_tensors import check_covered
from gemini_ft.recovery.restore import scatter
from gemini_ft.state import codec
from gemini_ft.state.gradients import KEY

_ZERO3, _BF16 = "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer"


def is_engine(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint is of a DeepSpeed engine."""
    try:
        checkpoint.extras("tensors", "cut")
    except KeyError:
        return False
    return True


class Engine:
    """The state of all ranks of an engine in one checkpoint.

    ``checkpoint``: where to read; it stays open.

    Raises:
        UnsupportedStateError: of a pipeline, whose stages hold different layers, or of ranks that were trained alone.
        CorruptDataError: a tensor is not whole.
        StateError: it holds a pickle that is not trusted.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._shards = checkpoint.shards
        # of each rank, see `gemini_ft.deepspeed.state.EngineState.extras`
        self.extras = [checkpoint.extras_of(owner, "tensors") for owner in range(len(checkpoint.shards))]
        self.about = codec.decode(self.extras[0]["about"])  # see `gemini_ft.deepspeed.partitions.about`
        checked_aliases(self.about["keys"])
        if any(name.startswith(f"{KEY}.outer") for name in (self.extras[0].get(KEY) or {}).get("names", ())):
            raise UnsupportedStateError(
                "the engine's ranks were trained alone (every in its gradient_pipeline), and each has an optimizer of its own: save "
                "engine.module.state_dict() in the script, after an average"
            )
        if any(value["about"] != self.extras[0]["about"] for value in self.extras):
            raise UnsupportedStateError("the ranks hold different layers (a pipeline); only engines with one stage can be exported")
        self.cuts = [Cut.unpack(codec.decode(value["cut"])) for value in self.extras]  # of each rank
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
        self._fill([Read.of(owner, piece, piece.name) for piece in pieces], tensors)
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
        checkpoint: where to read.
        optimizers: whether the state of the optimizer is wanted too. Then weights are the fp32 masters, else as the module has them.
    """

    def __init__(self, checkpoint: Checkpoint, optimizers: bool) -> None:
        engine = Engine(checkpoint)
        self._engine, self._params = engine, engine.parameters(optimizers)
        self._buffers = buffers_of(engine.partition(0))
        self._in_module = not optimizers

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
    with contextlib.closing(checkpoint):
        return (EngineStates if is_engine(checkpoint) else State)(checkpoint, optimizers)


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes ``folder/latest`` and ``folder/global_step<N>``.

    Raises:
        ConfigError: the checkpoint is not of a DeepSpeed engine, or DeepSpeed is not installed.
        UnsupportedStateError: its optimizer is one whose files are not known here.
    """
    if not is_engine(checkpoint):
        raise ConfigError(
            f"format='deepspeed' needs a stream of a DeepSpeed engine (deepspeed-0, ...); {checkpoint.stream!r} of run {checkpoint.run!r} "
            "is none. Use --format lightning, dcp or safetensors"
        )
    _ZeroWriter(Engine(checkpoint), folder).write()
    checkpoint.close()


class _ZeroWriter:
    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine, self._about, self._extras = engine, engine.about, [on_cpu(value) for value in engine.extras]
        counters = self._extras[0]["counters"]
        self._counters, self._kind = counters, self._extras[0]["optimizer"]
        self._files = _deepspeed_files()
        self._folder, self._tag = folder, f"global_step{counters['global_steps']}"
        if self._about["stage"] == 0 and self._kind != self._extras[0]["base optimizer"]:
            raise UnsupportedStateError(f"{self._kind} at stage 0 has files of its own; use --format dcp or safetensors")

    def write(self) -> None:
        folder = self._folder / self._tag
        folder.mkdir()
        params = self._engine.parameters(with_state=self._about["stage"] == 0)
        weights = {name: held[""].to(getattr(torch, self._about["params"][name][1])) for name, held in params.items()}
        for rank in range(len(self._extras)):
            partition = self._engine.partition(rank)
            buffers = buffers_of(partition)
            if self._about["stage"] == 3:
                # Weights are empty in the module between steps: they are in the optimizer's partitions.
                states = self._model_states({name: weight.new_empty(0) for name, weight in weights.items()} | buffers, partition)
                save_file(folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", states)
            elif rank == 0:
                optimizer = self._whole_optimizer(params) if self._about["stage"] == 0 else None
                frozen = {f"frozen.{name}": tensor for name, tensor in weights.items()}
                save_file(folder / "mp_rank_00_model_states.pt", self._model_states(weights | buffers, frozen, optimizer))
            if self._about["stage"] > 0:
                prefix = "bf16_" if self._about["bf16"] else ""
                content = {"optimizer_state_dict": self._optimizer_states(rank, partition), "ds_config": self._about["config"]}
                save_file(
                    folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", content | {"ds_version": self._about["version"]}
                )
        (self._folder / "latest").write_text(self._tag)

    def _model_states(self, tensors: dict[str, torch.Tensor], held: dict[str, torch.Tensor], optimizer: Any = None) -> dict[str, Any]:
        """The model's states of one rank; ``held`` has frozen parameters, or partitions of them, as ``frozen.<name>``."""
        module = {key: tensors[name] for key, name in self._about["keys"].items()}
        trained = [{name: torch.Size(self._about["params"][name][0]) for name in group} for group in self._about["masters"].values()]
        trained_names = {name for group in self._about["masters"].values() for name in group}
        frozen = [name for name in self._about["params"] if name not in trained_names] if self._about["stage"] > 1 else []
        return {
            "module": module,
            "buffer_names": [key for key, name in self._about["keys"].items() if name not in self._about["params"]],
            "optimizer": optimizer,
            "param_shapes": trained if self._about["stage"] > 0 else None,
            "frozen_param_shapes": {name: torch.Size(self._about["params"][name][0]) for name in frozen} if frozen else None,
            "shared_params": tied_keys(self._about["keys"]) if self._about["stage"] > 0 else None,
            "frozen_param_fragments": {name: held[f"frozen.{name}"] for name in frozen} if frozen else None,
            "lr_scheduler": self._extras[0].get("lr_scheduler"),
            "data_sampler": None,
            "random_ltd": None,
            "sparse_tensor_module_names": [],
            "skipped_steps": self._counters["skipped_steps"],
            "global_steps": self._counters["global_steps"],
            "global_samples": self._counters["global_samples"],
            "dp_world_size": len(self._extras),
            "mp_world_size": 1,
            "ds_config": self._about["config"],
            "ds_version": self._about["version"],
        }

    def _whole_optimizer(self, params: dict[str, dict[str, torch.Tensor]]) -> dict[str, Any]:
        """The state of the whole optimizer, numbered as torch's ``Optimizer.state_dict`` does it."""
        groups = self._about["groups"]
        state = [{key: value for key, value in params[name].items() if key} | self._value(0, f"param.{name}") for g in groups for name in g]
        return _state_dict(state, [len(group) for group in groups], self._extras[0]["groups"])

    def _value(self, rank: int, master: str) -> dict[str, Any]:
        return dict(self._extras[rank]["values"].get(master, {}))

    def _optimizer_states(self, rank: int, partition: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The state that the engine's optimizer would save for one rank."""
        masters = list(self._about["masters"])
        state = []
        for name in masters:
            kept = {key.removeprefix(f"{name}."): tensor for key, tensor in partition.items() if key.startswith(f"{name}.")}
            state.append(kept | self._value(rank, name))
        found = {
            "loss_scaler": self._files.loss_scaler(self._about["dynamic_loss_scale"], self._extras[rank]["scalers"].get("loss_scaler", {})),
            "dynamic_loss_scale": self._about["dynamic_loss_scale"],
            "overflow": False,
            "zero_stage": self._about["stage"],
            "partition_count": len(self._extras) if self._kind == _ZERO3 else [len(self._extras)] * len(masters),
            "ds_version": self._about["version"],
        }
        if self._kind == _ZERO3:
            firsts = [params[0] for params in self._about["masters"].values()]
            sizes = [sum(first in group for first in firsts) for group in self._about["groups"]]  # sub-groups of each group
            base = _state_dict(state, sizes, self._extras[rank]["groups"])
            return found | {"optimizer_state_dict": base, "fp32_flat_groups": [partition[name] for name in masters]}
        unpadded = [self._unpadded(rank, name, partition[name]) for name in masters]
        found |= {
            "clip_grad": self._about["clip_grad"],
            "base_optimizer_state": _state_dict(state, [1] * len(masters), self._extras[rank]["groups"]),
            "single_partition_of_fp32_groups": unpadded,
            "group_paddings": [partition[name].numel() - value.numel() for name, value in zip(masters, unpadded, strict=True)],
            "param_slice_mappings": [self._slices(rank, name) for name in masters],
        }
        return found | ({} if self._kind == _BF16 else {"param_alignment_paddings": self._about["between"]})

    def _unpadded(self, rank: int, master: str, value: torch.Tensor) -> torch.Tensor:
        ends = [fragment.offset + fragment.stop - fragment.start for fragment in self._engine.cuts[rank].of(master)]
        return value[: max(ends, default=0)]

    def _slices(self, rank: int, master: str) -> dict[str, Any]:
        found = self._engine.cuts[rank].of(master)
        return {fragment.param: self._files.address(fragment.offset, fragment.stop - fragment.start) for fragment in found}


def _deepspeed_files() -> Any:
    try:
        return importlib.import_module("gemini_ft.deepspeed.versions")
    except ImportError:
        raise ConfigError("format='deepspeed' needs deepspeed installed here: pip install 'gemini-ft[deepspeed]'") from None


def _state_dict(state: list[dict[str, Any]], sizes: list[int], groups: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "state": {number: kept for number, kept in enumerate(state) if kept},
        "param_groups": numbered_groups(groups, sizes, sum(sizes)),
    }
