"""Two threads beside the backward pass: one computes (compress, decompress), one communicates.

Groups pass through both in the order in which they are submitted, the same on all ranks. While one group is on the network, the
next one is compressed and the one before decompressed; nothing else uses the process group.

Where there is next to nothing to compute, threads of Python cost more than they hide. Then a group goes directly: the thread that
submits it does the work before its collective, and the backend's thread that has carried out the collective does the rest.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gemini_ft import accelerator
from gemini_ft.errors import AveragingError
from gemini_ft.ordered import Ordered

_LOOK = 1.0  # seconds between two looks at whether others have failed


@dataclass(frozen=True, kw_only=True)
class PendingCollective:
    """A collective that is to be carried out on the network's thread.

    Attributes:
        run: carries it out.
        nbytes: that this rank hands over.
        density: of a sparse gradient: share of its units that are present.
        begin: carries it out without waiting; the answer, None, is there when the future is. Only where the backend can do that.
    """

    run: Callable[[], Any]
    nbytes: int
    density: float | None = None
    begin: Callable[[], torch.futures.Future[Any]] | None = None


Work: TypeAlias = Generator[PendingCollective, Any, dict[str, Tensor]]
"""Computes, asks for collectives, is given what they return, and comes to the averages of named gradients."""


@dataclass(kw_only=True)
class GroupCost:
    """The cost of one group: seconds, bytes of its gradients, and bytes handed to collectives."""

    dense: int = 0
    encode: float = 0.0
    communicate: float = 0.0
    decode: float = 0.0
    nbytes: int = 0
    densities: list[float] = field(default_factory=list)


class GroupInFlight:
    """A group on its way.

    Args:
        single: it asks for one collective only, so that the network need not wait for what it does with the answer.
        then: called with the averages on the computing thread.
    """

    def __init__(self, work: Work, single: bool, then: Callable[[dict[str, Tensor]], None]) -> None:
        self.work, self.single, self.then = work, single, then
        self.figures = GroupCost()
        self.done: Future[None] = Future()
        self.ended = 0.0  # time.perf_counter()
        self.asked: queue.SimpleQueue[PendingCollective | None] = queue.SimpleQueue()
        self.ready: Any = None  # the device's event: the gradients are final
        self.finished: Any = None  # the device's event: the averages are

    @torch.no_grad()  # gradients of ``backward(create_graph=True)`` have a graph of their own
    def step(self, answer: Any) -> bool:
        """Computes until the next collective is asked for, or until the end (True)."""
        begin = time.perf_counter()
        try:
            call = self.work.send(answer)
        except StopIteration as end:
            self.then(end.value)
            self.then = lambda averages: None  # the job is kept for its figures, and would keep the averages
            self.figures.decode += time.perf_counter() - begin
            return True
        if self.single and self.figures.nbytes:
            raise AssertionError("a group that was to need one collective asks for a second one")
        self.figures.encode += time.perf_counter() - begin
        self.figures.nbytes += call.nbytes
        if call.density is not None:
            self.figures.densities.append(call.density)
        self.asked.put(call)
        return False

    def end(self, error: BaseException | None = None) -> None:
        """Tells those that wait that the averages are there, or why they are not."""
        self.ended = time.perf_counter()
        if error is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)
        self.asked.put(None)


class Lanes:
    """The two threads, and the groups on their way through them.

    Args:
        device: of the gradients. On an accelerator the work is queued on a stream of its own, after what the job waits for.
        broken: called once, with the first error and whether it is one of computing, not of a collective, on the thread where it happens;
            gives the error that everything raises from then on.
    """

    def __init__(self, device: torch.device, broken: Callable[[BaseException, bool], BaseException]) -> None:
        self._broken: BaseException | None = None
        self._breaking, self._on_broken = threading.Lock(), broken
        self._device, module = device, accelerator.module_of(device)
        self._stream = module.Stream(device) if module is not None else None
        self._computing, self._communicating = (Ordered(f"gradients-{name}", self._on_stream) for name in ("codec", "network"))

    def submit(self, job: GroupInFlight) -> None:
        """Puts a group on its way; the same groups in the same order on all ranks."""
        self.check()
        if self._stream is not None:
            job.ready = accelerator.stream_of(self._device).record_event()
        self._communicating.put(partial(self._carry, job))
        self._computing.put(partial(self._advance, job))

    def submit_directly(self, job: GroupInFlight) -> None:
        """Puts a group on its way without the threads. While one is under way none may be submitted to them, or its order is lost.

        ``job``: asks for one collective only, which can `PendingCollective.begin`; on CPUs.
        """
        self.check()
        self._advance(job)
        call = job.asked.get()
        if call is None:
            return
        assert call.begin is not None
        begin = time.perf_counter()
        try:
            call.begin().add_done_callback(partial(self._answered, job, begin))
        except BaseException as error:
            job.end(self.fail(error))

    def _answered(self, job: GroupInFlight, begin: float, future: torch.futures.Future[Any]) -> None:
        """Takes the result of a collective, on one of the backend's threads."""
        job.figures.communicate += time.perf_counter() - begin
        try:
            future.value()
        except BaseException as error:
            self.fail(error)
        self._advance(job)

    def fail(self, error: BaseException, is_computing: bool = False) -> BaseException:
        """Stops all averaging from now on; returns the error that says why."""
        with self._breaking:
            if self._broken is None:
                self._broken = self._on_broken(error, is_computing)
            return self._broken

    def check(self) -> None:
        """Raises the error that has stopped all averaging, if there was one."""
        if self._broken is not None:
            raise self._broken

    def wait(self, job: GroupInFlight, anxious: Callable[[], BaseException | None]) -> None:
        """Returns when the averages are there; raises the error that prevents them.

        ``anxious``: asked once in a while, as long as they are not there, whether it is worth waiting; an error: it is not.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                job.done.exception(_LOOK)
            if job.done.done():
                break
            if (error := anxious()) is not None:
                raise self.fail(error)
        job.done.result()
        if job.finished is not None:
            accelerator.stream_of(self._device).wait_event(job.finished)

    def close(self) -> None:
        """Ends both threads, after what was submitted. Nothing can be averaged any more."""
        self._communicating.close()  # first: it hands work to the other one
        self._computing.close()
        why = (
            "the gradient pipeline has been closed; to train on without it, wrap the model anew"
            if self._broken is None
            else str(self._broken)
        )
        self._broken = AveragingError(why)  # without a traceback, whose frames would keep the script's objects

    def _advance(self, job: GroupInFlight, answer: Any = None) -> None:
        if job.done.done():
            return
        if self._broken is not None:
            job.end(self._broken)
            return
        try:
            if self._stream is not None:
                self._stream.wait_event(job.ready)
            if job.step(answer):
                job.finished = self._stream.record_event() if self._stream is not None else None
                job.end()
        except BaseException as error:
            job.end(self.fail(error, is_computing=True))

    def _carry(self, job: GroupInFlight) -> None:
        while (call := job.asked.get()) is not None:
            begin = time.perf_counter()
            try:
                self.check()  # other ranks may not take part in work after a failure
                answer = call.run()
            except BaseException as error:
                self.fail(error)
                self._computing.put(partial(self._advance, job))  # where jobs end
                return
            job.figures.communicate += time.perf_counter() - begin
            self._computing.put(partial(self._advance, job, answer))
            if job.single:
                return

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return accelerator.on_stream(self._stream, self._device) if self._stream is not None else contextlib.nullcontext()
