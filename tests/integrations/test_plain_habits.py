"""What scripts do around a plain loop: under plain DDP, undisturbed under gemini and killed it ends with the same bits, or it is named."""

from __future__ import annotations

import sys
from pathlib import Path

from three_ways import WAYS, Cell, differing, run

CASE = Path(__file__).parents[1] / "kit" / "habits_case.py"
TOGETHER = "scaler lbfgs averages zipped counted adversaries unfreezes normed generators accumulates".split()


def test_habits_of_plain_loops_three_ways(tmp_path: Path) -> None:
    """Scaled losses, closures, averages, zipped and unfinished epochs, several optimizers and models, generators; and uneven inputs, where
    a rank has come to the end of its inputs when another is killed, and again in the epoch after that.
    """
    cells = {
        "together": Cell({"trainings": TOGETHER}, ["0:4", "1:6"]),
        "uneven": Cell({"trainings": ["uneven"]}, ["1:5", "0:2"]),
    }
    folders = {way: tmp_path / way for way in WAYS}
    for way, folder in folders.items():
        folder.mkdir()
        run(CASE, way, folder=folder, cells=cells)
    outputs = {way: (folder / "output").read_text() for way, folder in folders.items()}
    for rank in "01":
        for name in (*TOGETHER, "uneven"):
            parent = "uneven" if name == "uneven" else "together"
            found = differing({way: folder / parent for way, folder in folders.items()}, name, Cell())
            assert not found, (name, found, outputs["killed"][-3000:])
