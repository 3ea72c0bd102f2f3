"""The plan of one trial, and the measurements that it hands back. Imports no torch, because the parent process reads it too."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Plan:
    """The numbers of blocks and of timed iterations in each; the same for all rows of one size."""

    megabytes: int  # of state per rank
    tokens: int  # rows of input per iteration
    pairs: int  # saved blocks, each between two plain ones
    plain: int  # timed iterations of a plain block
    saved: int  # timed iterations of a saved block
    warm: int = 3  # saved blocks of one iteration before the measurement
    stage: int = 0  # of ZeRO
    dtype: str = "bf16"  # of an engine's weights: bf16 or fp32


@dataclass
class Block:
    """Measurements of one block on one rank; times in seconds."""

    saved: bool
    warm: bool = False  # one of the first saves: only its memory is looked at
    iterations: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)  # of those, how long the training thread stood still
    called: dict[int, float] = field(default_factory=dict)  # step -> monotonic time of the call that saves it
    completed: dict[int, float] = field(default_factory=dict)  # step -> monotonic time at which its copies were complete
    foreign: float = 0.0  # share of the machine that other programs took (rank 0 knows)
    cpu: dict[str, float] = field(default_factory=dict)  # processor seconds in all iterations, see Usage.cpu_since (rank 0 knows)
    fresh: int = 0  # bytes the kernel handed to all processes of the trial (rank 0 knows)
    held: int = 0  # bytes of RAM all processes of the trial hold together at its end (rank 0 knows)
