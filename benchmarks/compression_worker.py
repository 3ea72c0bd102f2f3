"""One process of benchmarks/compression.py: times codecs alone, or is one rank of four behind shaped links. Prints JSON at the end."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from compression_textbook import TEXTBOOK
from gemini_ft.compression.base import Bundle, Compressor, Payload, Reducer, Turn
from gemini_ft.compression.collective import answer, turn
from gemini_ft.compression.methods import COMPRESSORS, METHODS, create

OPTIONS: dict[str, dict[str, Any]] = {
    "topk": {"ratio": 0.01},
    "randomk": {"ratio": 0.01},
    "threshold": {"value": 2.5758},  # gradients are standard normal: one element of a hundred
    "hard_threshold": {"count": 1},  # replaced by what makes lambda the same
    "sampled_threshold": {"ratio": 0.01},
    "sidco_e": {"ratio": 0.01},
    "sidco_p": {"ratio": 0.01},
    "sidco_gp": {"ratio": 0.01},
    "adaq": {"ratio": 0.01},
    "dgc": {"ratio": 0.01},
    "powersgd": {"rank": 1},
    "atomo": {"atoms": 3},
}
CODECS = [name for name in METHODS if name != "hard_threshold"]  # which is threshold
LINKS = [*(name for name in CODECS if name != "atomo"), "efsignsgd+two_phase"]
Columns = dict[str, list[float]]
PATIENCE = 4.0  # seconds after which a codec has been timed often enough, if it was three times
LARGEST = 2048  # rows of a matrix that is decomposed: time grows with their cube
HOOKS = ["torch fp16 hook", "torch bf16 hook", "torch PowerSGD hook"]  # the batched one fails an assertion of its own in torch 2.13


def settle(name: str) -> int:
    """Steps before the clock counts: SIDCo's controllers look for their number of stages."""
    return 11 if name.startswith("sidco") else 2


class Bucket:
    """A stand-in for a DDP bucket, as far as torch's hooks use one; real buckets cannot be made outside of DDP.

    The tensors are parts of one buffer, as DDP's are when a backward pass has written them there: `fill` does that pass's part.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._flat = torch.empty(sum(shape.numel() for shape in self._shapes))

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Writes gradients, which hooks change in place."""
        torch.cat([tensor.reshape(-1) for tensor in tensors], out=self._flat)

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        parts = torch.split(self._flat, [shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class Hook:
    """One of torch's hooks as a step: flat in, flat mean out.

    Args:
        tensors: the gradients of every step.
    """

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._bucket = list(tensors), Bucket(tensors)
        group = dist.group.WORLD
        if "PowerSGD" in name:
            self._state: Any = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
            self._hook: Any = powerSGD_hook.powerSGD_hook
        else:
            self._state = group
            self._hook = default_hooks.fp16_compress_hook if "fp16" in name else default_hooks.bf16_compress_hook

    def prepare(self) -> None:
        """Puts the gradients where DDP's backward pass leaves them; not to be timed, for DDP does not do it beside the hook."""
        self._bucket.fill(self._tensors)

    def __call__(self) -> Tensor:
        result: Tensor | list[Tensor] = self._hook(self._state, self._bucket).wait()
        return result[0] if isinstance(result, list) else result


def gradients(megabytes: float, count: int, seed: int) -> dict[str, Tensor]:
    """Standard normal matrices of equal size, together so many MB."""
    elements = int(megabytes * 2**20 / 4 / count)
    rows = 2 ** (int(elements**0.5).bit_length() - 1)
    stream = torch.Generator().manual_seed(seed)
    return {f"layer{number}": torch.randn(rows, elements // rows, generator=stream) for number in range(count)}


def method(name: str) -> Reducer:
    bare, _, two_phase = name.partition("+")
    return create(bare, **({"two_phase": True} if two_phase else {}), **OPTIONS.get(bare, {}))


def step(each: Reducer, tensors: dict[str, Tensor], at: Turn) -> dict[str, float]:
    """Seconds of one exchange, bytes handed to collectives."""
    spent = {"encode": 0.0, "collective": 0.0, "decode": 0.0, "nbytes": 0.0}
    clock = time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        spent[phase] += now - clock
        clock = now

    exchange = each.exchange(Bundle.of(tensors, each.align), at)
    request, phase = next(exchange), "encode"
    try:
        while True:
            lap(phase)
            spent["nbytes"] += request.tensor.nbytes
            given = answer(request, None)
            lap("collective")
            agreed = request.kind == "max"  # on scales: what is encoded comes after that
            request, phase = exchange.send(given), phase if agreed else "decode"
    except StopIteration as done:
        done.value.tensors()
        lap("decode")
    return spent


def timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


# --------------------------------------------------------------------------- codecs alone


def codecs(megabytes: float, count: int, rounds: int, names: Sequence[str]) -> dict[str, Columns]:
    """By method: seconds of encode, decode, of whole exchanges fused and layer by layer, of the textbook's encode; bytes."""
    tensors = gradients(megabytes, count, 0)
    if max(min(tensor.shape) for tensor in tensors.values()) > LARGEST:
        names = [name for name in names if name != "atomo"]
    return {name: _codec(name, tensors, rounds) for name in random.Random(count).sample(names, len(names))}


def _codec(name: str, tensors: dict[str, Tensor], rounds: int) -> Columns:
    """A figure per round. The order changes from round to round: each finds caches and free memory as another has left them."""
    timings, until = _timings(name, tensors), time.perf_counter() + PATIENCE
    columns: dict[str, list[float]] = {}
    for number in range(settle(name) + rounds):
        if number >= settle(name) + 3 and time.perf_counter() > until:
            break
        row: dict[str, float] = {}
        for timing in random.Random(number).sample(timings, len(timings)):
            row |= timing(Turn(step=number))
        for key, value in row.items():
            columns.setdefault(key, []).append(value)
    return {key: values[settle(name) :] for key, values in columns.items()}


def _timings(name: str, tensors: dict[str, Tensor]) -> list[Callable[[Turn], dict[str, float]]]:
    fused, layered = method(name), method(name)

    def together(at: Turn) -> dict[str, float]:
        spent = step(fused, tensors, at)
        alone = {} if name in COMPRESSORS else {"encode": spent["encode"], "decode": spent["decode"]}
        return {"fused": _sides(spent), "nbytes": spent["nbytes"], **alone}

    def one_by_one(at: Turn) -> dict[str, float]:
        return {"layered": sum(_sides(step(layered, {key: value}, at)) for key, value in tensors.items())}

    timings: list[Callable[[Turn], dict[str, float]]] = [together, one_by_one]
    if name in COMPRESSORS:
        timings.append(_without_feedback(COMPRESSORS[name](**OPTIONS.get(name, {})), tensors))
    if name in TEXTBOOK:
        timings.append(_textbook(name, tensors))
    if name == "powersgd":
        hook = Hook("torch PowerSGD hook", list(tensors.values()))

        def torchs(at: Turn) -> dict[str, float]:
            hook.prepare()
            return {"torch": timed(hook)}

        timings.append(torchs)
    return timings


def _sides(spent: dict[str, float]) -> float:
    return spent["encode"] + spent["decode"]


def _without_feedback(each: Compressor, tensors: dict[str, Tensor]) -> Callable[[Turn], dict[str, float]]:
    def alone(at: Turn) -> dict[str, float]:
        payloads: list[Payload] = []
        encode = timed(lambda: payloads.append(each.compress(Bundle.of(tensors, each.align), at)))
        return {"encode": encode, "decode": timed(lambda: each.decompress(payloads[0]).tensors())}

    return alone


def _textbook(name: str, tensors: dict[str, Tensor]) -> Callable[[Turn], dict[str, float]]:
    encoders = [TEXTBOOK[name]() for _ in tensors]
    given = [tensor if name == "atomo" else tensor.view(-1) for tensor in tensors.values()]
    return lambda at: {"textbook": timed(lambda: [encode(tensor) for encode, tensor in zip(encoders, given, strict=True)])}


# --------------------------------------------------------------------------- behind links


def link(megabytes: float, count: int, rounds: int, names: Sequence[str]) -> dict[str, Columns]:
    """By method or hook: seconds of one synchronisation, of the slowest rank, and its phases on this one."""
    tensors = gradients(megabytes, count, dist.get_rank())
    methods = {name: method(name) for name in names if name not in HOOKS}
    hooks = {name: Hook(name, list(tensors.values())) for name in names if name in HOOKS}
    columns: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for number in range(max(map(settle, names)) + rounds):
        for name in random.Random(number).sample(names, len(names)):  # an order that changes, alike on all ranks
            if number >= settle(name) + rounds:
                continue
            if name in hooks:
                hooks[name].prepare()
            dist.barrier()
            begin = time.perf_counter()
            row = step(methods[name], tensors, turn(number)) if name in methods else {}
            if name in hooks:
                hooks[name]()
            total = torch.tensor([time.perf_counter() - begin])
            dist.all_reduce(total, dist.ReduceOp.MAX)
            for key, value in {**row, "total": float(total)}.items():
                columns[name].setdefault(key, []).append(value)
    return {name: {key: values[settle(name) :] for key, values in column.items()} for name, column in columns.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["codecs", "link"])
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--methods", nargs="*", default=[])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.part == "codecs":
            dist.init_process_group("gloo", init_method=f"file://{Path(folder, 'store')}", rank=0, world_size=1)
        else:
            dist.init_process_group("gloo")
        names = arguments.methods or (CODECS if arguments.part == "codecs" else [*LINKS, *HOOKS])
        run = codecs if arguments.part == "codecs" else link
        found = run(arguments.megabytes, arguments.tensors, arguments.rounds, names)
        if dist.get_rank() == 0:
            print(json.dumps(found))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
