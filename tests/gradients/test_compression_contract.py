"""What every compression method must be, whatever it does: one test per promise, run on all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agent_kit import eventually
from compression_kit import EVERY, OPTIONS, SHAPES, gradients, measured, method, run_every, same, spied, through_a_file, together
from exchange_kit import simulate
from rank_kit import World
from torch import Tensor

from gemini_ft.compression import buffers, kernels
from gemini_ft.compression.base import Bundle, Compressor, Payload, Primitive, Reducer, Turn
from gemini_ft.compression.cast import Inceptionn
from gemini_ft.compression.collective import reduce, run
from gemini_ft.compression.dgc import MomentumCorrection, SampledThreshold
from gemini_ft.compression.feedback import ErrorFeedback, TwoPhase
from gemini_ft.compression.low_rank import PowerSGD
from gemini_ft.compression.methods import COMPRESSORS, create
from gemini_ft.compression.quantise import ThreeLC
from gemini_ft.compression.sign import MajorityVote
from gemini_ft.compression.sparse import RandomK, Sparsifier, entries

WORLD = 3
HALF_ULP = 2.0**-24  # of a float32, relative

every = pytest.mark.parametrize("name", EVERY)
every_compressor = pytest.mark.parametrize("name", COMPRESSORS)


def compressor(name: str, **more: Any) -> Compressor:
    return COMPRESSORS[name](**OPTIONS.get(name, {}), **more)


# -- error feedback


@every_compressor
def test_what_is_sent_and_what_is_left_make_up_the_gradient(name: str) -> None:
    each = compressor(name)
    bundle = Bundle.of(gradients(1), each.align)
    for step in range(3):
        given = bundle.flat.clone()
        payload = each.compress(bundle, Turn(step=step))
        sent = each.decompress(payload).flat
        left = each.residual(Bundle(bundle.layout, given.clone()), payload)
        if isinstance(each, Sparsifier | RandomK):
            assert torch.equal(sent + left, given)
            assert not (left.bool() & sent.bool()).any()
        else:  # one subtraction, rounded
            for ours, theirs, gradient in zip(*map(bundle.layout.views, (sent, left, given)), strict=True):
                wrong = (ours.double() + theirs - gradient).abs()
                assert (wrong <= HALF_ULP * torch.maximum(theirs.abs(), torch.full_like(theirs, 2.0**-126)).double()).all()


@every_compressor
def test_nothing_is_lost_over_many_steps(name: str) -> None:
    """Sum of what was sent plus the residual = sum of the gradients, up to half an ulp of the two roundings of every step."""
    each = ErrorFeedback(compressor(name))
    total = torch.zeros(Bundle.of(gradients(0), each.align).flat.numel(), dtype=torch.float64)
    bound = torch.zeros_like(total)
    for step in range(20):
        bundle = Bundle.of(gradients(step), each.align)
        given = bundle.flat.clone()
        before = each.residuals.flat(bundle.layout, given.device).clone()
        (sent,) = simulate([each.exchange(bundle, Turn(step=step))])
        total += given.double() - sent.flat
        left = each.residuals.flat(bundle.layout, given.device)
        bound += HALF_ULP * ((given + before).abs() + left.abs()).double()
    views = zip(bundle.layout.views(total - left), bundle.layout.views(bound), strict=True)
    assert all((wrong.abs() <= limit + 1e-30).all() for wrong, limit in views)


@pytest.mark.parametrize("name", ["powersgd", "efsignsgd+two_phase", "topk+two_phase"])
def test_nothing_is_lost_where_residuals_are_several(name: str) -> None:
    methods = [method(name) for _ in range(WORLD)]
    total = {key: torch.zeros(shape, dtype=torch.float64) for key, shape in SHAPES.items()}
    for step in range(20):
        ranks = [gradients(100 * step + rank) for rank in range(WORLD)]
        means = together(methods, ranks, step)
        for key in SHAPES:
            total[key] += sum(rank[key].double() for rank in ranks) / WORLD - means[key]
    for key, value in total.items():
        left = torch.zeros(value.numel(), dtype=torch.float64)
        for rank, each in enumerate(methods):
            left += _residual(each, key, rank)
        torch.testing.assert_close(left.view(value.shape), value, rtol=1e-4, atol=1e-5 * max(1.0, float(value.abs().max())))


def _residual(each: Reducer, key: str, rank: int) -> Tensor:
    """This rank's share in what the mean has missed of one tensor."""
    if isinstance(each, PowerSGD):
        return each.state_dict()["errors"][key].double() / WORLD
    assert isinstance(each, TwoPhase)
    state = each.state_dict()
    left = state["sender"][key].double() / WORLD
    length = -(-left.numel() // WORLD)
    if (own := state["owner"].get(f"{key}/{rank}/mean")) is not None:
        left[rank * length : rank * length + own.numel()] += own
    return left


def test_a_leaky_residual_is_what_is_asked_for() -> None:
    each = create("topk", ratio=0.1, feedback=0.5)
    first, second = gradients(1), gradients(2)
    reduce(each, first, 0)
    left = {name: value.clone() for name, value in each.state_dict()["residuals"].items()}
    plain = create("topk", ratio=0.1, feedback=0)
    expected = reduce(plain, {name: second[name] + 0.5 * left[name].view(second[name].shape) for name in second}, 1)
    assert same(reduce(each, second, 1), expected)


def test_residuals_can_follow_the_learning_rate() -> None:
    """EF-signSGD: p = lr g + e, in units of the parameters."""
    each = ErrorFeedback(compressor("efsignsgd"), follow_lr=True)
    error = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step, lr in enumerate([0.1, 0.1, 0.01, 0.05]):
        given = gradients(step)
        sent = reduce(each, given, step, lr=lr)
        for name, gradient in given.items():
            p = lr * gradient.double() + error[name]
            expected = p.abs().mean() * torch.where(p >= 0, 1.0, -1.0).double()
            torch.testing.assert_close(sent[name].double() * lr, expected.double(), rtol=1e-4, atol=1e-7)
            error[name] = p - expected
    with pytest.raises(ValueError, match="lr=None: error feedback that follows"):
        reduce(each, given, 9)


# -- liveness

ALIKE: dict[str, tuple[tuple[int, ...], float]] = {  # by name: shape, and how much elements differ from each other
    "zero_d": ((), 0.0),
    "one": ((1,), 0.0),
    "few": ((7,), 0.0),
    "equal": ((200,), 0.0),
    "nearly": ((200,), 1e-4),
    "spread": ((50,), 0.03),
    "matrix": ((10, 20), 0.03),
}


@every
def test_every_element_arrives_however_alike_the_others_are(name: str) -> None:
    """Logit scales, gates and layer scales: a gradient that stays as it is reaches the optimizer within some steps."""
    stream, each, steps = torch.Generator().manual_seed(7), method(name), 150
    given = {key: 0.3 * (1 + spread * torch.randn(shape, generator=stream)) for key, (shape, spread) in ALIKE.items()}
    sent = {key: torch.zeros_like(value) for key, value in given.items()}
    for step in range(steps):
        torch._foreach_add_(list(sent.values()), list(reduce(each, given, step).values()))
    for key, value in given.items():
        part = sent[key] / steps / (value.sign() if isinstance(each, MajorityVote) else value)
        most = 10.0 if isinstance(each, MomentumCorrection) else 1.0  # momentum of 0.9 makes ten of one, where none is masked
        assert 0.3 <= float(part.min()) <= float(part.max()) <= 1.25 * most, (key, part)


BUDGETED = ["topk", "sampled_threshold", "sidco_e", "sidco_p", "sidco_gp", "adaq"]


@pytest.mark.parametrize("name", BUDGETED)
@pytest.mark.parametrize("kind", ["alike", "nearly alike", "nearly empty", "skewed"])
def test_a_ratio_is_kept_whatever_the_values_are(name: str, kind: str) -> None:
    """At most twice as many elements as the ratio says, of each tensor and in each step."""
    stream, size, ratio = torch.Generator().manual_seed(3), 20000, 0.001
    normal = torch.randn(size, generator=stream)
    value = {
        "alike": torch.full((size,), 0.3),
        "nearly alike": 0.3 + 1e-4 * normal,
        "nearly empty": torch.where(torch.rand(size, generator=stream) < 0.01, normal, 0.0),
        "skewed": normal**9,
    }[kind]
    each = COMPRESSORS[name](ratio=ratio)
    for step in range(12):
        sent = each.compress(Bundle.of({"w": value}, each.align), Turn(step=step))
        found = int(torch.count_nonzero(each.decompress(sent).flat))
        assert 1 <= found <= 2 * ratio * size, step


# -- expectation

UNBIASED = [("none", {}), ("qsgd", {}), ("qsgd", {"levels": 3}), ("terngrad", {"clip": None}), ("natural", {}), ("natural8", {})]
UNBIASED += [("randomk", {"ratio": 0.1, "scaled": True}), ("atomo", {"atoms": 2}), ("atomo", {"atoms": 1})]


@pytest.mark.parametrize(("name", "options"), UNBIASED)
def test_the_mean_of_many_draws_is_the_gradient(name: str, options: dict[str, Any]) -> None:
    each = COMPRESSORS[name](**options)
    assert each.unbiased
    given = gradients(3, {"matrix": (12, 9), "vector": (30,)})
    _check_mean(given, [reduce(each, given, step) for step in range(1500)])


def test_the_mean_of_many_draws_is_the_mean_of_ranks() -> None:
    methods = [method("int8") for _ in range(4)]
    assert methods[0].unbiased
    ranks = [gradients(rank, {"matrix": (12, 9), "vector": (30,)}) for rank in range(4)]
    mean = {name: torch.stack([rank[name] for rank in ranks]).mean(0) for name in ranks[0]}
    _check_mean(mean, [together(methods, ranks, step) for step in range(1000)])


def _check_mean(expected: dict[str, Tensor], draws: list[dict[str, Tensor]]) -> None:
    for name, value in expected.items():
        found = torch.stack([draw[name] for draw in draws]).double()
        error = (found.mean(0) - value).abs()
        deviation = found.std(0) / math.sqrt(len(draws))
        # Five and a half standard errors: one false alarm in 10^5 runs of all cases, and the seeds are fixed. The rest is for
        # elements that are hardly ever drawn.
        assert (error <= 5.5 * deviation + 8 / len(draws) * found.abs().max()).all(), name
        along = (found * value).flatten(1).sum(1)
        assert abs(along.mean() - value.double().square().sum()) <= 5.5 * along.std() / math.sqrt(len(draws)) + 1e-5 * along.mean(), name


# -- wire


@every
def test_as_many_bytes_travel_as_the_formula_says(name: str) -> None:
    each = method(name)
    for step in range(6):  # warm-up and stages change what is picked
        bundle = Bundle.of(gradients(step), each.align)
        requests: list[Tensor] = []
        exchange = spied(each.exchange(bundle, Turn(step=step)), requests)
        _, nbytes = measured(exchange)
        assert nbytes == each.wire_bytes(bundle.layout, selected=_selected(each, bundle, requests))


def _selected(each: Reducer, bundle: Bundle, requests: list[Tensor]) -> int | None:
    """What was picked, counted in the values that come out."""
    inner = each.inner if isinstance(each, ErrorFeedback | MomentumCorrection) else each
    if each.primitive is not Primitive.ALL_GATHER_V:
        return None
    assert isinstance(inner, Compressor)
    if isinstance(inner, ThreeLC):
        return requests[0].numel() - 4 * len(bundle.layout.names)
    sent = inner.decompress(Payload(layout=bundle.layout, data=requests[0])).flat
    if isinstance(inner, Inceptionn):  # bytes of words, which truncation leaves in their ranges
        magnitudes = sent.abs()
        return sum(nbytes * int((magnitudes >= limit).sum()) for nbytes, limit in ((1, 2.0**-10), (1, 2.0**-5), (2, 1.0)))
    return int(torch.count_nonzero(sent))


@every
def test_a_payload_is_flat_tensors_and_nothing_else(name: str) -> None:
    each = method(name)
    requests: list[Tensor] = []
    measured(spied(each.exchange(Bundle.of(gradients(1), each.align), Turn()), requests))
    assert requests
    assert all(type(tensor) is Tensor and tensor.dim() == 1 for tensor in requests)


# -- ranks


@every
def test_one_by_one_or_together_is_the_same(name: str) -> None:
    fused, single = ([method(name) for _ in range(WORLD)] for _ in range(2))
    for step in range(7):
        ranks = [gradients(10 * step + rank) for rank in range(WORLD)]
        found = together(fused, ranks, step)
        for key in SHAPES:
            alone = together(single, [{key: rank[key]} for rank in ranks], step)
            assert same(alone, {key: found[key]}), (step, key)


@every
def test_where_a_block_of_memory_ends_does_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = method(name), method(name)
    for step in range(3):
        expected = reduce(one, gradients(step), step)
        with monkeypatch.context() as small:
            small.setattr(kernels, "BLOCK", 40)
            assert same(reduce(other, gradients(step), step), expected)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_ranks_on_a_process_group(world: int, tmp_path: Path) -> None:
    """All ranks hold the same bits, those of the ranks beside each other in one process, whatever order they arrive in."""
    steps = 3
    with World(tmp_path, world) as ranks:
        found = ranks.finish(run_every, steps, world, restarts=0)
    for name in EVERY:
        methods = [method(name) for _ in range(world)]
        for step in range(steps):
            expected = together(methods, [gradients(1000 * step + rank) for rank in range(world)], step)
        text = "".join(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex() for value in expected.values())
        assert all(rank[name] == text for rank in found), name


@every
def test_memory_that_is_used_again_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what lay in a buffer before matters, nor is one lent again while somebody holds it."""
    plain, lent = [method(name) for _ in range(2)], [method(name) for _ in range(2)]
    found, expected = [], []
    for step in range(4):
        ranks = [gradients(10 * step + rank) for rank in range(2)]
        expected.append({key: value.clone() for key, value in together(plain, ranks, step).items()})
        with monkeypatch.context() as everything:
            everything.setattr(buffers.BUFFERS, "large", 1)
            lend = buffers.BUFFERS.lend

            def poisoned(nbytes: int, lend: Callable[[int], Any] = lend) -> Any:
                part = lend(nbytes)
                part.fill(255)
                return part

            everything.setattr(buffers.BUFFERS, "lend", poisoned)
            found.append(together(lent, ranks, step))
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))


def test_a_buffer_is_lent_again_when_nobody_holds_it() -> None:
    own = buffers.Buffers()
    first = own.empty(2**20)
    address, held = first.data_ptr(), first[100:].view(torch.int32).numpy()
    del first
    assert own.empty(2**20).data_ptr() != address
    del held
    assert own.empty(2**20 - 5, torch.int32).data_ptr() == address  # it fits
    assert address % 64 == 0
    assert own.empty(2**18).data_ptr() != address  # too large for that by far
    assert own.nbytes == 2 * 2**22 + 2**20
    own.idle = 0.0
    own.empty(2**18)
    assert own.nbytes == 2**20


def test_idle_buffers_go_back_although_nothing_more_is_lent() -> None:
    own = buffers.Buffers(idle=0.01)
    held = own.empty(2**20)
    own.empty(2**19)  # is free at once, as nobody keeps it
    assert own.nbytes == 2**22 + 2**21
    eventually(lambda: own.nbytes == 2**22)
    del held
    eventually(lambda: own.nbytes == 0)
    own.empty(2**20)
    assert own.nbytes == 2**22
    eventually(lambda: own.nbytes == 0)


def test_a_buffer_is_held_by_views_of_an_array_too() -> None:
    own = buffers.Buffers()
    view = own.lend(2**20).view(np.float32)[5:]
    assert not np.shares_memory(view, own.lend(2**20))
    address = view.ctypes.data - 20
    del view
    assert own.lend(2**20).ctypes.data == address


@pytest.mark.parametrize("name", ["topk", "efsignsgd", "onebit", "qsgd", "terngrad", "natural", "dgc", "int8", "powersgd", "bf16"])
def test_a_step_needs_no_memory_that_the_steps_before_did_not(name: str) -> None:
    """Fresh pages from the kernel cost more than compression: of a group of some megabytes, each step uses the same again."""
    buffers.BUFFERS.clear()
    each, given = method(name), gradients(1, {"a": (400, 700), "b": (300, 800)})
    used = []
    for step in range(6):
        reduce(each, given, step)
        used.append(buffers.BUFFERS.nbytes)
    assert used[2] == used[-1] > 0


IDENTICAL = [("none", {}), ("topk", {"ratio": 1.0}), ("randomk", {"ratio": 1.0}), ("threshold", {"value": 1e-30})]


@pytest.mark.parametrize(("name", "options"), IDENTICAL)
def test_one_rank_that_leaves_nothing_out_changes_nothing(name: str, options: dict[str, Any]) -> None:
    each = create(name, **options)
    for step in range(2):
        assert same(reduce(each, gradients(step), step), gradients(step))


# -- state


@every
@pytest.mark.parametrize("regroup", [False, True], ids=["same groups", "other groups"])
def test_a_restored_state_goes_on_as_if_never_interrupted(name: str, regroup: bool) -> None:
    methods = [method(name) for _ in range(WORLD)]
    for step in range(4):
        together(methods, [gradients(10 * step + rank) for rank in range(WORLD)], step)
    restored = [method(name) for _ in range(WORLD)]
    for old, new in zip(methods, restored, strict=True):
        new.load_state_dict(through_a_file(old.state_dict()))
    for step in range(4, 8):
        ranks = [gradients(10 * step + rank) for rank in range(WORLD)]
        expected = together(methods, ranks, step)
        if not regroup:
            assert same(together(restored, ranks, step), expected)
            continue
        for half in (("embed", "norm", "zero_d"), ("scalar", "conv", "odd")):
            part = together(restored, [{key: rank[key] for key in half} for rank in ranks], step)
            assert same(part, {key: expected[key] for key in half})


# -- inputs


@every
def test_zeros_stay_zeros(name: str) -> None:
    each = method(name)
    zeros = {key: torch.zeros(shape) for key, shape in SHAPES.items()}
    for step in range(3):
        means = reduce(each, zeros, step)
        for key, value in means.items():
            allowed = value.abs() == 1 if isinstance(each, MajorityVote) else value == 0
            assert allowed.all(), key


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_makes_no_difference(name: str, dtype: torch.dtype) -> None:
    ranks = [gradients(rank) for rank in range(2)]
    found = []
    for each in (torch.float32, dtype):
        torch.set_default_dtype(each)
        try:
            methods = [method(name) for _ in range(2)]
            found.append([together(methods, ranks, step) for step in range(2)])
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(same(one, other) for one, other in zip(*found, strict=True))


@every
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_by_all_and_spares_the_rest(name: str, poison: float) -> None:
    """A step under AMP that is skipped: no other tensor notices, and the next step is as good as any."""
    methods, undisturbed = ([method(name) for _ in range(2)] for _ in range(2))
    for step in range(6):
        ranks = [gradients(10 * step + rank) for rank in range(2)]
        for_others = together(undisturbed, [{key: value for key, value in rank.items() if key != "odd"} for rank in ranks], step)
        if step == 2:
            ranks[1]["odd"] = ranks[1]["odd"].clone()
            ranks[1]["odd"][3, 5] = poison
        means = together(methods, ranks, step)
        assert same(for_others, {key: value for key, value in means.items() if key != "odd"})
        assert bool(torch.isfinite(means["odd"]).all()) == (step != 2)


@every
@pytest.mark.parametrize("value", [1e-42, 1e-38, 1e37, -2.5], ids=["subnormal", "tiny", "huge", "ordinary"])
def test_equal_values_of_any_size_stay_finite_and_in_range(name: str, value: float) -> None:
    each = method(name)
    means = reduce(each, {"all": torch.full((9, 11), value)}, 0)
    in_range = means["all"].abs() <= (1.0 if isinstance(each, MajorityVote) else 10.1 * abs(value))
    if value > 1e20:  # sums of squares, and float16, overflow: that must be seen
        in_range |= ~torch.isfinite(means["all"])
    assert in_range.all()


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_in_sixteen_bits_out(name: str, dtype: torch.dtype) -> None:
    narrow = {key: value.to(dtype) for key, value in gradients(5).items()}
    found = reduce(method(name), narrow, 0)
    expected = reduce(method(name), {key: value.float() for key, value in narrow.items()}, 0)
    assert same(found, {key: value.to(dtype) for key, value in expected.items()})


@every
def test_strides_do_not_matter_and_inputs_are_only_read(name: str) -> None:
    given = gradients(6, {"matrix": (16, 24), "cube": (8, 4, 3)})
    strided = {"matrix": given["matrix"].t().contiguous().t(), "cube": given["cube"].repeat(1, 1, 2)[:, :, :3]}
    assert not any(value.is_contiguous() for value in strided.values())
    before = {key: value.clone() for key, value in strided.items()}
    one, other = method(name), method(name)
    for step in range(2):
        assert same(reduce(one, strided, step), reduce(other, given, step))
        assert same(strided, before)
        alone = {"matrix": given["matrix"]}  # may be lent without a copy
        reduce(method(name), alone, step)["matrix"].add_(1)
        assert torch.equal(alone["matrix"], before["matrix"])


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        ({"w": torch.zeros(3, dtype=torch.float64)}, TypeError, "'w' is torch.float64"),
        ({"w": torch.zeros(3, dtype=torch.int32)}, TypeError, "'w' is torch.int32"),
        ({"w": torch.zeros(0)}, ValueError, "'w' has no elements"),
        ({}, ValueError, "no tensors"),
    ],
)
def test_what_cannot_be_compressed_is_refused(tensors: dict[str, Tensor], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        reduce(method("topk"), tensors, 0)


def test_a_turn_of_another_group_is_refused() -> None:
    each = method("signsgd")
    with pytest.raises(ValueError, match=r"an exchange among 2 ranks on a group of 1; make its Turn with turn\(step, group\)"):
        run(each.exchange(Bundle.of(gradients(1)), Turn(step=0, rank=0, world=2)))


def test_entries_are_unique() -> None:
    """Values of one element from several ranks are added; from one rank there is only one."""
    each = compressor("topk")
    assert isinstance(each, Sparsifier)
    equal = Bundle.of({"all": torch.ones(20000)})
    _, indices = entries(each.compress(equal, Turn()))
    assert indices.unique().numel() == indices.numel() == 2000


# -- scale

OF_THEIR_UNIT = {"fp16", "threshold", "hard_threshold", "natural8", "inceptionn"}  # a range, or a value in units of the gradient
SCALED = [name for name in EVERY if name not in OF_THEIR_UNIT]


@pytest.mark.parametrize("name", [*SCALED, "dgc clipped"])
@pytest.mark.parametrize("power", [-100, 100])
def test_the_unit_of_the_gradient_does_not_matter(name: str, power: int) -> None:
    """A power of two is exact: gradients of 1e-30 or 1e30 are treated like those of 1."""
    unit = 2.0**power
    plain, scaled = method(name.split()[0]), method(name.split()[0])
    if "clipped" in name:
        plain, scaled = (MomentumCorrection(SampledThreshold(0.1), clip_norm=0.1 * each) for each in (1.0, unit))
    for step in range(7):
        given = gradients(step)
        expected = reduce(plain, given, step)
        found = reduce(scaled, {key: value * unit for key, value in given.items()}, step)
        for key, value in expected.items():
            back = found[key] / (1.0 if isinstance(plain, MajorityVote) else unit)
            assert float((back - value).norm()) <= 1e-3 * float(value.norm()), (step, key)


@pytest.mark.parametrize(("name", "options"), [("qsgd", {}), ("terngrad", {"clip": None}), ("natural", {}), ("int8", {}), ("atomo", {})])
@pytest.mark.parametrize("power", [-118, -132], ids=["nearly subnormal", "subnormal"])
def test_the_smallest_numbers_are_rounded_without_bias(name: str, options: dict[str, Any], power: int) -> None:
    each = create(name, **options)
    value = torch.rand(20, 30, generator=torch.Generator().manual_seed(1)).add_(0.5).mul_(2.0**power)
    draws = torch.stack([reduce(each, {"w": value}, step)["w"] for step in range(200)]).double()
    assert float(draws.mean() / value.double().mean()) == pytest.approx(1, rel=0.1)
