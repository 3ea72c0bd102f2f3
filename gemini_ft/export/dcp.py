"""Writes model and optimizers as a folder of torch.distributed.checkpoint, under the names of ``get_state_dict``.

{"model": {name: tensor}, "optim": {"state": {name: {key: value}}, "param_groups": [{..., "params": [name, ...]}]}}
"""

from __future__ import annotations

import secrets
import warnings
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save

from gemini_ft.errors import StorageError
from gemini_ft.export.source import Checkpoint
from gemini_ft.export.state import OptimizerState
from gemini_ft.export.zero import read_states


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes a checkpoint into ``folder`` that any number of ranks can load."""
    state = read_states(checkpoint, optimizers=True)
    document = {"model": state.model() | state.extra_state(), "optim": _merged(state.optimizers())}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is the intent
        try:
            save(document, storage_writer=_DcpWriter(folder), no_dist=True)
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
