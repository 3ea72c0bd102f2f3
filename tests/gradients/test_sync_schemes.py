"""Every scheme computes the same sum, on every rank, or every rank raises the same error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sync_case
import torch
from agent_kit import preload
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_kit import on_ranks
from switch_kit import KEY, places, switches

from gemini_ft.sync import omnireduce, sparcml, wire
from gemini_ft.sync.base import Scheme
from gemini_ft.sync.builtin import Dense
from gemini_ft.sync.hierarchical import Hierarchical
from gemini_ft.sync.rows import SparseRows
from gemini_ft.sync.schemes import SCHEMES
from gemini_ft.sync.sparcml import DSARSplitAllgather
from gemini_ft.sync.switchml import SwitchML
from gemini_ft.sync.zen import Zen

preload("sync_case")


@pytest.fixture(scope="module", name="switch")
def a_switch() -> Iterator[str]:
    """Two switches, each with half of the slots."""
    with switches(2) as made:
        yield places(made)


MORE = [(2, None), (3, None), (4, None), (5, 2), (6, 0), (7, 1), (8, 2)]


# Every scheme meets every case once, on 2, 4 or 3 ranks; all on all are a soak.
@pytest.mark.parametrize(("world", "third"), [(1, None), (2, 0), (4, 1), *(pytest.param(*each, marks=pytest.mark.soak) for each in MORE)])
def test_the_sum_is_right_and_the_same_everywhere(world: int, third: int | None, switch: str, tmp_path: Path) -> None:
    assert on_ranks(tmp_path, world, sync_case.sums, third, TEST_SWITCH=switch) == [[]] * world


@pytest.mark.parametrize("third", [2, pytest.param(None, marks=pytest.mark.soak)])
def test_also_over_backends_that_need_to_know_sizes(third: int | None, tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 3, sync_case.collectives, third) == [[]] * 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Zen(seed="x"), "Zen: seed='x': must be a whole number"),  # type: ignore[arg-type]
        (lambda: Zen("md5"), "Zen: hashing='md5': must be one of its names"),  # type: ignore[arg-type]
        (lambda: Dense(check=1), "Dense: check=1: must be true or false"),  # type: ignore[arg-type]
        (lambda: Hierarchical(Zen(), 2.5), "Hierarchical: local_size=2.5: must be a whole number"),  # type: ignore[arg-type]
        (lambda: Hierarchical(Zen(), 0), "Hierarchical: local_size=0: "),
        (lambda: SwitchML("host", KEY), "SwitchML: switch='host': must be a text .host:port of the switch, or of several"),
        (
            lambda: SwitchML("host:1, other:65536", KEY),
            "SwitchML: switch='host:1, other:65536': must be a text .host:port of the switch, or of several",
        ),
        (
            lambda: SwitchML("host:1", KEY, packet=12),
            "SwitchML: packet=12: must be a whole number .bytes of a packet's values",
        ),
    ],
)
def test_a_scheme_with_an_option_that_makes_no_sense_is_refused(make: Callable[[], Scheme], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("world", [2, 3])
def test_what_cannot_be_summed_is_refused_by_all_with_the_same_words(world: int, switch: str, tmp_path: Path) -> None:
    first, *others = on_ranks(tmp_path, world, sync_case.refusals, TEST_SWITCH=switch)
    assert others == [first] * (world - 1)
    said = {(scheme, case): text for scheme, case, text in first}
    for scheme in {scheme for scheme, _ in said}:
        assert f"rank {world - 1}: " in said[scheme, "shape"]
        assert "(4,)" in said[scheme, "shape"]
        assert "(2, 6)" in said[scheme, "same size, other shape"]
        assert "torch.float64" in said[scheme, "dtype"]
        assert "torch.sparse_coo" in said[scheme, "layout"]
        assert f"rank {world - 1}: dtype torch.int64: must be one of torch.float32" in said[scheme, "integers"]
        assert f"rank {world - 1}: indices 9 to 9 in dimension 0: must be from 0 to 8" in said[scheme, "index"]
        assert said[scheme, "afterwards"] == str([float(world)] * 3)


def test_ranks_with_different_schemes_are_told(tmp_path: Path) -> None:
    first, second = on_ranks(tmp_path, 2, sync_case.other_schemes)
    assert first == second
    schemes, seeds, hashes = first
    assert "rank 0: sparse-ps of (3,)" in schemes
    assert "rank 1: zen by rotation, seed 0, of (3,)" in schemes
    assert "rank 1: zen by rotation, seed 1, of (3,)" in seeds
    assert "rank 1: zen by hierarchical, seed 0, of (3,)" in hashes


def test_nan_and_infinity_stay(switch: str, tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 3, sync_case.special_values, TEST_SWITCH=switch) == [[]] * 3


def test_dsar_in_few_bits_is_right_on_average_and_the_same_everywhere(tmp_path: Path) -> None:
    """SparCML's section 6: the sums in QSGD's form."""
    assert on_ranks(tmp_path, 3, sync_case.quantised_sums) == [[]] * 3


def test_a_single_server_adds_each_gradient_as_it_comes(tmp_path: Path) -> None:
    """So its memory does not grow with the number of ranks."""
    assert on_ranks(tmp_path, 4, sync_case.most_messages_at_a_server) == [1, 1, 1, 1]


def test_a_hierarchical_scheme_has_the_state_of_the_one_between_hosts() -> None:
    first, second = (Hierarchical(DSARSplitAllgather(bits=4), 2) for _ in range(2))
    first.inter.load_state_dict({"sums": 7})
    second.load_state_dict(first.state_dict())
    assert second.inter.state_dict() == first.state_dict() == {"sums": 7}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_few_bits_make_no_infinity(bits: int, dtype: torch.dtype) -> None:
    """A value may become the norm of its bucket, which is no number of the dtype where values are large."""
    values = (torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) * (torch.finfo(dtype).max / 13)).to(dtype)
    found = sparcml.restore(sparcml.quantise(values, bits, 1024, torch.Generator().manual_seed(1)), values, bits, 1024)
    assert found.isfinite().all()
    small = values / 64
    found = sparcml.restore(sparcml.quantise(small, bits, 1024, torch.Generator().manual_seed(1)), small, bits, 1024)
    assert not torch.equal(found, small)  # those are quantised


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_few_bits_are_as_many_bytes_as_they_say(bits: int) -> None:
    """1500 values in buckets of 64, the last one filled up; each with a norm of 8 bytes. Scale makes no difference."""
    for scale in (1e-30, 1.0, 1e30):
        values = scale * torch.randn(30, 50, generator=torch.Generator().manual_seed(1))
        message = sparcml.quantise(values, bits, 64, torch.Generator().manual_seed(2))
        assert len(wire.payload(message)) == 8 + 24 * 8 + 1536 * bits // 8
        restored = sparcml.restore(message, values, bits, 64) / scale
        if scale == 1e-30:
            first = restored
        torch.testing.assert_close(restored, first, rtol=1e-5, atol=0)
    zeros = torch.zeros(10, 3)
    assert torch.equal(sparcml.restore(sparcml.quantise(zeros, bits, 8, torch.Generator()), zeros, bits, 8), zeros)


def test_in_the_background_they_take_turns(switch: str, tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 4, sync_case.in_the_background, TEST_SWITCH=switch) == [[]] * 4


def test_groups_do_not_disturb_each_other(switch: str, tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 5, sync_case.subgroups, TEST_SWITCH=switch) == [[]] * 5


MOST = 400  # rows of the gradients on which Zen must be lossless


def adversarial() -> st.SearchStrategy[list[list[int]]]:
    """Indices of up to three ranks: any, consecutive, strided, Zipf, or all those that one server gets by either hash."""
    some = st.lists(st.integers(0, MOST - 1), max_size=80)
    consecutive = st.builds(
        lambda start, count: list(range(start, min(MOST, start + count))), st.integers(0, MOST - 1), st.integers(0, 150)
    )
    strided = st.builds(lambda start, step: list(range(start, MOST, step)), st.integers(0, 20), st.integers(1, 20))
    zipf = st.builds(lambda ranks: [int(MOST * (rank / 1000) ** 5) for rank in ranks], st.lists(st.integers(0, 999), max_size=80))
    one_server = st.builds(sync_case.of_one_server, st.booleans(), st.integers(0, 2), st.just(MOST))
    return st.lists(st.one_of(some, consecutive, strided, zipf, one_server), min_size=3, max_size=3)


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.data_too_large])
@given(choices=st.lists(adversarial(), min_size=10, max_size=25))
def test_zen_is_lossless_whatever_the_indices(choices: list[list[list[int]]], tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 3, sync_case.zen_on, choices, MOST) == [[True] * (2 * len(choices))] * 3


def test_the_hook_averages_as_ddp_does(tmp_path: Path) -> None:
    first, *others = on_ranks(tmp_path, 3, sync_case.ddp_gradients)
    assert others == [first] * 2
    assert len(first) == 10
    assert max(first[:5]) < 1e-5
    assert max(first[5:]) < 2e-2


def test_the_hook_takes_what_the_hooks_of_torch_take(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 2, sync_case.hook_without_state) == ["state='zen': must be a HookState, a process group, or None"] * 2


@pytest.mark.parametrize(("rows", "width"), [(40, 256), (90, 64), (2000, 1), (33, 300), (20, 512), (50, 7)])
def test_blocks_come_back_as_rows(rows: int, width: int) -> None:
    """Also the last block, which is not full, and rows of which only some blocks hold anything but zeros."""
    stream = torch.Generator().manual_seed(1)
    matrix = torch.randn(rows, width, generator=stream) * (torch.rand(rows, 1, generator=stream) < 0.3)
    matrix[:, : width // 2] = 0
    given = SparseRows(rows=rows, indices=torch.arange(rows), values=matrix)
    blocks = omnireduce.to_blocks(given)
    assert blocks.values.shape[1] == omnireduce.BLOCK
    assert bool(blocks.values.any(1).all())
    back = omnireduce.from_blocks(blocks, rows, width)
    assert torch.equal(back.indices, matrix.any(1).nonzero().flatten())
    assert torch.equal(back.dense(), matrix)


def test_rows_that_are_blocks_stay_where_they_are() -> None:
    blocks = SparseRows(rows=9, indices=torch.tensor([2, 7]), values=torch.ones(2, omnireduce.BLOCK))
    assert omnireduce.from_blocks(blocks, 9, omnireduce.BLOCK).values.data_ptr() == blocks.values.data_ptr()


def test_without_a_group_it_is_said_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group first"):
        SCHEMES["zen"]().all_reduce(torch.zeros(3))
