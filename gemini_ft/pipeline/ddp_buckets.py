"""The synchronizer as a communication hook of DistributedDataParallel.

DDP's buckets only say when gradients are ready; what travels together is the plan's. So that small buckets do not mean small
messages, and are worth having: with ``bucket_cap_mb`` of 1 or less gradients are under way sooner.
"""

import threading
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

if TYPE_CHECKING:
    from gemini_ft.pipeline.synchronizer import GradientSynchronizer


def communication_hook(state: "DdpBuckets", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:  # DDP compares the annotations
    """For ``DistributedDataParallel.register_comm_hook``."""
    return state.ready(bucket)


class DdpBuckets:
    """Hands the gradients of buckets over, and the averages back.

    Args:
        synchronizer: whose model is the DDP one.
        otherwise: state and hook for buckets of which the synchronizer averages nothing.
    """

    def __init__(self, synchronizer: "GradientSynchronizer", otherwise: tuple[Any, Any] | None) -> None:
        self._synchronizer, self._averager, self._otherwise = synchronizer, synchronizer.averager, otherwise
        self._ours = {tensor.name for tensor in self._averager.tensors}
        self._waiting: set[_Bucket] = set()
        self._averager.on_failure = self._fail

    def ready(self, bucket: GradBucket) -> Future[Tensor]:
        """A bucket's gradients are final."""
        names = [self._synchronizer.name_of(param) for param in bucket.parameters()]
        if any(self._averager.has(name) for name in names):  # of the backward pass before
            self._synchronizer.backward_over()
        if self._otherwise is not None and self._ours.isdisjoint(names):
            state, hook = self._otherwise
            future: Future[Tensor] = hook(state, bucket)
            return future
        self._synchronizer.backward_over()
        gradients = dict(zip(names, bucket.gradients() or [bucket.buffer()], strict=True))  # a sparse one has no views
        waiting = _Bucket(bucket.buffer(), len(names), self._waiting.discard)
        self._waiting.add(waiting)
        if beside := {name: gradient for name, gradient in gradients.items() if name not in self._ours}:
            self._averager.beside(beside, partial(_take_all, waiting, beside))
        for name, gradient in gradients.items():
            if name in self._ours:
                self._synchronizer.ready(name)
                self._averager.ready(name, gradient, partial(waiting.take, gradient))
        found: Future[Tensor] = waiting.future
        return found

    def _fail(self, error: BaseException) -> None:
        """DDP waits for every bucket: none may be forgotten."""
        for waiting in list(self._waiting):
            waiting.fail(error)


class _Bucket:
    """A bucket whose averages are awaited."""

    def __init__(self, buffer: Tensor, tensors: int, over: Any) -> None:
        devices: Any = [buffer.device] if buffer.device.type == "cuda" else []
        self.future: Any = Future(devices=devices)
        self._buffer, self._left, self._over = buffer, tensors, over
        self._lock = threading.Lock()  # groups may be averaged by several threads of the backend

    def take(self, gradient: Tensor, mean: Tensor) -> None:
        if gradient.is_sparse:
            self._buffer = mean
        else:
            gradient.copy_(mean)
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            self._over(self)
            self.future.set_result(self._buffer)

    def fail(self, error: BaseException) -> None:
        self._over(self)
        self.future.set_exception(error)


def _take_all(bucket: _Bucket, gradients: Mapping[str, Tensor], means: Mapping[str, Tensor]) -> None:
    for name, mean in means.items():
        bucket.take(gradients[name], mean)
