"""Model and optimizers as a folder of torch.distributed.checkpoint, under the names that ``get_state_dict`` gives them.

{"model": {name: tensor}, "optim": {"state": {name: {key: value}}, "param_groups": [{..., "params": [name, ...]}]}}
"""

from __future__ import annotations

import warnings
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from gemini_ft.errors import StorageError
from gemini_ft.export.source import Checkpoint
from gemini_ft.export.state import OptimizerState
from gemini_ft.export.zero import read_states


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """Write into ``folder``. It can be loaded by any number of ranks."""
    state = read_states(checkpoint, optimizers=True)
    document = {"model": state.model() | state.extra_state(), "optim": _merged(state.optimizers())}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is the intent
        try:
            save(document, storage_writer=FileSystemWriter(folder), no_dist=True)
        except CheckpointException as error:  # no Exception, and it does not say what happened in its first line
            reasons = "; ".join(str(reason) for reason, _ in error.failures.values())
            raise StorageError(f"{folder}: torch.distributed.checkpoint cannot write there: {reasons}; is there room?") from None


def _merged(optimizers: list[OptimizerState]) -> dict[str, Any]:
    """Several optimizers as one, as get_state_dict does it."""
    groups = [
        {**hyper, "params": names}
        for optimizer in optimizers
        for hyper, names in zip(optimizer.groups, _names_per_group(optimizer), strict=True)
    ]
    return {"state": {name: values for optimizer in optimizers for name, values in optimizer.state.items()}, "param_groups": groups}


def _names_per_group(optimizer: OptimizerState) -> list[list[str]]:
    return [optimizer.names[start:stop] for start, stop in pairwise(accumulate(optimizer.sizes, initial=0))]
