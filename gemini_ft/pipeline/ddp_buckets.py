"""The synchronizer as a communication hook of DistributedDataParallel.

DDP's buckets only say when gradients are ready; what travels together is the plan's. So that small buckets do not mean small
messages, and are worth having: with ``bucket_cap_mb`` of 1 or less gradients are under way sooner.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.futures import Future

from gemini_ft.accelerator import holds
from gemini_ft.errors import StateError

if TYPE_CHECKING:
    from gemini_ft.pipeline.synchronizer import GradientSynchronizer


def communication_hook(state: "DdpBuckets", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:  # DDP compares the annotations
    """The hook for ``DistributedDataParallel.register_comm_hook``."""
    return state.ready(bucket)


class DdpBuckets:
    """Hands the gradients of buckets over, and the averages back.

    ``otherwise``: state and hook for buckets of which the synchronizer averages nothing.
    """

    def __init__(self, synchronizer: "GradientSynchronizer", otherwise: tuple[Any, Any] | None) -> None:
        self._synchronizer, self._averager, self.otherwise = synchronizer, synchronizer.averager, otherwise
        self._ours = {tensor.name for tensor in self._averager.tensors}
        self._waiting: set[_Bucket] = set()
        self._error: BaseException | None = None  # of this backward pass
        self._will_end = False  # the end of the backward pass has been asked for

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # in a copy of the model, which averages as if it had no hook

    def ready(self, bucket: GradBucket) -> Future[Tensor]:
        """Takes a bucket whose gradients are final.

        DDP turns every error of a future into one of its own. So none is given to it: it gets the bucket as it is, and the error is
        raised where the backward pass ends.
        """
        self._ask_for_end()
        if self._error is None:
            try:
                return self._handed(bucket)
            except BaseException as error:
                if not self._will_end:
                    raise
                self._fail(self._averager.failed(error))
        return _answered(bucket.buffer())

    def _handed(self, bucket: GradBucket) -> Future[Tensor]:
        if not getattr(self._synchronizer.ddp, "_divide_by_initial_world_size", True):  # as the last join() was told
            raise StateError(
                "join(divide_by_initial_world_size=False) divides by the ranks that still have inputs, and a gradient pipeline by all of "
                "them: leave that option out; DDP forgets a join() that is over in `with ddp_model.join(enable=False): pass`"
            )
        names = [self._synchronizer.name_of(param) for param in bucket.parameters()]
        if self._synchronizer.lets_ranks_differ:
            self._check_inputs()
            if not self._averager.tensors:
                self._synchronizer.trained_alone(names)
                return _answered(bucket.buffer())
        if any(self._averager.has(name) for name in names):  # of the backward pass before
            self._synchronizer.backward_over()
        if self.otherwise is not None and self._ours.isdisjoint(names):
            state, hook = self.otherwise
            future: Future[Tensor] = hook(state, bucket)
            return future
        if self._synchronizer.discards_all:
            return _answered(bucket.buffer())
        self._synchronizer.backward_over()
        if not self._averager.tensors:  # ranks train alone from here on
            self._synchronizer.trained_alone(names)
            return _answered(bucket.buffer())
        self._synchronizer.warn_of_left(names)
        gradients = dict(zip(names, _views(bucket), strict=True))
        waiting = _Bucket(bucket.buffer(), len(names), self._waiting.discard)
        self._waiting.add(waiting)
        if beside := {name: gradient for name, gradient in gradients.items() if name not in self._ours}:
            self._averager.beside(beside, partial(_take_all, waiting, beside))
        for name, gradient in gradients.items():
            if name not in self._ours:
                continue
            if self._synchronizer.is_discarded(name):
                self._averager.absent(name)
                waiting.take(gradient, gradient)
                continue
            self._synchronizer.ready(name)
            self._averager.ready(name, gradient, partial(waiting.take, gradient))
        self._synchronizer.trained_alone(names)
        found: Future[Tensor] = waiting.future
        return found

    def _check_inputs(self) -> None:
        """Refuses join(), under which ranks go on without others."""
        ddp = self._synchronizer.ddp
        if ddp is not None and ddp._join_config.enable:
            raise StateError(
                "join() lets a rank whose inputs have ended answer the others' collectives, and between two averages of a rule with every "
                "nobody trains for it: give all ranks as many batches, or leave every, or quality: loss, out"
            )

    def _ask_for_end(self) -> None:
        if not self._will_end:
            with contextlib.suppress(RuntimeError):  # a bucket of unused parameters is ready before the backward pass has begun
                _queue_callback(self._backward_ends)
                self._will_end = True

    def _backward_ends(self) -> None:
        """Raises another rank's error before DDP waits for its buckets, where it would be lost."""
        self._will_end = False
        if self._error is None:
            try:
                self._averager.wait()
            except BaseException as error:
                self._fail(error)
        if self._error is not None:
            failed, self._error = self._error, None
            _queue_callback(partial(_raise, failed))  # when DDP has come to its own end

    def _fail(self, error: BaseException) -> None:
        """Ends all buckets with an error: DDP waits for every one, so none may be forgotten."""
        self._error = error
        for waiting in list(self._waiting):
            waiting.end()


def _queue_callback(call: Callable[[], None]) -> None:
    """Queues a call for the end of the current backward pass, after all that was queued before. Raises RuntimeError: none is."""
    Variable._execution_engine.queue_callback(call)


def _raise(error: BaseException) -> None:
    raise error


def _answered(buffer: Tensor) -> Future[Tensor]:
    devices: Any = [buffer.device] if holds(buffer) else []
    future: Future[Tensor] = Future(devices=devices)
    future.set_result(buffer)
    return future


class _Bucket:
    """A bucket whose averages are awaited."""

    def __init__(self, buffer: Tensor, tensors: int, over: Any) -> None:
        devices: Any = [buffer.device] if holds(buffer) else []
        self.future: Any = Future(devices=devices)
        self._buffer, self._left, self._over, self._is_over = buffer, tensors, over, False
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
            self.end()

    def end(self) -> None:
        """Answers with the bucket as it is now, unless that has been done."""
        with self._lock:
            is_first, self._is_over = not self._is_over, True
        if is_first:
            self._over(self)
            self.future.set_result(self._buffer)


def _views(bucket: GradBucket) -> list[Tensor]:
    """The gradients of a bucket, in its memory; complex ones as (..., 2) real numbers.

    ``bucket.gradients()`` takes a complex parameter for one of half its size, and so gives wrong places for it and all that follow it.
    """
    buffer, params = bucket.buffer(), bucket.parameters()
    if buffer.is_sparse:
        return [buffer]
    shapes = [(*param.shape, 2) if param.is_complex() else param.shape for param in params]
    parts = buffer.split_with_sizes([math.prod(shape) for shape in shapes])
    return [_in_order_of(param, part.view(shape)) for part, shape, param in zip(parts, shapes, params, strict=True)]


def _in_order_of(param: Tensor, part: Tensor) -> Tensor:
    """The part of a bucket with the strides of its parameter, as DDP has filled it: transposed, for example, or channels last."""
    if param.is_contiguous() or param.is_complex() or not torch.ops.aten.is_non_overlapping_and_dense(param):
        return part
    return part.as_strided(param.shape, param.stride())


def _take_all(bucket: _Bucket, gradients: Mapping[str, Tensor], means: Mapping[str, Tensor]) -> None:
    for name, mean in means.items():
        bucket.take(gradients[name], mean)
