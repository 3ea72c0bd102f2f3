"""A rank that cannot go on tells the others, which would wait for its gradients until the group's time limit.

A rank that is killed cannot tell. The first rank whose collective breaks looks for ended connections, and tells the others.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from gemini_ft.errors import AveragingError, GeminiError

_KEY = "gemini_ft/gradients/failed"
_TAG = 0x6F6E6365  # of messages that are never received
PATIENCE = 5.0  # seconds in which the others notice that all connections of a process that ends are closed
_LOOK = 0.05  # seconds between two looks


class Failures:
    """Errors of ranks, in the store of a process group.

    Args:
        group: whose collectives fail, or wait for nothing; None: one rank.
        control: of its ranks, or of more, and on CPUs; its connections last as long as processes do, and ranks are numbered as in it.
        names: of its ranks in errors, by their number in it: among all ranks of the job. (): as in it.
    """

    def __init__(self, group: Any, control: Any, names: Sequence[int] = ()) -> None:
        self._group, self._control, self._rank = group, control, control.rank() if control is not None else 0
        self._names = names or range(control.size() if control is not None else 1)
        self._resolved: BaseException | None = None

    def resolved(self, error: BaseException, step: int, is_computing: bool = False) -> BaseException:
        """The error to raise here: this one, which the others are told, or one that names the first rank that failed.

        Args:
            step: in which it happened, as all ranks count.
            is_computing: whether it happened between collectives, so that no other rank can be its cause.
        """
        if self._group is None or error is self._resolved:
            return error
        is_own = is_computing or isinstance(error, GeminiError) or not isinstance(error, RuntimeError | OSError)
        cause = self.heard(step) if is_own else self._cause(step)
        said = f"{type(error).__name__}: {error}"
        if cause is None and is_own:
            self._tell(self._rank, _failed(self._names[self._rank], said), step)
        elif cause is None:
            unexplained = AveragingError(
                f"gradients are averaged no more: a collective failed on rank {self._names[self._rank]}, and no rank is known to have "
                f"failed; a host may be lost, or the network between two: {said}"
            )
            self._tell(None, unexplained, step)
        elif not is_own:
            cause.__cause__ = error
        self._resolved = error if is_own or cause is None else cause
        return self._resolved

    def _tell(self, rank: int | None, error: AveragingError, step: int) -> None:
        """Leaves word for the others; ``rank`` is the one that has failed, if it is known, and is not told."""
        with contextlib.suppress(Exception):  # the store may have gone with the rank that had it
            self._group.get_group_store().set(_KEY, json.dumps([rank, step, str(error)[:2000]]))

    def _cause(self, step: int) -> AveragingError | None:
        """The error of the rank that was the first to fail, whether it has told of it or not; None: all live, and none has."""
        end = time.monotonic() + PATIENCE
        while True:
            # First those whose processes have ended, to which nothing can be sent: one that ends because of a failure has left word before.
            gone = [rank for rank in range(self._control.size()) if rank != self._rank and not self._can_send(rank)]
            is_answered = True
            try:
                if (told := self._told(step)) is not None:
                    return told
            except Exception:
                is_answered = False
            if gone and not is_answered:
                return AveragingError(
                    "gradients are averaged no more: the processes of these ranks have ended, one of them first: "
                    f"{', '.join(str(self._names[rank]) for rank in gone)}; the process group's store, which may know more, does not "
                    "answer, as when it has gone with the host that was lost"
                )
            if gone:
                first, *others = (self._names[rank] for rank in gone)
                more = f"; so have those of ranks {', '.join(map(str, others))}" if others else ""
                found = _failed(first, f"its process has ended without a word, as one does that is killed{more}")
                self._tell(gone[0], found, step)
                return found
            if time.monotonic() > end:
                return None
            time.sleep(_LOOK)

    def _can_send(self, rank: int) -> bool:
        try:
            self._control.send([torch.zeros(1)], rank, _TAG)
        except RuntimeError:
            return False
        return True

    def heard(self, step: int) -> AveragingError | None:
        """The error of another rank in this step, as an error for this rank; None: there is none."""
        with contextlib.suppress(Exception):
            return self._told(step) if self._group is not None else None
        return None

    def _told(self, step: int) -> AveragingError | None:
        """Does what `heard` does; raises an error of the store where that does not answer."""
        store = self._group.get_group_store()
        rank, when, text = json.loads(store.get(_KEY)) if store.check([_KEY]) else (self._rank, step, "")
        return None if rank == self._rank or when != step else AveragingError(text)

    def forget(self) -> None:
        """Forgets the error, whose traceback has frames of the script."""
        self._resolved = None

    def abort(self) -> None:
        """Ends the connections, so that the others, which may wait for this rank, look for its word."""
        if self._group is not None:
            threading.Thread(
                target=self._abort, name="gradients-abort", daemon=True
            ).start()  # a thread of the backend must not wait for itself

    def _abort(self) -> None:
        with contextlib.suppress(Exception):
            self._group.abort()


def _failed(rank: int, text: str) -> AveragingError:
    return AveragingError(f"rank {rank} has failed, and averages no gradients any more: {text}")
