"""All schemes by name, and their places in Zen's design space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from .base import Dimensions, Scheme, SparseScheme
from .builtin import AGsparse, Dense, SinglePS, SparsePS
from .fpisa import FPISA
from .hierarchical import Hierarchical
from .omnireduce import OmniReduce, OmniReduceStreaming
from .ring import InceptionnRing, Ring8
from .sparcml import DSARSplitAllgather, SSARRecursiveDoubling, SSARSplitAllgather
from .switch_scheme import SwitchScheme
from .switchml import SwitchML
from .zen import Zen

SCHEMES: Mapping[str, type[SparseScheme]] = {
    scheme.name: scheme
    for scheme in (Dense, AGsparse, SSARRecursiveDoubling, SSARSplitAllgather, DSARSplitAllgather, SinglePS, SparsePS, OmniReduce, Zen)
}
"""The schemes that can be made without arguments and give the exact sum, but for its roundings, by name."""

LOSSY_SCHEMES: Mapping[str, type[Scheme]] = {InceptionnRing.name: InceptionnRing, Ring8.name: Ring8}
"""The schemes that leave out part of the gradients, by name; no other scheme takes their place or the other way round."""

SWITCH_SCHEMES: Mapping[str, type[SwitchScheme[Any]]] = {scheme.name: scheme for scheme in (SwitchML, OmniReduceStreaming, FPISA)}
"""The schemes that go through a switch, whose address and key they need, by name."""


def dimensions_table() -> str:
    """The four dimensions of every scheme, as a Markdown table."""
    rows = ["| scheme | class | communication | aggregation | partition | balance |", "|" + "---|" * 6]
    schemes: list[type[Scheme]] = [*SCHEMES.values(), Hierarchical, *LOSSY_SCHEMES.values(), *SWITCH_SCHEMES.values()]
    for scheme in schemes:
        place = cast(Dimensions, scheme.dimensions)  # a property of the base class, a plain value in these
        cells = (place.communication, place.aggregation, place.partition, place.balance or "n/a")
        rows.append(f"| {scheme.name} | `{scheme.__module__.rpartition('.')[2]}.{scheme.__name__}` | {' | '.join(cells)} |")
    return "\n".join(rows)
