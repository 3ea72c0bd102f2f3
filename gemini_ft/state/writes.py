"""Finds out when a loop writes state that is being copied: before the next forward pass, or in it.

A loop that writes parameters in forward (an embedding with max_norm) does so again when it is resumed, so its state may be copied at the
end of each step instead. A write before the forward pass may stand behind the end of the iteration, and would be lost: it cannot be told
from one at the beginning of the next, so the user is asked.
"""

from __future__ import annotations

from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook

from gemini_ft.state.copy_plan import CopyPlan


class WriteWatch:
    """Looks at the tensors of one snapshot when the first module's forward begins."""

    def __init__(self, plan: CopyPlan, marks: list[tuple[int, int]]) -> None:
        self._plan, self._marks = plan, marks
        self.early: list[str] | None = None  # names of the tensors written by then; None: no forward has begun
        self._handle: Any = register_module_forward_pre_hook(self._look)

    def _look(self, *_: Any) -> None:
        self.end()
        if self.early is None:
            self.early = self._plan.changed(self._marks)

    def end(self) -> None:
        """Stops looking."""
        self._handle.remove()
