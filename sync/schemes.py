"""All schemes by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Scheme, SparseScheme
from .builtin import AGsparse, Dense, SinglePS, SparsePS
from .fpisa import FPISA
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
