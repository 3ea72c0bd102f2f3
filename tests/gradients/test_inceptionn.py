"""INCEPTIONN (MICRO 2018): words of 0 to 32 bits under an error bound, as a method of compression and as a ring."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
import sync_case
import torch
from compression_kit import gradients
from hypothesis import given
from hypothesis import strategies as st
from rank_kit import on_ranks

from gemini_ft.compression import Inceptionn, create, reduce, truncation
from gemini_ft.compression.base import Bundle, Turn
from gemini_ft.sync import InceptionnRing

BITS = (0, 8, 16, 32)  # of a word, by tag
BOUNDS = st.integers(1, truncation.MOST)
VALUES = st.lists(st.floats(width=32) | st.floats(-2, 2, width=32) | st.floats(-0.03125, 0.03125, width=32), max_size=40)


def joined(values: torch.Tensor, bound: int) -> torch.Tensor:
    return torch.cat([part.view(torch.uint8) for part in truncation.encode(values, bound)])


def there_and_back(values: torch.Tensor, bound: int) -> torch.Tensor:
    return truncation.decode(joined(values, bound), torch.empty_like(values), bound)


def exponent(value: float) -> int:
    """The biased exponent of a float32."""
    return struct.unpack("<I", struct.pack("<f", value))[0] >> 23 & 0xFF


def tag(value: float, bound: int) -> int:
    """The paper's algorithm 2, which looks at the exponent: its error bound is that of 2^-bound, and its middle is rounded up."""
    least = 127 - bound
    middle = least + math.ceil((127 - least) / 2)
    return sum(exponent(value) >= limit for limit in (least, middle, 127))


@given(values=VALUES, bound=BOUNDS)
def test_every_error_is_below_the_bound_and_no_magnitude_grows(values: list[float], bound: int) -> None:
    given_values = torch.tensor(values)
    found = there_and_back(given_values, bound)
    for before, after in zip(given_values.tolist(), found.tolist(), strict=True):
        if not abs(before) < 1:  # NaN too
            assert struct.pack("<f", before) == struct.pack("<f", after)
        else:
            assert abs(before - after) < 2.0**-bound
            assert abs(after) <= abs(before)
            assert after == 0 or (after < 0) == (before < 0)
    assert torch.equal(joined(found, bound), joined(there_and_back(found, bound), bound))
    assert torch.equal(there_and_back(found, bound).view(torch.int32), found.view(torch.int32))


@given(values=VALUES, bound=BOUNDS)
def test_words_have_the_lengths_of_the_paper(values: list[float], bound: int) -> None:
    tags = [tag(value, bound) for value in values]
    assert len(joined(torch.tensor(values), bound)) == -(-len(tags) // 4) + sum(BITS[each] for each in tags) // 8
    *_, packed = truncation.encode(torch.tensor(values), bound)
    assert [int(packed[place // 4]) >> 2 * (place % 4) & 3 for place in range(len(tags))] == tags


def test_the_words_of_the_paper_do_not_keep_to_its_bound_and_these_do() -> None:
    """Its 8 bits are a sign and the fraction's bits from 2^-1 to 2^-7, although the values are below 2^-5: three of them ever count."""
    values = torch.rand(5000, generator=torch.Generator().manual_seed(1)) * 2.0**-5
    values = values[values >= 2.0**-10]
    papers = (values * 2**7).floor() / 2**7
    assert float((papers - values).abs().max()) > 2.0**-8
    assert float((there_and_back(values, 10) - values).abs().max()) <= 2.0**-12


def test_special_values() -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-39, 1.0, -1.0, 3.4e38, 2.0**-10, -(2.0**-10)])
    found = there_and_back(values, 10)
    expected = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 0.0, 0.0, 0.0, 1.0, -1.0, 3.4e38, 2.0**-10, -(2.0**-10)])
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    almost = torch.tensor([1.0, 2.0**-5, 2.0**-10]).nextafter(torch.tensor(0.0))
    assert there_and_back(almost, 10).tolist() == [1 - 2.0**-15, 2.0**-5 - 2.0**-12, 0.0]


@pytest.mark.parametrize("block", [4, 64])
def test_where_a_block_ends_does_not_matter(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.cat([tensor.flatten() for tensor in gradients(1).values()]) * 0.05
    expected = joined(values, 8)
    with monkeypatch.context() as small:
        small.setattr(truncation, "BLOCK", block)
        assert torch.equal(joined(values, 8), expected)
        assert torch.equal(truncation.decode(expected, torch.empty_like(values), 8), there_and_back(values, 8))


def test_the_way_of_accelerators_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.cat([tensor.flatten() for tensor in gradients(1).values()] + [torch.tensor([math.nan, -math.inf, -0.0])]) * 0.3
    expected, decoded = joined(values, 10), there_and_back(values, 10)
    monkeypatch.setattr(truncation, "holds", lambda tensor: True)
    assert torch.equal(joined(values, 10), expected)
    assert torch.equal(there_and_back(values, 10).view(torch.int32), decoded.view(torch.int32))


@pytest.mark.parametrize("off", [-1, 1])
def test_bytes_that_are_no_encoded_tensor_are_refused(off: int) -> None:
    data = joined(torch.linspace(-2, 2, 41), 10)
    wrong = torch.cat([data, data])[: len(data) + off]
    with pytest.raises(ValueError, match=r"bytes of 41 truncated values"):
        truncation.decode(wrong, torch.empty(41), 10)
    with pytest.raises(ValueError, match=r"3 bytes of 41 truncated values"):
        truncation.decode(data[:3], torch.empty(41), 10)


@pytest.mark.parametrize("make", [Inceptionn, InceptionnRing])
@pytest.mark.parametrize("bound", [0, 15, 2.5])
def test_bounds_that_cannot_be_kept_are_refused(make: type[Inceptionn] | type[InceptionnRing], bound: int) -> None:
    with pytest.raises(ValueError, match=rf"{make.__name__}: bound={bound}: must be a whole number \(b of the error bound 2\^-b, from 1 "):
        make(bound)


# -- the method


def test_small_gradients_are_sent_in_the_end() -> None:
    """Without the residual that the paper does without, a gradient below the bound never arrives."""
    small = {"w": torch.full((9,), 2.0**-12)}
    for feedback, arrived in ((1.0, 4 * 2.0**-12), (0.0, 0.0)):
        method = create("inceptionn", feedback=feedback)
        sent = [reduce(method, small, step)["w"] for step in range(4)]
        assert sum(sent).tolist() == [arrived] * 9  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_of_a_gradient_are_off_by_less_than_the_bound(dtype: torch.dtype) -> None:
    given_values = {name: (value * 0.1).to(dtype) for name, value in gradients(4).items()}
    found = reduce(create("inceptionn", bound=6, feedback=0), given_values, 0)
    assert all(float((found[name] - value).abs().max()) < 2.0**-6 for name, value in given_values.items())
    assert any(float((found[name] - value).abs().max()) > 2.0**-7 for name, value in given_values.items())


def test_most_of_a_gradient_that_is_small_takes_two_bits_each() -> None:
    bundle = Bundle.of({"w": torch.full((8000,), 1e-4)})
    assert Inceptionn().compress(bundle, Turn()).data.nbytes == 2000


# -- the ring


@pytest.mark.parametrize("world", [2, 3])
def test_both_legs_of_the_ring_are_truncated(world: int, tmp_path: Path) -> None:
    """The sums, bit for bit, and the bytes of each message, against the ring worked out in one process."""
    assert on_ranks(tmp_path, world, sync_case.truncated_sums) == [[]] * world


def test_ddp_averages_over_the_ring(tmp_path: Path) -> None:
    first, second = on_ranks(tmp_path, 2, sync_case.ddp_truncated)
    assert first == second
    assert 0 < first[0] < 2 * 2.0**-10
