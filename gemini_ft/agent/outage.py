"""An outage of storage, as its user hears of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_REASONS = 8  # that are told of one outage


@dataclass
class Outage:
    """The time in which an operation does not work.

    Attributes:
        since: its beginning, on the system's clock.
        error: the newest.
    """

    since: float
    error: str = ""
    _told: set[str] = field(default_factory=set, init=False)  # reasons of which the user has heard

    def again(self, error: str) -> bool:
        """Takes note of an error; returns whether the user should hear of it.

        One reason may hide behind another, but numbers and ids make none.
        """
        self.error = error
        reason = re.sub(r"\S*\d\S*", "", error)
        if reason in self._told or len(self._told) == _REASONS:
            return False
        self._told.add(reason)
        return True
