"""The formulas give the numbers of the paper, and Auto does what they say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import sync_case
import torch
from agent_kit import preload
from test_sync_schemes import on_ranks

from gemini_ft.sync import costs
from gemini_ft.sync.auto import candidates, describe
from gemini_ft.sync.costs import FORMULAS, Link, Traffic
from gemini_ft.sync.hierarchical import Hierarchical
from gemini_ft.sync.schemes import LOSSY_SCHEMES, SCHEMES, SWITCH_SCHEMES

preload("sync_case")
ELEMENTS = 10**9


def spread(ranks: int, density: float, densification: dict[int, float], skew: float = 1.0) -> Traffic:
    """Elements of float32, in units of M: one byte is 1 / M."""
    densities = {count: density * gamma for count, gamma in densification.items()}
    return Traffic(ranks=ranks, nbytes=ELEMENTS, unit=4, densities=densities, push_skew=skew, pull_skew=skew)


def cost(scheme: str, traffic: Traffic) -> float:
    return costs.seconds(scheme, traffic, Link(alpha=0.0, beta=1 / ELEMENTS))


def independent(ranks: int) -> dict[int, float]:
    """Densification where every rank's indices are drawn evenly, at low density: no overlap."""
    return {1 << power: float(1 << power) for power in range(ranks.bit_length())}


def test_every_scheme_has_a_formula() -> None:
    assert set(FORMULAS) == set(SCHEMES)


@pytest.mark.parametrize("ranks", [2, 4, 16, 128])
def test_dense_and_agsparse(ranks: int) -> None:
    traffic = spread(ranks, 0.01, {1: 1.0, ranks: 2.0})
    assert cost("dense", traffic) == pytest.approx(2 * (ranks - 1) / ranks)
    assert cost("agsparse", traffic) == pytest.approx(2 * (ranks - 1) * 0.01)


def test_equation_2() -> None:
    """Full overlap: log2(n) rounds of the same size; no overlap: every round doubles it."""
    for ranks in (4, 8, 16):
        full = spread(ranks, 1e-4, dict.fromkeys(independent(ranks), 1.0))
        assert cost("ssar-recursive-doubling", full) == pytest.approx(2e-4 * math.log2(ranks))
        none = spread(ranks, 1e-4, independent(ranks))
        assert cost("ssar-recursive-doubling", none) == pytest.approx(2e-4 * (ranks - 1))


def test_parameter_servers_suffer_from_skew() -> None:
    """Appendix B: 2 (n - 1) (d + d^n) s^n M / n. A part is never more than dense."""
    traffic = spread(8, 0.005, {1: 1.0, 8: 4.0}, skew=5.0)
    assert cost("sparse-ps", traffic) == pytest.approx(2 * 7 / 8 * (0.005 + 0.02) * 5)
    assert cost("sparse-ps", spread(8, 0.1, {1: 1.0, 8: 4.0}, skew=6.0)) == pytest.approx(2 * 7 / 8)
    push = 2 * 7 / 8 * 0.005 * 5
    assert cost("ssar-split-allgather", traffic) == pytest.approx(push + 2 * 7 / 8 * 0.02)
    assert cost("dsar-split-allgather", traffic) == pytest.approx(push + 7 / 8)
    assert costs.dsar_split_allgather(traffic, 4 / 32)[1] / ELEMENTS == pytest.approx(push + 7 / 8 / 8)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_the_link_of_a_single_server_carries_everything(ranks: int) -> None:
    """2 p d, where the server is a worker too and its own share stays: 2 (p - 1) d of what is dense, (p - 1) (d + d^n) of pairs."""
    full = spread(ranks, 1.0, {1: 1.0, ranks: 1.0})
    assert cost("single-ps", full) == pytest.approx(2 * (ranks - 1))
    apart = costs.textbook(ranks, ELEMENTS, Link(alpha=0.0, beta=1 / ELEMENTS))["parameter server"]
    assert apart - cost("single-ps", full) == pytest.approx(2)
    assert cost("single-ps", spread(ranks, 0.01, {1: 1.0, ranks: 1.5})) == pytest.approx((ranks - 1) * 2 * (0.01 + 0.015))


def test_zen_saves_the_pulls_indices() -> None:
    """(n - 1)/n (2 d + gamma d + 1/32); a bitmap for the push too from a density of 1/32 on."""
    assert cost("zen", spread(16, 0.01, {1: 1.0, 16: 8.0})) == pytest.approx(15 / 16 * (0.02 + 0.08 + 1 / 32))
    assert cost("zen", spread(16, 0.05, {1: 1.0, 16: 8.0})) == pytest.approx(15 / 16 * (0.05 + 0.4 + 2 / 32))


def test_lstm_rows() -> None:
    """Row-sparse gradients, calibrated to the LSTM profile, 8 and 16 ranks: what a row's single index saves."""
    row = {"unit": 1024, "nbytes": ELEMENTS}
    densities = {1: 0.0113, 2: 0.0189, 4: 0.0312, 8: 0.0535, 16: 0.088}
    at_8 = Traffic(ranks=8, densities=densities, **row)
    at_16 = Traffic(ranks=16, densities=densities, push_skew=11.5, pull_skew=11.5, **row)
    assert [round(cost(name, at_8), 2) for name in ("agsparse", "ssar-recursive-doubling", "zen")] == [0.08, 0.06, 0.06]
    assert cost("dense", at_16) == pytest.approx(1.875)
    assert cost("agsparse", at_16) == pytest.approx(0.17, abs=0.005)
    assert cost("zen", at_16) == pytest.approx(0.094, abs=0.003)
    assert cost("sparse-ps", at_16) > 0.9


def test_worlds_that_are_no_power_of_two_send_twice_more() -> None:
    traffic = spread(6, 0.01, {1: 1.0, 2: 1.5, 4: 2.0, 6: 2.5})
    assert costs.ssar_recursive_doubling(traffic) == (4, pytest.approx(ELEMENTS * 0.02 * (1 + 1.5 + 1 + 2.5)))


def test_latency_and_names() -> None:
    traffic = spread(8, 0.01, {1: 1.0, 2: 1.5, 4: 2.0, 8: 3.0})
    assert costs.seconds("dense", traffic, Link(alpha=1.0, beta=1e-30)) == pytest.approx(14)
    assert costs.seconds("ssar-recursive-doubling", traffic, Link(alpha=1.0, beta=1e-30)) == pytest.approx(3)
    with pytest.raises(ValueError, match="'ring': there are formulas for dense, agsparse"):
        costs.seconds("ring", traffic, Link(alpha=0.0, beta=1.0))
    with pytest.raises(ValueError, match="must be finite"):
        Link(alpha=-1.0, beta=1.0)


# -- the profile


def test_a_gradient_described_by_hand() -> None:
    sets = [torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 9]), torch.tensor([2, 15]), torch.tensor([3])]
    traffic = describe(sets, 16, 512, 4)
    assert traffic.densities == {1: 4 / 16, 2: 5 / 16, 4: 6 / 16}
    assert (traffic.ranks, traffic.nbytes, traffic.unit, traffic.index, traffic.block) == (4, 16 * 2048, 2048, 4, 1024)
    assert traffic.push_skew == 8 / 4  # the first of four parts is sent 4, 2, 1 and 1 units; were it even, the fullest rank would send 1
    assert traffic.pull_skew == 4 * 4 / 6
    assert (traffic.push_blocks, traffic.pull_blocks) == (1.0, 1.0)


def test_blocks_of_elements() -> None:
    traffic = describe([torch.tensor([0, 255, 256]), torch.tensor([1023, 512])], 1024, 1, 4)
    assert (traffic.push_blocks, traffic.pull_blocks) == (1.0, 1.0)
    traffic = describe([torch.tensor([3]), torch.tensor([4])], 4096, 1, 4)
    assert (traffic.push_blocks, traffic.pull_blocks) == (1 / 8, 1 / 8)


def test_all_ranks_see_the_same_profile(tmp_path: Path) -> None:
    first, *others = on_ranks(tmp_path, 3, sync_case.profile)
    assert others == [first, first]
    traffic, link = first
    assert sorted(traffic.densities) == [1, 2, 3]
    assert traffic.densities[1] < traffic.densities[2] < traffic.densities[3]
    assert traffic.pull_skew > 1.5
    assert 0 < link.alpha < 1
    assert 0 < link.beta < 1e-3


def test_auto_agrees_and_begins_anew_when_the_gradient_changes(tmp_path: Path) -> None:
    first, *others = on_ranks(tmp_path, 3, sync_case.auto_plans)
    assert others == [first, first]
    found = next(number for number, chosen in enumerate(first) if chosen is not None)
    before, after = first[found], first[-1]
    assert found >= 4
    assert {before, after} <= set(SCHEMES)
    assert first[found : found + 5] == [before] * 4 + [None]  # the third call of another regime ends the plan
    assert set(first[found + 5 : -1]) == {None}


def test_auto_has_nothing_to_try_where_there_is_one_rank(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 1, sync_case.auto_alone) == [(True, {}, {})]


def test_auto_tries_what_the_formulas_cannot_rule_out(tmp_path: Path) -> None:
    """On loopback processors decide: the best takes many times as long as its bytes, and a scheme of more bytes may be faster."""
    for tried, close, least, took in on_ranks(tmp_path, 2, sync_case.auto_tries):
        open_to_all = {name for name, seconds in least.items() if seconds < took}
        assert open_to_all - close, "the formulas alone would have tried all of them"
        assert open_to_all <= tried


def test_latency_keeps_nobody_from_being_tried() -> None:
    densities = {1: 0.0113, 2: 0.0189, 4: 0.0312, 8: 0.0535, 16: 0.088}
    traffic = Traffic(ranks=16, nbytes=ELEMENTS, unit=1024, densities=densities, push_skew=11.5, pull_skew=11.5)
    assert candidates(FORMULAS, traffic, Link(alpha=0.0, beta=1e-9)) == ["ssar-recursive-doubling", "zen"]
    slow = Link(alpha=1.0, beta=1e-9)
    assert costs.seconds("zen", traffic, slow) > 5 * costs.seconds("ssar-recursive-doubling", traffic, slow)
    assert candidates(FORMULAS, traffic, slow) == ["ssar-recursive-doubling", "zen"]


def test_the_page_has_the_table_of_dimensions() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sync.md").read_text()
    schemes = {**SCHEMES, Hierarchical.name: Hierarchical, **LOSSY_SCHEMES, **SWITCH_SCHEMES}
    rows = [f"| {name} | `{scheme.__module__.rpartition('.')[2]}.{scheme.__name__}` | " for name, scheme in schemes.items()]
    assert [row for row in rows if row not in page] == []


def test_the_textbook_patterns_at_a_glance() -> None:
    """The single server's link carries 2 p d; a ring's 2 d however many ranks there are; a switch's d; a tree has the fewest messages."""
    link = Link(alpha=1e-4, beta=1e-9)
    eight, sixteen = (costs.textbook(ranks, 10**8, Link(alpha=0.0, beta=1e-9)) for ranks in (8, 16))
    assert eight == pytest.approx({"parameter server": 1.6, "ring": 0.175, "tree": 0.3, "switch": 0.1})
    assert sixteen["parameter server"] == pytest.approx(2 * eight["parameter server"])
    assert sixteen["switch"] == eight["switch"] < sixteen["ring"] < 0.2
    small = costs.textbook(8, 100, link)
    assert min(small, key=lambda each: small[each]) == "switch"
    assert small["tree"] < small["ring"] == pytest.approx(14e-4, rel=1e-2)
    assert set(costs.textbook(1, 100, link).values()) == {0.0}


# -- through a switch


def test_a_link_waits_for_its_slots_only_where_their_packets_are_shorter_than_a_round_trip() -> None:
    """By hand: packets of 90 + 10 bytes at 1 ms a byte take 0.1 s. Two slots, five packets, rounds of 2, 2 and 1."""
    pool = costs.Pool(slots=2, packet=90, header=10)
    busy = pool.stream(
        5, Link(alpha=0.02, beta=1e-3)
    )  # 0.04 + 0.1 < 0.2: five packets one after the other, after 2 headers, and two round trips
    assert busy == pytest.approx((0.04 + 0.02) + 5 * 0.1 + 0.04)
    waits = pool.stream(5, Link(alpha=0.5, beta=1e-3))  # 1 + 0.1 > 0.2: every round lasts a round trip
    assert waits == pytest.approx((1.0 + 0.02) + 2 * 1.1 + (1.0 + 0.1))
    assert pool.stream(1, Link(alpha=0.5, beta=1e-3)) == pytest.approx((1.0 + 0.01) + (1.0 + 0.1))
    assert pool.stream(0, Link(alpha=0.5, beta=1e-3)) == 0.0


def test_a_pool_is_large_enough_when_it_holds_what_a_round_trip_takes() -> None:
    """SwitchML, section 3.6: slots for as many packets as leave within a round trip; more of them gain nothing."""
    link = Link(alpha=5e-5, beta=8e-10)  # 10 Gbit/s
    times = [costs.switchml(10**8, link, costs.Pool(slots=slots, packet=1024, header=52)) for slots in (58, 117, 118, 512)]
    assert times[0] == pytest.approx(2 * times[1], rel=2e-2)
    assert times[1] > times[2] == pytest.approx(times[3], rel=1e-3)


def test_what_a_switch_saves_in_the_papers() -> None:
    """SwitchML: 8/14 of a ring with 8 ranks, in packets that are 5 % longer than their values (1076 bytes for 1024). FPISA: the same, and
    half of it in 16 bits. OmniReduce: 2 (p - 1) / (p D) times as fast as a ring; with aggregators on the ranks' hosts, 1 / D times.
    """
    link, elements, bare = Link(alpha=0.0, beta=1e-9), 2**24, costs.Pool(header=0)
    ring = costs.textbook(8, 4 * elements, link)["ring"]
    assert costs.switchml(elements, link, bare) / ring == pytest.approx(8 / 14, rel=1e-3)
    assert costs.switchml(elements, link, costs.Pool(slots=256, packet=1024, header=52)) / ring == pytest.approx(
        8 / 14 * 1076 / 1024, rel=1e-3
    )
    assert costs.fpisa(elements, link) == costs.switchml(elements, link)
    assert costs.fpisa(elements, link, itemsize=2) == pytest.approx(costs.switchml(elements, link) / 2, rel=1e-3)
    for density in (1.0, 0.1, 0.01):
        dedicated = costs.omnireduce_streaming(4 * elements, density, link, bare)
        assert ring / dedicated == pytest.approx(2 * 7 / 8 / density, rel=1e-2)
        assert ring / costs.omnireduce_streaming(4 * elements, density, link, bare, colocated=8) == pytest.approx(1 / density, rel=1e-2)


def test_every_scheme_of_a_switch_is_shown() -> None:
    shown = costs.switched(8, 10**6, Link(alpha=1e-5, beta=1e-9))
    assert {name.partition(",")[0] for name in shown} == set(SWITCH_SCHEMES)
    assert shown["switchml"] > shown["omnireduce-streaming, 10%"] > shown["omnireduce-streaming, 1%"] > 0
    assert costs.switched(2, 10**6, Link(alpha=1e-5, beta=1e-9)) == shown
    assert set(costs.switched(1, 10**6, Link(alpha=1e-5, beta=1e-9)).values()) == {0.0}
