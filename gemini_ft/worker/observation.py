"""A worker's help in keeping replicas out of the training's way: it shows its agent its traffic, and profiles of its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from gemini_ft.core.traffic import Profiler
from gemini_ft.wire.worker_messages import Observed, ToAgent, Watch
from gemini_ft.worker.collectives import observe


class Observation:
    """The observation of this process's traffic, for one session.

    Args:
        tell: sends a message, and descriptors beside it, to the agent; raises AgentError when it is gone.
        window: steps that make a profile.
    """

    def __init__(self, tell: Callable[[ToAgent, Sequence[int]], None], window: int) -> None:
        self._tell = tell
        self._profiler = Profiler(window)
        self._stack = contextlib.ExitStack()
        self._observer = self._stack.enter_context(observe())

    def introduce(self) -> None:
        """Introduces itself to an agent that knows nothing of this yet."""
        page = self._observer.page
        self._tell(Watch(), (page.page, page.bell))
        self._report()

    def step_over(self) -> None:
        """Takes note that a step has ended."""
        if self._profiler.add(self._observer.step_over()):
            self._report()

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Shows meanwhile that the training stands still until a snapshot has travelled."""
        return self._observer.waiting()

    def close(self) -> None:
        self._stack.close()

    def _report(self) -> None:
        self._tell(Observed(profile=self._profiler.profile), ())
