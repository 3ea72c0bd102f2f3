"""The events of a run, one JSON object per line, appended to the file that GEMINI_EVENTS names.

For drills, tests and dashboards; without the variable nothing is written. Every line has ``event``, ``at`` (seconds of the
system's clock), ``pid``, ``run``, ``host``, ``rank`` and ``stream``, and besides:

    joined     incarnation, hosts (of each rank), resuming ("nothing", "memory", "storage"), iteration
    resumed    iteration, sources ("own memory", "peer <host>", "storage" -> bytes this rank has read), seconds
    step       iteration: it has ended; blocked: seconds for which snapshots held up the step before it
    committed  iteration: all its copies are complete
    skipped    iteration: it will have no copies
    drained    iteration: this rank has left after it, as its host is drained
    fault      fault (as given), iteration, moment: injected by gemini_ft.faults.inject
    leader     epoch, leader: that host's agent leads the commits from now on, in place of another one; ``rank`` is null
    left       finished, interrupted; neither after a failure
    validated  iteration, seconds: the loop was paused for so long after it
    waited     seconds: storage could not say for so long what there is to resume
    hang       cause, ranks, text, report: why the job hangs, as this host's agent has learnt before it kills workers (docs/metrics.md)
    straggler  ranks: those that are slow from now on, perhaps none; text: what has changed (docs/metrics.md); ``rank`` is null
    diverged   ranks: those that differ in what all must hold alike; text: the error that all of them raise; ``rank`` is null
    damaged    owner, iteration: this host's copy of that rank's shard was not what its owner made, and is discarded; ``rank`` is null
    replayed   iteration, ranks (rank -> what it found), text: an iteration that was computed again has other bits
    lost       cause ("died", "failed" in place, "hang", "drain"), incarnation, stood (seconds without progress, of a hang): the agent has
               seen the end of this rank's worker, which had not left
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from gemini_ft.errors import ConfigError

_log = logging.getLogger("gemini_ft")


class EventLog:
    """The events of one worker's part of a stream; writes nothing without GEMINI_EVENTS.

    ``run``: id of the run; None: the one that GEMINI_RUN_ID names. ``who``: what every line has besides.

    Raises ConfigError: GEMINI_EVENTS cannot be written.
    """

    def __init__(self, run: str | None = None, **who: Any) -> None:
        path = os.environ.get("GEMINI_EVENTS")
        self._torn, self._lost = False, 0  # whether the last line is there in part only; lines that are not there at all
        self._who = {"pid": os.getpid(), "run": run or os.environ.get("GEMINI_RUN_ID"), **who}
        try:  # appending is atomic: the lines of several processes do not mix
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644) if path else -1
        except OSError as error:
            raise ConfigError(f"GEMINI_EVENTS={path}: cannot be written ({error.strerror}); name a file in a folder that exists") from None

    def write(self, event: str, **facts: Any) -> None:
        """Appends one line."""
        if self._fd >= 0:
            line = {"event": event, "at": time.time(), **self._who, **facts}
            data = (json.dumps(line) + "\n").encode()
            try:
                written = os.write(self._fd, b"\n" + data if self._torn else data)
                self._torn = written < len(data) + self._torn
            except OSError as error:  # a full disk costs events, and no step
                self._lost += 1
                if self._lost == 1:
                    _log.warning(
                        "events are lost: GEMINI_EVENTS=%s cannot be written (%s)", os.environ.get("GEMINI_EVENTS"), error.strerror
                    )

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Reads all events so far, whole lines only; none while there is no file. A line that is no JSON object is skipped."""
    try:
        text = Path(path).read_text(errors="replace")
    except FileNotFoundError:
        return []
    found = []
    for line in text[: text.rfind("\n") + 1].splitlines():
        with contextlib.suppress(ValueError):  # the disk was full in the middle of it
            if isinstance(event := json.loads(line), dict):
                found.append(event)
    return found
