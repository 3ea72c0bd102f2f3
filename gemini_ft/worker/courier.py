"""Carries replicas from worker to worker, through the sub-buffers of one small reserved buffer (GEMINI, SOSP'23, section 5).

The agents decide what travels, and when; two workers move the bytes, in a process group of their own: from the sender's slot,
through a sub-buffer of the receiver's device, into the memory of the receiver's agent. While one sub-buffer is copied out, the next
is received into. What cannot be delivered is reported, never retried: the agents then do without the workers.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from gemini_ft import accelerator
from gemini_ft.agent.lifecycle import yield_to_training
from gemini_ft.config import TrafficConfig
from gemini_ft.errors import AgentError
from gemini_ft.ordered import Ordered
from gemini_ft.state.copy_plan import MappedSlot
from gemini_ft.wire.worker_messages import Collect, Collected, Dispatch, Dispatched, ToAgent
from gemini_ft.worker.collectives import unobserved

_END_SECONDS = 5.0  # for transfers under way

Order = TypeVar("Order", bound=Dispatch | Collect)


class Courier:
    """The courier of one worker. Making it is collective over the default process group."""

    def __init__(
        self,
        traffic: TrafficConfig,
        timeout: float,  # seconds that a transfer may take
        tell: Callable[[ToAgent], None],  # sends a message to the agent
        slots: Callable[[], Mapping[int, MappedSlot]],  # the slots of this worker's own shard, by index
        custody: Callable[[], Mapping[str, int]],  # descriptors of replicas that the agent has entrusted to this worker, by key
    ) -> None:
        self._tell, self._slots, self._custody = tell, slots, custody
        self._timeout = timedelta(seconds=timeout)
        on_device = "nccl" in dist.get_backend_config()
        self._device = accelerator.current_device() if on_device else torch.device("cpu")
        # NCCL has no tags, and what two ranks send each other at a time must not wait for each other: a group for either direction.
        self._groups = [dist.new_group(backend="nccl" if on_device else "gloo", timeout=self._timeout) for _ in range(1 + on_device)]
        self._buffer = torch.empty(traffic.sub_buffers * traffic.piece_bytes, dtype=torch.uint8, device=self._device)
        parts = list(torch.split(self._buffer, traffic.piece_bytes))
        out = len(parts) // 2 if on_device else 0  # on a CPU bytes are sent from the slot itself
        self._free_in, self._free_out = _queue(parts[out:]), _queue(parts[:out])
        self._replicas: dict[str, MappedSlot] = {}  # key -> as this worker maps it
        self._lock = threading.Lock()
        self._sending: dict[int, _Lane[Dispatch]] = {}  # rank -> the lane to it
        self._receiving: dict[int, _Lane[Collect]] = {}
        self._writing = threading.Lock()
        self._era = 0  # of the agent; orders of an earlier one must not be written
        self._closed = False

    def dispatch(self, order: Dispatch) -> None:
        """Sends a piece of a slot; the agent is told when it has gone."""
        with self._lock:
            if self._closed:
                return
            try:
                if order.target not in self._sending:
                    self._sending[order.target] = _Lane(self._send, self._sent, self._answer, self._apart)
                self._sending[order.target].put(order)
            except AgentError as error:
                self._answer(order, str(error))

    def collect(self, order: Collect) -> None:
        """Receives a piece of a replica; the agent is told when it is in its memory."""
        with self._lock:
            if self._closed:
                return
            try:
                if order.source not in self._receiving:
                    self._receiving[order.source] = _Lane(self._receive, self._received, self._answer, self._apart)
                self._receiving[order.source].put(order)
            except AgentError as error:
                self._answer(order, str(error))

    def forget(self) -> None:
        """Forgets its orders, as the agent has been restarted: the memory that it waited for is not written any more."""
        with self._writing:
            self._era += 1

    def close(self) -> None:
        """Takes no more orders, and gives up the transfers under way that do not end in a few seconds; not collective.

        Those of gloo cannot be called back, and a thread that waits for one until the interpreter ends may abort the process. So this
        waits for the others, which carry out theirs, or end.
        """
        with self._lock:
            self._closed = True
        end = time.monotonic() + _END_SECONDS
        for sending in self._sending.values():
            sending.close(end)
        for receiving in self._receiving.values():
            receiving.close(end)
        for free in (self._free_in, self._free_out):
            free.put(None)
        for slot in self._replicas.values():
            slot.close()
        self._replicas.clear()

    # -- inside

    def _group(self, source: int, target: int) -> Any:
        return self._groups[source < target and len(self._groups) > 1]

    def _send(self, order: Dispatch) -> tuple[Any, Any]:
        slot = self._slots().get(order.slot)
        if slot is None:
            raise AgentError(f"slot {order.slot} is gone")
        piece, place = slot.tensor[order.offset : order.offset + order.nbytes], None
        if self._device.type != "cpu":
            place = _take(self._free_out)
            piece = place[: order.nbytes].copy_(piece, non_blocking=True)
        return dist.isend(piece, order.target, self._group(dist.get_rank(), order.target), order.tag), place

    def _sent(self, order: Dispatch, work: Any, place: Any) -> None:
        self._wait(work)
        if place is not None:
            self._free_out.put(place)

    def _receive(self, order: Collect) -> tuple[Any, Any]:
        era, place = self._era, _take(self._free_in)
        group = self._group(order.source, dist.get_rank())
        return dist.irecv(place[: order.nbytes], order.source, group, order.tag), (era, place)

    def _received(self, order: Collect, work: Any, taken: tuple[int, torch.Tensor]) -> None:
        era, place = taken
        try:
            self._wait(work)
            with self._writing:
                if order.key and era == self._era:
                    self._replica(order.key).tensor[order.position : order.position + order.nbytes].copy_(place[: order.nbytes])
        finally:
            self._free_in.put(place)

    def _wait(self, work: Any) -> None:
        work.wait(self._timeout)
        if (module := accelerator.module_of(self._device)) is not None:
            module.current_stream(self._device).synchronize()

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Keeps a thread apart from the training, which goes before it, and does not count what it sends.

        On a device it has a stream of its own: in the training's a piece would stand behind work that may wait for another rank, and that
        one for a piece.
        """
        yield_to_training()
        is_host = accelerator.module_of(device := self._device) is None
        with unobserved(), contextlib.nullcontext() if is_host else accelerator.on_stream(accelerator.own_stream(device), device):
            yield

    def _replica(self, key: str) -> MappedSlot:
        held = self._custody()
        for gone in self._replicas.keys() - held.keys():
            self._replicas.pop(gone).close()
        if key not in self._replicas:
            if key not in held:
                raise AgentError("this worker does not have the replica's memory")
            fd = os.dup(held[key])
            self._replicas[key] = MappedSlot(fd, 0, os.fstat(fd).st_size, self._device)
        return self._replicas[key]

    def _answer(self, order: Dispatch | Collect, error: str) -> None:
        if self._closed and error:
            return
        answer: ToAgent
        if isinstance(order, Dispatch):
            answer = Dispatched(tag=order.tag, error=error)
        else:
            answer = Collected(source=order.source, tag=order.tag, error=error)
        with contextlib.suppress(AgentError):  # its death is noticed, and mended, elsewhere
            self._tell(answer)


class _Lane(Generic[Order]):
    """Transfers with one peer: one thread begins them, another waits for their ends, both in order."""

    def __init__(
        self,
        begin: Callable[[Order], tuple[Any, Any]],
        end: Callable[[Order, Any, Any], None],
        answer: Callable[[Order, str], None],
        within: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._begin, self._end, self._answer = begin, end, answer
        threads: list[Ordered] = []
        try:
            for _ in range(2):
                threads.append(Ordered("gemini-courier", within))
        except RuntimeError as error:
            for thread in threads:
                thread.close(timeout=0)
            raise AgentError(f"no thread can be started for pieces of replicas ({error}); see `ulimit -u` and pids.max") from None
        self._beginning, self._ending = threads

    def put(self, order: Order) -> None:
        self._beginning.put(partial(self._begin_one, order))

    def close(self, end: float) -> None:
        """Ends the lane, after its transfers; returns at the time ``end`` (of the monotonic clock) at the latest."""
        for thread in (self._beginning, self._ending):
            thread.close(timeout=max(0.0, end - time.monotonic()))

    def _begin_one(self, order: Order) -> None:
        try:
            self._ending.put(partial(self._end_one, order, *self._begin(order)))
        except (RuntimeError, AgentError) as error:
            self._answer(order, _first_line(error))

    def _end_one(self, order: Order, work: Any, place: Any) -> None:
        error = ""
        try:
            self._end(order, work, place)
        except (RuntimeError, AgentError) as failure:
            error = _first_line(failure)
        self._answer(order, error)


def _queue(parts: list[torch.Tensor]) -> queue.SimpleQueue[torch.Tensor | None]:
    free: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
    for part in parts:
        free.put(part)
    return free


def _take(free: queue.SimpleQueue[torch.Tensor | None]) -> torch.Tensor:
    place = free.get()
    if place is None:
        free.put(None)  # for the next one that waits
        raise AgentError("the session is over")
    return place


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
