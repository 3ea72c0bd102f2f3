"""No test is skipped without a word of what it needs and how to get that."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SKIPS = {"skip": 0, "skipif": None, "importorskip": None}  # position of the reason, where it is not a keyword
REASON = re.compile(r"needs [^:]+: .+")


def reasons(tree: ast.AST) -> Iterator[tuple[int, ast.expr | None]]:
    """The reason of each skip, and its line."""
    for node in ast.walk(tree):
        called = ast.unparse(node.func).split(".") if isinstance(node, ast.Call) else [""]
        if isinstance(node, ast.Call) and called[0] == "pytest" and called[-1] in SKIPS:
            position = SKIPS[called[-1]]
            given = node.args[position] if position is not None and node.args else None
            yield node.lineno, next((keyword.value for keyword in node.keywords if keyword.arg == "reason"), given)


def text(reason: ast.expr | None) -> str:
    """A reason as far as it is written down; values that are filled in stand as they are in the code."""
    match reason:
        case ast.Constant(value=str(words)):
            return words
        case ast.JoinedStr(values=parts):
            return "".join(text(part) if isinstance(part, ast.Constant) else ast.unparse(part)[2:-1] for part in parts)
    return ""


def test_every_skip_says_what_is_missing_and_how_to_get_it() -> None:
    silent = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for line, reason in reasons(ast.parse(path.read_text())):
            if not REASON.fullmatch(text(reason)):
                silent.append(f"{name}:{line}: {ast.unparse(reason) if reason is not None else 'no reason'}")
    assert not silent, "a reason is 'needs <what>: <how to get it>'"
