"""A worker's look at its host's agent while it waits for a slot: an agent that is too slow is replaced, like one that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable

from gemini_ft.agent.client import AgentClient
from gemini_ft.core.diligence import Diligence


class Supervision:
    """Judges the agent by how it answers requests (`gemini_ft.core.diligence`); used by several threads, whose looks may overlap.

    Args:
        client: the connection to the present agent.
        patience: as `agent_timeout`.
    """

    def __init__(self, client: Callable[[], AgentClient], patience: float) -> None:
        self._client, self._diligence = client, Diligence(patience)

    def asked(self) -> None:
        self._diligence.asked(time.monotonic())

    def answered(self) -> None:
        self._diligence.answered()

    def committed(self) -> None:
        self._diligence.committed()

    def begin(self) -> None:
        """Records that nothing is asked for a while."""
        self._diligence.begin()

    def replaced(self) -> None:
        """Records that another agent is there."""
        self._diligence.replaced(time.monotonic())

    def look(self) -> None:
        """Looks at the agent; one that is slow has been replaced when this returns, and its connection is lost."""
        client = self._client()
        if client.has_unread:
            return  # the answer may be there, and it is this process that is slow
        patience = self._diligence.patience
        if self._diligence.look(time.monotonic(), client.agent_work):
            client.replace_agent(f"nothing was committed for {patience:g} s, and most of the time it owed answers and did not work on them")
