"""Times, names and tables as people read them."""

from __future__ import annotations

from collections.abc import Sequence

NAMED = 8  # ranks or hosts in a sentence


def in_words(seconds: float) -> str:
    """A time, to one digit of the unit that fits."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def named(names: Sequence[str]) -> str:
    """The first names in a row, and whether there are others."""
    return ", ".join(names[:NAMED]) + " and others" * (len(names) > NAMED)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side, each as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
