"""Placement and its survival probabilities, against the paper's figures and against counting every case.

GEMINI: Wang et al., SOSP 2023. Algorithm 1 is the mixed placement, Theorem 1 its distance from the optimum,
Corollary 1 the probability of recovery from memory when the replicas divide the hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations, permutations, product
from math import comb

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gemini_ft.core.placement import Placement, describe, fatal_domains, mixed, part_sizes, place, ring, survival_probability
from gemini_ft.errors import ConfigError


def named(count: int) -> list[str]:
    return [f"host-{index:04}" for index in range(count)]


def counted(placement: Mapping[str, Sequence[str]], lost: int) -> Fraction:
    """The probability, by trying every set of lost hosts."""
    survived = total = 0
    for gone in map(set, combinations(placement, lost)):
        total += 1
        survived += all(set(holders) - gone for holders in placement.values())
    return Fraction(survived, total)


def corollary_1(hosts: int, replicas: int, lost: int) -> Fraction:
    """The paper's lower bound; exact while fewer than two groups can be lost."""
    return max(Fraction(0), 1 - Fraction(hosts * comb(hosts - replicas, lost - replicas), replicas * comb(hosts, lost)))


def of_groups(hosts: int, replicas: int, lost: int) -> Fraction:
    """The exact value behind Corollary 1: inclusion and exclusion over the groups that are lost whole."""
    safe = sum(
        (-1) ** j * comb(hosts // replicas, j) * comb(hosts - j * replicas, lost - j * replicas) for j in range(lost // replicas + 1)
    )
    return Fraction(safe, comb(hosts, lost))


def percent(probability: Fraction) -> float:
    return round(100 * float(probability), 1)


cases = st.integers(1, 24).flatmap(lambda hosts: st.tuples(st.just(hosts), st.integers(1, hosts)))


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[str], int, dict[str, str]]:
    """Hosts in any order, replicas, and a failure domain for each host."""
    count, replicas = draw(cases)
    hosts = draw(st.permutations(named(count)))
    racks = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    return hosts, replicas, {host: f"rack-{rack}" for host, rack in zip(hosts, racks, strict=True)}


# -- Algorithm 1 ----------------------------------------------------------------------------------


def test_algorithm_1_groups_when_replicas_divide() -> None:
    assert mixed(["a", "b", "c", "d"], 2) == {"a": ("a", "b"), "b": ("b", "a"), "c": ("c", "d"), "d": ("d", "c")}


def test_algorithm_1_ring_of_the_rest() -> None:
    assert mixed(["a", "b", "c", "d", "e"], 2) == {"a": ("a", "b"), "b": ("b", "a"), "c": ("c", "d"), "d": ("d", "e"), "e": ("e", "c")}


@given(clusters())
def test_every_shard_has_its_own_host_first_and_exactly_m_holders(cluster: tuple[list[str], int, dict[str, str]]) -> None:
    hosts, replicas, domains = cluster
    placement = place(hosts, replicas, domains)
    assert sorted(placement) == sorted(hosts)
    for host, holders in placement.items():
        assert holders[0] == host
        assert len(set(holders)) == len(holders) == replicas
        assert set(holders) <= set(hosts)


@given(clusters())
def test_every_host_sends_and_receives_equally_much(cluster: tuple[list[str], int, dict[str, str]]) -> None:
    hosts, replicas, domains = cluster
    placement = place(hosts, replicas, domains)
    for position in range(replicas):  # even the n-th copies of all shards fall on different hosts
        assert sorted(holders[position] for holders in placement.values()) == sorted(hosts)


@given(clusters())
def test_the_order_of_hosts_does_not_matter(cluster: tuple[list[str], int, dict[str, str]]) -> None:
    hosts, replicas, domains = cluster
    assert place(hosts, replicas) == place(sorted(hosts), replicas)
    assert place(hosts, replicas, domains) == place(sorted(hosts), replicas, dict(sorted(domains.items())))


def test_one_host_is_its_own_and_only_holder() -> None:
    assert place(["alone"], 2) == {"alone": ("alone",)}


@pytest.mark.parametrize(
    ("hosts", "replicas", "words"),
    [
        (["a", "b"], 3, "replicas=3 needs as many hosts, got 2; set replicas to 2 or less"),
        (["a", "b", "a"], 2, "hosts ['a'] are given more than once"),
        (["a"], 0, "replicas=0: must be at least 1"),
        ([], 1, "at least one host"),
    ],
)
def test_what_cannot_be_placed_is_refused(hosts: list[str], replicas: int, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        place(hosts, replicas)
    assert words in str(error.value)


# -- failure domains ------------------------------------------------------------------------------


def test_each_group_spans_the_racks() -> None:
    hosts = named(8)
    racks = {host: f"rack-{index // 4}" for index, host in enumerate(hosts)}
    placement = place(hosts, 2, racks)
    assert all(len({racks[holder] for holder in holders}) == 2 for holders in placement.values())
    assert fatal_domains(placement, racks) == []
    assert fatal_domains(place(hosts, 2), racks) == ["rack-0", "rack-1"]  # without being told of them


@given(clusters())
def test_groups_span_as_many_domains_as_they_can(cluster: tuple[list[str], int, dict[str, str]]) -> None:
    hosts, replicas, domains = cluster
    assume(len(hosts) % replicas == 0)
    groups = {frozenset(holders) for holders in place(hosts, replicas, domains).values()}
    spans = [len({domains[host] for host in group}) for group in groups]
    assert sum(spans) == sum(min(size, len(groups)) for size in Counter(domains.values()).values())  # no domain can be in more groups
    assert max(spans) - min(spans) <= 1


@pytest.mark.parametrize(("count", "replicas"), [(3, 2), (5, 2), (5, 3), (6, 2), (7, 2), (7, 3), (7, 4)])
def test_domains_against_every_other_order_of_the_hosts(count: int, replicas: int) -> None:
    """No order has fewer fatal domains or a wider narrowest span; over all shards a ring may lose one domain."""
    hosts = named(count)
    for sizes in partitions(count):
        racks = [f"rack-{index}" for index, size in enumerate(sizes) for _ in range(size)]
        ours = spans_of(place(hosts, replicas, dict(zip(hosts, racks, strict=True))), dict(zip(hosts, racks, strict=True)))
        others = [spans_of(mixed(hosts, replicas), dict(zip(hosts, order, strict=True))) for order in set(permutations(racks))]
        best = [max(values) for values in zip(*others, strict=True)]
        assert ours[:2] == tuple(best[:2]), sizes
        assert ours[2] >= best[2] - 1, sizes


@given(clusters())
def test_hosts_are_spread_by_the_rule_that_is_slow_to_look_up(cluster: tuple[list[str], int, dict[str, str]]) -> None:
    """Each host of the largest domain first goes where there are fewest of its kind, then most room: here every part is looked at."""
    hosts, replicas, domains = cluster
    parts: list[list[str]] = [[] for _ in part_sizes(len(hosts), replicas)]
    size_of = Counter(domains.values())
    for host in sorted(hosts, key=lambda host: (-size_of[domains[host]], domains[host], host)):
        room = [size - len(part) for part, size in zip(parts, part_sizes(len(hosts), replicas), strict=True)]
        kin = [sum(domains[other] == domains[host] for other in part) for part in parts]
        min((kin[j], -room[j], j, part) for j, part in enumerate(parts) if room[j])[3].append(host)
    placement = place(hosts, replicas, domains)
    assert len(hosts) == 1 or sorted(map(sorted, parts)) == sorted(sorted(part) for part in parts_of(placement))


def parts_of(placement: Placement) -> list[set[str]]:
    """Hosts that hold each other's copies, directly or by way of others."""
    parts: list[set[str]] = []
    for holders in placement.values():
        joined = [part for part in parts if part & set(holders)]
        parts = [part for part in parts if part not in joined] + [set(holders).union(*joined)]
    return parts


def test_a_domain_is_split_between_a_group_and_the_larger_ring() -> None:
    hosts = named(8)
    racks = {host: f"rack-{max(index, 1)}" for index, host in enumerate(hosts)}  # the first two share one
    placement = place(hosts, 3, racks)
    assert not set(placement[hosts[0]]) & set(placement[hosts[1]])
    assert all(len({racks[holder] for holder in holders}) == 3 for holders in placement.values())


def spans_of(placement: Placement, domains: Mapping[str, str]) -> tuple[int, int, int]:
    """Fatal domains (negative), domains of the narrowest holder set, and of all together."""
    spans = [len({domains[holder] for holder in holders}) for holders in placement.values()]
    return -len(fatal_domains(placement, domains)), min(spans), sum(spans)


def partitions(total: int, largest: int | None = None) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for first in range(min(total, largest or total), 0, -1):
        for rest in partitions(total - first, first):
            yield (first, *rest)


def test_a_host_without_a_domain_is_named() -> None:
    with pytest.raises(ConfigError, match=r"\['b'\] have no failure domain.*GEMINI_DOMAIN on every host or on none"):
        place(["a", "b"], 2, {"a": "rack-1"})


# -- survival probabilities -----------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "expected"), [(2, 93.3), (3, 80.0), (4, 61.5), (5, 41.0)])
def test_paper_corollary_1_sixteen_hosts_two_replicas(lost: int, expected: float) -> None:
    assert percent(survival_probability(part_sizes(16, 2), 2, lost)) == expected


@pytest.mark.parametrize(("hosts", "replicas", "lost", "expected"), [(128, 2, 2, 99.2), (1000, 2, 2, 99.9), (16, 4, 4, 99.8)])
def test_paper_corollary_1_other_sizes(hosts: int, replicas: int, lost: int, expected: float) -> None:
    assert percent(survival_probability(part_sizes(hosts, replicas), replicas, lost)) == expected


def test_the_ring_that_the_paper_compares_with() -> None:
    assert percent(survival_probability([16], 2, 2)) == 86.7
    assert percent(survival_probability([16], 2, 3)) == 62.9  # exact; the bound 1 - N C(N-m, k-m) / C(N, k) says 60.0


@given(cases, st.data())
def test_corollary_1_bounds_and_closed_form_of_groups(case: tuple[int, int], data: st.DataObject) -> None:
    hosts, replicas = case
    assume(hosts % replicas == 0)
    lost = data.draw(st.integers(replicas, hosts))
    probability = survival_probability(part_sizes(hosts, replicas), replicas, lost)
    assert probability == of_groups(hosts, replicas, lost)
    assert probability >= corollary_1(hosts, replicas, lost)
    if lost < 2 * replicas:
        assert probability == corollary_1(hosts, replicas, lost)


@given(cases)
def test_fewer_losses_than_replicas_are_always_survived(case: tuple[int, int]) -> None:
    hosts, replicas = case
    parts = part_sizes(hosts, replicas)
    assert all(survival_probability(parts, replicas, lost) == 1 for lost in range(replicas))
    assert survival_probability(parts, replicas, replicas) < 1
    assert survival_probability(parts, replicas, hosts) == 0


@given(st.integers(2, 4), st.integers(1, 8), st.data())
def test_rings_against_counting(replicas: int, more: int, data: st.DataObject) -> None:
    placement = ring(named(replicas + more), replicas)
    lost = data.draw(st.integers(0, len(placement)))
    assert survival_probability([len(placement)], replicas, lost) == counted(placement, lost)


@given(clusters(), st.data())
def test_mixed_against_counting(cluster: tuple[list[str], int, dict[str, str]], data: st.DataObject) -> None:
    hosts, replicas, domains = cluster
    assume(len(hosts) <= 12)
    placement = place(hosts, replicas, domains)
    lost = data.draw(st.integers(0, len(hosts)))
    parts = part_sizes(len(hosts), len(placement[hosts[0]]))
    assert survival_probability(parts, len(placement[hosts[0]]), lost) == counted(placement, lost)


def test_a_thousand_hosts_and_a_long_ring_are_counted_exactly() -> None:
    assert survival_probability(part_sizes(1000, 2), 2, 10) == of_groups(1000, 2, 10)
    adjacent = Fraction(200 * 197, 2)  # ways to choose two of a ring of 200 that are not neighbours
    assert survival_probability([200], 2, 2) == adjacent / comb(200, 2)


@pytest.mark.parametrize("lost", [-1, 5])
def test_impossible_losses_are_refused(lost: int) -> None:
    with pytest.raises(ConfigError, match=f"lost={lost} hosts of 4"):
        survival_probability(part_sizes(4, 2), 2, lost)


# -- Theorem 1 ------------------------------------------------------------------------------------


@given(st.integers(2, 24).flatmap(lambda hosts: st.tuples(st.just(hosts), st.integers(2, hosts))))
def test_theorem_1_gap_to_the_optimum(case: tuple[int, int]) -> None:
    """m lost hosts are fatal if they are some shard's holders; N shards need at least N/m distinct holder sets."""
    hosts, replicas = case
    upper_bound = 1 - Fraction(-(-hosts // replicas), comb(hosts, replicas))
    gap = upper_bound - survival_probability(part_sizes(hosts, replicas), replicas, replicas)
    assert 0 <= gap <= Fraction(2 * replicas - 3, comb(hosts, replicas))
    if hosts % replicas == 0:
        assert gap == 0


@pytest.mark.parametrize(("count", "replicas"), [(4, 2), (6, 2), (4, 4), (6, 3)])
def test_theorem_1_no_placement_beats_groups(count: int, replicas: int) -> None:
    """With m lost hosts only the number of distinct holder sets counts: try all placements, host after host."""
    hosts = range(count)
    sets = [[frozenset((host, *others)) for others in combinations(set(hosts) - {host}, replicas - 1)] for host in hosts]
    fewest = min(len(set(choice)) for choice in product(*sets))
    assert survival_probability(part_sizes(count, replicas), replicas, replicas) == 1 - Fraction(fewest, comb(count, replicas))


# -- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "replicas", "words"),
    [
        (1, 2, "1 host, 1 replica: a lost process is survived, a lost host is not, because no other host holds a copy."),
        (3, 1, "3 hosts, 1 replica: a lost process is survived, a lost host is not; replicas=2 would survive any single one."),
        (2, 2, "2 hosts, 2 replicas, 1 group of 2. The loss of any 1 host is survived; 2 hosts at once never."),
        (5, 2, "and a ring of 3. The loss of any 1 host is survived; 2 hosts at once with 60.0 %; 3 hosts at once never."),
        (16, 2, "8 groups of 2. The loss of any 1 host is survived; 2 hosts at once with 93.3 %; 3 hosts at once with 80.0 %; "),
    ],
)
def test_a_placement_in_words(hosts: int, replicas: int, words: str) -> None:
    assert words in describe(place(named(hosts), replicas))


def test_what_is_not_certain_never_reads_as_certain() -> None:
    assert "100" not in describe(place(named(2000), 4)).removeprefix("2000")


def test_domains_in_words() -> None:
    racks = dict(zip(named(4), ["a", "a", "a", "b"], strict=True))
    assert "Of the 2 failure domains, the loss of a as a whole is not survived." in describe(place(named(4), 2, racks), racks)
    racks[named(4)[0]] = "b"
    assert "The loss of any one of the 2 failure domains is survived." in describe(place(named(4), 2, racks), racks)
