"""Replaces what other packages have no settings for. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
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


def take_rank(environ: Mapping[str, str]) -> None:
    """Corrects the rank in modules that have read it while they were imported, for the sake of another process or attempt."""
    for module, variable in (("lightning_utilities.core.rank_zero", "RANK"), ("torchmetrics.utilities.prints", "LOCAL_RANK")):
        if module in sys.modules and environ.get(variable, "").isdigit():  # it has none in reserve
            sys.modules[module].rank_zero_only.rank = int(environ[variable])
