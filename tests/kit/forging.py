"""Forges nested data: every place in it, and a copy with another value there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def places(body: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything in nested dicts, lists and tuples."""
    yield at
    for key, value in body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, (list, tuple)) else ():
        yield from places(value, (*at, key))


def put_at(body: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    copy = dict(body) if isinstance(body, dict) else list(body)
    copy[at[0]] = put_at(copy[at[0]], at[1:], value)
    return copy
