"""The models that benchmarks/pipelines.py trains: many small tensors, and a large embedding. Real data made of text and of shapes."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, CONTEXT, LAYERS, CLASSES = 20_000, 96, 32, 6, 512
IMAGE, BATCH = 16, 8
GPT_WORDS, GPT_BATCH = 8192, 4

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Two convolutions around which the input passes (He et al., 2016)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(inside, outside, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(inner + self.short(x))


def resnet() -> nn.Module:
    """ResNet-56 for small images: 170 tensors, 3.4 MB of gradients."""
    parts: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    width = 16
    for stage in range(3):
        for number in range(9):
            stride = 2 if stage and not number else 1
            parts.append(Block(width, 16 << stage, stride))
            width = 16 << stage
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Transformer(nn.Module):
    """Words in, a class of the next word out: by default 80 tensors, 10.7 MB of gradients, of which the embedding is 7.7."""

    def __init__(self, vocabulary: int = VOCABULARY, width: int = WIDTH, layers: int = LAYERS, classes: int = CLASSES) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, words: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        out: Tensor = self.head(self.layers(self.embedding(words) + self.place, mask=mask, is_causal=True))
        return out


@cache
def text() -> Tensor:
    """The words of the standard library's source, each as a number that grows with its rarity."""
    words: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        words += path.read_text(errors="replace").split()
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    number = {word: rank for rank, word in enumerate(sorted(counts, key=lambda word: (-counts[word], word)))}
    return torch.tensor([number[word] % VOCABULARY for word in words])


def text_batch(source: torch.Generator) -> Batch:
    words = text()
    starts = torch.randint(len(words) - CONTEXT - 1, (BATCH,), generator=source)
    rows = torch.stack([words[start : start + CONTEXT + 1] for start in starts.tolist()])
    return rows[:, :-1], (rows[:, 1:] % CLASSES).flatten()


def gpt() -> nn.Module:
    """Words in, the next word out: 10.5 million parameters, 42 MB of gradients."""
    return Transformer(GPT_WORDS, 256, 8, GPT_WORDS)


def gpt_batch(source: torch.Generator) -> Batch:
    words = text().clamp(max=GPT_WORDS - 1)  # the last one stands for all that are rarer
    starts = torch.randint(len(words) - CONTEXT - 1, (GPT_BATCH,), generator=source)
    rows = torch.stack([words[start : start + CONTEXT + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:].flatten()


def image_batch(source: torch.Generator) -> Batch:
    """Bars and waves of ten kinds at random places, with noise."""
    labels = torch.randint(10, (BATCH,), generator=source)
    grid = torch.arange(IMAGE, dtype=torch.float32)
    shift = torch.randint(IMAGE, (BATCH, 1, 1), generator=source)
    across = ((grid.view(1, 1, -1) + shift) * (1 + labels % 5).view(-1, 1, 1) * 0.4).sin()
    down = ((grid.view(1, -1, 1) + shift) * (1 + labels // 5).view(-1, 1, 1) * 0.6).cos()
    clean = torch.stack([across.expand(-1, IMAGE, -1), down.expand(-1, -1, IMAGE), across * down], 1)
    return clean + 0.5 * torch.randn(clean.shape, generator=source), labels


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch[0])
    return F.cross_entropy(scores.flatten(0, -2), batch[1])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Batch], float]] = {
    "resnet": (resnet, image_batch, 0.05),
    "transformer": (Transformer, text_batch, 0.3),
    "gpt": (gpt, gpt_batch, 1e-3),
}
"""Name -> model, batch, learning rate: of AdamW for gpt, of SGD for the others."""
