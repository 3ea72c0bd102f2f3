"""Docstrings are plain English: they have none of the phrases that the guide for contributors rules out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = [
    "agent",
    "cli",
    "core",
    "deepspeed",
    "export",
    "faults",
    "launch",
    "pipeline",
    "recovery",
    "storage",
    "testing",
    "wire",
    "worker",
]
RIDDLES = {
    "Takes note": r"\bTakes? note\b",
    "Said to": r"^Said to\b",
    "a first sentence that begins with What, Of, Those or Who": r"\A(What|Of|Those|Who)\b",
    "somebody": r"\bsomebody\b",
    "See the module": r"\b[Ss]ee the module\b",
}


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each docstring in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


@pytest.mark.parametrize("name", RIDDLES)
def test_no_docstring_is_a_riddle(name: str) -> None:
    folders = [ROOT / "sync", ROOT / "compression", *(ROOT / "gemini_ft" / folder for folder in FOLDERS)]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        for line, text in docstrings(path)
        if re.search(RIDDLES[name], text, re.MULTILINE if name == "Said to" else 0)
    ]
    assert not found, f"say who does it, and to what ({name}): " + "; ".join(found)
