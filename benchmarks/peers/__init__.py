"""One adapter per way of keeping a training state, behind one small interface.

A row of the benchmark is the name of an adapter in ``ROWS``. Adapters import what they measure when they are built, so a
package that is not installed costs only its own row.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Peer(Protocol):
    """The interface of every adapter. All calls come from the training thread."""

    completed: dict[int, float]
    """Step -> monotonic time at which its copies were complete; filled from any thread."""

    def setup(self, load: Any, folder: Path) -> None:
        """Get ready for ``load``; ``folder`` is an empty folder in memory (tmpfs) shared by the ranks."""

    def save(self, step: int) -> None:
        """Take the state after ``step`` updates; returns as soon as training may go on."""

    def before_update(self) -> None:
        """Called just before the optimizer changes the state."""

    def wait_complete(self) -> None:
        """Return when everything saved so far is complete, or has been given up."""

    def close(self) -> None:
        """Release everything."""


class Adapter:
    """Defaults for adapters that need no call before the update."""

    def __init__(self) -> None:
        self.completed: dict[int, float] = {}

    def before_update(self) -> None:
        return

    def close(self) -> None:
        return


@dataclass(frozen=True)
class Row:
    """One row of the report."""

    title: str
    target: str  # "module:class" below this package
    copies: str  # where the copies of one rank's state end up, the training's own tensors not counted; empty: none
    same_state: bool = False  # whether the ranks hold equal state, as under plain data parallelism
    quick: bool = False  # whether it starts fast enough for --quick
    own_loop: bool = False  # whether the row drives the training itself (Lightning)
    options: tuple[tuple[str, object], ...] = ()


ROWS = {
    "none": Row("no checkpoint", "nothing:Nothing", "", quick=True),
    "gemini": Row("gemini-ft", "gemini:Gemini", "own host, peer host (memory of agents)", quick=True),
    "gemini_encrypted": Row(
        "gemini-ft, encrypted between hosts",
        "gemini:Gemini",
        "own host, peer host (memory of agents)",
        quick=True,
        options=(("encrypt", True),),
    ),
    "gemini_plain": Row(
        "gemini-ft, no TLS, no tags (for measurement alone)",
        "gemini:Gemini",
        "own host, peer host (memory of agents)",
        quick=True,
        options=(("protected", False),),
    ),
    "gemini_modules": Row(
        "gemini-ft, 1 000 small modules more",
        "gemini:Gemini",
        "own host, peer host (memory of agents)",
        options=(("modules", 1000),),
    ),
    **{
        f"gemini_{policy}": Row(
            f"gemini-ft, agents and copy threads {said}",
            "gemini:Gemini",
            "own host, peer host (memory of agents)",
            options=(("policy", policy),),
        )
        for policy, said in (("normal", "of SCHED_OTHER"), ("nice", "of SCHED_BATCH and nice 10"), ("idle", "of SCHED_IDLE"))
    },
    "gemini_ddp": Row(
        "gemini-ft, equal ranks: each owns half",
        "gemini:Gemini",
        "own host, peer host (memory of agents)",
        same_state=True,
        quick=True,
        options=(("replicated", True),),
    ),
    "gemini_lightning": Row(
        "gemini-ft, Lightning strategy: each owns half",
        "lightning_rows:GeminiFit",
        "own host, peer host (memory of agents)",
        same_state=True,
        own_loop=True,
    ),
    "floor": Row("physical floor", "floor:Floor", "own RAM, peer RAM; no commit", quick=True),
    "floor_verified": Row("physical floor + xxh3", "floor:Floor", "own RAM, peer RAM; no commit", quick=True, options=(("verify", True),)),
    "floor_ddp": Row(
        "physical floor, equal ranks: each sends half",
        "floor:Floor",
        "own RAM, peer RAM; no commit",
        same_state=True,
        options=(("replicated", True),),
    ),
    "lm_resiliency": Row("lm-resiliency", "lmr:LmResiliency", "own RAM, peer RAM (in the trainers)", quick=True),
    "lm_resiliency_ddp": Row("lm-resiliency, equal ranks", "lmr:LmResiliency", "own RAM, peer RAM (in the trainers)", same_state=True),
    "torch_dcp": Row("torch DCP async_save", "dcp:AsyncSave", "own host (tmpfs file)"),
    "nvrx_clique": Row("NVRx local, clique", "nvrx:Clique", "own host, peer host (tmpfs files)"),
    "lightning_dump": Row("Lightning's state dump", "lightning_rows:StateDump", "", same_state=True, own_loop=True),
    "lightning_file": Row(
        "Lightning's ModelCheckpoint", "lightning_rows:FileOfEveryStep", "one file (tmpfs)", same_state=True, own_loop=True
    ),
    "dlrover": Row("DLRover flash checkpoint", "dlrover_flash:FlashCheckpoint", "own host (shared memory)"),
}


def build(name: str, rows: Mapping[str, Row] = ROWS) -> Peer:
    """Import and build the adapter of row ``name``; raises whatever its package raises."""
    row = rows[name]
    module, _, cls = row.target.partition(":")
    make: Callable[..., Peer] = getattr(importlib.import_module(f"peers.{module}"), cls)
    return make(**dict(row.options))
