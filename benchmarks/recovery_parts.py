"""The phases of a recovery, and the parts of which each consists, for `recovery_time.py`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import common

PHASES = ("detection", "rendezvous", "process start", "group", "restore", "first step")
EXPLAINED_FROM = 0.2  # seconds of a phase from which on the report says what it consists of
# Mark -> what happens until then, and whose it is. A mark is reached when the slowest rank has reached it.
PARTS = {
    "victim": ("what was killed is gone: the kernel takes its memory back", "kernel"),
    "noticed": ("the launcher has noticed, and has ended the other workers", "launcher"),
    "gone": ("these are gone: the kernel takes their memory back", "kernel"),
    "created": ("rendezvous; the new processes exist", "launcher"),
    "started": ("forked, or an interpreter started; everything is imported", "launcher"),
    "group": ("process group", "torch"),
    "model": ("the script builds its model: fresh pages, random numbers", "script"),
    "wrapped": ("DDP wraps it", "torch"),
    "joined": ("agents are found, copies compared; ranks agree on what to resume", "gemini-ft"),
    "prepared": ("small state is read; DDP, Lightning and the optimizer's state are prepared", "script, gemini-ft"),
    "resumed": ("every byte is read, verified and laid into fresh pages", "gemini-ft"),
    "restored": ("the rest is put back: loops, counters, random states; torchrun: all of the state", "integration"),
    "forward": ("first batch and forward pass: fresh pages for activations", "training"),
    "backward": ("backward pass and all-reduce: fresh pages for gradients and buckets", "training"),
    "step": ("the update", "training"),
}
PHASE_ENDS = dict(zip(("gone", "created", "started", "group", "restored", "step"), PHASES, strict=True))


def split(marks: Mapping[str, float]) -> tuple[tuple[float, ...], dict[tuple[str, str], float]]:
    """Phases, and the parts of each that add up to it: every mark ends a part that the one before it began.

    A spare's worker may exist before the last old one has gone: a phase that is over when the one before it ends took no time.
    """
    ends = [marks["start"]]
    for mark in PHASE_ENDS:
        ends.append(max(marks[mark], ends[-1]))
    parts = {}
    for (mark, phase), (begin, end) in zip(PHASE_ENDS.items(), pairwise(ends), strict=True):
        inside = sorted((at, name) for name, at in marks.items() if begin < at < end and name not in PHASE_ENDS)
        for (before, _), (at, name) in pairwise([(begin, ""), *inside, (end, mark)]):
            parts[phase, name] = at - before
    return tuple(b - a for a, b in pairwise(ends)), parts


def explanation(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The parts of those phases of one case that are not short; ``rows``: a job's title -> its figures."""
    lines = []
    for title, row in rows.items():
        for part, seconds in row.get("parts_s", {}).items():
            phase, mark = part.split(": ")
            if row["phases_s"][phase] >= EXPLAINED_FROM and seconds >= 0.01:
                lines.append([title, phase, f"{seconds:.2f}", *PARTS[mark]])
    if not lines:
        return []
    told = (
        f"Phases of {EXPLAINED_FROM:g} s and more, by what they consist of. Where ranks overlap, a part ends with the slowest rank; "
        "medians of parts need not add up to the median of their phase."
    )
    return [told, common.table(["job", "phase", "seconds", "until", "whose"], lines)]
