"""Rings without aggregators whose messages carry few bits: each part of a gradient goes around twice, and every hop encodes it anew."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import ProcessGroup

from gemini_ft.compression import truncation
from gemini_ft.validation import Seed, checked

from . import wire
from .base import Scheme, admit_dense
from .exchange import Exchange
from .options import Bucket, RingWords
from .rows import from_matrix
from .sparcml import stream_seed

_FLAG = 8  # bytes: whether what follows is quantised


class EncodedRing(Scheme):
    """A ring all-reduce in which every message is encoded, on both legs; values are added in float32.

    Each part of the gradient goes around once, and every rank adds its own values to what comes; then the sums go around, encoded once.
    Every rank has the same bits. A sparse gradient is made dense; float64 is rounded to float32 first. Nothing is kept of what is left out.
    """

    whole = True

    def _sum(self, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        matrix, exchange = admit_dense(tensor, group, self._describe(tensor))
        if exchange.size > 1:
            matrix = self._around(matrix.view(-1).float(), exchange).to(matrix.dtype).view(matrix.shape)
        return from_matrix(matrix, tensor)

    def _around(self, flat: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        """The sum of the ranks' gradients, float32 (n,)."""
        size, rank = exchange.size, exchange.rank
        to, source = (rank + 1) % size, (rank - 1) % size
        length = -(-flat.numel() // size)
        parts = torch.cat([flat, flat.new_zeros(size * length - flat.numel())]).view(size, length)
        coming = torch.empty_like(parts[0])
        for step in range(size - 1):
            message = exchange.shift(self._encoded(parts[(rank - step) % size]), to, source)
            parts[(rank - step - 1) % size] += self._decoded(wire.payload(message), coming)
        message = self._encoded(parts[(rank + 1) % size])  # a sum, which this rank takes as all others will have it
        for step in range(size):
            self._decoded(wire.payload(message), parts[(rank + 1 - step) % size])
            if step < size - 1:
                message = exchange.shift(message, to, source)
        return parts.view(-1)[: flat.numel()]

    def recoded(self, part: torch.Tensor) -> torch.Tensor:
        """A part, float32 (n,), as the next rank has it: encoded and decoded."""
        return self._decoded(wire.payload(self._encoded(part)), torch.empty_like(part))

    @abstractmethod
    def _encoded(self, part: torch.Tensor) -> torch.Tensor:
        """A message with the values of a part, float32 (n,)."""

    @abstractmethod
    def _decoded(self, payload: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """Fills ``into``, float32 (n,), with what `_encoded` gave, and returns it."""


class InceptionnRing(EncodedRing):
    """The exchange of INCEPTIONN (Li et al., MICRO 2018, section IV): every message of the ring carries truncated values.

    Each is a gradient, or a sum of gradients, truncated as in `gemini_ft.compression.truncation`. With n ranks a value is truncated n times
    on its way, so it is off by less than n 2^-bound beside the roundings of float32, in which values are added. Infinities and NaN
    travel as they are. For error feedback there is `gemini_ft.compression.cast`.

    ``bound``: b of the error bound 2^-b, from 1 to 14, in units of the gradients that are added up; the paper's are 6, 8 and 10.
    """

    name = "inceptionn-ring"

    @checked
    def __init__(self, bound: truncation.Bound = 10) -> None:
        self._bound = bound

    @property
    def _title(self) -> str:
        return f"{self.name} within 2^-{self._bound}"

    def _encoded(self, part: torch.Tensor) -> torch.Tensor:
        words = [each.view(torch.uint8) for each in truncation.encode(part, self._bound)]
        message = wire.new(sum(map(len, words)), part.device)
        torch.cat(words, out=wire.payload(message))
        return message

    def _decoded(self, payload: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        return truncation.decode(payload, into, self._bound)


class Ring8(EncodedRing):
    """A ring whose messages have 8 bits a value, or the 16 of bfloat16: each hop quantises anew, by chance and without bias.

    A value becomes one of the two numbers beside it that the words have, by chance, so that the value is what is expected; words of 8
    bits are fractions of the largest magnitude of their bucket, which travels in float32. A sum of n ranks is rounded n times, each
    time by less than the distance of two words. A part with an infinity, a NaN or a subnormal scale travels in float32. The chances
    depend on the seed, the number of the sum and the rank alone.

    Args:
        words: int8, evenly spaced; e4m3 or e5m2, floats of 8 bits; or bf16.
        bucket: values that share a scale.
        seed: of the chances.
    """

    name = "ring8"

    @checked
    def __init__(self, words: RingWords = "int8", bucket: Bucket = 128, seed: Seed = 0) -> None:
        self._words, self._bucket, self._seed = words, bucket, seed
        self._sums = 0
        self._chances = torch.Generator()

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums = int(state["sums"])

    def wire_bytes(self, elements: int) -> int:
        """Bytes of the words and scales of so many values; on each leg a rank sends all parts but one of them."""
        return elements * _KINDS[self._words].dtype.itemsize + 4 * -(-elements // self._bucket)

    @property
    def _title(self) -> str:
        return f"{self.name} in {self._words}, buckets of {self._bucket}, seed {self._seed},"

    def _around(self, flat: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        self._chances.manual_seed(stream_seed(self._seed, f"{self._sums} of {len(flat)}", exchange.rank))
        self._sums += 1
        return super()._around(flat, exchange)

    def _encoded(self, part: torch.Tensor) -> torch.Tensor:
        buckets, kind = torch.cat([part, part.new_zeros(-len(part) % self._bucket)]).view(-1, self._bucket), _KINDS[self._words]
        largest = buckets.abs().amax(1, keepdim=True)
        scales = largest / kind.most if kind.most is not None else torch.ones_like(largest)
        if not bool(part.isfinite().all()) or bool(((largest > 0) & (scales < torch.finfo(torch.float32).tiny)).any()):
            return _message(0, wire.as_bytes(part))
        scales = scales.where(scales > 0, 1.0)
        scaled = buckets.double() / scales
        distance = kind.distance(scaled)
        up = torch.rand(scaled.shape, generator=self._chances, dtype=torch.float64).to(scaled.device)
        rounded = (scaled / distance + up).floor_().mul_(distance)
        if kind.most is not None:
            rounded.clamp_(-kind.most, kind.most)
        return _message(1, wire.as_bytes(scales), wire.as_bytes(rounded.to(kind.dtype)))

    def _decoded(self, payload: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        rest = payload[_FLAG:]
        if not int(payload[0]):
            return into.copy_(rest.view(torch.float32))
        buckets = -(-len(into) // self._bucket)
        scales, words = rest[: 4 * buckets].view(torch.float32), rest[4 * buckets :].view(_KINDS[self._words].dtype)
        values = words.float().view(buckets, self._bucket) * scales.unsqueeze(1)
        return into.copy_(values.flatten()[: len(into)])


class _Words:
    """Words of a dtype.

    Attributes:
        most: the largest one, for which buckets are scaled; None: they are not.
        mantissa: bits of it; None: the words are whole numbers.
        least: exponent of the smallest number that has them all.
    """

    def __init__(self, dtype: torch.dtype, most: float | None, mantissa: int | None = None, least: int = 0) -> None:
        self.dtype, self.most, self._mantissa, self._least = dtype, most, mantissa, least

    def distance(self, values: torch.Tensor) -> torch.Tensor:
        """The distance between the two words beside each value."""
        if self._mantissa is None:
            return torch.ones_like(values)
        exponents = (values.frexp().exponent - 1).clamp_(min=self._least) - self._mantissa
        return torch.ldexp(torch.ones_like(values), exponents)


_KINDS = {
    "int8": _Words(torch.int8, 127.0),
    "e4m3": _Words(torch.float8_e4m3fn, 448.0, 3, -6),
    "e5m2": _Words(torch.float8_e5m2, 57344.0, 2, -14),
    "bf16": _Words(torch.bfloat16, None, 7, -126),
}


def _message(flag: int, *parts: torch.Tensor) -> torch.Tensor:
    return wire.wrap(torch.cat([parts[0].new_full((_FLAG,), flag), *parts]))
