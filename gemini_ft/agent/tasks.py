"""Background tasks of the agent's event loop; and a log that refused connections cannot fill."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """Tasks under way; the loop alone would not keep them alive."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    async def over(self) -> None:
        """Waits for those that are under way now."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


_SPAN = 60.0  # seconds
_MOST = 50  # lines in that time


class RateLimitedLog:
    """Passes lines on to ``log``; of those beyond the first ones of each minute it says only how many they were."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._since = -_SPAN
        self._seen = 0

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._since >= _SPAN:
            if self._seen > _MOST:
                self._log(f"{self._seen - _MOST} more of this kind were not logged")
            self._since, self._seen = now, 0
        self._seen += 1
        if self._seen <= _MOST:
            self._log(text)
        elif self._seen == _MOST + 1:
            self._log(f"no more of this kind is logged for {_SPAN:g} s")
