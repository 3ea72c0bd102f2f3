"""Runs of many seeds, each in a process of its own: what a simulated process that was killed has left is never cleaned up."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from gemini_ft.hosts import is_readable
from simulation import drawn
from simulation.history import Check, violations
from simulation.world import World

QUIET = 400.0  # simulated seconds without faults in which the job must come up again
_PATIENCE = 60  # processor seconds that a run may take
_REAL = 60.0  # seconds by the clock for each of these, as the machine may be busy with other work
_TOLD = 20  # violations of a run that are told
_NEVER = (  # in agents' logs: faults of theirs, and words that only a hostile peer says
    *("Traceback", "the agent failed at", "is no collector", "is not a report", "is not a decision", "copies of another host"),
    *("not its place", "chunks are missing", "Error(", "Error:", "before hello", "is not for an agent"),
)


@dataclass
class Outcome:
    """The result of one seed."""

    seed: int
    digest: str = ""
    wrong: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)  # event -> how often it happened
    simulated: float = 0.0  # seconds
    passed: float = 0.0  # seconds of these over which the clock has jumped
    processor: float = 0.0  # seconds
    reached: bool = False  # whether a place of the package that was changed on purpose (`drawn`) was reached


def play(
    seed: int,
    seconds: float,
    before: Callable[[], Any] | None = None,
    patience: int = _PATIENCE,
    ranks: int = 0,
    *,
    spells: int = 1,
    gap: float = 0.0,
    has_faults: bool = True,
) -> Outcome:
    """Simulates a seed in a forked process, which may take ``patience`` processor seconds.

    Without faults it ends after ``seconds``, where else the job must come up again.

    ``before`` is called there first, to break the package: what follows ends with the first violation. ``spells`` and ``gap``: those of
    `World.simulate`.
    """
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (patience, patience))
            gc.disable()  # nothing is collected in so short a life, and looking for it takes a third of the time
            if before is not None:
                before()
            said = json.dumps(asdict(_play(seed, seconds, before is not None, ranks, spells, gap, has_faults))).encode()
        except BaseException:
            said = json.dumps(asdict(Outcome(seed, wrong=[traceback.format_exc()[-2000:]]))).encode()
        while said:
            said = said[os.write(writing, said) :]
        os._exit(0)
    os.close(writing)
    heard, end = b"", time.monotonic() + _REAL * patience
    while is_readable(reading, max(0.0, end - time.monotonic())) and (part := os.read(reading, 2**16)):
        heard += part
    os.close(reading)
    if time.monotonic() > end:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        return Outcome(**json.loads(heard))
    except ValueError:
        return Outcome(seed, wrong=[f"the simulation has come to no end within {patience} processor seconds"])


def _play(seed: int, seconds: float, is_broken: bool, ranks: int, spells: int, gap: float, has_faults: bool) -> Outcome:
    world, begin = World(seed, ranks), time.process_time()
    world.judge = Check() if is_broken else None
    world.is_quiet = not has_faults
    history = world.simulate(seconds, QUIET if has_faults else 0.0, spells, gap)
    took = time.process_time() - begin
    said = [line[:2000] for line in world.lines if any(text in line for text in _NEVER)]
    wrong = [*violations(history), *world.loop.errors, *said]
    counts = dict(Counter(event["event"] for event in history))
    return Outcome(seed, world.digest, wrong[:_TOLD], counts, history[-1]["at"], world.recess.passed, took, bool(drawn.RAN))
