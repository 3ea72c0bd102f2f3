"""A rank that cannot go on tells the others, which would wait for its gradients until the group's time limit.

A rank that is killed tells nobody. The first one whose collective breaks looks whose connections have ended, and tells the others.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any

import torch

from gemini_ft.errors import GeminiError, StateError

_KEY = "gemini_ft/gradients/failed"
_TAG = 0x6F6E6365  # of messages that nobody receives
_PATIENCE = 5.0  # seconds in which the others notice that all connections of a process that ends are closed
_LOOK = 0.05  # seconds between two looks


class Failures:
    """Errors of ranks, in the store of a process group.

    Args:
        group: whose collectives fail, or wait for nothing; None: one rank.
        control: of the same ranks and on CPUs; its connections last as long as processes do.
        rank: this one.
    """

    def __init__(self, group: Any, control: Any, rank: int) -> None:
        self._group, self._control, self._rank = group, control, rank
        self._resolved: BaseException | None = None

    def resolved(self, error: BaseException, step: int) -> BaseException:
        """The error to be raised here: this one, of which the others are told, or one that names the rank that was the first to fail.

        Args:
            error: no average can be made any more.
            step: in which it happened, as all ranks count.
        """
        if self._group is None or error is self._resolved:
            return error
        is_own = isinstance(error, GeminiError) or not isinstance(error, RuntimeError | OSError)  # not of a collective that failed
        cause = self.heard(step) if is_own else self._cause(step)
        if cause is None:
            self._tell(self._rank, f"{type(error).__name__}: {error}", step)
        elif not is_own:
            cause.__cause__ = error
        self._resolved = error if is_own or cause is None else cause
        return self._resolved

    def _tell(self, rank: int, text: str, step: int) -> None:
        with contextlib.suppress(Exception):  # the store may have gone with the rank that had it
            self._group.get_group_store().set(_KEY, json.dumps([rank, step, text[:2000]]))

    def _cause(self, step: int) -> StateError | None:
        """The error of the rank that was the first to fail, whether it has told of it or not; None: all live, and none has."""
        end = time.monotonic() + _PATIENCE
        while (heard := self.heard(step)) is None:
            if gone := self._gone():
                first, *others = gone
                text = "its process has ended without a word, as one does that is killed"
                text += f"; so have those of ranks {', '.join(map(str, others))}" if others else ""
                self._tell(first, text, step)
                return _failed(first, text)
            if time.monotonic() > end:
                return None
            time.sleep(_LOOK)
        return heard

    def _gone(self) -> list[int]:
        """Ranks whose processes have ended: nothing can be sent to them, whatever the living ones are doing."""
        return [rank for rank in range(self._control.size()) if rank != self._rank and not self._can_send(rank)]

    def _can_send(self, rank: int) -> bool:
        try:
            self._control.send([torch.zeros(1)], rank, _TAG)
        except RuntimeError:
            return False
        return True

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
        return _failed(rank, text)

    def abort(self) -> None:
        """Ends the connections, so that the others, which may wait for this rank, look at what it has said."""
        if self._group is not None:
            threading.Thread(
                target=self._abort, name="gradients-abort", daemon=True
            ).start()  # a thread of the backend must not wait for itself

    def _abort(self) -> None:
        with contextlib.suppress(Exception):
            self._group.abort()


def _failed(rank: int, text: str) -> StateError:
    return StateError(f"rank {rank} has failed, and averages no gradients any more: {text}")
