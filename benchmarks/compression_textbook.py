"""The public formulations that our encoders are timed against: each method in the few lines of torch in which it is published.

They follow the papers' pseudo-code as public PyTorch code has it, with what makes that slow: sorting, boolean masks, random numbers
of torch's generator, codes that are not packed. Mistakes of such code are not repeated, and nobody's code is copied. Each takes one
float32 tensor, flat but for ATOMO's matrices, and returns the tensors that would travel; what keeps a state is an object per tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gemini_ft.compression.cast import codebook


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


def sampled_threshold(x: Tensor, ratio: float) -> list[Tensor]:
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


class Dgc:
    """With its memory: momentum correction, and masking of what is sent."""

    def __init__(self, ratio: float, momentum: float = 0.9) -> None:
        self.ratio, self.momentum = ratio, momentum
        self.velocity = self.residual = torch.zeros(1)

    def __call__(self, x: Tensor) -> list[Tensor]:
        self.velocity = self.momentum * self.velocity + x
        self.residual = self.residual + self.velocity
        values, indices = sampled_threshold(self.residual, self.ratio)
        self.velocity[indices] = 0
        self.residual[indices] = 0
        return [values, indices]


def exponential(tail: Tensor, start: Tensor | float, ratio: float) -> Tensor:
    return start - (tail.mean() - start) * math.log(ratio)


def pareto(tail: Tensor, start: Tensor | float, ratio: float) -> Tensor:
    mean, variance = tail.mean() - start, tail.var()
    shape = 0.5 * (mean**2 / variance - 1)
    scale = 0.5 * mean * (mean**2 / variance + 1)
    return start + scale * (1 - torch.exp(shape * math.log(ratio))) / shape


def gamma(tail: Tensor, start: Tensor | float, ratio: float) -> Tensor:
    spread = torch.log(tail.mean()) - torch.log(tail + 1e-30).mean()
    shape = (3 - spread + torch.sqrt((spread - 3) ** 2 + 24 * spread)) / (12 * spread)
    return -tail.mean() / shape * (math.log(ratio) + torch.lgamma(shape))


Fit = Callable[[Tensor, Tensor | float, float], Tensor]


class Sidco:
    """With its controller of stages."""

    def __init__(self, ratio: float, first: Fit, later: Fit) -> None:
        self.ratio, self.first, self.later = ratio, first, later
        self.stages = 1
        self.achieved: list[float] = []

    def __call__(self, x: Tensor) -> list[Tensor]:
        magnitude = x.abs()
        indices = (magnitude > self.limit(magnitude)).nonzero().view(-1)
        self.achieved.append(indices.numel() / (self.ratio * x.numel()))
        if len(self.achieved) == 5:
            mean = sum(self.achieved) / 5
            self.stages = max(1, self.stages - (mean > 1.2) + (mean < 0.8))
            self.achieved.clear()
        return [x[indices], indices]

    def limit(self, tail: Tensor) -> Tensor:
        if self.stages == 1:
            return self.first(tail, 0.0, self.ratio)
        limit = self.first(tail, 0.0, 0.25)
        for _ in range(self.stages - 1):
            tail = tail[tail > limit]
            limit = self.later(tail, tail.min(), (self.ratio / 0.25) ** (1 / (self.stages - 1)))
        return limit


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


class Signum:
    """With its momentum."""

    def __init__(self, momentum: float = 0.9) -> None:
        self.momentum, self.average = momentum, torch.zeros(1)

    def __call__(self, x: Tensor) -> list[Tensor]:
        self.average = self.momentum * self.average + (1 - self.momentum) * x
        return signsgd(self.average)


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


def natural8(x: Tensor) -> list[Tensor]:
    bits = x.view(torch.int32)
    up = (bits & 0x7FFFFF) > torch.randint(0, 2**23, x.shape, dtype=torch.int32)
    exponent = (bits >> 23 & 255) + up
    return [(exponent.clamp(18, 145) - 18 | bits >> 24 & 128).to(torch.uint8)]


def dynamic8(x: Tensor) -> list[Tensor]:
    codes = codebook(x.device)
    borders = (codes[:-1] + codes[1:]) / 2
    scale = x.abs().max()
    return [torch.bucketize(x / scale, borders).to(torch.uint8), scale]


def threelc(x: Tensor) -> list[Tensor]:
    scale = x.abs().max()
    digits = (x / scale).round().add(1).to(torch.uint8)
    digits = torch.nn.functional.pad(digits, (0, -digits.numel() % 5), value=1).view(-1, 5)
    quartic = digits[:, 0] * 81 + digits[:, 1] * 27 + digits[:, 2] * 9 + digits[:, 3] * 3 + digits[:, 4]
    values, lengths = torch.unique_consecutive(quartic, return_counts=True)
    zeros = values == 121
    pieces = torch.where(zeros, (lengths + 13) // 14, lengths)
    runs = torch.repeat_interleave(torch.where(zeros, 255, values), pieces)
    rest = (lengths - 14 * (pieces - 1))[zeros]
    runs[pieces.cumsum(0)[zeros] - 1] = torch.where(rest > 1, rest + 241, 121).to(torch.uint8)
    return [scale, runs]


def sketch(x: Tensor, bins: int = 64) -> list[Tensor]:
    sample = x[:: max(1, x.numel() // 16384)]
    borders = torch.quantile(sample, torch.arange(1, bins) / bins)
    codes = torch.bucketize(x, borders)
    sums = torch.zeros(bins).scatter_add_(0, codes, x)
    return [codes.to(torch.uint8), sums / torch.bincount(codes, minlength=bins)]


def inceptionn(x: Tensor, bound: int = 10) -> list[Tensor]:
    exponents = (x.view(torch.int32) >> 23) & 0xFF
    tags = (exponents >= 127 - bound).int() + (exponents >= 127 - bound // 2) + (exponents >= 127)
    words = (x[tags == 2] * 2**15).to(torch.int16), (x[tags == 1] * 2.0 ** (7 + bound // 2)).to(torch.int8)
    columns = torch.nn.functional.pad(tags, (0, -x.numel() % 4)).view(-1, 4)
    packed = columns[:, 0] + 4 * columns[:, 1] + 16 * columns[:, 2] + 64 * columns[:, 3]
    return [x[tags == 3], *words, packed.to(torch.uint8)]


def int8(x: Tensor) -> list[Tensor]:
    scale = x.abs().max()
    return [(x * (127 / scale) + torch.rand_like(x)).floor().to(torch.int8), scale]


def atomo(matrix: Tensor, atoms: int) -> list[Tensor]:
    left, weights, right = torch.linalg.svd(matrix, full_matrices=False)
    chances = (atoms * weights / weights.sum()).clamp(max=1)
    drawn = (torch.rand_like(chances) < chances).nonzero().view(-1)
    return [left[:, drawn], weights[drawn] / chances[drawn], right[drawn]]


Encoder = Callable[[Tensor], list[Tensor]]

# What makes the encoder of one tensor. The options are those of `compression_worker.OPTIONS`.
TEXTBOOK: dict[str, Callable[[], Encoder]] = {
    "fp16": lambda: fp16,
    "bf16": lambda: bf16,
    "topk": lambda: partial(topk, ratio=0.01),
    "randomk": lambda: partial(randomk, ratio=0.01),
    "threshold": lambda: partial(threshold, value=2.5758),
    "sampled_threshold": lambda: partial(sampled_threshold, ratio=0.01),
    "dgc": lambda: Dgc(0.01),
    "sidco_e": lambda: Sidco(0.01, exponential, exponential),
    "sidco_p": lambda: Sidco(0.01, pareto, pareto),
    "sidco_gp": lambda: Sidco(0.01, gamma, pareto),
    "adaq": lambda: partial(adaq, ratio=0.01),
    "signsgd": lambda: signsgd,
    "signum": Signum,
    "efsignsgd": lambda: efsignsgd,
    "onebit": lambda: onebit,
    "qsgd": lambda: qsgd,
    "terngrad": lambda: terngrad,
    "natural": lambda: natural,
    "natural8": lambda: natural8,
    "dynamic8": lambda: dynamic8,
    "threelc": lambda: threelc,
    "sketch": lambda: sketch,
    "inceptionn": lambda: inceptionn,
    "int8": lambda: int8,
    "atomo": lambda: partial(atomo, atoms=3),
}
