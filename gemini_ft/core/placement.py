"""Decides which hosts hold whose shards, and computes how likely every shard survives the loss of some of them.

Implements Algorithm 1 ("mixed") of GEMINI (Wang et al., SOSP 2023) and, beyond the paper, failure
domains such as racks. Hosts are placed, not ranks: all ranks of a host share its holders. Pure.

Words: a *holder* of a host keeps a copy of its shards, the host itself is always the first; a *part*
is a set of hosts whose shards never leave it: a group of ``replicas`` hosts, or the ring of the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from heapq import heapify, heappop, heappush
from math import comb

from gemini_ft.errors import ConfigError

Placement = dict[str, tuple[str, ...]]


def place(hosts: Sequence[str], replicas: int, domains: Mapping[str, str] | None = None) -> Placement:
    """Chooses the holders of every host's shards.

    Args:
        hosts: ids, each once. Their order does not matter: ranks move between hosts at a restart,
            and copies that are already in place should stay the right ones.
        replicas: copies of every shard (the paper's m), the one on its own host included.
        domains: host -> failure domain, for all hosts or none. Each domain is then spread over as many
            parts as possible, and no part spans fewer domains than it must.

    Returns:
        host -> its holders, itself first. Every host sends and receives ``replicas - 1`` shards.
        A single host gets itself alone, whatever ``replicas`` says.

    Raises ConfigError: too few hosts, a host given twice, or one without a domain.
    """
    _check(hosts, replicas, domains or {})
    ordered = sorted(hosts)
    if len(ordered) == 1:
        return ring(ordered, 1)
    return mixed(_spread(ordered, replicas, domains) if domains else ordered, replicas)


def mixed(hosts: Sequence[str], replicas: int) -> Placement:
    """GEMINI, Algorithm 1: groups of ``replicas`` hosts in the order given; the rest is one ring at the end.

    Needs at least ``replicas`` hosts.
    """
    placement: Placement = {}
    at = 0
    for size in part_sizes(len(hosts), replicas):
        placement |= ring(hosts[at : at + size], replicas)
        at += size
    return placement


def ring(hosts: Sequence[str], replicas: int) -> Placement:
    """Each host's shards go to the next ``replicas - 1`` hosts of the ring; with ``replicas`` hosts this is the paper's group."""
    size = len(hosts)
    return {host: tuple(hosts[(at + step) % size] for step in range(replicas)) for at, host in enumerate(hosts)}


def part_sizes(hosts: int, replicas: int) -> list[int]:
    """Hosts in each part: ``replicas`` in all of them but the last, which takes the remainder as well."""
    sizes = [replicas] * (hosts // replicas)
    sizes[-1] += hosts % replicas
    return sizes


def survival_probability(parts: Sequence[int], replicas: int, lost: int) -> Fraction:
    """Probability that every shard still has a holder after ``lost`` hosts are lost at once, all sets of them being equally likely. Exact.

    Args:
        parts: hosts of each ring (`ring`); `part_sizes` gives those of a placement by `place`, with failure domains or without.
        replicas: copies of every shard.
        lost: hosts.

    Raises ConfigError: ``lost`` is negative or above the number of hosts.
    """
    hosts = sum(parts)
    if not 0 <= lost <= hosts:
        raise ConfigError(f"lost={lost} hosts of {hosts}: must be between 0 and the number of hosts")
    ways = [1] + [0] * lost  # to lose 0, 1, ... hosts of the parts so far, and no shard
    for size in parts:
        safe = [_safe_losses(size, replicas, gone) for gone in range(min(size, lost) + 1)]
        ways = [sum(ways[total - gone] * each for gone, each in enumerate(safe[: total + 1])) for total in range(lost + 1)]
    return Fraction(ways[lost], comb(hosts, lost))


def fatal_domains(placement: Mapping[str, Iterable[str]], domains: Mapping[str, str]) -> list[str]:
    """Failure domains whose loss as a whole takes every copy of some shard with it."""
    spans = ({domains[holder] for holder in holders} for holders in placement.values())
    return sorted({next(iter(span)) for span in spans if len(span) == 1})


def describe(placement: Mapping[str, Sequence[str]], domains: Mapping[str, str] | None = None) -> str:
    """Words for a placement made by `place`, and for what it survives, in two or three short sentences."""
    hosts = len(placement)
    if hosts == 1:
        return "1 host, 1 replica: a lost process is survived, a lost host is not, because no other host holds a copy."
    replicas = len(next(iter(placement.values())))
    if replicas == 1:
        return f"{hosts} hosts, 1 replica: a lost process is survived, a lost host is not; replicas=2 would survive any single one."
    text = f"{hosts} hosts, {replicas} replicas, {_count_parts(hosts, replicas)}. The loss of any {_hosts(replicas - 1)} is survived"
    most = max(replicas, min(replicas + 2, hosts - 1))
    for lost in range(replicas, most + 1):
        probability = survival_probability(part_sizes(hosts, replicas), replicas, lost)
        text += f"; {_hosts(lost)} at once {_chance(probability)}"
        if not probability:
            break
    return f"{text}. {_describe_domains(placement, domains)}" if domains else f"{text}."


def _check(hosts: Sequence[str], replicas: int, domains: Mapping[str, str]) -> None:
    if not hosts:
        raise ConfigError("hosts=[]: a placement needs at least one host")
    if twice := sorted(host for host, count in Counter(hosts).items() if count > 1):
        raise ConfigError(f"hosts {twice} are given more than once; every host needs an id of its own (GEMINI_HOST_ID)")
    if replicas < 1:
        raise ConfigError(f"replicas={replicas}: must be at least 1, the copy on a shard's own host")
    if replicas > len(hosts) > 1:
        raise ConfigError(f"replicas={replicas} needs as many hosts, got {len(hosts)}; set replicas to {len(hosts)} or less, or add hosts")
    if domains and (without := sorted(set(hosts) - domains.keys())):
        raise ConfigError(f"hosts {without} have no failure domain, but others do; set GEMINI_DOMAIN on every host or on none")


# -- failure domains ------------------------------------------------------------------------------


def _spread(hosts: Sequence[str], replicas: int, domains: Mapping[str, str]) -> list[str]:
    """Orders hosts so that `mixed` cuts them into parts that span as many domains as they can."""
    parts: list[list[str]] = [[] for _ in part_sizes(len(hosts), replicas)]
    free = [(-size, j) for j, size in enumerate(part_sizes(len(hosts), replicas))]  # much room first; each part once
    heapify(free)
    for _, members in _by_domain(hosts, domains):
        used: list[tuple[int, int]] = []  # parts that have one more host of this domain than those in ``free``
        for host in members:
            if not free:
                free, used = used, []
                heapify(free)
            minus_room, j = heappop(free)
            parts[j].append(host)
            if minus_room < -1:
                used.append((minus_room + 1, j))
        for part in used:
            heappush(free, part)
    return [host for part in parts for host in _apart(part, domains)]


def _apart(hosts: Sequence[str], domains: Mapping[str, str]) -> list[str]:
    """Orders a ring so that hosts of one domain stand far apart: neighbours hold each other's copies."""
    order: dict[int, str] = {}
    free = list(range(len(hosts)))
    for _, members in _by_domain(hosts, domains):
        order |= {free[i * len(free) // len(members)]: host for i, host in enumerate(members)}
        free = [position for position in free if position not in order]
    return [order[position] for position in range(len(hosts))]


def _by_domain(hosts: Sequence[str], domains: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Domains and their hosts, the largest first: it is the hardest to spread."""
    members: dict[str, list[str]] = {}
    for host in hosts:
        members.setdefault(domains[host], []).append(host)
    return sorted(members.items(), key=lambda item: (-len(item[1]), item[0]))


# -- counting -------------------------------------------------------------------------------------


@cache
def _safe_losses(size: int, replicas: int, lost: int) -> int:
    """Ways to lose ``lost`` hosts of a ring, but never ``replicas`` that follow each other, which hold a shard together."""
    if size == replicas:  # each shard is on all of them
        return comb(size, lost) - (lost == size)
    # By the run of lost hosts around the ring's first place: ``run`` hosts between two that live, in run + 1 positions.
    return sum((run + 1) * _without_runs(size - run - 2 - (lost - run), lost - run, replicas) for run in range(min(replicas, lost + 1)))


def _without_runs(living: int, lost: int, replicas: int) -> int:
    """Ways to put lost hosts between, before and behind living ones, fewer than ``replicas`` in each place: inclusion and exclusion."""
    places = range(lost // replicas + 1) if living >= 0 else ()
    return sum((-1) ** full * comb(living + 1, full) * comb(lost - full * replicas + living, living) for full in places)


# -- words ----------------------------------------------------------------------------------------


def _count_parts(hosts: int, replicas: int) -> str:
    *groups, last = part_sizes(hosts, replicas)
    if last == replicas:
        groups.append(last)
    words = [f"{len(groups)} group{'s' * (len(groups) != 1)} of {replicas}"] if groups else []
    return " and ".join(words if last == replicas else [*words, f"a ring of {last}"])


def _hosts(count: int) -> str:
    return f"{count} host{'s' * (count != 1)}"


def _chance(probability: Fraction) -> str:
    """Per cent with one decimal, cut and not rounded, so that only a certainty reads 100 %."""
    tenths = int(probability * 1000)
    return f"with {tenths // 10}.{tenths % 10} %" if probability else "never"


def _describe_domains(placement: Mapping[str, Sequence[str]], domains: Mapping[str, str]) -> str:
    count = len({domains[host] for host in placement})
    fatal = fatal_domains(placement, domains)
    if not fatal:
        return f"The loss of any one of the {count} failure domains is survived."
    return f"Of the {count} failure domains, the loss of {', '.join(fatal)} as a whole is not survived."
