"""The figures of an agent by their names in Prometheus, read from its account of itself (``gemini status --json``), and their `Measures`.

Figures are in base units, counters count since the agent began, and an age is given as the time of its beginning. docs/metrics.md has the
list.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import gemini_ft
from gemini_ft.core.goodput import PastTime, RunTime, TimeLedger
from gemini_ft.core.promql import Sample
from gemini_ft.core.versions import Version
from gemini_ft.wire.worker_messages import ENDING, LATE, WRITTEN

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

Account = Mapping[str, Any]
Value = float | None  # None: there is no value, and the page has no line for it
Values = Value | Mapping[str, Value]  # a mapping: a value for each value of the figure's label

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PACED = 32  # events of which the mean interval is taken
_UNDECIDED = 64  # the most iterations that are remembered until they are committed; some never are


class Distribution:
    """Counts of values that were at most as large as each bound."""

    def __init__(self, bounds: Sequence[float] = _SECONDS) -> None:
        self._bounds, self._counts = bounds, [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def account(self) -> dict[str, Any]:
        """Returns ``total`` and ``buckets``: (bound, number of values up to it), as Prometheus has them; the last bound is infinite."""
        buckets = list(zip([*map(str, self._bounds), "+Inf"], accumulate(self._counts), strict=True))
        return {"buckets": buckets, "total": self.total}


class MeanInterval:
    """The mean time between the last events, in ``seconds``; None: there have not been two in a row yet."""

    def __init__(self) -> None:
        self._times = deque[tuple[float, int]](maxlen=_PACED)
        self.seconds: float | None = None

    def add(self, at: float, number: int) -> None:
        """Records an event by its time, and its number among all events, which grows."""
        self._times.append((at, number))
        (first, low), (last, high) = self._times[0], self._times[-1]
        self.seconds = (last - first) / (high - low) if high > low else self.seconds

    def pause(self) -> None:
        """Says that the time until the next event is no interval."""
        self._times.clear()


class Measures:
    """Figures of one stream on one host since this agent began.

    ``host``: its name.

    Attributes:
        step_pace: how long steps take here.
        commit_pace: the time from one commit to the next.
        commit_seconds: time from the end of a step here until it was committed.
        blocked_seconds: time for which snapshots held up each step of each worker.
        waited_seconds: the part of that time for which the update waited for the copy.
        skips: reason -> number of snapshots that a worker of this host gave up.
        restarts: cause -> number of incarnations that followed another one.
        time: the time of the run by phase, as this host sees it; it goes on from what other agents, or a stored checkpoint, have kept.
    """

    def __init__(self, host: str = "") -> None:
        self._host = host
        self.step: int | None = None  # the newest step that a worker of this host has ended; None: none yet
        self.step_pace, self.commit_pace, self._commits = MeanInterval(), MeanInterval(), 0
        self.commit_seconds, self.blocked_seconds, self.waited_seconds = Distribution(), Distribution(), Distribution()
        self.skips = Counter(dict.fromkeys(("late", "written", "ending", "other"), 0))
        self.restarts = Counter(dict.fromkeys(("died", "failed", "hang", "drain", "elsewhere"), 0))
        self.failed_at: dict[str, float] = {}  # cause -> when a worker was last lost by it, in seconds of the system's clock
        self.time = TimeLedger(time.monotonic())
        self._ended: dict[int, float] = {}  # iteration -> when the first worker said that it has ended
        self._is_restoring = False
        self._cause = ""  # of the restart that is to come

    def opened(self, number: int, resumed: Version | None, is_restart: bool, past: PastTime) -> None:
        """Begins a new incarnation; a restart is counted under the cause that was seen here."""
        now = time.monotonic()
        joined = now - (past.under_way or 0.0)
        if past.time is not None or past.under_way is not None:
            self.time.go_on(past.time or RunTime(seconds={}), time.time() - now, joined - past.waited)
        if past.waited:
            self.time.waited(joined, past.waited)
        self.time.joined(joined, number, resumed.iteration if resumed is not None else 0)
        if past.restored is not None:
            self.time.restored(now - past.restored)
        if past.replayed is not None:
            self.time.stepped(now - past.replayed[0], past.replayed[1], 0.0)
        self._is_restoring = resumed is not None and past.restored is None
        if is_restart:
            self.restarts[self._cause or "elsewhere"] += 1
        self._cause = ""
        self._ended.clear()
        self.step = None
        self.step_pace.pause()
        self.commit_pace.pause()

    def reserved(self) -> None:
        """Counts the restore as over, as a worker asks for its slots once it has its state back."""
        if self._is_restoring:
            self.time.restored(time.monotonic())

    def reached(self, iteration: int, held: Sequence[tuple[float, float]]) -> None:
        """Records that a worker has ended an iteration.

        Args:
            iteration: the newest one that it has ended.
            held: of its last iterations the seconds for which each was held up, and the part of these at the update.
        """
        if self.step is None or iteration > self.step:
            self.step, self._is_restoring = iteration, False
            self.step_pace.add(time.monotonic(), iteration)
            self.time.stepped(time.monotonic(), iteration, held[-1][0] if held else 0.0)
            self._ended[iteration] = time.monotonic()
            if len(self._ended) > _UNDECIDED:
                del self._ended[next(iter(self._ended))]
        for blocked, waited in held:
            self.blocked_seconds.add(blocked)
            self.waited_seconds.add(waited)

    def committed(self, iteration: int) -> None:
        self._commits += 1
        self.commit_pace.add(time.monotonic(), self._commits)
        if (ended := self._ended.get(iteration)) is not None:
            self.commit_seconds.add(time.monotonic() - ended)
        self._ended = {later: at for later, at in self._ended.items() if later > iteration}

    def skipped(self, reason: str) -> None:
        """Counts a snapshot that a worker gave up."""
        kind = {ENDING: "ending", LATE: "late"}.get(reason, "written" if reason.endswith(WRITTEN) else "other")
        self.skips[kind] += 1

    def lost(self, cause: str, stood: float = 0.0) -> None:
        """Records the end of a worker; the first end since the last restart is the cause of the next one, and the others follow from it."""
        if not self._cause:
            self._cause, self.failed_at[cause] = cause, time.time()
        self.time.failed(time.monotonic(), cause, self._host, stood=stood)

    def kept(self) -> RunTime | None:
        """The time of the run, for agents that come later; None: there is none yet."""
        return self.time.kept(time.time() - time.monotonic())

    @property
    def is_failing(self) -> bool:
        return bool(self._cause)

    def account(self) -> dict[str, Any]:
        """The measures as the agent's account of itself has them."""
        return {
            "step": self.step,
            "step_seconds": self.step_pace.seconds,
            "commit_interval": self.commit_pace.seconds,
            "skips": self.skips,
            "restarts": self.restarts,
            "failed_at": self.failed_at,
            "run": asdict(kept) if (kept := self.kept()) is not None else None,
            "seconds": {phase.replace(" ", "_"): seconds for phase, seconds in self.time.own.items()},
            "commit_seconds": self.commit_seconds.account(),
            "blocked_seconds": self.blocked_seconds.account(),
            "waited_seconds": self.waited_seconds.account(),
        }


class Figure(NamedTuple):
    """One figure; a name that ends in ``_total`` is that of a counter."""

    name: str
    meaning: str
    read: Callable[[Account], Values]
    label: str = ""  # name of a label beside ``stream``; empty: there is none


def _launches(of: Account) -> Values:
    is_over = of["streams"] and all(stream["finished"] for stream in of["streams"].values())
    return {of["run"]: 0 if is_over else len(of["launches"])}


def _spares(name: str) -> Callable[[Account], Values]:
    return lambda of: {of["run"]: of["spares"][name]} if of.get("spares") else None


OF_HOST = (
    Figure("gemini_agent_start_timestamp_seconds", "When this agent began.", lambda of: of["began"]),
    Figure("gemini_launches", "Launches of this host that are at work, whether or not workers are connected.", _launches, "run"),
    Figure("gemini_workers", "Workers of this host that are connected.", lambda of: {of["run"]: len(of["workers"])}, "run"),
    Figure("gemini_memory_used_bytes", "Memory of all slots.", lambda of: of["memory"]["used"]),
    Figure("gemini_memory_limit_bytes", "The most memory that slots may take.", lambda of: of["memory"]["limit"]),
    Figure("gemini_spares", "Hosts that wait to take the place of a lost one, as the launcher here sees.", _spares("waiting"), "run"),
    Figure("gemini_lacking_hosts", "Hosts without which the job does not go on, as the launcher here sees.", _spares("lacking"), "run"),
    Figure("gemini_hangs_total", "Workers of this host that were killed because they made no progress.", lambda of: of["hangs"]),
)


def _counted(name: str) -> Callable[[Account], Values]:
    return lambda of: of["counters"][name]


def _measured(name: str) -> Callable[[Account], Values]:
    return lambda of: of["measures"][name]


def _stored(name: str, otherwise: Value = None) -> Callable[[Account], Values]:
    return lambda of: None if of["storage"] is None else of["storage"][name] or otherwise


def _of_job(name: str) -> Callable[[Account], Values]:
    return lambda of: None if of["job"] is None else of["job"][name]


def _committed_at(of: Account) -> Value:
    return None if of["committed_age"] is None else time.time() - of["committed_age"]


def _lag(of: Account) -> Value:
    step, committed = of["measures"]["step"], of["committed"]
    return None if step is None or committed is None else max(0, step - committed)


def _of_gradients(name: str, unit: float = 1.0) -> Callable[[Account], Values]:
    """A figure of the gradients' pipeline by rule, the mean of the ranks here (`gemini_ft.state.gradients.GradientState.summary`)."""

    def read(of: Account) -> Values:
        found = defaultdict[str, list[float]](list)
        for rules in of["gradients"].values():
            for rule, figures in rules.items():
                found[rule] += [unit * figures[name]] if name in figures else []
        return {rule: fmean(values) for rule, values in found.items() if values}

    return read


def _slots(of: Account) -> Values:
    states = Counter(slot.partition(":")[0] for slots in of["shards"].values() for slot in slots)
    return {state: states[state] for state in ("empty", "writing", "torn", "complete")}


OF_STREAM = (
    Figure("gemini_finished", "Whether the job has finished its work; 0 also after an end by failure.", lambda of: int(of["finished"])),
    Figure(
        "gemini_finishing",
        "Whether all ranks of this host have finished, and those of others, or the last upload, have not yet.",
        lambda of: int(of["finishing"]),
    ),
    Figure("gemini_left_out", "Whether other hosts go on without this one, as one of them has said.", lambda of: int(of["left_out"])),
    Figure("gemini_commits_total", "Steps that were committed.", _counted("committed")),
    Figure("gemini_committed_step", "The newest step that is committed, as far as this host has heard.", lambda of: of["committed"]),
    Figure("gemini_committed_timestamp_seconds", "When the newest committed step was complete on this host.", _committed_at),
    Figure("gemini_step", "The newest step that a worker of this host has ended.", _measured("step")),
    Figure("gemini_step_seconds", "Time from one step to the next here, the mean of the last ones.", _measured("step_seconds")),
    Figure("gemini_commit_interval_seconds", "Time from one commit to the next, the mean of the last ones.", _measured("commit_interval")),
    Figure("gemini_lag_steps", "Steps that have ended since the newest committed one.", _lag),
    Figure("gemini_aborted_snapshots_total", "Steps that will not be committed, because of any host.", _counted("aborted")),
    Figure("gemini_skipped_snapshots_total", "Snapshots that workers here gave up.", _measured("skips"), "reason"),
    Figure("gemini_snapshot_interval_steps", "Steps between snapshots.", lambda of: of["traffic"] and of["traffic"]["interval"]),
    Figure("gemini_replica_bytes_total", "Bytes of shards that were sent to other hosts.", _counted("replica_bytes")),
    Figure("gemini_damaged_copies_total", "Copies here that had to be discarded.", _counted("damaged")),
    Figure("gemini_divergences_total", "Times that ranks differed in what they hold alike, or from themselves.", _counted("divergences")),
    Figure("gemini_slots", "Slots by state.", _slots, "state"),
    Figure("gemini_uploads_total", "Checkpoints that have reached storage.", _counted("uploads")),
    Figure("gemini_failed_uploads_total", "Checkpoints whose upload failed.", _counted("failed_uploads")),
    Figure("gemini_stored_step", "The newest step in storage, as far as this host knows.", _stored("stored")),
    Figure("gemini_stored_timestamp_seconds", "When the newest stored step was stored.", _stored("stored_at")),
    Figure("gemini_storage_failing_since_timestamp_seconds", "Since when storage fails; 0: it is well.", _stored("failing_since", 0)),
    Figure(
        "gemini_restarts_total",
        "Attempts after the first one, by the cause that this host saw.",
        _measured("restarts"),
        "cause",
    ),
    Figure("gemini_failed_timestamp_seconds", "When a worker of this host was last lost, by cause.", _measured("failed_at"), "cause"),
    Figure("gemini_time_seconds_total", "Time of the run by phase, as this host sees it.", _measured("seconds"), "phase"),
    Figure("gemini_leader_changes_total", "Times that another host has come to lead the commits.", _counted("leader_changes")),
    Figure("gemini_leader_reached", "Whether the leader of the commits hears this host at once.", lambda of: of["reaches_leader"]),
    Figure("gemini_gradient_bytes", "Bytes of a rank's gradients in a step, as they were.", _of_gradients("bytes_before"), "rule"),
    Figure("gemini_gradient_sent_bytes", "Bytes of a rank's gradients in a step, as they travelled.", _of_gradients("bytes_after"), "rule"),
    Figure("gemini_gradient_encode_seconds", "Time to encode gradients in a step.", _of_gradients("encode_ms", 1e-3), "rule"),
    Figure("gemini_gradient_communication_seconds", "Time for which gradients travelled.", _of_gradients("communication_ms", 1e-3), "rule"),
    Figure("gemini_gradient_decode_seconds", "Time to decode gradients in a step.", _of_gradients("decode_ms", 1e-3), "rule"),
    Figure("gemini_gradient_overlap_ratio", "Part of the communication that backward hid.", _of_gradients("overlap"), "rule"),
    Figure("gemini_gradient_density_ratio", "Part of the gradients' elements that travelled.", _of_gradients("density"), "rule"),
    Figure("gemini_stragglers", "Ranks of the job that are slow now.", lambda of: len(of["stragglers"])),
    Figure("gemini_job_hosts", "Hosts of the job, as its leader says.", _of_job("hosts")),
    Figure("gemini_job_ranks", "Ranks of the job, as its leader says.", _of_job("ranks")),
    Figure("gemini_job_absent_hosts", "Hosts of which the leader hears nothing.", _of_job("absent")),
    Figure("gemini_job_left_out_replicas", "Replicas without which steps are committed for now.", _of_job("left_out")),
)
DISTRIBUTIONS = (
    ("commit_seconds", "From the end of a step on this host until it was committed."),
    ("blocked_seconds", "Time for which snapshots held up a step of a worker."),
    ("waited_seconds", "The part of gemini_blocked_seconds for which an update waited for the copy."),
)


def samples(account: Account) -> Iterator[Sample]:
    """Yields all figures of the agent's account of itself, of distributions only the sums."""
    for figure in (*OF_HOST, *OF_STREAM):
        yield from ((figure.name, labels, value) for labels, value in _read(figure, account))
    for name, _ in DISTRIBUTIONS:
        yield from ((f"gemini_{name}_sum", {"stream": stream}, of["measures"][name]["total"]) for stream, of in account["streams"].items())


def families(account: Account) -> Iterator[Metric]:
    """Yields all figures of the agent's account of itself, in the types of prometheus-client."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily

    who = {"version": gemini_ft.__version__, "run": account["run"], "host": account["host"]}
    yield InfoMetricFamily("gemini_agent", "The agent that is asked.", value=who)
    for figure in (*OF_HOST, *OF_STREAM):
        names = [name for name in ("stream" if figure in OF_STREAM else "", figure.label) if name]
        kind = CounterMetricFamily if figure.name.endswith("_total") else GaugeMetricFamily
        family: CounterMetricFamily | GaugeMetricFamily = kind(figure.name, figure.meaning, labels=names)
        for labels, value in _read(figure, account):
            family.add_metric(list(labels.values()), value)
        yield family
    for name, meaning in DISTRIBUTIONS:
        histogram = HistogramMetricFamily(f"gemini_{name}", meaning, labels=["stream"])
        for stream, of in account["streams"].items():
            histogram.add_metric([stream], of["measures"][name]["buckets"], of["measures"][name]["total"])
        yield histogram


def _read(figure: Figure, account: Account) -> Iterator[tuple[dict[str, str], float]]:
    for stream, of in account["streams"].items() if figure in OF_STREAM else [("", account)]:
        found = figure.read(of)
        for part, value in found.items() if isinstance(found, Mapping) else [("", found)]:
            if value is not None:
                yield {name: label for name, label in (("stream", stream), (figure.label, part)) if label}, value
