"""A picture of some steps: what the training sends, when the network is idle, when replicas are sent."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any


def draw(timeline: Mapping[str, Any], folder: Path, name: str) -> str | None:
    """Write ``<date>-<name>.png``; returns the file's name, None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = timeline["steps"]
    origin = steps[0]["began"]
    figure, axes = pyplot.subplots(figsize=(12, 2.6), layout="constrained")
    for step in steps:
        begin = step["began"] - origin
        axes.axvline(begin, color="black", linewidth=0.8)
        busy = [(begin + each["begin"], each["end"] - each["begin"]) for each in step["collectives"]]
        axes.broken_barh(busy, (2, 0.8), color="tab:blue")
        axes.broken_barh([(begin + at, length) for at, length in step["idle"]], (1, 0.8), color="lightgrey")
    sent = [(span["first"] - origin, max(0.002, span["last"] - span["first"])) for span in timeline["spans"]]
    axes.broken_barh(sent, (0, 0.8), color="tab:orange")
    axes.set_yticks([0.4, 1.4, 2.4], ["replicas", "idle network", "training"])
    axes.set_xlim(0, steps[-1]["began"] - origin + steps[-1]["seconds"])
    axes.set_xlabel("seconds; lines are the beginnings of steps")
    paths = (folder / f"{date.today().isoformat()}-{name}{'' if n == 1 else f'-{n}'}.png" for n in itertools.count(1))
    path = next(path for path in paths if not path.exists())
    figure.savefig(path, dpi=110)
    return path.name
