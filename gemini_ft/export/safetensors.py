"""Writes a model's weights as one safetensors file, by hand: 8 bytes of size, a JSON header, the tensors end to end.

Tied tensors are there once, under their first name; the header's metadata has the others, as ``safetensors.torch`` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from struct import pack

import torch

from gemini_ft.errors import UnsupportedStateError
from gemini_ft.export.source import Checkpoint
from gemini_ft.export.zero import read_states
from gemini_ft.storage.shard import CODES


def write(checkpoint: Checkpoint, folder: Path, name: str) -> None:
    """Writes ``folder/name``.

    Raises:
        UnsupportedStateError: a dtype is unknown to safetensors; the tensor is named.
    """
    state = read_states(checkpoint, optimizers=False)
    tied = state.tied
    tensors = {key: tensor for key, tensor in state.model().items() if key not in tied}
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))  # so that all are aligned
    header = _header(ordered, {"format": "pt"} | tied)
    with open(folder / name, "wb") as file:
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
