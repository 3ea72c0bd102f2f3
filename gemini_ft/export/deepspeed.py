"""Writes a folder that ``engine.load_checkpoint`` continues from, without gemini-ft, as ``save_checkpoint`` would have.

With the number of ranks that wrote it; for others DeepSpeed's own ``ds_to_universal`` converts it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from gemini_ft.errors import ConfigError, UnsupportedStateError
from gemini_ft.export.source import Checkpoint
from gemini_ft.export.state_dicts import numbered_groups, on_cpu, save_file, tied_keys
from gemini_ft.export.zero import Engine, buffers_of, is_engine

_ZERO12, _ZERO3, _BF16 = "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer"


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
