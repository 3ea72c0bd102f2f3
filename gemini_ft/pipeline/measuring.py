"""Measures for the planners: when gradients become ready, and what compressing, communicating and decompressing take on this network."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gemini_ft import accelerator
from gemini_ft.compression.base import Turn
from gemini_ft.compression.costs import Affine, FittedCost, Sample, fit_line, interpolate
from gemini_ft.compression.timeline import GroupCosts
from gemini_ft.pipeline.plan import Tensor
from gemini_ft.pipeline.routes import Gradients, Route, of_all_ranks

_ROUNDS = 3  # that are counted, after one that is not
_LONG = 0.25  # seconds of one exchange from which on one round says enough, and larger groups nothing new
_LARGEST = 16 * 2**20  # dense bytes of the groups that are tried; larger ones are extrapolated
_LINE = 0.1  # worst relative error up to which a line is good enough
_KEPT = 16  # newest steps whose ready times are kept


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of groups of one rule, by dense bytes, each with its error; the same figures on all ranks."""

    encode: FittedCost
    communicate: FittedCost
    decode: FittedCost

    def group(self, device: torch.device) -> GroupCosts:
        """The costs for the timeline. On CPUs compressing takes processors and interpreter from the backward pass, on a stream not."""
        return GroupCosts(
            encode=self.encode.cost,
            communicate=self.communicate.cost,
            decode=self.decode.cost,
            encode_on="compute" if device.type == "cpu" else "beside",
        )

    @property
    def worst(self) -> float:
        """The largest relative error of the three that matters: of what takes longest."""
        return max((self.encode, self.communicate, self.decode), key=lambda fit: fit.cost(_LARGEST)).worst


def measure(make: Callable[[], Route], tensors: Sequence[Tensor], group: Any, device: torch.device) -> Costs:
    """Costs of groups of consecutive tensors. Collective; the group must be idle.

    ``make``: a route without memory. ``tensors``: of one rule, in their order, at least two.
    """
    found = []
    for run in _runs(tensors):
        gradients = _gradients(run, device)
        times = [_timed(make(), gradients, group, device)]
        if is_short := sum(slowest(times[0], group)) < _LONG:
            times = [_timed(make(), gradients, group, device) for _ in range(_ROUNDS)]
        typical = [statistics.median(each) for each in zip(*times, strict=True)]
        found.append((_nbytes(run), slowest([max(each, 1e-9) for each in typical], group)))
        if not is_short and found[0][0] < found[-1][0]:
            break
    encode, communicate, decode = ([Sample(nbytes=nbytes, seconds=times[stage]) for nbytes, times in found] for stage in range(3))
    return Costs(encode=fitted(encode), communicate=fitted(communicate), decode=fitted(decode))


def fitted(samples: Sequence[Sample]) -> FittedCost:
    """A line where one fits, else straight pieces."""
    if len({sample.nbytes for sample in samples}) < 2:
        return FittedCost(cost=Affine(alpha=statistics.median(sample.seconds for sample in samples), beta=0.0), mean=0.0, worst=0.0)
    line = fit_line(samples)
    return line if line.worst <= _LINE else interpolate(samples)


def _runs(tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Groups to try: the smallest and the largest tensor, and about 1, 2, 4, ... of the middle, up to all."""
    order = sorted(range(len(tensors)), key=lambda number: tensors[number].nbytes)
    spans = [(order[0], 1), (order[-1], 1)]
    count = 1
    while count < len(tensors):
        spans.append(((len(tensors) - count) // 2, count))
        count *= 2
    spans.append((0, len(tensors)))
    runs = {tuple(tensors[first : first + count]) for first, count in spans}
    smallest = tensors[order[0]].nbytes
    fitting = [run for run in runs if _nbytes(run) <= max(_LARGEST, 2 * smallest)]
    fitting = fitting if len({_nbytes(run) for run in fitting}) > 1 else sorted(runs, key=_nbytes)[:2]
    return sorted(fitting, key=lambda run: (_nbytes(run), run[0].name))


def _nbytes(run: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in run)


def _gradients(run: Sequence[Tensor], device: torch.device) -> Gradients:
    """Normally distributed; training's own random numbers stay what they are."""
    source = torch.Generator().manual_seed(0)
    dtypes = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64, 16: torch.complex128}
    return {t.name: torch.randn(t.shape, generator=source).to(device, dtypes[t.itemsize]) for t in run}


def _timed(route: Route, gradients: Gradients, group: Any, device: torch.device) -> tuple[float, float, float]:
    """Seconds of encoding, communicating and decoding."""
    world, rank = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
    work, answer = route.average(gradients, Turn(step=0, rank=rank, world=world), group, 1.0), None
    encode = communicate = 0.0
    begin = now_on(device)
    while True:
        try:
            call = work.send(answer)
        except StopIteration:
            return encode, communicate, now_on(device) - begin
        encode += now_on(device) - begin
        if group is not None:
            dist.barrier(group)  # so that no rank's compression is charged to the network
        begin = now_on(device)
        answer = call.run()
        after = now_on(device)
        communicate, begin = communicate + after - begin, after


def now_on(device: torch.device) -> float:
    """The time when all that was queued is done, in seconds."""
    if (module := accelerator.module_of(device)) is not None:
        module.synchronize(device)
    return time.perf_counter()


def slowest(seconds: Sequence[float], group: Any) -> list[float]:
    """The longest time of any rank, for each of ``seconds``. Collective."""
    return [max(each) for each in zip(*of_all_ranks(list(seconds), group), strict=True)]


class ModelHook:
    """Calls a method at every forward pass, except while the model is being compiled or exported.

    It does not get in the way of copying, pickling, exporting and compiling the user's model. In a copy of that, and where it is unpickled,
    it does nothing: a copy has no synchronizer, until it is given one of its own.

    ``method``: called with what a hook gets; its answer is not used.
    """

    def __init__(self, method: Callable[..., object] | None = None) -> None:
        self._method = method

    def __call__(self, *arguments: Any) -> None:
        if not torch.compiler.is_compiling() and self._method is not None:
            self._method(*arguments)

    def __reduce__(self) -> tuple[type[ModelHook], tuple[()]]:
        return ModelHook, ()


class ReadyTimes:
    """Notes the times of each step. Without a forward pass of the model itself, times count from the first gradient on."""

    def __init__(self, model: nn.Module) -> None:
        self.steps: deque[tuple[float, dict[str, float]]] = deque(maxlen=_KEPT)  # seconds of each as in `typical`
        self.begun: float | None = None  # the forward pass of this step
        self._forward = 0.0
        self._end: float | None = None
        self._at: dict[str, float] = {}
        self._handles: list[Any] = [
            model.register_forward_pre_hook(ModelHook(self._begin)),
            model.register_forward_hook(ModelHook(self._ended)),
        ]

    def _begin(self, *_: Any) -> None:
        self.begun = time.perf_counter()

    def _ended(self, *_: Any) -> None:
        self._end = time.perf_counter()
        self._forward = self._end - (self.begun if self.begun is not None else self._end)
        self._at = {}  # of a forward pass without a step: evaluation

    def ready(self, name: str) -> None:
        now = time.perf_counter()
        if self._end is None:
            self._end = now
        self._at[name] = now - self._end

    def step_over(self) -> None:
        if self._at:
            self.steps.append((self._forward, self._at))
        self._at, self._end, self._forward, self.begun = {}, None, 0.0, None

    def typical(self, names: list[str]) -> list[float]:
        """Medians over the last steps: of the forward pass, then from its end until each gradient was ready (infinite: it never was)."""
        found = list(self.steps)[1:] or list(self.steps)  # the first step is unlike all others
        ready = [statistics.median([at[name] for _, at in found if name in at] or [float("inf")]) for name in names]
        return [statistics.median([forward for forward, _ in found] or [0.0]), *ready]

    def close(self) -> None:
        """Removes all hooks from the model."""
        for handle in self._handles:
            handle.remove()
