"""``gemini goodput``: prints the ledger of a run's time, read from its events."""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from gemini_ft.core.goodput import FailureCost, Phase, TimeLedger
from gemini_ft.core.words import in_words, table
from gemini_ft.errors import ConfigError
from gemini_ft.events import read_events

_LOST = (Phase.DETECTION, Phase.RENDEZVOUS, Phase.STORAGE, Phase.RESTORE, Phase.REPLAY, Phase.STALL)
_LATEST = 1e11  # seconds: no clock says that


def command(argv: Sequence[str]) -> int:
    """Prints a ledger for each stream of each run."""
    parser = argparse.ArgumentParser(
        prog="gemini goodput",
        description="Say which part of a run's time was training, and what the rest was lost to, by phase and failure.",
        epilog="The events of all attempts count that GEMINI_EVENTS=FILE has collected. With a file for each host, give all of them.",
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="events of the run (default: the file that GEMINI_EVENTS names)")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    files = options.files or [path for path in [os.environ.get("GEMINI_EVENTS")] if path]
    if not files:
        raise ConfigError("which events? give the file that the run had in GEMINI_EVENTS")
    if missing := [path for path in files if not os.path.exists(path)]:
        raise ConfigError(f"there is no file {', '.join(missing)}; a run writes its events where GEMINI_EVENTS was set when it began")
    if folders := [path for path in files if os.path.isdir(path)]:
        raise ConfigError(f"{', '.join(folders)} is a folder; give the files in it that have the events of the run")
    try:
        found = ledgers(event for path in dict.fromkeys(map(os.path.realpath, files)) for event in read_events(path))
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read ({error.strerror})") from None
    if options.json:
        print(json.dumps({name: document(ledger) for name, ledger in found.items()}))
    elif found:
        print("\n\n".join(_shown(name, ledger) for name, ledger in found.items()))
    else:
        print(f"no rank has joined a run yet, by {', '.join(files)}")
    return 0 if found else 1


@dataclass(kw_only=True)
class _StreamEvents:
    """One stream of one run, as far as its events have been read."""

    ledger: TimeLedger
    joined: set[tuple[int, int]] = field(default_factory=set)  # (rank, incarnation), by the present count
    before: int = 0  # attempts of earlier counts
    newest: int = 0  # of the present count

    def attempt(self, event: Mapping[str, Any], incarnation: int) -> int:
        """The number of the attempt that a rank has joined: no rank joins one twice, so that a number that comes again begins a new count.

        A run counts from 1 again after a restart without memory.
        """
        if isinstance(rank := event.get("rank"), int):
            if (rank, incarnation) in self.joined:
                self.before, self.newest, self.joined = self.before + self.newest, 0, set()
            self.joined.add((rank, incarnation))
        self.newest = max(self.newest, incarnation)
        return self.before + incarnation


def ledgers(events: Iterable[Mapping[str, Any]]) -> dict[str, TimeLedger]:
    """Makes a ledger for each stream of each run, of events in any order.

    Returns:
        By name: that of the stream; ``run/stream`` where there are several runs.
    """
    lines = sorted(filter(_is_event, events), key=lambda event: float(event["at"]))
    runs: defaultdict[str, set[str]] = defaultdict(set)  # stream -> runs that are named
    for event in lines:
        runs[event["stream"]] |= {_run(event)} - {""}
    found: dict[tuple[str, str], _StreamEvents] = {}
    for event in lines:
        stream, at = event["stream"], float(event["at"])
        run = _run(event) or (next(iter(runs[stream])) if len(runs[stream]) == 1 else "")  # earlier versions name no run
        if event["event"] in ("joined", "waited") and (run, stream) not in found:
            found[run, stream] = _StreamEvents(ledger=TimeLedger(at - _seconds(event.get("seconds"))))
        if (course := found.get((run, stream))) is not None:
            _book(course, event, at)
    is_one = len({run for run, _ in found}) == 1
    return {stream if is_one else f"{run or '?'}/{stream}": course.ledger for (run, stream), course in found.items()}


def _book(course: _StreamEvents, event: Mapping[str, Any], at: float) -> None:
    ledger = course.ledger
    match event:
        case {"event": "joined", "incarnation": int(incarnation), "iteration": int(iteration)}:
            ledger.joined(at, course.attempt(event, incarnation), iteration)
        case {"event": "waited", "seconds": seconds} if _is_number(seconds):
            ledger.waited(at, _seconds(seconds))
        case {"event": "resumed"}:
            ledger.restored(at)
        case {"event": "step", "iteration": int(iteration)}:
            ledger.stepped(at, iteration, _seconds(event.get("blocked")))
        case {"event": "lost", "cause": str(cause), "host": str(host)}:
            number = event.get("incarnation")  # earlier versions do not say it
            ledger.failed(at, cause, host, course.before + number if isinstance(number, int) else None, _seconds(event.get("stood")))
        case {"event": "left", "finished": True}:
            ledger.ended(at)
        case {"event": "left", "interrupted": True}:
            ledger.ended(at, is_interrupted=True)


def _is_event(line: Mapping[str, Any]) -> bool:
    return isinstance(line.get("event"), str) and isinstance(line.get("stream"), str) and _is_number(line.get("at"))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and -_LATEST < value < _LATEST  # and no NaN


def _seconds(value: Any) -> float:
    return max(0.0, float(value)) if _is_number(value) else 0.0


def _run(event: Mapping[str, Any]) -> str:
    return run if isinstance(run := event.get("run"), str) else ""


def document(ledger: TimeLedger) -> dict[str, Any]:
    """Returns a ledger for programs: seconds and shares by phase, and the cost of each failure."""
    return {
        "total_seconds": ledger.total,
        "seconds": dict(ledger.seconds),
        "shares": dict(ledger.shares()),
        "failures": [
            {
                "at": failure.at,
                "cause": failure.cause or None,
                "host": failure.host or None,
                "step": failure.step,
                "resumed": failure.resumed,
                "lost_seconds": sum(failure.seconds.values()),
                "seconds": dict(failure.seconds),
            }
            for failure in ledger.failures
        ],
    }


def _shown(name: str, ledger: TimeLedger) -> str:
    shares = ledger.shares()
    rows = [(str(phase), in_words(ledger.seconds[phase]), f"{shares[phase]:.2%}") for phase in (Phase.TRAINING, *_LOST)]
    lines = [f"{name}: {in_words(ledger.total)}, goodput {shares[Phase.TRAINING]:.2%}", table([("phase", "time", "share"), *rows])]
    if ledger.failures:
        head = ("failure", "cause", "host", "step", "resumed", "lost", *map(str, _LOST))
        lines += ["", table([head, *map(_row, ledger.failures)])]
    return "\n".join(lines)


def _row(failure: FailureCost) -> tuple[str, ...]:
    when = f"{datetime.fromtimestamp(failure.at).astimezone():%Y-%m-%d %H:%M:%S}"
    resumed = "-" if failure.resumed is None else str(failure.resumed)
    phases = (f"{failure.seconds.get(phase, 0.0):.1f} s" for phase in _LOST)
    return when, failure.cause or "?", failure.host or "?", str(failure.step), resumed, f"{sum(failure.seconds.values()):.1f} s", *phases
