"""The language of GEMINI_FAULTS: failures, their times and their targets. Pure; `gemini_ft.faults.inject` carries them out.

    step=20:rank=1:sigkill; step=40:host=2:kill; step=60:group=0:kill; probability=0.001:seed=7:sigkill

Faults are separated by semicolons or newlines. A fault is one kind and its `key=value` pairs, separated by colons.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemini_ft.errors import ConfigError

# Done by each rank that is hit, to itself; or by the process that comes to one of PROCESS_MOMENTS.
RANK_KINDS = {
    "sigkill": "the worker dies of SIGKILL",
    "sigstop": "the worker stops and hangs, until hang_timeout ends it",
    "exception": "the worker raises gemini_ft.faults.inject.InjectedFault",
    "exit": "the worker ends by os._exit (code=1)",
    "delay": "the worker does nothing for some seconds (seconds=60)",
    "flip": "a bit flips in the worker's memory (of=weight, moment or gradient)",
}
# Done once on each host that is hit.
HOST_KINDS = {
    "agent": "the host's agent dies of SIGKILL",
    "kill": "launcher, workers and agent of the host die at once, as in a power cut",
    "corrupt": "a bit flips in every copy in the agent's memory (owner=RANK: of that rank's shard only)",
    "slow": "the host's agent gets a share of its time (share=0.02) for some seconds (seconds=60)",
    "storage_full": "the file system of storage.url is filled (until=STEP: and freed again)",
}
KINDS = RANK_KINDS | HOST_KINDS
INSIDE_KINDS = [kind for kind in RANK_KINDS if kind != "flip"]  # at PROCESS_MOMENTS
PLACES = ("weight", "moment", "gradient")  # of a flip
OCCURRENCE = re.compile(r"\d+-[0-9a-f]{8}(-\d+)?")  # all that `Fault.occurrence` can return

MOMENTS = {
    "end_of_step": "the step is computed, its snapshot not yet begun",
    "in_copy": "the snapshot of the step is being copied and replicated",
    "before_update": "gradients are there, the optimizer is about to write",
    "validation_start": "Lightning's validation begins",
    "validation_end": "Lightning's validation is over",
    "epoch_start": "a training epoch of Lightning begins",
    "epoch_end": "a training epoch of Lightning is over",
}
# Inside the processes of a run (`gemini_ft.failpoints`): of those that are meant, the first one to come there is hit.
PROCESS_MOMENTS = {
    "agent_opens": "an agent is asked to begin an incarnation, and has not; the snapshot is the one that is resumed",
    "agent_copied": "an agent has a whole copy of its own rank's shard, and has told nobody",
    "agent_received": "an agent has a whole replica of a rank's shard, and has not acknowledged it",
    "agent_decides": "the agent that leads has decided a commit, and has told nobody",
    "agent_commits": "an agent hears of a commit, and has not acted on it",
    "agent_uploads": "a rank's committed shard is due for storage, and nothing of it is there",
    "agent_stored": "a rank's shard is in storage, and the agent that leads has not heard of it",
    "agent_manifest": "all shards are in storage, and no manifest makes them a checkpoint",
    "worker_chosen": "the ranks have chosen what to resume, and have begun nothing",
    "worker_opened": "the incarnation has begun, and nothing is loaded",
    "worker_hands_over": "a worker has given the memory back to another agent, which has not opened the incarnation",
    "launcher_starts": "a launcher is about to start a worker",
    "launcher_restarts": "a launcher has seen workers fail, and has not begun to restart them",
}
_OF_NO_SNAPSHOT = ("worker_hands_over", "launcher_starts", "launcher_restarts")
_OF_NO_RANK = ("agent_opens", "agent_decides", "agent_commits", "agent_manifest", "launcher_starts", "launcher_restarts")


@dataclass(frozen=True)
class World:
    """The ranks and hosts of the job, as far as faults need to know them."""

    hosts: Sequence[str]  # host of each rank
    holders: Mapping[int, Sequence[str]] = field(default_factory=dict)  # rank -> hosts that hold copies of its shard

    @property
    def groups(self) -> list[list[str]]:
        """Sets of hosts that hold the same shards, in order of their names: to lose one is to lose a shard."""
        return sorted(sorted(group) for group in {frozenset(hosts) for hosts in self.holders.values()})


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One entry of GEMINI_FAULTS. Steps are counts of finished iterations."""

    kind: str
    text: str  # as given
    name: str = ""  # of this entry of this list
    moment: str = "end_of_step"
    step: int | None = None  # the first iteration at which it may happen
    until: int | None = None  # random faults: the last such iteration; storage_full: the one at which there is room again
    rank: int | None = None
    everyone: bool = False  # rank=all
    host: str | None = None  # its id, or its place among the sorted ids
    group: int | None = None
    owner: int | None = None
    probability: float | None = None
    seed: int | None = None
    code: int = 1
    of: str = "weight"  # flip: where the bit is
    share: float = 0.02  # slow: of each second, in which the process may run
    seconds: float = 60.0  # slow, delay: for which it is

    def occurrence(self, iteration: int) -> str:
        """The name under which the fault happens at most once: a scheduled one in a run, a random one in an iteration."""
        return self.name if self.probability is None else f"{self.name}-{iteration}"

    def is_due(self, iteration: int, moment: str) -> bool:
        """Whether the fault happens now, unless it has happened before.

        A scheduled fault is due at its step or the first such moment after it: an iteration may be without a snapshot, and
        validation may come every hundred steps.
        """
        if moment != self.moment or iteration < (self.step or 0):
            return False
        if self.probability is None:
            return True
        return iteration <= (self.until or iteration) and self._dice(iteration).random() < self.probability

    def is_about(self, host: str, iteration: int | None, rank: int | None) -> bool:
        """Whether a moment inside a process of ``host`` is meant, which is about this snapshot and rank, if about any."""
        if self.step is not None and (iteration is None or iteration < self.step):
            return False
        return self.host in (None, host) and self.rank in (None, rank)

    def doers(self, world: World, iteration: int) -> list[int]:
        """The ranks that carry the fault out: all that are hit, or the first one on each host that is hit."""
        hit = self._hit(world, iteration)
        if self.kind in RANK_KINDS:
            return hit
        return sorted({world.hosts.index(world.hosts[rank]) for rank in hit})

    def owners(self, world: World, host: str) -> list[int]:
        """The ranks whose shards a `corrupt` fault damages on ``host``."""
        if self.owner is not None:
            return [self.owner]
        if self.rank is not None:
            return [self.rank]
        return sorted(rank for rank, hosts in world.holders.items() if host in hosts)

    def check(self, world: World) -> None:
        """Raises ConfigError when it names a rank, host or group that this job does not have, or a host by its place inside a process."""
        hosts = sorted(set(world.hosts))
        numbered = int(self.host) if self.host is not None and self.host.isdigit() and self.host not in hosts else None
        if numbered is not None and self.moment in PROCESS_MOMENTS:
            raise ConfigError(f"{_where(self.text)}: at {self.moment} host is the id of a host: {', '.join(hosts)}")
        for key, value, count in (
            ("rank", self.rank, len(world.hosts)),
            ("owner", self.owner, len(world.hosts)),
            ("host", numbered, len(hosts)),
            ("group", self.group, len(world.groups)),
        ):
            if value is not None and value >= count:
                raise ConfigError(f"{_where(self.text)}: {key}={value}, but this job has {count} of them, counted from 0")

    def _hit(self, world: World, iteration: int) -> list[int]:
        ranks = range(len(world.hosts))
        if self.probability is not None and not self.has_target:
            dice = self._dice(iteration)
            dice.random()  # the number that decided whether it happens
            return [dice.randrange(len(ranks))]
        if self.rank is not None:
            return [self.rank]
        if self.everyone:
            return list(ranks)
        hosts = world.groups[self.group] if self.group is not None else [_host(self.host or "", world)]
        return [rank for rank in ranks if world.hosts[rank] in hosts]

    def _dice(self, iteration: int) -> random.Random:
        """A random generator that is the same on all ranks, and in a run that is repeated."""
        return random.Random(f"{self.seed}/{self.name}/{iteration}")

    @property
    def has_target(self) -> bool:
        """Whether rank, host or group is given."""
        return self.everyone or any(target is not None for target in (self.rank, self.host, self.group))


def _host(given: str, world: World) -> str:
    hosts = sorted(set(world.hosts))
    if given in hosts or not given.isdigit() or int(given) >= len(hosts):
        return given
    return hosts[int(given)]


def parse(text: str) -> tuple[Fault, ...]:
    """Reads a list of faults.

    Raises ConfigError: an entry has an unknown word, a wrong value, or lacks something; it says what is allowed.
    """
    entries = [entry for entry in (part.strip() for part in re.split(r"[;\n]", text)) if entry]
    return tuple(_entry(number, entry) for number, entry in enumerate(entries))


def _entry(number: int, text: str) -> Fault:
    words = [word.strip() for word in text.split(":")]
    kinds = [word for word in words if "=" not in word]
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"{_where(text)}: unknown kind {kind!r}{_guess(kind, KINDS)}; allowed: {', '.join(KINDS)}")
    if len(kinds) != 1:
        raise ConfigError(f"{_where(text)}: needs exactly one kind, has {len(kinds)}; allowed: {', '.join(KINDS)}")
    given: dict[str, Any] = {}
    for key, _, value in (word.partition("=") for word in words if "=" in word):
        if key not in _KEYS:
            raise ConfigError(f"{_where(text)}: unknown key {key!r}{_guess(key, _KEYS)}; allowed: {', '.join(_KEYS)}")
        if key in given:
            raise ConfigError(f"{_where(text)}: {key} is given twice")
        given[key] = _value(text, key, value)
    if given.get("rank") == "all":
        del given["rank"]
        given["everyone"] = True
    name = f"{number}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    fault = Fault(kind=kinds[0], text=text, name=name, **given)
    _check_relations(fault)
    return fault


def _value(text: str, key: str, value: str) -> Any:
    convert, allowed = _KEYS[key]
    try:
        return convert(value.strip())
    except (ValueError, KeyError):
        raise ConfigError(f"{_where(text)}: {key}={value} must be {allowed}") from None


def _check_relations(fault: Fault) -> None:
    """Checks everything that two words of an entry have to do with each other."""
    targets = [fault.rank is not None, fault.everyone, fault.host is not None, fault.group is not None].count(True)
    is_random, is_inside = fault.probability is not None, fault.moment in PROCESS_MOMENTS
    problem = None
    if targets > 1:
        problem = "give only one of rank, host and group"
    elif is_random and fault.seed is None:
        problem = "a random fault needs a seed, so that the drill can be repeated: seed=7"
    elif not is_random and fault.seed is not None:
        problem = "seed goes with probability: probability=0.01"
    elif is_inside and (fault.kind not in INSIDE_KINDS or fault.everyone or fault.group is not None or is_random):
        problem = f"at {fault.moment} goes one of {', '.join(INSIDE_KINDS)}, with {_said_of(fault.moment)}"
    elif is_inside and fault.step is not None and fault.moment in _OF_NO_SNAPSHOT:
        problem = f"at {fault.moment} goes {_said_of(fault.moment)}; the moment is about no snapshot"
    elif is_inside and fault.rank is not None and fault.moment in _OF_NO_RANK:
        problem = f"at {fault.moment} goes {_said_of(fault.moment)}; the moment is about no rank"
    elif not is_inside and not is_random and fault.step is None:
        problem = "say when: step=20, or probability=0.01:seed=7"
    elif not is_inside and not is_random and not targets:
        problem = "say who: rank=1 (or rank=all), host=0, or group=0"
    elif fault.until is not None and not (is_random or fault.kind == "storage_full"):
        problem = "until goes with probability or storage_full"
    elif fault.until is not None and fault.until < (fault.step or 0):
        problem = f"until={fault.until} is before step={fault.step}"
    elif fault.owner is not None and fault.kind != "corrupt":
        problem = "owner goes with corrupt"
    elif fault.code != 1 and fault.kind != "exit":
        problem = "code goes with exit"
    elif fault.of != "weight" and fault.kind != "flip":
        problem = "of goes with flip"
    elif fault.share != 0.02 and fault.kind != "slow":
        problem = "share goes with slow"
    elif fault.seconds != 60.0 and fault.kind not in ("slow", "delay"):
        problem = "seconds go with slow and delay"
    if problem is not None:
        raise ConfigError(f"{_where(fault.text)}: {problem}")


def _said_of(moment: str) -> str:
    """The keys that say which time a moment inside a process is meant."""
    step, rank = ["step"] * (moment not in _OF_NO_SNAPSHOT), ["rank=N"] * (moment not in _OF_NO_RANK)
    return " or ".join([*step, *rank, "host=ID"])


def _where(text: str) -> str:
    return f"GEMINI_FAULTS, {text!r}"


def _guess(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _number(kind: Callable[[str], float], is_allowed: Callable[[float], bool]) -> Callable[[str], float]:
    def convert(value: str) -> float:
        if not is_allowed(number := kind(value)):
            raise ValueError
        return number

    return convert


def _text(value: str) -> str:
    if not value:
        raise ValueError
    return value


_MOMENTS = MOMENTS | PROCESS_MOMENTS
_from_0, _from_1 = _number(int, lambda number: number >= 0), _number(int, lambda number: number >= 1)
_COUNTED = "a whole number from 0"
_KEYS: dict[str, tuple[Callable[[str], Any], str]] = {
    "step": (_from_1, "a whole number from 1"),
    "until": (_from_1, "a whole number from 1"),
    "rank": (lambda value: value if value == "all" else _from_0(value), f"{_COUNTED}, or 'all'"),
    "host": (_text, "a host's id, or its place among the sorted ids, from 0"),
    "group": (_from_0, _COUNTED),
    "owner": (_from_0, _COUNTED),
    "moment": ({moment: moment for moment in _MOMENTS}.__getitem__, f"one of {', '.join(_MOMENTS)}"),
    "probability": (_number(float, lambda number: 0 < number <= 1), "above 0 and at most 1"),
    "seed": (int, "a whole number"),
    "code": (_from_0, _COUNTED),
    "of": ({place: place for place in PLACES}.__getitem__, f"one of {', '.join(PLACES)}"),
    "share": (_number(float, lambda number: 0 < number < 1), "above 0 and below 1"),
    "seconds": (_number(float, lambda number: 0 < number < math.inf), "above 0"),
}
