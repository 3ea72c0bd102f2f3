"""Numbers as people say them."""

from __future__ import annotations


def in_words(seconds: float) -> str:
    """A time, to one digit of the unit that fits."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
