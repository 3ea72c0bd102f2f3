"""The public formulations that our encoders are timed against: each method in the few lines of torch in which it is published.

They follow the papers' pseudo-code as public PyTorch code has it, with what makes that slow: sorting, boolean masks, random numbers
of torch's generator, codes that are not packed. Mistakes of such code are not repeated, and nobody's code is copied. Each takes one
flat float32 tensor and returns the tensors that would travel.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def fp16(x: Tensor) -> list[Tensor]:
    return [x.half()]


def bf16(x: Tensor) -> list[Tensor]:
    return [x.bfloat16()]


def topk(x: Tensor, ratio: float) -> list[Tensor]:
    indices = torch.topk(x.abs(), max(1, int(ratio * x.numel())), sorted=False).indices
    return [x[indices], indices]


def randomk(x: Tensor, ratio: float) -> list[Tensor]:
    return [x[torch.randperm(x.numel())[: max(1, int(ratio * x.numel()))]]]


def threshold(x: Tensor, value: float) -> list[Tensor]:
    indices = (x.abs() >= value).nonzero().view(-1)
    return [x[indices], indices]


def dgc(x: Tensor, ratio: float) -> list[Tensor]:
    size = x.numel()
    magnitude = x.abs()
    sample = magnitude[torch.randint(size, (max(1, size // 100),))]
    limit = torch.topk(sample, max(1, int(ratio * sample.numel()))).values.min()
    mask = magnitude >= limit
    for _ in range(10):
        count = int(mask.sum())
        if 0.8 * ratio * size <= count <= 1.3 * ratio * size:
            break
        limit = limit * (1.3 if count > ratio * size else 0.8)
        mask = magnitude >= limit
    indices = mask.nonzero().view(-1)
    return [x[indices], indices]


def sidco_e(x: Tensor, ratio: float, stages: int = 2) -> list[Tensor]:
    magnitude = x.abs()
    tail = magnitude
    limit = -tail.mean() * math.log(0.25)
    for _ in range(stages - 1):
        tail = tail[tail > limit]
        start = tail.min()
        limit = start - (tail.mean() - start) * math.log((ratio / 0.25) ** (1 / (stages - 1)))
    indices = (magnitude > limit).nonzero().view(-1)
    return [x[indices], indices]


def adaq(x: Tensor, ratio: float) -> list[Tensor]:
    parts = []
    for side in (x, -x):
        positive = side[side > 0]
        limit = torch.topk(positive, max(1, int(ratio * positive.numel()))).values.min()
        indices = (side >= limit).nonzero().view(-1)
        parts += [x[indices].mean(), indices]
    return parts


def signsgd(x: Tensor) -> list[Tensor]:
    return [(x >= 0).to(torch.uint8)]


def efsignsgd(x: Tensor) -> list[Tensor]:
    return [x.abs().mean(), (x >= 0).to(torch.uint8)]


def onebit(x: Tensor) -> list[Tensor]:
    mask = x < 0
    below = mask.sum()
    low = x[mask].sum() / below
    high = x[~mask].sum() / (x.numel() - below)
    return [mask.to(torch.uint8), low, high]


def qsgd(x: Tensor, levels: int = 127, bucket: int = 128) -> list[Tensor]:
    rows = torch.nn.functional.pad(x, (0, -x.numel() % bucket)).view(-1, bucket)
    norms = rows.norm(dim=1, keepdim=True)
    level = levels * rows.abs() / norms
    floor = level.floor()
    rounded = floor + (torch.rand_like(level) < level - floor).float()
    return [(rounded * rows.sign()).to(torch.int8), norms]


def terngrad(x: Tensor) -> list[Tensor]:
    limit = 2.5 * x.std()
    clipped = x.clamp(-limit, limit)
    scale = clipped.abs().max()
    drawn = torch.rand_like(x) < clipped.abs() / scale
    return [(clipped.sign() * drawn).to(torch.int8), scale]


def natural(x: Tensor) -> list[Tensor]:
    bits = x.view(torch.int32)
    exponent = bits >> 23 & 255
    up = (bits & 0x7FFFFF) > torch.randint(0, 2**23, x.shape, dtype=torch.int32)
    return [(exponent + up).to(torch.uint8), (x < 0).to(torch.uint8)]


def dynamic8(x: Tensor, borders: Tensor) -> list[Tensor]:
    scale = x.abs().max()
    return [torch.bucketize(x / scale, borders).to(torch.uint8), scale]


def threelc(x: Tensor) -> list[Tensor]:
    scale = x.abs().max()
    digits = (x / scale).round().add(1).to(torch.uint8)
    digits = torch.nn.functional.pad(digits, (0, -digits.numel() % 5), value=1).view(-1, 5)
    quartic = digits[:, 0] * 81 + digits[:, 1] * 27 + digits[:, 2] * 9 + digits[:, 3] * 3 + digits[:, 4]
    values, lengths = torch.unique_consecutive(quartic, return_counts=True)
    return [scale, values, lengths]


def sketch(x: Tensor, bins: int = 64) -> list[Tensor]:
    sample = x[:: max(1, x.numel() // 16384)]
    borders = torch.quantile(sample, torch.arange(1, bins) / bins)
    codes = torch.bucketize(x, borders)
    sums = torch.zeros(bins).scatter_add_(0, codes, x)
    return [codes.to(torch.uint8), sums / torch.bincount(codes, minlength=bins)]


def int8(x: Tensor) -> list[Tensor]:
    scale = x.abs().max()
    return [(x * (127 / scale) + torch.rand_like(x)).floor().to(torch.int8), scale]


# The options are those of `compression_worker.OPTIONS`.
TEXTBOOK: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "fp16": fp16,
    "bf16": bf16,
    "topk": lambda x: topk(x, 0.01),
    "randomk": lambda x: randomk(x, 0.01),
    "threshold": lambda x: threshold(x, 2.5758),
    "sampled_threshold": lambda x: dgc(x, 0.01),
    "sidco_e": lambda x: sidco_e(x, 0.01),
    "adaq": lambda x: adaq(x, 0.01),
    "signsgd": signsgd,
    "efsignsgd": efsignsgd,
    "onebit": onebit,
    "qsgd": qsgd,
    "terngrad": terngrad,
    "natural": natural,
    "threelc": threelc,
    "sketch": sketch,
    "int8": int8,
}
