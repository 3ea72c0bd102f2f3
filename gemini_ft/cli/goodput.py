"""``gemini goodput``: prints the ledger of a run's time, read from its events."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from gemini_ft.core.goodput import FailureCost, Phase, TimeLedger
from gemini_ft.core.words import in_words, table
from gemini_ft.errors import ConfigError
from gemini_ft.events import read_events

_LOST = (Phase.DETECTION, Phase.RENDEZVOUS, Phase.STORAGE, Phase.RESTORE, Phase.REPLAY, Phase.STALL)


def command(argv: Sequence[str]) -> int:
    """Prints a ledger for each stream of the run."""
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
    found = ledgers(event for path in files for event in read_events(path))
    if options.json:
        print(json.dumps({stream: document(ledger) for stream, ledger in found.items()}))
    elif found:
        print("\n\n".join(_shown(stream, ledger) for stream, ledger in found.items()))
    else:
        print(f"no rank has joined a run yet, by {', '.join(files)}")
    return 0 if found else 1


def ledgers(events: Iterable[Mapping[str, Any]]) -> dict[str, TimeLedger]:
    """Makes a ledger for each stream, by name, of events in any order."""
    found: dict[str, TimeLedger] = {}
    for event in sorted(events, key=lambda event: float(event["at"])):
        stream, at = event["stream"], float(event["at"])
        if event["event"] in ("joined", "waited") and stream not in found:
            found[stream] = TimeLedger(at - float(event.get("seconds", 0.0)))
        if (ledger := found.get(stream)) is None:
            continue
        match event:
            case {"event": "joined", "incarnation": incarnation, "iteration": iteration}:
                ledger.joined(at, incarnation, iteration)
            case {"event": "waited", "seconds": seconds}:
                ledger.waited(at, seconds)
            case {"event": "resumed"}:
                ledger.restored(at)
            case {"event": "step", "iteration": iteration}:
                ledger.stepped(at, iteration, event.get("blocked", 0.0))
            case {"event": "lost", "cause": cause, "host": host}:
                ledger.failed(at, cause, host)
            case {"event": "left", "finished": True}:
                ledger.ended(at)
    return found


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


def _shown(stream: str, ledger: TimeLedger) -> str:
    shares = ledger.shares()
    rows = [(str(phase), in_words(ledger.seconds[phase]), f"{shares[phase]:.2%}") for phase in (Phase.TRAINING, *_LOST)]
    lines = [f"{stream}: {in_words(ledger.total)}, goodput {shares[Phase.TRAINING]:.2%}", table([("phase", "time", "share"), *rows])]
    if ledger.failures:
        head = ("failure", "cause", "host", "step", "resumed", "lost", *map(str, _LOST))
        lines += ["", table([head, *map(_row, ledger.failures)])]
    return "\n".join(lines)


def _row(failure: FailureCost) -> tuple[str, ...]:
    when = f"{datetime.fromtimestamp(failure.at).astimezone():%Y-%m-%d %H:%M:%S}"
    resumed = "-" if failure.resumed is None else str(failure.resumed)
    phases = (f"{failure.seconds.get(phase, 0.0):.1f} s" for phase in _LOST)
    return when, failure.cause or "?", failure.host or "?", str(failure.step), resumed, f"{sum(failure.seconds.values()):.1f} s", *phases
