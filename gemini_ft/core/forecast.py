"""A month of a job that fails at random: the work that is lost, with copies in memory and with checkpoints in storage alone. Pure.

A run draws failures of processes, hosts and failure domains, each with a constant rate, and lets both ways of checkpointing meet the same
ones. In memory, a snapshot counts when its replicas have arrived, and is lost where all holders of a shard are gone at the same time: by
one failure, or by others before the copies of the first are back. Then the newest checkpoint in storage counts.

Formulas stand beside the draw, in seconds: GEMINI's wasted time (section 2), and the best interval between checkpoints. J. W. Young, A
first order approximation to the optimum checkpoint interval, CACM 17(9), 1974. J. T. Daly, A higher order estimate of the optimum
checkpoint interval for restart dumps, FGCS 22(3), 2006.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, sqrt
from random import Random
from typing import Literal

from gemini_ft.core.placement import place
from gemini_ft.errors import ConfigError

DAY = 86400.0  # seconds
SLOTS = 2  # per copy: one complete, one in progress (docs/design.md, section 7)


def wasted_time(checkpoint: float, interval: float, retrieval: float) -> float:
    """Expected time that one failure wastes, by GEMINI: t_ckpt + 1 / (2 f) + t_rtvl.

    Args:
        checkpoint: from the moment that a state exists until its checkpoint can be used.
        interval: between two checkpoints, 1 / f; failures come at any moment of it alike.
        retrieval: until the checkpoint is loaded.
    """
    return checkpoint + interval / 2 + retrieval


def daly_interval(cost: float, between_failures: float) -> float:
    """The best time of training between two checkpoints that stop it for ``cost`` each: Young's to a higher order.

    Where writing takes too long for that to hold, it is the mean time between two failures.
    """
    if cost >= 2 * between_failures:
        return between_failures
    part = cost / (2 * between_failures)
    return sqrt(2 * cost * between_failures) * (1 + sqrt(part) / 3 + part / 9) - cost


_MOST = 1e30  # of any figure


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A job, the machines under it, and what befalls them. Bytes, bits per second, seconds."""

    hosts: int
    ranks: int  # per host
    state: float  # bytes of the whole job
    step: float  # seconds
    bandwidth: float  # bits per second of a host's link, each way, that replication may use
    replicas: int = 2
    domain: int = 0  # hosts per failure domain; 0: there are none
    process_failures: float = 0.0  # per host and day; its memory survives
    host_failures: float = 0.0  # per host and day
    domain_failures: float = 0.0  # per domain and day
    restart: float = 60.0  # seconds from a failure to the loading of the state
    replace: float = 300.0  # the same where a host must be replaced
    storage_bandwidth: float = 0.0  # bits per second of the whole job; 0: nothing is stored
    storage_interval: float = 3 * 3600.0  # seconds between checkpoints that leave memory for storage

    def __post_init__(self) -> None:
        for name in ("hosts", "ranks", "state", "step", "bandwidth", "replicas", "storage_interval"):
            if not 0 < getattr(self, name) < _MOST:
                raise ConfigError(f"{name}={getattr(self, name)}: must be more than 0, and less than {_MOST:g}")
        for name in ("domain", "process_failures", "host_failures", "domain_failures", "restart", "replace", "storage_bandwidth"):
            if not 0 <= getattr(self, name) < _MOST:
                raise ConfigError(f"{name}={getattr(self, name)}: must not be negative, and less than {_MOST:g}")
        if self.replicas > self.hosts:
            raise ConfigError(f"replicas={self.replicas} needs as many hosts, got {self.hosts}")
        if self.domain_failures and not self.domain:
            raise ConfigError(f"domain_failures={self.domain_failures}: say how many hosts a failure domain has, too")

    @property
    def domains(self) -> int:
        return ceil(self.hosts / self.domain) if self.domain else 0

    @property
    def share(self) -> float:
        """Bytes of the state that one host's ranks own."""
        return self.state / self.hosts

    @property
    def memory(self) -> float:
        """Bytes of slots on each host; one more of its own shards where they are stored."""
        return self.share * (SLOTS * self.replicas + (self.storage_bandwidth > 0))

    @property
    def replication(self) -> float:
        """Seconds in which a snapshot reaches its replicas."""
        return 8 * self.share * (self.replicas - 1) / self.bandwidth

    @property
    def every(self) -> int:
        """Steps per snapshot: 1, unless the links take longer than that."""
        return max(1, ceil(self.replication / self.step))

    @property
    def upload(self) -> float:
        """Seconds in which the whole state travels to storage, or from it."""
        return 8 * self.state / self.storage_bandwidth if self.storage_bandwidth else inf

    @property
    def failures_per_day(self) -> float:
        return self.hosts * (self.process_failures + self.host_failures) + self.domains * self.domain_failures

    @property
    def best_storage_interval(self) -> float:
        """Seconds of training between checkpoints that stop it, by Daly."""
        return daly_interval(self.upload, DAY / self.failures_per_day) if self.failures_per_day else inf


@dataclass(frozen=True)
class Failure:
    """A failure at ``at`` seconds that takes these hosts' memory; none: of a process alone."""

    at: float
    hosts: tuple[int, ...]


@dataclass
class RunOutcome:
    """The course of one run."""

    progress: float = 0.0  # seconds of training that count in the end
    lost: list[float] = field(default_factory=list)  # seconds of training that each failure took back
    from_storage: int = 0  # failures that memory did not survive


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Many runs of both ways; seconds."""

    days: float
    memory: list[RunOutcome]
    storage: list[RunOutcome]  # storage alone, at its best interval; empty: nothing is stored

    def ratio(self, runs: Sequence[RunOutcome]) -> float:
        """Effective training ratio, over all runs."""
        return sum(run.progress for run in runs) / (len(runs) * self.days * DAY)

    @property
    def fallback_probability(self) -> float:
        """Part of the runs in which memory did not survive at least once."""
        return sum(run.from_storage > 0 for run in self.memory) / len(self.memory)

    @property
    def fallbacks_per_run(self) -> float:
        return sum(run.from_storage for run in self.memory) / len(self.memory)


def lost_work(runs: Sequence[RunOutcome]) -> list[float]:
    """Seconds of training that each failure took back, of all runs, sorted."""
    return sorted(lost for run in runs for lost in run.lost)


def quantile(ordered: Sequence[float], q: float) -> float:
    """The value below which a part ``q`` of sorted values lies; 0 of none."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def forecast(cluster: Cluster, days: float = 30.0, runs: int = 20, seed: int = 1) -> Forecast:
    """Lets both ways of checkpointing meet the same failures, ``runs`` times."""
    holders = _holders(cluster)
    out = Forecast(days=days, memory=[], storage=[])
    for run in range(runs):
        failures = list(draw(cluster, days * DAY, Random(f"{seed}/{run}")))
        out.memory.append(in_memory(cluster, failures, days * DAY, holders))
        if cluster.storage_bandwidth:
            out.storage.append(in_storage(cluster, failures, days * DAY, cluster.best_storage_interval))
    return out


def draw(cluster: Cluster, until: float, rng: Random) -> Iterator[Failure]:
    rates = [cluster.hosts * cluster.process_failures, cluster.hosts * cluster.host_failures, cluster.domains * cluster.domain_failures]
    at = 0.0
    while sum(rates) and (at := at + rng.expovariate(sum(rates) / DAY)) < until:
        kind: Literal[0, 1, 2] = rng.choices((0, 1, 2), rates)[0]
        if kind == 0:
            yield Failure(at, ())
        elif kind == 1:
            yield Failure(at, (rng.randrange(cluster.hosts),))
        else:
            first = rng.randrange(cluster.domains) * cluster.domain
            yield Failure(at, tuple(range(first, min(first + cluster.domain, cluster.hosts))))


def in_memory(cluster: Cluster, failures: Sequence[Failure], until: float, holders: Sequence[Sequence[frozenset[int]]]) -> RunOutcome:
    """A run with copies in memory, and checkpoints that go from there to storage beside the training.

    ``holders``: for each host, the sets of hosts that hold a shard together and that it is in.
    """
    out = RunOutcome()
    interval = cluster.every * cluster.step
    resumed = stored = up = 0.0  # training that a restart began with, that is in storage; when training goes on
    gone: dict[int, float] = {}  # host -> until when its copies are missing
    for failure in failures:
        out.progress += max(0.0, failure.at - up)
        committed = max(resumed, (out.progress - cluster.replication) // interval * interval)
        if cluster.storage_bandwidth:
            stored = max(stored, _stored(cluster, out.progress))
        gone = {host: back for host, back in gone.items() if back > failure.at}
        gone |= dict.fromkeys(failure.hosts, inf)
        begin = failure.at + (cluster.replace if failure.hosts else cluster.restart)
        resumed = committed
        if any(members <= gone.keys() for host in failure.hosts for members in holders[host]):
            out.from_storage += 1
            resumed, begin = stored, begin + (cluster.upload if stored else 0.0)
            gone.clear()
        elif failure.hosts:
            begin += 8 * cluster.share / cluster.bandwidth
        up = max(up, begin)
        gone |= {host: up + 8 * cluster.share * cluster.replicas / cluster.bandwidth for host in failure.hosts if host in gone}
        out.lost.append(out.progress - resumed)
        out.progress = resumed
    out.progress += max(0.0, until - up)
    return out


def _stored(cluster: Cluster, progress: float) -> float:
    """The newest training that is in storage after ``progress``: one upload at a time, so that the next one waits for a slow one."""
    every = max(cluster.storage_interval, cluster.upload)
    over = (progress - cluster.upload - cluster.storage_interval) // every  # uploads after the first one
    return cluster.storage_interval + over * every if over >= 0 else 0.0


def in_storage(cluster: Cluster, failures: Sequence[Failure], until: float, interval: float) -> RunOutcome:
    """A run with checkpoints in storage alone: training stops while one is written, and every failure reads the newest."""
    out, up, committed = RunOutcome(), 0.0, 0.0

    def advance(now: float) -> float:
        """Seconds of training since the last restart, those behind a written checkpoint included."""
        nonlocal committed
        if interval == inf:
            return max(0.0, now - up)
        written, rest = divmod(max(0.0, now - up), interval + cluster.upload)
        committed += written * interval
        return written * interval + min(rest, interval)

    for failure in failures:
        out.progress += advance(failure.at)
        out.lost.append(out.progress - committed)
        out.progress = committed
        begin = failure.at + (cluster.replace if failure.hosts else cluster.restart) + (cluster.upload if committed else 0.0)
        up = max(up, begin)
    out.progress += advance(until)
    return out


def _holders(cluster: Cluster) -> list[list[frozenset[int]]]:
    names = [f"{number:06}" for number in range(cluster.hosts)]
    domains = {name: f"{number // cluster.domain:06}" for number, name in enumerate(names)} if cluster.domain else None
    sets = {frozenset(map(int, hosts)) for hosts in place(names, cluster.replicas, domains).values()}
    out: list[list[frozenset[int]]] = [[] for _ in names]
    for members in sorted(sets, key=sorted):
        for host in members:
            out[host].append(members)
    return out


# -- what to choose ---------------------------------------------------------------------------------

ENOUGH = 0.001  # part of the time that another replica must gain to be worth its memory


@dataclass(frozen=True)
class ReplicaChoice:
    """A number of replicas, and what it comes to."""

    cluster: Cluster
    found: Forecast
    fits: bool


def choices(cluster: Cluster, memory: float, days: float = 30.0, runs: int = 20, seed: int = 1) -> list[ReplicaChoice]:
    """One choice per number of replicas, 1 to 4; ``memory``: bytes per host that slots may take."""
    options = [replace(cluster, replicas=count) for count in range(1, min(4, cluster.hosts) + 1)]
    return [ReplicaChoice(option, forecast(option, days, runs, seed), option.memory <= memory) for option in options]


def best(offered: Sequence[ReplicaChoice]) -> ReplicaChoice | None:
    """The fewest replicas, 2 or more, after which another one gains nothing that counts; None: none fits into memory."""
    fitting = [choice for choice in offered if choice.fits]
    if not fitting:
        return None
    most = max(choice.found.ratio(choice.found.memory) for choice in fitting)
    enough = [choice for choice in fitting if choice.found.ratio(choice.found.memory) >= most - ENOUGH]
    replicated = [choice for choice in enough if choice.cluster.replicas > 1]
    return (replicated or enough)[0]
