"""A rank that cannot go on tells the others, which would wait for its gradients until the group's time limit."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

from gemini_ft.errors import GeminiError, StateError

_KEY = "gemini_ft/gradients/failed"


class Failures:
    """Errors of ranks, in the store of a process group.

    Args:
        group: whose collectives fail, or wait for nothing; None: one rank.
        rank: this one.
    """

    def __init__(self, group: Any, rank: int) -> None:
        self._group, self._rank = group, rank

    def resolved(self, error: BaseException, step: int) -> BaseException:
        """The error to be raised here: this one, of which the others are told, or the one that has been told by another rank before.

        Args:
            error: no average can be made any more.
            step: in which it happened, as all ranks count.
        """
        if self._group is None:
            return error
        is_own = isinstance(error, GeminiError) or not isinstance(error, RuntimeError | OSError)  # not of a collective that failed
        if not is_own and (heard := self.heard(step)) is not None:
            heard.__cause__ = error
            return heard
        self.tell(error, step)
        return error

    def tell(self, error: BaseException, step: int) -> None:
        """Leaves word of an error of this rank. It may be one that the user's code recovers from."""
        if self._group is None or self.heard(step) is not None:  # the first one is the cause
            return
        said = json.dumps([self._rank, step, f"{type(error).__name__}: {error}"[:2000]])
        with contextlib.suppress(Exception):  # the store may have gone with the rank that had it
            self._group.get_group_store().set(_KEY, said)

    def heard(self, step: int) -> StateError | None:
        """Another rank's error in this step, as an error for this rank; None: there is none."""
        if self._group is None:
            return None
        try:
            store = self._group.get_group_store()
            rank, when, text = json.loads(store.get(_KEY)) if store.check([_KEY]) else (self._rank, step, "")
        except Exception:
            return None
        if rank == self._rank or when != step:
            return None
        return StateError(f"rank {rank} has failed, and averages no gradients any more: {text}")

    def abort(self) -> None:
        """Ends the connections, so that the others, which may wait for this rank, look at what it has said."""
        if self._group is not None:
            threading.Thread(
                target=self._abort, name="gradients-abort", daemon=True
            ).start()  # a thread of the backend must not wait for itself

    def _abort(self) -> None:
        with contextlib.suppress(Exception):
            self._group.abort()
