"""``gemini goodput``: prints the ledger of a run's time: read from its events, told by its agents, or kept with a stored checkpoint."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter

from gemini_ft.cli.commands import documents_of
from gemini_ft.config import load_config
from gemini_ft.core.goodput import LATEST, BookedTime, FailureCost, Phase, RunTime, TimeLedger, by_cause, longer
from gemini_ft.core.words import in_words, table
from gemini_ft.errors import ConfigError
from gemini_ft.events import read_events
from gemini_ft.storage.base import WORD
from gemini_ft.storage.checkpoints import examine
from gemini_ft.storage.opening import open_existing

_OWN = (Phase.TRAINING, Phase.VALIDATION)
_LOST = (Phase.DETECTION, Phase.RENDEZVOUS, Phase.STORAGE, Phase.RESTORE, Phase.REPLAY, Phase.STALL)


def command(argv: Sequence[str]) -> int:
    """Prints a ledger for each stream of each run."""
    parser = argparse.ArgumentParser(
        prog="gemini goodput",
        description="Say which part of a run's time was training, and what the rest was lost to, by phase, cause and failure.",
        epilog="Events are those of all attempts that GEMINI_EVENTS=FILE has collected. With a file for each host, give all of them. "
        "Of a run without events its agents on this machine are asked; where there is none, its newest checkpoint in storage has the "
        "ledger as it was then.",
    )
    text = "events of the run, or its id (default: the file that GEMINI_EVENTS names)"
    parser.add_argument("files", nargs="*", metavar="FILE|RUN", help=text)
    parser.add_argument("--storage", metavar="URL", help="where the run has stored (default: that of GEMINI_STORAGE or GEMINI_CONFIG)")
    parser.add_argument("--endpoint-url", help="of an S3-compatible store (default: boto3's own choice)")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    files = options.files or [path for path in [os.environ.get("GEMINI_EVENTS")] if path]
    if not files:
        raise ConfigError("which run? give its id, or the file that it had in GEMINI_EVENTS")
    if len(files) == 1 and not os.path.exists(files[0]) and re.fullmatch(WORD, files[0]):
        found = _of_agents(files[0]) or _of_storage(files[0], options.storage, options.endpoint_url)
        none = f"there is no file {files[0]}, and neither agents here nor storage know how run {files[0]} has spent its time"
    else:
        found, none = _of_events(files), f"no rank has joined a run yet, by {', '.join(files)}"
    if options.json:
        print(json.dumps({name: document(ledger) for name, ledger in found.items()}))
    else:
        print("\n\n".join(_shown(name, ledger) for name, ledger in found.items()) or none)
    return 0 if found else 1


def _of_events(files: Sequence[str]) -> Mapping[str, BookedTime]:
    if missing := [path for path in files if not os.path.exists(path)]:
        raise ConfigError(f"there is no file {', '.join(missing)}; a run writes its events where GEMINI_EVENTS was set when it began")
    if folders := [path for path in files if os.path.isdir(path)]:
        raise ConfigError(f"{', '.join(folders)} is a folder; give the files in it that have the events of the run")
    try:
        return ledgers(event for path in dict.fromkeys(map(os.path.realpath, files)) for event in read_events(path))
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read ({error.strerror})") from None


def _of_agents(run: str) -> Mapping[str, BookedTime]:
    """The ledgers of a run by stream, as this machine's agents tell: of each stream the one that has seen most."""
    found: dict[str, RunTime] = {}
    for document in documents_of(None):
        for name, stream in document["streams"].items() if document["run"] == run else ():
            try:
                time = TypeAdapter(RunTime | None).validate_python(stream["measures"]["run"])
            except (LookupError, TypeError, ValueError) as error:  # as an agent of another version may tell it
                why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                print(f"the ledger of {name} that host {document['host']} has cannot be read, and is left out ({why})", file=sys.stderr)
                continue
            if (newer := longer(found.get(name), time)) is not None:
                found[name] = newer
    return found


def _of_storage(run: str, url: str | None, endpoint: str | None) -> Mapping[str, BookedTime]:
    """The ledgers of a run by stream, as its newest checkpoints in storage have them.

    Raises ConfigError: there is no such storage. StorageError: it failed.
    """
    settings = load_config().storage if url is None else None
    if url is None and settings is None:
        return {}
    place, endpoint = (url, endpoint) if settings is None else (settings.url, endpoint or settings.endpoint_url)
    found: dict[str, RunTime] = {}
    for info, manifest, _ in examine(open_existing(str(place), endpoint), run):
        if info.stream not in found and manifest is not None and manifest.time is not None:
            found[info.stream] = manifest.time
    return found


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
        case {"event": "validated", "seconds": seconds} if _is_number(seconds):
            ledger.validated(at, _seconds(seconds))
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
    return isinstance(value, int | float) and -LATEST < value < LATEST  # and no NaN


def _seconds(value: Any) -> float:
    return max(0.0, float(value)) if _is_number(value) else 0.0


def _run(event: Mapping[str, Any]) -> str:
    return run if isinstance(run := event.get("run"), str) else ""


def document(ledger: BookedTime) -> dict[str, Any]:
    """Returns a ledger for programs: seconds and shares by phase, and the cost of each cause and failure."""
    return {
        "total_seconds": ledger.total,
        "seconds": dict(ledger.seconds),
        "shares": dict(ledger.shares()),
        "causes": {failure.cause or "?": {"failures": failure.count, **_lost(failure)} for failure in by_cause(ledger.failures)},
        "failures": [
            {
                "at": failure.at,
                "cause": failure.cause or None,
                "failures": failure.count,
                "host": failure.host or None,
                "step": failure.step,
                "resumed": failure.resumed,
                **_lost(failure),
            }
            for failure in ledger.failures
        ],
    }


def _shown(name: str, ledger: BookedTime) -> str:
    shares = ledger.shares()
    rows = [(str(phase), in_words(ledger.seconds[phase]), f"{shares[phase]:.2%}") for phase in (*_OWN, *_LOST)]
    lines = [f"{name}: {in_words(ledger.total)}, goodput {ledger.goodput:.2%}", table([("phase", "time", "share"), *rows])]
    if ledger.failures:
        causes = [(failure.cause or "?", str(failure.count), *_times(failure)) for failure in by_cause(ledger.failures)]
        lines += ["", table([("cause", "failures", "lost", *map(str, _LOST)), *causes])]
        head = ("failure", "cause", "host", "step", "resumed", "lost", *map(str, _LOST))
        lines += ["", table([head, *map(_row, ledger.failures)])]
    return "\n".join(lines)


def _row(failure: FailureCost) -> tuple[str, ...]:
    when = f"{datetime.fromtimestamp(failure.at).astimezone():%Y-%m-%d %H:%M:%S}"
    if failure.count > 1:
        when = f"{failure.count} until {when}"
    resumed = "-" if failure.resumed is None else str(failure.resumed)
    return when, failure.cause or "?", failure.host or "?", str(failure.step), resumed, *_times(failure)


def _times(failure: FailureCost) -> tuple[str, ...]:
    return tuple(f"{seconds:.1f} s" for seconds in (sum(failure.seconds.values()), *(failure.seconds.get(phase, 0.0) for phase in _LOST)))


def _lost(failure: FailureCost) -> dict[str, Any]:
    return {"lost_seconds": sum(failure.seconds.values()), "seconds": dict(failure.seconds)}
