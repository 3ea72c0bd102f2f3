"""The run of Ray Train whose worker this process is, as its public interface tells it. Imports nothing of Ray's: a worker has it loaded."""

from __future__ import annotations

import sys
from typing import Any


def run_name() -> str | None:
    """The name of the run (``RunConfig(name=...)``), the same in all its workers and over all its restarts; None: this is none of them."""
    context = _context()
    return context.get_experiment_name() if context is not None else None


def launch_name() -> str | None:
    """A name for what one driver starts under this name of a run: its job, in its cluster. None: this process is no worker of Ray Train."""
    if (name := run_name()) is None:
        return None
    runtime = sys.modules["ray"].get_runtime_context()
    return f"ray-{runtime.gcs_address}-{runtime.get_job_id()}-{name}"


def _context() -> Any:
    train = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        return train.get_context()
    except (RuntimeError, DeprecationWarning):  # outside of a training function; in a trial of Ray Tune
        return None
