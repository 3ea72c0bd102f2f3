"""Replaces what torch's launcher has no settings for. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **changes: Any) -> Iterator[None]:
    """Inside, these attributes of a module or a class are others; each must be there already."""
    before = {name: getattr(owner, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
