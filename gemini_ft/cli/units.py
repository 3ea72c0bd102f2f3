"""Numbers with units, as types of options that sub-commands share."""

from __future__ import annotations

import argparse

from gemini_ft.config import parse_bytes

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def nbytes(text: str) -> float:
    """Bytes, from a number and a unit."""
    try:
        return float(parse_bytes(text))  # type: ignore[arg-type]
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give a number and a unit, such as 1.2TB or 500GiB") from None


def rate(text: str) -> float:
    """Bits per second, from a number and a unit."""
    return _number(text.strip().removesuffix("/s"), _RATES, "rate", "100gbit or 200mbit")


def seconds(text: str) -> float:
    """Seconds, from a number and a unit."""
    return _number(text, _TIMES, "time", "62s, 5min, 3h or 2d")


def _number(text: str, units: dict[str, float], what: str, example: str) -> float:
    digits = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(digits) :].strip().lower()
    try:
        return float(digits) * units[unit]
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}; give a number and a unit, such as {example}") from None
