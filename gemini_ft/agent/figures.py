"""The figures of an agent by their names in Prometheus, read from its account of itself (``gemini status --json``) and from `Measures`.

Figures are in base units, counters count since the agent began, and an age is given as the time of its beginning. docs/metrics.md has the
list.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import gemini_ft
from gemini_ft.agent.measures import Distribution, Measures
from gemini_ft.core.goodput import Phase

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

Account = Mapping[str, Any]
Value = float | None  # None: there is no value, and the page has no line for it
Values = Value | Mapping[str, Value]  # a mapping: a value for each value of the figure's label


class Figure(NamedTuple):
    """One figure; a name that ends in ``_total`` is that of a counter."""

    name: str
    meaning: str
    read: Callable[[Account], Values]
    label: str = ""  # name of a label beside ``stream``; empty: there is none


OF_HOST = (
    Figure("gemini_agent_start_timestamp_seconds", "When this agent began.", lambda of: of["began"]),
    Figure("gemini_workers", "Workers of this host that are connected.", lambda of: len(of["workers"])),
    Figure("gemini_memory_used_bytes", "Memory of all slots.", lambda of: of["memory"]["used"]),
    Figure("gemini_memory_limit_bytes", "The most memory that slots may take.", lambda of: of["memory"]["limit"]),
    Figure("gemini_hangs_total", "Workers of this host that were killed because they made no progress.", lambda of: of["hangs"]),
)


def _counted(name: str) -> Callable[[Account], Values]:
    return lambda of: of["counters"][name]


def _measured(read: Callable[[Measures], Values]) -> Callable[[Account], Values]:
    return lambda of: None if of["measures"] is None else read(of["measures"])


def _stored(name: str, otherwise: Value = None) -> Callable[[Account], Values]:
    return lambda of: None if of["storage"] is None else of["storage"][name] or otherwise


def _of_job(name: str) -> Callable[[Account], Values]:
    return lambda of: None if of["job"] is None else of["job"][name]


def _committed_at(of: Account) -> Value:
    return None if of["committed_age"] is None else time.time() - of["committed_age"]


def _lag(of: Account) -> Value:
    step, committed = of["measures"].step if of["measures"] is not None else None, of["committed"]
    return None if step is None or committed is None else max(0, step - committed)


def _seconds(of: Measures) -> Values:
    return {phase.replace(" ", "_"): seconds for phase, seconds in of.time.seconds.items() if phase != Phase.STORAGE}


def _slots(of: Account) -> Values:
    states = Counter(slot.partition(":")[0] for slots in of["shards"].values() for slot in slots)
    return {state: states[state] for state in ("empty", "writing", "torn", "complete")}


OF_STREAM = (
    Figure("gemini_commits_total", "Steps that were committed.", _counted("committed")),
    Figure("gemini_committed_step", "The newest step that is committed, as far as this host has heard.", lambda of: of["committed"]),
    Figure("gemini_committed_timestamp_seconds", "When the newest committed step was complete on this host.", _committed_at),
    Figure("gemini_step", "The newest step that a worker of this host has ended.", _measured(lambda of: of.step)),
    Figure("gemini_lag_steps", "Steps that have ended since the newest committed one.", _lag),
    Figure("gemini_aborted_snapshots_total", "Steps that will not be committed, because of any host.", _counted("aborted")),
    Figure("gemini_skipped_snapshots_total", "Snapshots that workers here gave up.", _measured(lambda of: of.skips), "reason"),
    Figure("gemini_snapshot_interval_steps", "Steps between snapshots.", lambda of: of["traffic"] and of["traffic"]["interval"]),
    Figure("gemini_replica_bytes_total", "Bytes of shards that were sent to other hosts.", _counted("replica_bytes")),
    Figure("gemini_damaged_copies_total", "Copies here that had to be discarded.", _counted("damaged")),
    Figure("gemini_slots", "Slots by state.", _slots, "state"),
    Figure("gemini_uploads_total", "Checkpoints that have reached storage.", _counted("uploads")),
    Figure("gemini_failed_uploads_total", "Checkpoints whose upload failed.", _counted("failed_uploads")),
    Figure("gemini_stored_step", "The newest step in storage, as far as this host knows.", _stored("stored")),
    Figure("gemini_stored_timestamp_seconds", "When the newest stored step was stored.", _stored("stored_at")),
    Figure("gemini_storage_failing_since_timestamp_seconds", "Since when storage fails; 0: it is well.", _stored("failing_since", 0)),
    Figure(
        "gemini_restarts_total",
        "Attempts after the first one, by the cause that this host saw.",
        _measured(lambda of: of.restarts),
        "cause",
    ),
    Figure("gemini_time_seconds_total", "Time of the run by phase, as this host sees it.", _measured(_seconds), "phase"),
    Figure("gemini_leader_changes_total", "Times that another host has come to lead the commits.", _counted("leader_changes")),
    Figure("gemini_leader_reached", "Whether the leader of the commits hears this host at once.", lambda of: of["reaches_leader"]),
    Figure("gemini_job_hosts", "Hosts of the job, as its leader says.", _of_job("hosts")),
    Figure("gemini_job_ranks", "Ranks of the job, as its leader says.", _of_job("ranks")),
    Figure("gemini_job_absent_hosts", "Hosts of which the leader hears nothing.", _of_job("absent")),
    Figure("gemini_job_left_out_replicas", "Replicas without which steps are committed for now.", _of_job("left_out")),
)
DISTRIBUTIONS: tuple[tuple[str, str, Callable[[Measures], Distribution]], ...] = (
    ("gemini_commit_seconds", "From the end of a step on this host until it was committed.", lambda of: of.commit_seconds),
    ("gemini_blocked_seconds", "Time for which snapshots held up a step of a worker.", lambda of: of.blocked_seconds),
    ("gemini_waited_seconds", "The part of gemini_blocked_seconds for which an update waited for the copy.", lambda of: of.waited_seconds),
)


def families(account: Account, measures: Mapping[str, Measures | None], began: float) -> Iterator[Metric]:
    """Yields all figures, in the types of prometheus-client.

    Args:
        account: the agent's account of itself.
        measures: by stream.
        began: time at which the agent began, in seconds of the system's clock.
    """
    from prometheus_client.core import HistogramMetricFamily, InfoMetricFamily

    who = {"version": gemini_ft.__version__, "run": account["run"], "host": account["host"]}
    yield InfoMetricFamily("gemini_agent", "The agent that is asked.", value=who)
    streams = {name: {**of, "measures": measures[name]} for name, of in account["streams"].items()}
    for figure in OF_HOST:
        yield _family(figure, {"": {**account, "began": began}}, [])
    for figure in OF_STREAM:
        yield _family(figure, streams, ["stream"])
    for name, meaning, distribution in DISTRIBUTIONS:
        histogram = HistogramMetricFamily(name, meaning, labels=["stream"])
        for stream, kept in measures.items():
            if kept is not None:
                histogram.add_metric([stream], distribution(kept).buckets(), distribution(kept).total)
        yield histogram


def _family(figure: Figure, accounts: Mapping[str, Account], labels: list[str]) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    family: CounterMetricFamily | GaugeMetricFamily
    labelled = [*labels, *([figure.label] if figure.label else [])]
    if figure.name.endswith("_total"):
        family = CounterMetricFamily(figure.name, figure.meaning, labels=labelled)
    else:
        family = GaugeMetricFamily(figure.name, figure.meaning, labels=labelled)
    for stream, account in accounts.items():
        for part, value in _parts(figure.read(account)):
            if value is not None:
                family.add_metric([*([stream] if labels else []), *([part] if figure.label else [])], value)
    return family


def _parts(found: Values) -> Iterable[tuple[str, Value]]:
    return found.items() if isinstance(found, Mapping) else [("", found)]
