"""The Triton kernels, on CPU tensors by Triton's interpreter: the bits of the CPU path, random ones excepted."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

import pytest
import torch
from compression_kit import EVERY, SHAPES, gradients, method, same
from torch import Tensor

from gemini_ft.compression import kernels, sparse
from gemini_ft.compression.base import Bundle, FlatLayout, Turn
from gemini_ft.compression.collective import reduce

pytest.importorskip("triton", reason="needs triton: pip install triton, where it has a build for the platform")
from gemini_ft.compression import triton_kernels

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    given = {**gradients(1), **{f"{name}'": value for name, value in gradients(2).items()}}
    given["norm"][:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    given["odd"][:2] = 0.0
    return Bundle.of(given, 64)


def seeds(layout: FlatLayout, step: int, device: str = "cpu") -> Tensor:
    return kernels.stream_seeds(layout, torch.device(device), 0, Turn(step=step))


def alone(bundle: Bundle, name: str) -> Bundle:
    return Bundle.of({name: bundle.tensors()[name]}, 64)


def test_select(bundle: Bundle) -> None:
    for scale in (0.01, 1.0, 3.0):
        thresholds = scale * torch.rand(len(bundle.layout.names), generator=torch.Generator().manual_seed(1)) + 1e-3
        found = triton_kernels.select(bundle.flat, bundle.layout, thresholds)
        assert torch.equal(found, kernels.select(bundle.flat, bundle.layout, thresholds))
    assert triton_kernels.select(bundle.flat, bundle.layout, thresholds + torch.inf).numel() == 3


def test_pack_signs(bundle: Bundle) -> None:
    assert torch.equal(triton_kernels.pack_signs(bundle.flat), kernels.pack_signs(bundle.flat))


@pytest.mark.parametrize("device", DEVICES)
def test_stochastic_round(bundle: Bundle, device: str) -> None:
    flat, layout = bundle.flat.to(device), bundle.layout
    finite = flat.nan_to_num(0.0, 0.0, 0.0)
    scales = torch.full((len(layout.names),), 1.7, device=device)
    draws = [triton_kernels.stochastic_round(finite, layout, scales, 40, seeds(layout, step, device), 0) for step in range(60)]
    clipped = (finite * 1.7).clamp(-40, 40)
    found = torch.stack(draws).double()
    assert all(((draw - clipped).abs() < 1).all() for draw in draws)
    deviation = found.std(0) / 60**0.5
    assert float(((found.mean(0) - clipped).abs() > 5.5 * deviation + 0.15).sum()) == 0
    assert abs(float((found.mean(0) - clipped).mean())) < 0.005
    with_bad = triton_kernels.stochastic_round(flat, layout, scales, 40, seeds(layout, 0, device), 0)
    assert with_bad[torch.isnan(flat)].tolist() == [0]


@pytest.mark.parametrize("device", DEVICES)
def test_stochastic_round_by_buckets(bundle: Bundle, device: str) -> None:
    layout, ones = bundle.layout, torch.ones(bundle.layout.total, device=device)
    scales = torch.arange(layout.total // 64, device=device).float()
    found = triton_kernels.stochastic_round(ones, layout, scales, 127, seeds(layout, 0, device), 64)
    assert torch.equal(found.view(-1, 64)[:100, 5].float(), scales[:100].clamp(max=127))


@pytest.mark.parametrize("device", DEVICES)
def test_natural(bundle: Bundle, device: str) -> None:
    flat, layout = bundle.flat.to(device), bundle.layout
    own = flat.view(torch.int32) >> 23 & 255
    draws = torch.stack([triton_kernels.natural(flat, layout, seeds(layout, step, device)) for step in range(60)]).int()
    assert ((draws == own) | (draws == own + 1)).all()
    assert (draws[:, own >= 254] == own[own >= 254]).all()
    finite = torch.isfinite(flat) & (flat != 0)
    values = torch.exp2(draws.double() - 127)[:, finite]
    ratio = values.mean(0) / flat[finite].abs()
    assert abs(float(ratio.mean()) - 1) < 0.005


@pytest.mark.parametrize("name", SHAPES)
def test_a_group_gives_what_its_tensors_give(bundle: Bundle, name: str) -> None:
    single = alone(bundle, name)
    number = bundle.layout.names.index(name)
    part = slice(bundle.layout.starts[number], bundle.layout.starts[number] + bundle.layout.spans[number])
    scales = torch.linspace(1, 9, len(bundle.layout.names))
    whole = triton_kernels.stochastic_round(bundle.flat, bundle.layout, scales, 127, seeds(bundle.layout, 3), 0)
    assert torch.equal(
        whole[part],
        triton_kernels.stochastic_round(single.flat, single.layout, scales[number : number + 1], 127, seeds(single.layout, 3), 0),
    )
    exponents = triton_kernels.natural(bundle.flat, bundle.layout, seeds(bundle.layout, 3))
    assert torch.equal(exponents[part], triton_kernels.natural(single.flat, single.layout, seeds(single.layout, 3)))


# -- the side of an accelerator against the side of a CPU


def _words(flat: Tensor) -> Tensor:
    """Bytes that differ from element to element, as codes or as packed bits."""
    return flat.abs().nan_to_num(0.0, 0.0).mul(37).to(torch.uint8)


def _all_blocks(flat: Tensor, layout: FlatLayout) -> Tensor:
    factors = torch.linspace(0.5, 9.0, len(layout.names), device=flat.device)
    return torch.cat([values.clone() for _, values in kernels.scaled_blocks(flat, layout, factors)])


DETERMINISTIC: dict[str, Callable[[Tensor, FlatLayout], object]] = {
    "select": lambda flat, layout: kernels.select(flat, layout, torch.ones(len(layout.names), device=flat.device)),
    "not_below": lambda flat, _: kernels.not_below(flat, 1.0),
    "negative": lambda flat, _: kernels.negative(flat),
    "equal": lambda flat, _: kernels.equal(_words(flat), 0),
    "indices": lambda flat, _: kernels.indices(flat > 0),
    "pack": lambda flat, _: kernels.pack(flat > 0),
    "pack_signs": lambda flat, _: kernels.pack_signs(flat),
    "pack_signs_and_zeros": lambda flat, _: kernels.pack_signs_and_zeros(flat.nan_to_num(0.0, 0.0, 0.0)),
    "pack_small": lambda flat, _: [kernels.pack_small(_words(flat) & (2**bits - 1), bits) for bits in (2, 4)],
    "unpack_signs": lambda flat, _: kernels.unpack_signs(_words(flat)),
    "unpack_small": lambda flat, _: [kernels.unpack_small(_words(flat), bits, 1) for bits in (2, 4)],
    "scaled_blocks": _all_blocks,
    "largest": lambda flat, _: sparse.largest(flat[torch.isfinite(flat)].abs(), 50).sort().values,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_an_accelerator_gives_the_bits_of_a_cpu(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, name: str, device: str) -> None:
    """On a CPU its code runs too, its kernels in the interpreter."""
    call = DETERMINISTIC[name]
    expected = call(bundle.flat, bundle.layout)
    for module in (kernels, sparse):
        monkeypatch.setattr(module, "holds", lambda tensor: True)
    found = call(bundle.flat.to(device), bundle.layout)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, check_device=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EVERY)
def test_every_method_runs_on_a_device(name: str) -> None:
    fused, single = method(name), method(name)
    for step in range(4):
        given = {key: value.cuda() for key, value in gradients(step).items()}
        means = reduce(fused, given, step)
        assert all(mean.is_cuda and bool(torch.isfinite(mean).all()) for mean in means.values())
        for key in SHAPES:
            alone = reduce(single, {key: given[key]}, step)
            assert same({key: alone[key].cpu()}, {key: means[key].cpu()}), key
