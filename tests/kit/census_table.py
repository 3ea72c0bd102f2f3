"""The table of docs/failure_model.md as the code has it (``python tests/kit/census_table.py`` prints it)."""

from __future__ import annotations

import gemini_ft.checkpointer  # noqa: F401  # with all modules that declare rules
from gemini_ft.core.census import rules


def whole_table() -> str:
    lines = ["| state | what becomes of it | how, or the way out |", "|---|---|---|"]
    return "\n".join(lines + [f"| {rule.what} | {rule.fate} | {rule.how} |" for rule in rules()])


if __name__ == "__main__":
    print(whole_table())
