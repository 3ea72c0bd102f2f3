"""``gemini top``: the hosts of a run side by side, again every few seconds in a terminal."""

from __future__ import annotations

import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from gemini_ft.cli.accounts import Answers, asking, parser_of
from gemini_ft.core.words import in_words, table

if TYPE_CHECKING:
    from rich.console import Group

HEAD = ("host", "stream", "ranks", "step", "steps/s", "committed", "age", "lag", "held up", "memory", "stored", "uploads", "last failure")
_JOB = {
    "gemini_job_hosts": "hosts",
    "gemini_job_ranks": "ranks",
    "gemini_job_absent_hosts": "absent hosts",
    "gemini_job_left_out_replicas": "replicas left out",
    "gemini_stragglers": "stragglers",
}
Figures = Mapping[str, float]  # of one stream on one host, those of the host included; a label's value follows the name: NAME/VALUE


def command(argv: Sequence[str]) -> int:
    """Shows a table until Ctrl-C; prints it once where there is no terminal. Status 1: no agent has answered."""
    epilog = "Without a terminal the table is printed once. The job needs no option, unless addresses are given."
    parser = parser_of("top", "Show the hosts of a run side by side: steps, commits, memory, uploads and failures.", epilog)
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="between two looks (default: %(default)g)")
    parser.add_argument("--once", action="store_true", help="print the table once")
    options = parser.parse_args(argv)
    ask = asking(options)
    if options.once or not sys.stdout.isatty():
        answers = ask()
        print("\n".join([*summary(answers), table([HEAD, *rows(answers, time.time())])]))
        return int(not any(answers.values()))
    from rich.live import Live

    signal.signal(signal.SIGINT, signal.default_int_handler)  # nothing else ends it, also where a script's shell has Ctrl-C ignored
    with suppress(KeyboardInterrupt), Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(ask(), time.time()), refresh=True)
            time.sleep(max(0.1, options.every))
    return 0


def screen(answers: Answers, now: float) -> Group:
    """Returns the lines and the table for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = Table(*HEAD, box=None)
    for row in rows(answers, now):
        shown.add_row(*map(Text, row))
    return Group(*map(Text, summary(answers)), shown)


def summary(answers: Answers) -> Iterator[str]:
    """Yields a line for each stream whose leader has answered, and one for the agents that have not."""
    for agent, stream, of in _streams(answers):
        if "gemini_job_hosts" in of:
            yield f"{stream}, led by {agent}: " + ", ".join(f"{word} {of[name]:.0f}" for name, word in _JOB.items() if name in of)
    if away := [agent for agent, of in answers.items() if of is None]:
        yield f"no answer: {', '.join(away)}"


def rows(answers: Answers, now: float) -> list[tuple[str, ...]]:
    """Returns a row for each stream of each host, of the figures at ``now``, by the system's clock."""
    return [_row(agent, stream, of, now) for agent, stream, of in _streams(answers)]


def _streams(answers: Answers) -> Iterator[tuple[str, str, Figures]]:
    for agent, samples in answers.items():
        found = defaultdict[str, dict[str, float]](dict)
        for name, labels, value in samples or ():
            part = "".join(f"/{of}" for label, of in labels.items() if label not in ("stream", "run"))
            found[labels.get("stream", "")][name + part] = value
        of_host = found.pop("", {})
        yield from ((agent, stream, of_host | of) for stream, of in found.items())


def _row(agent: str, stream: str, of: Figures, now: float) -> tuple[str, ...]:
    def shown(name: str) -> str:
        return f"{of[name]:.0f}" if name in of else "-"

    def ago(name: str) -> str:
        return in_words(now - of[name]) if name in of else "-"

    pace, stall = of.get("gemini_step_seconds"), of.get("gemini_time_seconds_total/checkpoint_stall", 0.0)
    stepping = stall + of.get("gemini_time_seconds_total/training", 0.0)
    used, limit = (of.get(f"gemini_memory_{name}_bytes", 0.0) / 2**30 for name in ("used", "limit"))
    failures = {name.partition("/")[2]: at for name, at in of.items() if name.startswith("gemini_failed_timestamp_seconds/")}
    cause = max(failures, key=lambda cause: failures[cause], default="")
    restarts = sum(value for name, value in of.items() if name.startswith("gemini_restarts_total/"))
    failed, since = of.get("gemini_failed_uploads_total"), of.get("gemini_storage_failing_since_timestamp_seconds")
    return (
        agent,
        stream,
        shown("gemini_workers"),
        shown("gemini_step"),
        f"{1 / pace:.3g}" if pace else "-",
        shown("gemini_committed_step"),
        ago("gemini_committed_timestamp_seconds"),
        shown("gemini_lag_steps"),
        f"{stall / stepping:.1%}" if stepping else "-",
        f"{used:.2f} of {limit:.1f} GiB",
        f"fails for {in_words(now - since)}" if since else ago("gemini_stored_timestamp_seconds"),
        shown("gemini_uploads_total") + (f", {failed:.0f} failed" if failed else ""),
        f"{cause}, {in_words(now - failures[cause])} ago; restarts {restarts:.0f}" if cause else "-",
    )
