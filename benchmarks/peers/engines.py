"""Ways of keeping a DeepSpeed engine's training state at every step; ``load.engine`` is what they are given."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from common import MARK
from peers import Adapter, Row

_HOSTS = "own host, peer host (memory of agents)"
ROWS = {
    "none": Row("no checkpoint", "engines:Nothing", "", quick=True),
    "gemini": Row("gemini-ft", "engines:Gemini", _HOSTS, quick=True),
    "gemini_alone": Row("gemini-ft, own copy alone", "engines:Gemini", "own host (memory of agents)", options=(("replicas", 1),)),
    "lm_resiliency": Row("lm-resiliency", "engines:LmResiliency", "own RAM, peer RAM (in the trainers)", quick=True),
    "deepspeed_torch": Row("DeepSpeed, torch writer", "engines:SaveCheckpoint", "files (tmpfs)", quick=True),
    "deepspeed_fast": Row(
        "DeepSpeed, fast engine, python writer", "engines:SaveCheckpoint", "files (tmpfs)", options=(("decoupled", False),)
    ),
    "deepspeed_decoupled": Row(
        "DeepSpeed, decoupled engine, python writer", "engines:SaveCheckpoint", "files (tmpfs)", options=(("decoupled", True),)
    ),
}
WRITERS = [name for name in ROWS if name.startswith("deepspeed_")]


class EngineAdapter(Adapter):
    """Defaults: nothing to add to DeepSpeed's configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.config: dict[str, Any] = {}


class Nothing(EngineAdapter):
    """No checkpoint."""

    def setup(self, load: Any, folder: Path) -> None:
        return

    def save(self, step: int) -> None:
        return

    def wait_complete(self) -> None:
        return


class Gemini(EngineAdapter):
    """gemini-ft on two emulated hosts. The engine's own calls, made by hand so that they can be timed.

    Args:
        replicas: copies of each rank's state.
    """

    def __init__(self, replicas: int = 2) -> None:
        super().__init__()
        self._replicas = replicas

    def setup(self, load: Any, folder: Path) -> None:
        import torch.distributed as dist

        from gemini_ft.deepspeed import Protection

        os.environ |= {"GEMINI_HOST_ID": f"host{dist.get_rank()}", "GEMINI_RUN_ID": os.environ[MARK], "GEMINI_LOG_DIR": str(folder)}
        self._protection = Protection(load.engine, {"replicas": self._replicas})
        self._saved: dict[int, tuple[int, float]] = {}  # our step -> the engine's, and when the call returned

    def before_update(self) -> None:
        self._protection.checkpointer.wait_before_update()

    def save(self, step: int) -> None:
        self._protection.updated()
        self._protection.stepped()
        self._saved[step] = (self._protection.checkpointer._iteration, time.monotonic())

    def wait_complete(self) -> None:
        stats, until = self._protection.checkpointer.stats, time.monotonic() + 60.0
        while len(stats.commit_seconds) + stats.skipped < stats.snapshots:
            if time.monotonic() > until:
                raise TimeoutError(f"{stats.snapshots} snapshots, {len(stats.commit_seconds)} committed, {stats.skipped} skipped")
            time.sleep(0.001)
        for step, (theirs, returned) in self._saved.items():
            if theirs in stats.commit_seconds:
                self.completed[step] = returned + stats.commit_seconds[theirs]

    def close(self) -> None:
        self._protection.close()


class LmResiliency(EngineAdapter):
    """Its DeepSpeed integration at every step; what it does after the engine's step, called by hand so that it can be timed."""

    def setup(self, load: Any, folder: Path) -> None:
        import torch
        from lm_resiliency.checkpointing.config import InMemoryCkptConfig
        from lm_resiliency.integrations.deepspeed.training import DeepSpeedResiliency

        from peers import lmr

        self._watch = lmr.watch
        config = InMemoryCkptConfig(interval=1, replication_jump=1, disk_flush_interval=0, disk_folder=str(folder), pin_memory=False)
        self._resiliency = DeepSpeedResiliency(load.engine, config, device=torch.device("cpu"))
        load.engine.step = self._resiliency._original_step

    def save(self, step: int) -> None:
        self._resiliency._post_step(())
        self._watch(self._resiliency._ckpt_manager, step, self.completed, self._resiliency.step_count)

    def before_update(self) -> None:
        """Nothing: it does not hold the update back while it copies."""

    def wait_complete(self) -> None:
        self._resiliency._ckpt_manager.finalize_replication()

    def close(self) -> None:
        self._resiliency.close()


class SaveCheckpoint(EngineAdapter):
    """``engine.save_checkpoint`` after every step, to memory; the newest two are kept.

    Args:
        decoupled: of DeepSpeed's fast writer; None: torch's writer.
    """

    def __init__(self, decoupled: bool | None = None) -> None:
        super().__init__()
        if decoupled is not None:
            # Its type "fast" needs an op that DeepSpeed does not have on CPUs ("This op had not been implemented on CPU backend").
            writer = {"type": "PYTHON", "decoupled": decoupled, "data_parallel": "replica"}
            self.config = {"checkpoint": {"checkpoint_serialization": False, "writer": writer}}

    def setup(self, load: Any, folder: Path) -> None:
        self._engine, self._folder = load.engine, folder
        if load.engine.checkpoint_engine.is_decoupled():
            hand_over = load.engine.checkpoint_engine.save
            load.engine.checkpoint_engine.save = lambda state_dict, path: hand_over(_detached(state_dict), path)

    def before_update(self) -> None:
        if self._engine.checkpoint_engine.is_decoupled():
            self._engine._commit_decoupled_checkpoint()

    def save(self, step: int) -> None:
        self._engine.save_checkpoint(str(self._folder), tag=f"step{step % 2}")
        if not self._engine.checkpoint_engine.is_decoupled():
            self.completed[step] = time.monotonic()

    def wait_complete(self) -> None:
        self.before_update()


def _detached(value: Any) -> Any:
    """The same tensors without gradients: the writer's process refuses those on a CPU that require one."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach()
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _detached(item)) for key, item in value.items())
    return [_detached(item) for item in value] if type(value) is list else value
