"""What happens to a run, one JSON object per line, appended to the file that GEMINI_EVENTS names.

For drills, tests and dashboards; without the variable nothing is written. Every line has ``event``, ``at`` (seconds of the
system's clock), ``pid``, ``host``, ``rank`` and ``stream``, and besides:

    joined     incarnation, hosts (of each rank), resuming ("nothing", "memory", "storage"), iteration
    resumed    iteration, sources ("own memory", "peer <host>", "storage" -> bytes this rank has read), seconds
    step       iteration: it has ended
    committed  iteration: all its copies are complete
    skipped    iteration: it will have no copies
    fault      fault (as given), iteration, moment: injected by gemini_ft.faults
    left       finished, interrupted; neither after a failure
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class EventLog:
    """Where one worker's part of a stream writes its events; does nothing without GEMINI_EVENTS."""

    def __init__(self, **who: Any) -> None:
        path = os.environ.get("GEMINI_EVENTS")
        self._who = {"pid": os.getpid(), **who}
        # Appending is atomic: the lines of several processes do not mix.
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644) if path else -1

    def write(self, event: str, **facts: Any) -> None:
        """Append one line."""
        if self._fd >= 0:
            line = {"event": event, "at": time.time(), **self._who, **facts}
            os.write(self._fd, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """All events so far, whole lines only; none while there is no file."""
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
