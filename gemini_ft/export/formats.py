"""The formats of one model and its optimizers: a Lightning checkpoint, a torch.distributed.checkpoint, safetensors."""

from __future__ import annotations

import json
import logging
import pickle
import secrets
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from struct import pack
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save

from gemini_ft.errors import ConfigError, StorageError, UnsupportedStateError
from gemini_ft.export.source import Checkpoint
from gemini_ft.export.state_dicts import OptimizerState, State, numbered_groups, on_cpu, save_file
from gemini_ft.export.zero import EngineStates, read_states
from gemini_ft.lightning.capture import file_checkpoint
from gemini_ft.storage.shard import CODES

_log = logging.getLogger("gemini_ft")


def write_lightning(checkpoint: Checkpoint, path: Path) -> None:
    """Writes a Lightning ``.ckpt`` that ``Trainer.fit(ckpt_path=...)`` continues from, without gemini-ft.

    Raises ConfigError: the checkpoint is not of a Lightning Trainer. StateError: it holds a pickle that is not trusted.
    """
    try:
        saved = on_cpu(checkpoint.extras("extras", "checkpoint"))
    except KeyError:
        raise ConfigError(
            f"format='lightning' needs a stream of a Lightning Trainer (fit-0, ...); {checkpoint.stream!r} of run {checkpoint.run!r} is of "
            "a loop without a Trainer, whose progress Lightning cannot continue. Use --format dcp or safetensors"
        ) from None
    state = read_states(checkpoint, optimizers=True)
    model = state.model(raw=True) | state.extra_state()
    content = file_checkpoint(saved, model, [_state_dict(optimizer) for optimizer in state.optimizers()])
    save_file(path, content)
    _warn_if_not_plain(path)


def _state_dict(optimizer: OptimizerState) -> dict[str, Any]:
    """The state of one optimizer, numbered as ``torch.optim.Optimizer.state_dict`` does it."""
    numbers = {name: number for number, name in enumerate(optimizer.names)}
    state = {numbers[name]: values for name, values in optimizer.state.items()} | optimizer.other
    return {"state": state, "param_groups": numbered_groups(optimizer.groups, optimizer.sizes, len(optimizer.names))}


def _warn_if_not_plain(path: Path) -> None:
    try:
        torch.load(path, weights_only=True, mmap=True, map_location="meta")
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        _log.warning(
            "the checkpoint holds objects that torch.load refuses by default (%s): load it with Trainer.fit(..., weights_only=False), "
            "or keep only plain values in callbacks and on_save_checkpoint",
            reason,
        )


def write_dcp(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes model and optimizers as a folder of torch.distributed.checkpoint, which any number of ranks can load; see `document`."""
    content = document(read_states(checkpoint, optimizers=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is the intent
        try:
            save(content, storage_writer=_DcpWriter(folder), no_dist=True)
        except CheckpointException as error:  # no Exception, and it does not say what happened in its first line
            reasons = "; ".join(str(reason) for reason, _ in error.failures.values())
            raise StorageError(f"{folder}: torch.distributed.checkpoint cannot write there: {reasons}; is there room?") from None


class _DcpWriter(FileSystemWriter):
    """Writes files whose names no earlier export has, so that both can lie in one place until the metadata are exchanged."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Extends torch's method: the plans keep the beginning of the files' names."""
        nonce = secrets.token_hex(4)
        planned = super().prepare_global_plan(plans)
        return [replace(plan, storage_data=replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{nonce}_")) for plan in planned]


def document(state: State | EngineStates, optimizers: bool = True, flat: bool = False) -> dict[str, Any]:
    """Model and optimizers as ``get_state_dict`` gives them, several optimizers as one.

    {"model": {name: tensor}, "optim": {"state": {name: {key: value}}, "param_groups": [{..., "params": [name, ...]}]}}

    What a script has saved itself comes under its own keys, flattened.

    ``flat``: the optimizer as with ``flatten_optimizer_state_dict``: {"state.<name>.<key>": value, "param_groups.<name>.<key>": value}.
    """
    if isinstance(state, State) and state.is_written:
        return state.model(raw=True) | state.values
    if not optimizers:
        return {"model": state.model()}
    optim = _merged(state.optimizers())
    if flat:
        groups = {
            f"param_groups.{name}.{key}": value
            for group in optim["param_groups"]
            for name in group["params"]
            for key, value in group.items()
        }
        values = {f"state.{name}.{key}": value for name, held in optim["state"].items() for key, value in held.items()}
        optim = values | {key: value for key, value in groups.items() if not key.endswith(".params")}
    return {"model": state.model() | state.extra_state(), "optim": optim}


def _merged(optimizers: list[OptimizerState]) -> dict[str, Any]:
    numbered = [(each.names, group) for each in optimizers for group in numbered_groups(each.groups, each.sizes, len(each.names))]
    groups = [{**group, "params": [names[number] for number in group["params"]]} for names, group in numbered]
    return {"state": {name: values for optimizer in optimizers for name, values in optimizer.state.items()}, "param_groups": groups}


def write_safetensors(checkpoint: Checkpoint, path: Path) -> None:
    """Writes the weights as one safetensors file, ``path``: 8 bytes of size, a JSON header, the tensors end to end.

    Tied tensors are there once, under their first name; the header's metadata has the others, as ``safetensors.torch`` does.

    Raises UnsupportedStateError: a dtype is unknown to safetensors; the tensor is named.
    """
    state = read_states(checkpoint, optimizers=False)
    tied = state.tied
    tensors = {key: tensor for key, tensor in state.model().items() if key not in tied}
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))  # so that all are aligned
    header = _header(ordered, {"format": "pt"} | tied)
    with open(path, "wb") as file:
        file.write(pack("<Q", len(header)) + header)
        file.writelines(tensor.contiguous().flatten().view(torch.uint8).numpy().data for tensor in ordered.values())


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    rows: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in CODES:
            raise UnsupportedStateError(f"{name} has the dtype {dtype}, which safetensors does not know; use --format dcp")
        start, end = end, end + tensor.numel() * tensor.element_size()
        rows[name] = {"dtype": CODES[dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(rows, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
