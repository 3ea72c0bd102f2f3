"""What is particular to a compression method: the numbers of its paper, and the mistakes that public code has made with it."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from compression_kit import OPTIONS, gradients, same, together
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gemini_ft.compression import cast, kernels, low_rank, quantise, sign
from gemini_ft.compression.base import Bundle, FlatLayout, Payload, Turn, layout_of
from gemini_ft.compression.chunked import ChunkedTopK
from gemini_ft.compression.collective import reduce
from gemini_ft.compression.dgc import MomentumCorrection, SampledThreshold
from gemini_ft.compression.feedback import TwoPhase
from gemini_ft.compression.kernels import row_norms
from gemini_ft.compression.methods import COMPRESSORS, create
from gemini_ft.compression.quantise import QSGD, GlobalInt8, Sketch, TernGrad
from gemini_ft.compression.sidco import SIDCo, Stages, gamma_quantile
from gemini_ft.compression.sparse import RandomK, Threshold, TopK, entries, largest

ROOT = Path(__file__).parents[2]


def one(flat: Tensor, align: int = 8) -> Bundle:
    return Bundle.of({"w": flat}, align)


def layout(size: int) -> FlatLayout:
    return layout_of(("w",), ((size,),), (torch.float32,), 8)


# -- sparsifiers


@pytest.mark.parametrize("size", [1, 7, 5000, 100_001])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "sorted", "mostly zero", "equal"])
def test_the_largest_are_the_largest(size: int, ratio: float, kind: str) -> None:
    """Candidates from a sample, then exactly what sorting gives, also where the sample misleads."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)).abs()
    if kind == "heavy tails":
        values = values.pow(8)
    elif kind == "sorted":
        values = values.sort().values
    elif kind == "mostly zero":
        values *= torch.arange(size) % 97 == 0
    elif kind == "equal":
        values = torch.ones(size)
    count = max(1, int(ratio * size))
    found = largest(values, count)
    assert found.unique().numel() == count
    assert torch.equal(values[found].sort().values, values.topk(count).values.sort().values)


def test_hard_threshold_of_the_paper() -> None:
    """Lambda for ResNet-18 at a thousandth of 11 173 962 elements (Sahu et al., table of hyperparameters)."""
    assert Threshold.hard(11_174).value == pytest.approx(4.73e-3, rel=1e-3)


def test_random_k_draws_the_same_elements_on_all_ranks_each_once() -> None:
    methods = [RandomK(0.5), RandomK(0.5)]
    seen = torch.zeros(100)
    for step in range(200):
        drawn = [each.compress(one(torch.ones(100)), Turn(step=step, rank=rank, world=2)).shared for rank, each in enumerate(methods)]
        assert drawn[0] is not None
        assert drawn[1] is not None
        assert torch.equal(drawn[0], drawn[1])
        assert drawn[0].unique().numel() == 50
        seen[drawn[0]] += 1
    assert (seen - 100).abs().max() < 5.5 * math.sqrt(200 / 4)


def test_contributions_to_one_element_are_added() -> None:
    """Public code scatters them, so that the last rank's wins."""
    ranks = [{"w": torch.tensor([4.0, 0, 0, 1])}, {"w": torch.tensor([2.0, 0, 0, 1])}]
    means = together([create("topk", ratio=0.25, feedback=0) for _ in ranks], ranks, 0)
    assert means["w"].tolist() == [3, 0, 0, 0]


def test_what_is_kept_for_the_papers_loses_to_another_method_in_bytes_loss_and_seconds() -> None:
    """As docs/compression.md says it of the figures that it has, and of the report beside it."""
    page, report = (ROOT / "docs" / "compression.md").read_text(), (ROOT / "benchmarks/results/2026-11-24-compression.md").read_text()
    paper = set(re.findall(r"`(\w+)`", page.partition("**Kept for the papers**: ")[2].partition(". Another")[0]))
    learned = re.findall(r"^\| (\w+)(.*) \| [^|]* \| ([\d.]+) % \| [\d.]+ \| ([\d.]+) \|", page, re.MULTILINE)
    timed = re.findall(r"^\| (\w+) \|.*\| ([\d.]+) \([^|]*\| ([\d.]+) \([^|]*\| ([\d.]+) \([^|]*\|$", report, re.MULTILINE)
    speeds = {name: tuple(map(float, cells)) for name, *cells in timed} | {"fp16": (1.1, 0.99, 0.93), "bf16": (1.0, 1.0, 1.0)}
    rows = [(name, options, float(nbytes), float(loss), speeds[name]) for name, options, nbytes, loss in learned if name in speeds]
    best = {"none"}  # it is what all others are compared with
    for name, _, nbytes, loss, speed in rows:
        beaten_by = [
            other
            for other, _, less, lower, faster in rows
            if other != name and less <= nbytes and lower <= loss and all(two >= one for one, two in zip(speed, faster, strict=True))
        ]
        best |= set() if beaten_by else {name}
    best |= {"qsgd", "int8"} - best  # unbiased and without memory, which what beats them is not
    best -= {"efsignsgd"}  # with two_phase alone
    assert paper == {name for name, *_ in rows} - best


def test_sparseloco_as_it_is_described() -> None:
    """Algorithm 1: m = 0.95 e + g, Q(top-k of each chunk of m) travels, e = m - Q; the mean over ranks. 64 of 4096, 12 + 2 bits each."""
    sizes, world = {"w": (3, 3000), "b": (70,)}, 3
    methods = [create("chunked_topk", feedback=0.95) for _ in range(world)]
    left = [{name: np.zeros(shape).ravel() for name, shape in sizes.items()} for _ in range(world)]
    for step in range(4):
        ranks = [gradients(10 * step + rank, sizes) for rank in range(world)]
        means = together(methods, ranks, step)
        for name in sizes:
            expected = np.zeros_like(left[0][name])
            for rank, memory in zip(ranks, left, strict=True):
                moved = 0.95 * memory[name] + rank[name].numpy().ravel()
                sent = _two_bits(moved, _largest_of_chunks(moved))
                memory[name], expected = moved - sent, expected + sent / world
            np.testing.assert_allclose(means[name].numpy().ravel(), expected, rtol=1e-4, atol=1e-6)
    elements = 4096 * 1000
    assert 4 * elements / create("chunked_topk").wire_bytes(layout(elements)) > 146


def test_what_ranks_send_of_chunks_is_added_up_as_one_by_one() -> None:
    """Only what has come is added, with the bits of whole buffers."""
    sizes = {"w": (3, 3000), "b": (70,)}
    chunked = ChunkedTopK()
    sent = [chunked.compress(Bundle.of(gradients(rank, sizes), chunked.align), Turn(step=0)) for rank in range(3)]
    total = torch.zeros(sent[0].layout.total)
    for payload in sent:
        total += chunked.decompress(payload).flat
    assert same(chunked.aggregate(sent).tensors(), Bundle(sent[0].layout, total / 3).tensors())


def _largest_of_chunks(values: npt.NDArray[np.float64]) -> list[int]:
    chunks = [range(begin, min(begin + 4096, values.size)) for begin in range(0, values.size, 4096)]
    return [place for chunk in chunks for place in sorted(chunk, key=lambda at: -abs(values[at]))[: max(1, len(chunk) // 64)]]


def _two_bits(values: npt.NDArray[np.float64], places: list[int]) -> npt.NDArray[np.float64]:
    """The values that arrive: each the mean of those that share its sign and its side of the mean magnitude."""
    sent, border = np.zeros_like(values), np.abs(values[places]).mean()
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for at in places:
        kinds.setdefault((values[at] < 0, abs(values[at]) > border), []).append(at)
    for own in kinds.values():
        sent[own] = values[own].mean()
    return sent


# -- DGC


def test_dgc_is_momentum_where_all_is_sent() -> None:
    """With the sampled threshold at all of it, masking leaves no momentum: plain averages. In vectors it is kept."""
    each = MomentumCorrection(SampledThreshold(1.0), momentum=0.9)
    velocity = torch.zeros(24)
    for step in range(4):
        given = gradients(step, {"matrix": (6, 8), "vector": (24,)})
        means = reduce(each, given, step)
        velocity = 0.9 * velocity + given["vector"]
        torch.testing.assert_close(means["vector"], velocity)


@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_follows_its_pseudo_code(nesterov: bool) -> None:
    """Algorithm 4 of the paper, element by element; what is picked is taken from the method."""
    each = MomentumCorrection(SampledThreshold(0.2), momentum=0.9, nesterov=nesterov)
    u, v = np.zeros((20, 30), np.float32), np.zeros((20, 30), np.float32)
    m = np.float32(0.9)
    for step in range(6):
        given = gradients(step, {"w": (20, 30)})
        g = given["w"].numpy()
        u = m * (u + g) if nesterov else m * u + g
        v = v + u + g if nesterov else v + u
        sent = reduce(each, given, step)["w"].numpy()
        mask = sent != 0
        assert 0.8 * 120 <= mask.sum() <= 1.3 * 120
        np.testing.assert_allclose(sent, np.where(mask, v, 0), rtol=1e-5)
        assert np.abs(v[mask]).min() >= np.abs(v[~mask]).max()
        u[mask], v[mask] = 0, 0


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0.001, [0.25, 0.0625, 0.0156, 0.004, 0.001]), (0.01, [0.25, 0.112, 0.05, 0.022, 0.01]), (0.5, [0.5] * 5)],
)
def test_dgc_warms_up_as_in_the_paper(ratio: float, expected: list[float]) -> None:
    """Section 3.3: sparsity rises exponentially from 75 % (75, 93.75, 98.4375, 99.6, 99.9 %); a stage was an epoch."""
    each = SampledThreshold(ratio, warmup_steps=40)
    assert [each.ratio_at(step) for step in (0, 10, 20, 39, 40)] == pytest.approx(expected, rel=0.02)
    assert each.ratio_at(9) == each.ratio_at(0)


def test_dgc_sends_all_of_a_vector_behind_a_large_matrix() -> None:
    means = reduce(create("dgc"), {"matrix": torch.zeros(4097, 4096), "vector": torch.arange(1.0, 8.0)}, 0)  # float32 has no 2^24 + 1
    assert means["vector"].tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_dgc_clips_by_the_number_of_ranks() -> None:
    methods = [MomentumCorrection(SampledThreshold(1.0), momentum=0.0, clip_norm=2.0) for _ in range(4)]
    ranks = [{"w": torch.full((10, 10), 5.0)} for _ in range(4)]
    assert together(methods, ranks, 0)["w"].norm() == pytest.approx(1.0)


# -- SIDCo


def draws(kind: str, size: int = 400_000) -> Tensor:
    stream = np.random.default_rng(5)
    values = {
        "laplace": lambda: stream.laplace(size=size),
        "normal": lambda: stream.standard_normal(size),
        "double gamma": lambda: stream.gamma(0.5, size=size) * stream.choice([-1, 1], size),
        "student": lambda: stream.standard_t(3, size),
    }[kind]()
    return torch.from_numpy(values.astype(np.float32))


@pytest.mark.parametrize(
    ("kind", "distribution", "ratio", "stages", "low", "high"),
    [
        ("laplace", "exponential", 0.001, 1, 0.9, 1.1),
        ("laplace", "exponential", 0.001, 3, 0.9, 1.1),
        ("normal", "exponential", 0.001, 3, 0.55, 0.85),
        ("normal", "exponential", 0.001, 4, 0.9, 1.25),
        ("normal", "pareto", 0.001, 3, 0.75, 1.05),
        ("double gamma", "exponential", 0.001, 3, 0.9, 1.25),
        ("student", "pareto", 0.001, 4, 0.85, 1.2),
        ("double gamma", "gamma", 0.01, 1, 0.95, 1.05),
        ("double gamma", "gamma", 0.001, 3, 0.8, 1.2),
    ],
)
def test_sidco_selects_what_its_fit_promises(kind: str, distribution: str, ratio: float, stages: int, low: float, high: float) -> None:
    magnitudes = draws(kind).abs()
    threshold = SIDCo(ratio, distribution).threshold(magnitudes, stages)  # type: ignore[arg-type]
    assert low <= float((magnitudes > threshold).float().mean()) / ratio <= high


@pytest.mark.parametrize("kind", ["laplace", "normal", "double gamma", "student"])
@pytest.mark.parametrize("distribution", ["exponential", "pareto", "gamma"])
def test_sidco_finds_the_number_of_stages(kind: str, distribution: str) -> None:
    each = SIDCo(0.001, distribution)  # type: ignore[arg-type]
    bundle = one(draws(kind))
    achieved = [entries(each.compress(bundle, Turn(step=step)))[1].numel() / 400 for step in range(60)]
    assert 0.5 < np.mean(achieved[-10:]) < 1.5


def test_sidco_has_a_controller_for_each_tensor() -> None:
    each = SIDCo(0.001, "exponential")
    for step in range(30):
        each.compress(Bundle.of({"easy": draws("laplace"), "hard": draws("normal")}), Turn(step=step))
    assert each.stages["easy"].stages < each.stages["hard"].stages


@pytest.mark.parametrize(("achieved", "stages"), [(1.5, 2), (0.5, 4), (1.1, 3), (0.9, 3)])
def test_the_first_move_of_the_stage_controller_is_the_papers(achieved: float, stages: int) -> None:
    control = Stages(stages=3)
    for _ in range(5):
        assert control.stages == 3
        control.observe(achieved, most=5)
    assert control.stages == stages


def test_a_move_that_made_it_worse_is_taken_back() -> None:
    control, selected = Stages(stages=2), {1: 8.6, 2: 1.5, 3: 1.07}
    visited = []
    for _ in range(30):
        control.observe(selected[control.stages], most=5)
        visited.append(control.stages)
    assert visited[5] == 1
    assert visited[-1] == 3


@pytest.mark.parametrize("shape", [0.05, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("upper", [0.3, 0.01, 0.001])
def test_the_gamma_quantile_is_one(shape: float, upper: float) -> None:
    x = gamma_quantile(shape, upper)
    found = torch.special.gammaincc(torch.tensor(shape, dtype=torch.float64), torch.tensor(x, dtype=torch.float64))
    assert float(found) == pytest.approx(upper, rel=1e-4)


# -- signs


@given(st.integers(1, 9), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_the_majority_is_that_of_counting(ranks: int, seed: int) -> None:
    stream = np.random.default_rng(seed)
    votes = stream.integers(0, 256, (ranks, 5), dtype=np.uint8)
    coin = stream.integers(0, 256, 5, dtype=np.uint8)
    found = sign.majority([torch.from_numpy(vote) for vote in votes], lambda: torch.from_numpy(coin)).numpy()
    count = np.unpackbits(votes, axis=1).astype(int).sum(0)
    expected = np.where(2 * count == ranks, np.unpackbits(coin), 2 * count > ranks)
    assert np.array_equal(np.unpackbits(found), expected)


def test_votes_are_signs_and_zeros_do_not_drift() -> None:
    methods = [create("signsgd") for _ in range(3)]
    total = torch.zeros(1000)
    for step in range(50):
        values = torch.tensor([-1.0, 2.0]).repeat(500)
        values[500:] = 0
        mean = together(methods, [{"w": values}] * 3, step)["w"]
        assert torch.equal(mean[:500], values[:500].sign())
        total += mean
    assert total[500:].abs().max() < 5.5 * math.sqrt(50)
    assert total[500:].mean().abs() < 5.5 * math.sqrt(50 / 500)


def test_signum_votes_on_momentum() -> None:
    each = create("signum", momentum=0.9)
    for step, value in enumerate([1.0, -0.5, -1.0]):
        mean = reduce(each, {"w": torch.full((9,), value)}, step)["w"]
    assert (mean == -1).all()  # 0.1 -> 0.04 -> -0.064
    each = create("signum", momentum=0.99)
    for step, value in enumerate([1.0, -0.5]):
        mean = reduce(each, {"w": torch.full((9,), value)}, step)["w"]
    assert (mean == 1).all()


def test_one_bit_has_the_mean_of_each_side() -> None:
    values = torch.tensor([-4.0, -2.0, 1.0, 3.0, 0.0, 8.0, -3.0])
    mean = reduce(create("onebit", feedback=0), {"w": values}, 0)["w"]
    torch.testing.assert_close(mean, torch.where(values < 0, -3.0, 3.0))


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_one_bit_keeps_the_smaller_side(side: float) -> None:
    """A mean of 1e-6 beside a million elements of magnitude 1: neither a difference of sums nor one of means may decide it."""
    values = torch.full((1 << 20,), -side)
    values[77] = 1e-6 * side
    mean = reduce(create("onebit", feedback=0), {"w": values}, 0)["w"]
    assert mean[[76, 77]].tolist() == pytest.approx([-side, 1e-6 * side], rel=1e-5)


# -- quantisers


@pytest.mark.parametrize(("levels", "bucket"), [(127, 128), (7, 512), (1, 64)])
def test_qsgd_keeps_to_its_variance(levels: int, bucket: int) -> None:
    """Lemma 3.1: at most min(b / s^2, sqrt(b) / s) times the squared norm, for each bucket."""
    values = torch.randn(bucket, generator=torch.Generator().manual_seed(1))
    each = QSGD(levels, bucket)
    found = torch.stack([each.decompress(each.compress(one(values, bucket), Turn(step=step))).flat for step in range(400)])
    variance = float((found - values).square().sum(1).mean() / values.square().sum())
    assert variance <= min(bucket / levels**2, math.sqrt(bucket) / levels)


def test_terngrad_has_three_values_and_clips() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    values[0] = 100.0
    found = reduce(create("terngrad"), {"w": values}, 0)["w"]
    scale = 2.5 * float(values.std())
    assert found.abs().unique().tolist() == pytest.approx([0.0, scale], rel=1e-3)
    assert reduce(TernGrad(clip=None), {"w": values}, 0)["w"].abs().max() == 100


def test_natural_rounds_to_neighbours_with_the_fraction_as_chance() -> None:
    values = torch.tensor([1.0, 1.25, -1.75, 2.0**127, 3.0e38, 2.0**-126, 2.0**-127, 0.0])
    each = cast.Natural()
    found = torch.stack([each.decompress(each.compress(one(values), Turn(step=step))).flat for step in range(2000)])
    kinds = [set(column.unique().tolist()) for column in found.unbind(1)]
    assert kinds == [{1.0}, {1.0, 2.0}, {-1.0, -2.0}, {2.0**127}, {2.0**127}, {2.0**-126}, {0.0, 2.0**-126}, {0.0}]
    assert float((found[:, 1] == 2).float().mean()) == pytest.approx(0.25, abs=0.05)
    assert float((found[:, 2] == -2).float().mean()) == pytest.approx(0.75, abs=0.05)


def test_natural_keeps_to_its_variance() -> None:
    """Theorem 1: an eighth of the squared norm."""
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    for each in (cast.Natural(), cast.Natural8()):
        error = each.decompress(each.compress(one(values), Turn())).flat - values
        assert float(error.square().sum() / values.square().sum()) <= 1 / 8


def test_dynamic8_finds_the_nearest_code() -> None:
    codes = cast.codebook(torch.device("cpu"))
    assert codes.unique().numel() == 256
    assert codes[[0, -1]].tolist() == pytest.approx([-0.99296875, 1.0])
    stream = np.random.default_rng(3)
    values = np.concatenate(
        [stream.uniform(-1, 1, 20_000), stream.choice([-1, 1], 20_000) * 10 ** stream.uniform(-9, 0, 20_000), [0, 1, -1]]
    )
    relative = torch.from_numpy(values.astype(np.float32))
    found = codes[cast.nearest(relative).int()]
    best = (codes.double().unsqueeze(0) - relative.double().unsqueeze(1)).abs().amin(1)
    torch.testing.assert_close((found.double() - relative.double()).abs(), best, rtol=1e-6, atol=1e-12)


@given(st.lists(st.tuples(st.sampled_from([0, 5, 121, 242]), st.integers(1, 40)), max_size=12))
@settings(deadline=None)
def test_3lc_runs_come_back(runs: list[tuple[int, int]]) -> None:
    quartic = torch.tensor([value for value, length in runs for _ in range(length)], dtype=torch.uint8)
    short = quantise.shorten(quartic)
    assert torch.equal(quantise.lengthen(short), quartic)
    pieces = [(value, len(list(group))) for value, group in itertools.groupby(quartic.tolist())]
    assert short.numel() == sum(-(-length // 14) if value == 121 else length for value, length in pieces)


def test_3lc_sends_the_nearest_of_three_values() -> None:
    values = torch.tensor([1.0, 0.51, 0.49, -0.51, 0.0, -1.0, 0.2])
    assert reduce(create("threelc", feedback=0), {"w": values}, 0)["w"].tolist() == [1, 1, 0, -1, 0, -1, 0]
    sparse = reduce(create("threelc", feedback=0, sparsity=1.5), {"w": values}, 0)["w"]
    assert sparse.tolist() == pytest.approx([1.5, 0, 0, 0, 0, -1.5, 0])


def test_the_bins_of_a_sketch_are_even_and_their_means_exact() -> None:
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(1)).pow(3)
    found = Sketch().decompress(Sketch().compress(one(values), Turn())).flat
    kinds, counts = found.unique(return_counts=True)
    assert kinds.numel() > 55  # borders that bfloat16 cannot tell apart make one bin of two
    for kind in kinds:
        assert float(values[found == kind].mean()) == pytest.approx(float(kind), rel=1e-3, abs=1e-6)
    assert counts.max() < 4 * 50_000 / 64
    assert float((found - values).norm() / values.norm()) < 0.5


def test_the_bins_of_a_sketch_are_even_wherever_values_lie() -> None:
    """Values that bfloat16 cannot tell apart, beside some that it can, and beside zeros."""
    draws = torch.randn(30_000, generator=torch.Generator().manual_seed(1))
    for values in (draws + 1000, torch.cat([draws, draws / 10 - 1000, torch.zeros(9000)])):
        found = Sketch().decompress(Sketch().compress(one(values), Turn())).flat
        _, counts = found[values != 0].unique(return_counts=True)
        assert counts.max() < 4 * values.numel() / 64


@pytest.mark.parametrize(("world", "relative"), [(2, 0.025), (8, 0.1)])
def test_integers_of_all_ranks_are_as_fine_as_their_bucket(world: int, relative: float) -> None:
    """Values whose size differs from place to place, as rows of a gradient do: no large one makes the others coarse."""
    stream, size, bucket = torch.Generator().manual_seed(world), 128 * 300, 128
    unit = 10.0 ** (3 * torch.rand(size // bucket, 1, generator=stream))
    ranks = [torch.randn(size // bucket, bucket, generator=stream) * unit for _ in range(world)]
    mean, found = torch.stack(ranks).mean(0), together([GlobalInt8() for _ in ranks], [{"w": each} for each in ranks], 0)["w"]
    largest = torch.stack(ranks).abs().amax((0, 2)).unsqueeze(1)
    assert ((found - mean).abs() <= largest / (127 // world)).all()
    assert float((found - mean).norm() / mean.norm()) < relative
    errors = ((found - mean) / largest * (127 // world)).square().mean().sqrt()
    assert float(errors) <= 0.5 / world**0.5
    rows = ((found - mean).norm(dim=1) / mean.norm(dim=1)).median()
    assert float(rows) < relative


def test_integers_of_all_ranks_fit() -> None:
    """Also when all ranks have the largest value everywhere, where rounding up once too often would wrap around."""
    for world in (1, 2, 3, 4, 31, 127):
        methods = [GlobalInt8() for _ in range(world)]
        means = together(methods, [{"w": torch.full((20,), 0.7)}] * world, 0)
        torch.testing.assert_close(means["w"], torch.full((20,), 0.7))
    with pytest.raises(ValueError, match="on 128 ranks: their sum fits int8 on at most 127"):
        next(GlobalInt8().exchange(one(torch.ones(8)), Turn(step=0, rank=0, world=128)))


def test_small_codes_are_packed() -> None:
    for bits in (2, 4):
        codes = torch.randint(0, 2**bits, (64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
        packed = kernels.pack_small(codes, bits)
        assert packed.numel() == 64 * bits // 8
        assert torch.equal(kernels.unpack_small(packed, bits, 0), codes.float())


# -- low rank


def test_powersgd_finds_a_matrix_of_its_rank() -> None:
    stream = torch.Generator().manual_seed(1)
    matrix = torch.randn(40, 2, generator=stream) @ torch.randn(2, 30, generator=stream)
    means = together([create("powersgd", rank=2) for _ in range(3)], [{"w": matrix}] * 3, 0)
    torch.testing.assert_close(means["w"], matrix, rtol=1e-3, atol=1e-4)


def test_powersgd_warms_up() -> None:
    """Steps on one matrix are steps of the power iteration: in the end the best approximation of that rank."""
    matrix = gradients(4, {"w": (30, 40)})["w"]
    each = create("powersgd", rank=2, error_feedback=False)
    for step in range(300):
        found = reduce(each, {"w": matrix}, step)["w"]
    u, s, v = torch.linalg.svd(matrix)
    torch.testing.assert_close(found, u[:, :2] @ torch.diag(s[:2]) @ v[:2], rtol=1e-2, atol=1e-3)


def test_every_matrix_is_made_orthonormal_by_itself() -> None:
    """Public code divides matrices of one shape by a norm over all of them."""
    stream = torch.Generator().manual_seed(1)
    factors = [torch.randn(4, 50, generator=stream) * 10.0**scale for scale in (-3, 0, 3)]
    dependent = torch.randn(1, 50, generator=stream).repeat(3, 1) * torch.tensor([[1.0], [2.0], [-7.0]])
    stack, row = torch.stack(factors), torch.randn(1, 1, 50, generator=stream)
    low_rank.orthonormalise([stack, row, dependent.unsqueeze(0)])
    for factor in [*stack, *row]:
        torch.testing.assert_close(factor @ factor.t(), torch.eye(factor.shape[0]), rtol=0, atol=1e-5)
    assert dependent[0].norm() == pytest.approx(1)
    assert (dependent[1:] == 0).all()


def test_small_matrices_and_vectors_travel_whole() -> None:
    given = gradients(1, {"vector": (100,), "small": (3, 3)})
    means = reduce(create("powersgd"), given, 0)
    assert same(means, given)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12), st.integers(1, 6), st.floats(0, 0.999))
@settings(deadline=None)
def test_atomo_draws_as_many_as_it_may_with_the_best_chances(weights: list[float], budget: int, offset: float) -> None:
    each = torch.tensor(weights, dtype=torch.float64)
    chances = low_rank.probabilities(each, budget)
    count = min(budget, len(weights))
    assert float(chances.sum()) == pytest.approx(count)
    assert (chances <= 1 + 1e-12).all()
    below = chances < 1 - 1e-9
    if below.any():  # p = w / t below one, and w >= t where p is one: the conditions of theorem 2
        t = (each[below] / chances[below]).mean()
        torch.testing.assert_close(each[below] / t, chances[below])
        assert (each[~below] >= t * (1 - 1e-9)).all()
    drawn = low_rank.systematic(chances, count, offset)
    assert drawn.unique().numel() == count


def test_the_atoms_of_a_matrix_add_up_to_it() -> None:
    for shape in ((8, 20), (20, 8)):
        matrix = gradients(2, {"w": shape})["w"]
        lefts, rights = low_rank.atoms(matrix)
        torch.testing.assert_close(lefts.t() @ rights, matrix, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sampled_threshold", "sidco_e", "adaq", "dgc", "signsgd"])
def test_zeros_are_not_picked_where_subnormals_are_flushed(name: str) -> None:
    values = torch.zeros(1000)
    values[::50] = 1.0
    torch.set_flush_denormal(True)
    try:
        found = reduce(create(name), {"w": values.view(20, 50)}, 0)["w"].view(-1)
    finally:
        torch.set_flush_denormal(False)
    if name == "signsgd":
        assert (found[::50] == 1).all()
        assert (found < 0).any()
    else:
        assert (found[values == 0] == 0).all()
        assert found.abs().sum() > 0


# -- by name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "topq"}, "compression 'topq': must be one of none, fp16"),
        ({"name": "powersgd", "feedback": 0.5}, "has its own memory"),
        ({"name": "topk", "feedback": 2.0}, r"beta=2.0: must be above 0 and at most 1"),
        ({"name": "topk", "ratio": 0.0}, "ratio=0.0: must be a number"),
        ({"name": "threshold", "two_phase": True}, r"TwoPhase\(Threshold\): needs payloads of one length"),
        ({"name": "topk", "feedback": 0.5, "two_phase": True}, "must be 0 or 1"),
        ({"name": "atomo", "two_phase": True}, r"TwoPhase\(Atomo\): a rank owns a run .* leave two_phase out, or take powersgd"),
        ({"name": "qsgd", "bucket": 20}, "multiple of 8"),
        ({"name": "sidco_e", "ratio": 2}, "ratio=2"),
        ({"name": "dgc", "clip_norm": -1}, "clip_norm=-1: must be a number"),
        ({"name": "dgc", "warmup_steps": -5}, "warmup_steps=-5: must be a whole number"),
        ({"name": "terngrad", "clip": math.nan}, "clip=nan: must be a number"),
        ({"name": "qsgd", "levels": 3.7}, "levels=3.7: must be a whole number"),
        ({"name": "hard_threshold", "count": 2.5}, "count=2.5: must be a whole number"),
        ({"name": "hard_threshold"}, "needs the option 'count'"),
        ({"name": "powersgd", "rank": 2.5, "least_rate": math.nan}, "rank=2.5: .*; least_rate=nan: "),
        ({"name": "randomk", "seed": "x"}, "seed='x': must be a whole number"),
        ({"name": "fp16", "seed": 1}, "has no option 'seed'; it has none"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        create(**arguments)  # type: ignore[arg-type]


def test_options_may_be_numbers_of_numpy() -> None:
    """A whole number of numpy is checked as the equal number of Python; its floats and bools are no whole numbers."""
    assert TopK(np.float32(0.25)).ratio == 0.25
    assert QSGD(levels=np.int64(7), seed=np.uint8(7)).levels == 7
    for wrong in (np.float64(7.0), np.bool_(True), np.int64(0)):
        with pytest.raises(ValueError, match=r"QSGD: levels=.*: must be a whole number"):
            QSGD(levels=wrong)


def _takes_two_phases(name: str) -> bool:
    try:
        return bool(create(name, two_phase=True, **OPTIONS.get(name, {})))
    except ValueError:
        return False


@pytest.mark.parametrize("name", [name for name in COMPRESSORS if _takes_two_phases(name)])
def test_two_phases_send_less_than_everything(name: str) -> None:
    """Also of a matrix, whose parts are no matrices."""
    methods = [create(name, two_phase=True, **OPTIONS.get(name, {})) for _ in range(4)]
    sent: list[list[Tensor]] = [[] for _ in methods]
    together(methods, [gradients(rank, {"w": (64, 64)}) for rank in range(4)], 0, sent=sent)
    assert sum(tensor.nbytes for tensor in sent[0]) < 4 * 64 * 64


@pytest.mark.parametrize("name", ["topk", "topk+two_phase", "randomk", "sampled_threshold", "sidco_p", "adaq", "dgc"])
def test_another_ratio_may_be_set_between_steps(name: str) -> None:
    each = create(name.split("+")[0], ratio=0.01, two_phase="+" in name)
    sent = []
    for step, ratio in enumerate([0.01] * 10 + [0.2] * 10):
        each.ratio = ratio
        sent.append(int(reduce(each, gradients(step, {"w": (40, 50)}), step)["w"].count_nonzero()))
    assert np.mean(sent[15:]) > 5 * np.mean(sent[5:10])
    assert each.ratio == 0.2
    with pytest.raises(ValueError, match="ratio=0: must be above 0"):
        each.ratio = 0


@pytest.mark.parametrize("name", ["qsgd", "onebit", "powersgd", "threshold"])
def test_a_ratio_that_means_nothing_is_not_taken(name: str) -> None:
    with pytest.raises(AttributeError, match="has no ratio"):
        create(name).ratio = 0.1


def test_a_state_of_another_method_is_refused() -> None:
    with pytest.raises(ValueError, match="GlobalInt8 has no state"):
        GlobalInt8().load_state_dict(create("signum").state_dict())


def test_a_payload_of_another_layout_is_refused() -> None:
    payload = QSGD().compress(one(torch.ones(256), 128), Turn())
    with pytest.raises(ValueError, match="264 bytes where 132 were expected"):
        QSGD().decompress(Payload(layout=layout_of(("w",), ((128,),), (torch.float32,), 128), data=payload.data))


def test_two_phases_cost_less_than_a_gather() -> None:
    whole, parts = TopK(0.01), TwoPhase(TopK(0.01))
    assert parts.wire_bytes(layout(80_000), world=8) < 1.2 * 2 * whole.wire_bytes(layout(80_000))


def test_a_hard_threshold_has_the_least_total_error_for_its_budget() -> None:
    """Sahu et al., section 4: of all choices of the same total number of elements over a whole run, one threshold for all steps has the
    least sum of squared errors; top-k spends the budget evenly, which is best only for each step alone.
    """
    stream = torch.Generator().manual_seed(1)
    steps = [torch.randn(2000, generator=stream) * scale for scale in (8.0, 4.0, 2.0, 1.0, 0.5, 0.25)]
    hard = Threshold(4.0)
    kept = [int(entries(hard.compress(one(values), Turn()))[1].numel()) for values in steps]
    assert len(set(kept)) > 2

    def total(counts: list[int]) -> float:
        squares = [values.square().sort().values for values in steps]
        return sum(float(each[: each.numel() - count].sum()) for each, count in zip(squares, counts, strict=True))

    least = total(kept)
    wrong = sum(float(hard.residual(one(values.clone()), hard.compress(one(values), Turn())).square().sum()) for values in steps)
    assert wrong == pytest.approx(least, rel=1e-5)
    even = sum(kept) // len(kept)
    assert least < 0.7 * total([even] * len(kept))  # top-k
    for taken, added in itertools.permutations(range(len(kept)), 2):  # no exchange of one element between two steps makes it less
        if kept[taken]:
            assert total([count - (number == taken) + (number == added) for number, count in enumerate(kept)]) >= least * (1 - 1e-6)


@pytest.mark.parametrize("exponent", [-120, -99, -98, 90, 97])
def test_norms_of_other_scales_are_those_of_the_same_numbers(exponent: int) -> None:
    """Scaling is by powers of two, also where the largest value has an odd exponent: bits are those of a gradient of ordinary scale."""
    rows = torch.randn(200, 100, generator=torch.Generator().manual_seed(1))
    assert torch.equal(row_norms(rows * 2.0**exponent), torch.linalg.vector_norm(rows, dim=1) * 2.0**exponent)
