"""Drills of the alert rules: figures of two hosts over time, in which something is wrong from a moment on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gemini_ft.core.promql import Sample

EVERY = 15.0  # seconds between two looks
SINCE = 600.0  # seconds after the beginning that something goes wrong
LENGTH = 2850.0  # seconds
CAUSES = ("died", "failed", "hang", "drain", "elsewhere")
Answer = list[Sample] | None
Figures = dict[str, float | None]  # by name and the value of its label; None: the page has no line for it


def quiet(host: str, at: float) -> Figures:
    """The figures of a host in a job that goes well: a commit every five seconds, the last one a second ago."""
    figures: Figures = {"launches": 1, "workers": 2, "hangs_total": 0, "committed_timestamp_seconds": at - 1, "commit_interval_seconds": 5}
    figures |= {f"restarts_total/{cause}": 0 for cause in CAUSES}
    figures |= {"lacking_hosts": 0, "finished": 0, "finishing": 0, "left_out": 0}
    figures |= {"divergences_total": 0, "stragglers": 0, "storage_failing_since_timestamp_seconds": 0, "damaged_copies_total": 0}
    figures |= {"blocked_seconds_sum": 0.01 * at}
    return figures | ({"job_absent_hosts": 0, "job_left_out_replicas": 0} if host == "a" else {})


@dataclass(frozen=True, kw_only=True)
class Drill:
    """A course of events.

    Attributes:
        change: (host, seconds since ``SINCE``) -> figures that are other than usual; None: the agent does not answer.
        fires: alert -> seconds since ``SINCE`` until it must have fired, to 30 seconds.
        hosts: of the job; of several runs, as RUN/HOST.
        until: seconds since ``SINCE`` for which it lasts.
        spares: that there are.
    """

    change: Callable[[str, float], Figures | None]
    fires: dict[str, float]
    hosts: tuple[str, ...] = ("a", "b")
    until: float = LENGTH
    spares: int = 1

    def answers(self, at: float) -> dict[str, Answer]:
        """The answers of all agents."""
        found: dict[str, Answer] = {}
        for host in self.hosts:
            is_wrong = SINCE <= at < SINCE + self.until
            changed = self.change(host, at - SINCE) if is_wrong or host == "spare" else {}
            run = host.rpartition("/")[0] or "llm"
            found[host] = None if changed is None else samples(quiet(host, at) | {"spares": self.spares} | changed, run)
        return found


def samples(figures: Figures, run: str) -> list[Sample]:
    """Figures as an agent of a run has them."""
    of_host = {name: {"run": run} for name in ("launches", "workers", "spares", "lacking_hosts")} | {"hangs_total": {}}
    found = list[Sample]()
    for name, value in figures.items():
        figure, _, cause = name.partition("/")
        labels = of_host.get(figure, {"stream": "main"})
        if value is not None:
            found.append((f"gemini_{figure}", labels | ({"cause": cause} if cause else {}), float(value)))
    return found


def on(host: str, **changed: float | None) -> Callable[[str, float], Figures]:
    """A change of one host."""
    return lambda of, _: dict(changed) if of == host else {}


def away(host: str) -> Callable[[str, float], Figures | None]:
    """An agent that does not answer."""
    return lambda of, _: None if of == host else {}


def ended(host: str, since: float) -> Figures | None:
    """A job that has finished: its agents wait a little, one longer than the other, and the leader hears nothing of that one."""
    figures: Figures = {"launches": 0, "workers": 0, "finished": 1, "committed_timestamp_seconds": SINCE}
    if host == "a":
        return (figures | {"job_absent_hosts": 1, "job_left_out_replicas": 1}) if since < 1500 else None
    return figures if since < 60 else None


def storing(_: str, since: float) -> Figures:
    """A job that has finished; its last upload goes on after its workers have ended, and after its launcher has."""
    return {"finishing": 1, "committed_timestamp_seconds": SINCE, "workers": 2 if since < 300 else 0, "launches": int(since < 1500)}


def left_out(host: str, _: float) -> Figures:
    """A host that waits as a spare, while the others go on without it."""
    return {"workers": 0, "committed_timestamp_seconds": 0, "left_out": 1} if host == "spare" else {}


def restarting(host: str, since: float) -> Figures:
    """A job that loses a worker every five minutes; after half an hour its agents are lost too and count anew."""
    lost = since // 300
    return {"restarts_total/died": lost if since < 1800 else lost - 6}


DRILLS = {
    "nothing": Drill(change=on("a"), fires={}),
    "stalled": Drill(change=lambda _, __: {"committed_timestamp_seconds": SINCE}, fires={"GeminiProgressStalled": 120}),
    "stalled while slow": Drill(
        change=lambda _, __: {"committed_timestamp_seconds": SINCE, "commit_interval_seconds": 40}, fires={"GeminiProgressStalled": 800}
    ),
    "stalled with rare commits": Drill(
        change=lambda _, __: {"committed_timestamp_seconds": SINCE, "commit_interval_seconds": 600}, fires={"GeminiProgressStalled": 1800}
    ),
    "stalled without workers": Drill(
        change=lambda _, __: {"committed_timestamp_seconds": SINCE, "workers": 0},
        fires={"GeminiNoWorkers": 900},
    ),
    "a commit every forty minutes": Drill(
        change=lambda _, __: {"committed_timestamp_seconds": SINCE, "commit_interval_seconds": 2400}, fires={}
    ),
    "a host that is left out": Drill(change=left_out, hosts=("a", "b", "spare"), fires={}),
    "a host that is left out, seen alone": Drill(change=left_out, hosts=("spare",), fires={}),
    "a last upload that takes long": Drill(change=storing, fires={}),
    "one of two runs ends": Drill(change=away("one/a"), hosts=("one/a", "two/a"), fires={}),
    "one of two runs loses a host": Drill(change=away("two/b"), hosts=("one/a", "two/a", "two/b"), fires={"GeminiAgentAway": 120}),
    "a restart of a minute": Drill(change=lambda _, since: {"workers": 0, "committed_timestamp_seconds": SINCE}, fires={}, until=60),
    "a host that never commits": Drill(
        change=on("b", committed_timestamp_seconds=None, commit_interval_seconds=None), fires={"GeminiNothingCommitted": 1800}
    ),
    "a crash": Drill(change=lambda _, __: {"launches": 0, "workers": 0}, fires={"GeminiJobFailed": 120}),
    "an agent is away": Drill(change=away("b"), fires={"GeminiAgentAway": 120}),
    "a spare that is not needed": Drill(change=away("spare"), hosts=("a", "b", "spare"), fires={}),
    "the end": Drill(change=ended, fires={}),
    "restarts": Drill(change=restarting, fires={"GeminiRestartStorm": 2100}),
    "a hang": Drill(change=on("b", hangs_total=2), fires={"GeminiWorkersHang": 0}),
    "a divergence": Drill(change=on("a", divergences_total=1), fires={"GeminiRanksDiverged": 0}),
    "a straggler": Drill(change=lambda _, __: {"stragglers": 1}, fires={"GeminiStraggler": 600}),
    "an absent host": Drill(change=on("a", job_absent_hosts=1), fires={"GeminiHostAbsent": 120}),
    "a replica that is left out": Drill(change=on("a", job_left_out_replicas=1), fires={"GeminiUnprotected": 600}),
    "no spare for a lost host": Drill(change=lambda _, __: {"spares": 0, "lacking_hosts": 1}, fires={"GeminiSparesExhausted": 120}),
    "the last spare is taken": Drill(change=lambda _, __: {"spares": 0}, fires={"GeminiLastSpareTaken": 60}),
    "a round in which spares take places": Drill(change=lambda _, __: {"spares": 0, "lacking_hosts": 2}, fires={}, until=30),
    "a job that never had spares": Drill(change=on("b"), fires={}, spares=0),
    "storage": Drill(change=on("b", storage_failing_since_timestamp_seconds=SINCE), fires={"GeminiStorageAway": 900}),
    "damaged copies": Drill(change=on("b", damaged_copies_total=1), fires={"GeminiCopiesDamaged": 0}),
    "held up": Drill(
        change=lambda host, since: {"blocked_seconds_sum": 0.01 * SINCE + 0.2 * since} if host == "b" else {},
        fires={"GeminiTrainingHeldUp": 870},  # half of the ten minutes that are looked at, and ten minutes in which it must last
    ),
}
