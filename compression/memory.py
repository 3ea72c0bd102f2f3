"""Per-tensor memories of a method, kept flat per group so that a step touches each of them once."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .base import Bundle, FlatLayout, State


class Memory:
    """One float32 tensor per name, zero at first. Tensors of a group lie in one flat buffer; groups may change at any time."""

    def __init__(self) -> None:
        self._fixed = False
        self._flat: dict[tuple[str, ...], tuple[FlatLayout, Tensor]] = {}
        self._waiting: dict[str, Tensor] = {}  # loaded, or of a group that is no more: not in any group yet

    def flat(self, layout: FlatLayout, device: torch.device) -> Tensor:
        """The group's buffer, (layout.total,); it may be written in place, padding stays zero.

        Raises ValueError: a tensor of that name has had another number of elements.
        """
        found = self._flat.get(layout.names)
        if found is not None and (found[0] is layout or (found[0].spans == layout.spans and found[0].sizes == layout.sizes)):
            return found[1]
        return self._regroup(layout, device)

    def replace(self, layout: FlatLayout, flat: Tensor) -> None:
        """Makes ``flat`` the group's buffer; one that holds still takes over its values."""
        if self._fixed and layout.names in self._flat:
            self.flat(layout, flat.device).copy_(flat)
        else:
            self._flat[layout.names] = (layout, flat)

    def _regroup(self, layout: FlatLayout, device: torch.device) -> Tensor:
        ours = set(layout.names)
        for names in [names for names in self._flat if not ours.isdisjoint(names)]:
            old, flat = self._flat.pop(names)
            self._waiting.update(zip(old.names, old.views(flat), strict=True))
        fresh = torch.zeros(layout.total, dtype=torch.float32, device=device)
        for name, view in zip(layout.names, layout.views(fresh), strict=True):
            if (kept := self._waiting.pop(name, None)) is not None:
                if kept.numel() != view.numel():
                    raise ValueError(f"{name!r} has {view.numel()} elements, its memory {kept.numel()}: start with a fresh method")
                view.copy_(kept)
        self.replace(layout, fresh)
        return fresh

    def state_dict(self) -> State:
        """The tensors by name, float32 (elements,); not copied."""
        state: State = dict(self._waiting)
        for layout, flat in self._flat.values():
            state.update(zip(layout.names, layout.views(flat), strict=True))
        return dict(sorted(state.items()))

    def hold_still(self) -> None:
        """Keeps a group's buffer where it is while the groups are the same, for `Reducer.hold_still`."""
        self._fixed = True

    def forget(self, names: Collection[str]) -> None:
        """Sets to zero all that is kept for these names, and for names made of them (``name/mean``, ``name#1``)."""
        for name, kept in self.state_dict().items():
            if name in names or re.split("[/#]", name)[0] in names:
                kept.zero_()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._flat.clear()
        self._waiting = {name: value.clone() for name, value in state.items()}


def put_back(layout: FlatLayout, flat: Tensor, before: Tensor | None, numbers: Sequence[int]) -> None:
    """Gives the tensors of these numbers the values they had in ``before``, which may be None for no numbers."""
    for number in numbers:
        assert before is not None
        layout.views(flat)[number].copy_(layout.views(before)[number])


def non_finite(bundle: Bundle) -> list[int]:
    """Numbers of the tensors that have a NaN or an infinity."""
    if bool(torch.isfinite(bundle.flat.sum())):  # a sum of finite values may overflow, one with a NaN or infinity is never finite
        return []
    return [number for number, view in enumerate(bundle.views) if not bool(torch.isfinite(view).all())]
