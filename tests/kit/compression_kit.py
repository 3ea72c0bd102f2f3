"""Gradients, methods and rounds for the tests of gradient compression; worker functions for real process groups."""

from __future__ import annotations

import contextlib
import io
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import DEFAULT, patch

import numpy as np
import torch
import torch.distributed as dist
from exchange_kit import simulate
from torch import Tensor

from gemini_ft.compression import collective
from gemini_ft.compression.base import Bundle, CollectiveRequest, Exchange, Reducer, Turn
from gemini_ft.compression.collective import added, answer, reduce, turn
from gemini_ft.compression.methods import COMPRESSORS, METHODS, create
from gemini_ft.compression.topology import Topology

Gradients = dict[str, Tensor]

# Chosen so that something is left out of the small tensors of the tests.
OPTIONS: dict[str, dict[str, Any]] = {
    "topk": {"ratio": 0.1},
    "chunked_topk": {"ratio": 0.1},
    "randomk": {"ratio": 0.1},
    "threshold": {"value": 1.0},
    "hard_threshold": {"count": 1},
    "sampled_threshold": {"ratio": 0.1, "warmup_steps": 3},
    "sidco_e": {"ratio": 0.05},
    "sidco_p": {"ratio": 0.05},
    "sidco_gp": {"ratio": 0.05},
    "adaq": {"ratio": 0.1},
    "dgc": {"ratio": 0.1, "warmup_steps": 3},
    "powersgd": {"rank": 2},
    "atomo": {"atoms": 2},
}
SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (40, 24),
    "conv": (12, 4, 3, 3),
    "norm": (24,),
    "odd": (13, 17),
    "scalar": (1,),
    "zero_d": (),
}
EVERY = [*METHODS, *(f"{name}+two_phase" for name in ("efsignsgd", "topk", "qsgd", "sketch", "powersgd") if name in COMPRESSORS)]


def method(name: str, **more: Any) -> Reducer:
    """A fresh method by its name in `EVERY`."""
    bare, _, suffix = name.partition("+")
    return create(bare, **({"two_phase": True} if suffix else {}), **OPTIONS.get(bare, {}), **more)


def gradients(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Gradients:
    """Normal values whose scale differs from tensor to tensor, float32."""
    stream = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=stream) * 10.0 ** (number % 3 - 1) for number, (name, shape) in enumerate(shapes.items())}


def together(
    methods: Sequence[Reducer],
    ranks: Sequence[Mapping[str, Tensor]],
    step: int,
    lr: float | None = None,
    topology: Topology | None = None,
    sent: Sequence[list[Tensor]] | None = None,
) -> Gradients:
    """One step of all ranks in this process; their results must be the same bits. ``sent`` gets what each hands to collectives."""
    bundles = [Bundle.of(tensors, each.align) for each, tensors in zip(methods, ranks, strict=True)]
    turns = [Turn(step=step, rank=rank, world=len(ranks), lr=lr) for rank in range(len(ranks))]
    exchanges = [each.exchange(bundle, at) for each, bundle, at in zip(methods, bundles, turns, strict=True)]
    if sent is not None:
        exchanges = [spied(exchange, tensors) for exchange, tensors in zip(exchanges, sent, strict=True)]
    results = simulate(exchanges, topology)
    for other in results[1:]:
        assert same(results[0].tensors(), other.tensors())
    return results[0].tensors()


def spied(exchange: Exchange, sent: list[Tensor]) -> Exchange:
    """The same exchange; ``sent`` gets what it hands to collectives."""
    try:
        request = next(exchange)
        while True:
            sent.append(request.tensor)
            request = exchange.send((yield request))
    except StopIteration as done:
        bundle: Bundle = done.value
        return bundle


def through_a_file(state: Mapping[str, Any]) -> Any:
    """As a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether names, shapes, dtypes and all bits are equal."""
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape and one[name].dtype == other[name].dtype and bits(one[name]) == bits(other[name])
        for name in one
    )


def bits(tensor: Tensor) -> bytes:
    raw: np.ndarray[Any, Any] = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return raw.tobytes()


def measured(exchange: Exchange) -> tuple[Bundle, int]:
    """Run an exchange of one rank among itself; what it comes to, and the bytes it has handed to collectives."""
    nbytes = 0
    try:
        request = next(exchange)
        while True:
            nbytes += request.tensor.nbytes
            request = exchange.send(answer(request, None))
    except StopIteration as done:
        return done.value, nbytes


# -- on a process group


@contextlib.contextmanager
def called() -> Iterator[list[str]]:
    """The collectives that exchanges call meanwhile, by name."""
    names: list[str] = []

    def note(name: str, *_: Any, **__: Any) -> Any:
        names.append(name)
        return DEFAULT

    with contextlib.ExitStack() as patches:
        for module, name in ((dist, "all_reduce"), (dist, "all_to_all_single"), (collective, "all_gather_single")):
            spy = patches.enter_context(patch.object(module, name, wraps=getattr(module, name)))
            spy.side_effect = partial(note, name)
        yield names


def run_every(steps: int, world: int) -> dict[str, str]:
    """Each method for some steps on this rank, with pauses so that ranks arrive in every order; its results as hex."""
    dist.init_process_group("gloo")
    pauses = random.Random(int(os.environ["RANK"]))
    found = {}
    for name in EVERY:
        each = method(name)
        for step in range(steps):
            time.sleep(pauses.random() * 0.01)
            means = reduce(each, gradients(1000 * step + dist.get_rank()), step)
        found[name] = "".join(bits(tensor).hex() for tensor in means.values())
    for number, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int32)):
        # Long enough for more than a gather, not to be divided by ranks, and as float16 with sums that it cannot hold.
        scale = 20.0 / world if dtype == torch.int8 else 20.0 * 1000 ** (number == 1)
        parts = [torch.randn(20_001, generator=torch.Generator().manual_seed(rank)).mul_(scale).to(dtype) for rank in range(world)]
        with called() as names:
            (total,) = answer(CollectiveRequest("sum", parts[dist.get_rank()].clone()), None)
        in_any_order = world == 2 or not dtype.is_floating_point
        assert names == (["all_reduce"] if in_any_order else ["all_to_all_single", "all_gather_single"]), dtype
        assert same({"": total}, {"": added(parts)}), dtype
    nothing = reduce(create("threshold"), {"w": torch.zeros(9)}, 0)["w"]  # payloads of no bytes, from all ranks
    assert torch.equal(nothing, torch.zeros(9))
    assert turn(0).world == world
    dist.destroy_process_group()
    return found
