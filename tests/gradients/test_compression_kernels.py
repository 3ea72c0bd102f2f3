"""The Triton kernels, on CPU tensors by Triton's interpreter: the bits of the CPU path, random ones excepted."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

import pytest
import torch
from compression_kit import EVERY, SHAPES, gradients, method, same
from torch import Tensor

from gemini_ft.compression import kernels
from gemini_ft.compression.base import Bundle, Layout, Turn
from gemini_ft.compression.collective import reduce

pytest.importorskip("triton", reason="needs triton, which has no build for this platform or is not installed")
from gemini_ft.compression import triton_kernels

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    given = {**gradients(1), **{f"{name}'": value for name, value in gradients(2).items()}}
    given["norm"][:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    given["odd"][:2] = 0.0
    return Bundle.of(given, 64)


def seeds(layout: Layout, step: int) -> Tensor:
    return kernels.stream_seeds(layout, CPU, 0, Turn(step))


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


def test_stochastic_round(bundle: Bundle) -> None:
    finite = Bundle(bundle.layout, bundle.flat.nan_to_num(0.0, 0.0, 0.0))
    scales = torch.full((len(bundle.layout.names),), 1.7)
    draws = [triton_kernels.stochastic_round(finite.flat, bundle.layout, scales, 40, seeds(bundle.layout, step), 0) for step in range(60)]
    clipped = (finite.flat * 1.7).clamp(-40, 40)
    found = torch.stack(draws).double()
    assert all(((draw - clipped).abs() < 1).all() for draw in draws)
    deviation = found.std(0) / 60**0.5
    assert float(((found.mean(0) - clipped).abs() > 5.5 * deviation + 0.15).sum()) == 0
    assert abs(float((found.mean(0) - clipped).mean())) < 0.005
    with_bad = triton_kernels.stochastic_round(bundle.flat, bundle.layout, scales, 40, seeds(bundle.layout, 0), 0)
    assert with_bad[torch.isnan(bundle.flat)].tolist() == [0]


def test_stochastic_round_by_buckets(bundle: Bundle) -> None:
    scales = torch.arange(bundle.layout.total // 64).float()
    found = triton_kernels.stochastic_round(torch.ones(bundle.layout.total), bundle.layout, scales, 127, seeds(bundle.layout, 0), 64)
    assert torch.equal(found.view(-1, 64)[:100, 5].float(), scales[:100].clamp(max=127))


def test_natural(bundle: Bundle) -> None:
    own = bundle.flat.view(torch.int32) >> 23 & 255
    draws = torch.stack([triton_kernels.natural(bundle.flat, bundle.layout, seeds(bundle.layout, step)) for step in range(60)]).int()
    assert ((draws == own) | (draws == own + 1)).all()
    assert (draws[:, own >= 254] == own[own >= 254]).all()
    finite = torch.isfinite(bundle.flat) & (bundle.flat != 0)
    values = torch.exp2(draws.double() - 127)[:, finite]
    ratio = values.mean(0) / bundle.flat[finite].abs()
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_as_on_a_cpu(bundle: Bundle) -> None:
    flat = bundle.flat.cuda()
    thresholds = torch.ones(len(bundle.layout.names), device="cuda")
    assert torch.equal(kernels.select(flat, bundle.layout, thresholds).cpu(), kernels.select(bundle.flat, bundle.layout, thresholds.cpu()))
    assert torch.equal(kernels.pack_signs(flat).cpu(), kernels.pack_signs(bundle.flat))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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
