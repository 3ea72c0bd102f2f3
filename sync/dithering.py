"""QSGD (Alistarh et al., NeurIPS 2017): values as few bits each, beside one norm per bucket. Unbiased. For the dense phase of SparCML."""

from __future__ import annotations

import hashlib

import torch

from . import wire

_FLAG = 8  # bytes: whether what follows is quantised


def stream_seed(seed: int, number: int, rank: int) -> int:
    """The seed of a rank's chances for one sum: one that no other sum and no other rank has."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {number} {rank}".encode(), digest_size=7).digest(), "little")


def quantise(values: torch.Tensor, bits: int, bucket: int, generator: torch.Generator) -> torch.Tensor:
    """A message with the values of a tensor, in ``bits`` bits each: the sign, and a level of the L2 norm of their bucket.

    A value v of a bucket with norm w becomes w / s times one of the two whole numbers beside s |v| / w, by chance, so that v is what is
    expected, with s = 2^(bits - 1) - 1 levels. Values of a part with a NaN, an infinity, or a norm that is no
    number of their dtype travel as they are: one of them may become the norm.
    """
    levels = 2 ** (bits - 1) - 1
    buckets = _padded(values.flatten(), bucket).view(-1, bucket).to(torch.float64)
    largest = buckets.abs().amax(1, keepdim=True)  # what is divided by it can be squared, however small or large it was
    norms = largest * (buckets / largest.where(largest > 0, 1.0)).norm(dim=1, keepdim=True)
    if not bool((norms <= torch.finfo(values.dtype).max).all()):
        return _message(0, wire.as_bytes(values))
    scaled = levels * buckets.abs() / norms.where(norms > 0, 1.0)
    codes = (scaled + torch.rand(scaled.shape, generator=generator, dtype=torch.float64).to(scaled.device)).floor_().clamp_(max=levels)
    signed = codes.copysign(buckets).to(torch.int16) + levels
    return _message(1, torch.cat([wire.as_bytes(norms), _pack(signed.to(torch.uint8).flatten(), bits)]))


def restore(message: torch.Tensor, like: torch.Tensor, bits: int, bucket: int) -> torch.Tensor:
    """The values of a message, in the shape and dtype of ``like``."""
    payload = wire.payload(message)
    rest = payload[_FLAG:]
    if not int(payload[0]):
        return rest.view(like.dtype).view(like.shape)
    levels, buckets = 2 ** (bits - 1) - 1, -(-like.numel() // bucket)
    norms = rest[: 8 * buckets].view(torch.float64).unsqueeze(1)
    signed = _unpack(rest[8 * buckets :], bits).view(buckets, bucket).to(torch.float64) - levels
    values: torch.Tensor = (signed * (norms / levels)).flatten()[: like.numel()]
    return values.to(like.dtype).view(like.shape)


def _message(flag: int, data: torch.Tensor) -> torch.Tensor:
    message = wire.new(_FLAG + len(data), data.device)
    payload = wire.payload(message)
    payload[:_FLAG] = flag
    payload[_FLAG:] = data
    return message


def _padded(flat: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.cat([flat, flat.new_zeros(-len(flat) % multiple)])


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of ``bits`` bits in bytes, the first in the lowest bits; uint8, as many as a whole number of bytes takes."""
    columns = codes.view(-1, 8 // bits)
    packed = columns[:, 0].clone()
    for place in range(1, columns.shape[1]):
        packed |= columns[:, place] << (bits * place)
    return packed


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    places = range(0, 8, bits)
    return torch.stack([packed >> place & (2**bits - 1) for place in places], 1).flatten()
