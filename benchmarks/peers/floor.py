"""The physical floor: a copy into prepared memory, then a chunked exchange with the peer in a thread. No commit, no safety."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

from load import Load
from peers import Adapter

CHUNK = 16 * 2**20
IN_FLIGHT = 2  # per direction


class Floor(Adapter):
    """The floor: as fast as memory and network of this machine allow.

    One buffer for the own state and one for the peer's, both touched beforehand; the training thread waits for the copy,
    the exchange runs beside the training. With ``verify`` every chunk is hashed by its sender and again by its receiver. Where ranks
    are ``replicated``, each keeps and sends every other tensor.
    """

    def __init__(self, verify: bool = False, replicated: bool = False) -> None:
        super().__init__()
        self._verify, self._replicated = verify, replicated
        self._work: queue.Queue[int | None] = queue.Queue()
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None

    def setup(self, load: Load, folder: Path) -> None:
        tensors = list(load.tensors().values())
        shares = [tensors[rank::2] for rank in range(2)] if self._replicated else [tensors] * 2
        self._live = shares[dist.get_rank()]
        nbytes = max(sum(tensor.nbytes for tensor in share) for share in shares)
        self._own, self._peers = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
        self._slots, offset = [], 0
        for tensor in self._live:
            self._slots.append(self._own[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            offset += tensor.nbytes
        self._peer = 1 - dist.get_rank()
        self._group = dist.new_group(backend="gloo")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def save(self, step: int) -> None:
        self._wait_idle()
        for slot, tensor in zip(self._slots, self._live, strict=True):
            slot.copy_(tensor)
        self._idle.clear()
        self._work.put(step)

    def wait_complete(self) -> None:
        self._wait_idle()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _wait_idle(self) -> None:
        self._idle.wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (step := self._work.get()) is not None:
            try:
                self._exchange()
                self.completed[step] = time.monotonic()
            except BaseException as error:  # handed to the training thread
                self._error = error
            self._idle.set()

    def _exchange(self) -> None:
        pairs = list(zip(torch.split(self._own, CHUNK), torch.split(self._peers, CHUNK), strict=True))
        sent, received = (torch.zeros(len(pairs), dtype=torch.int64) for _ in range(2))
        flying: deque[tuple[int, dist.Work, dist.Work]] = deque()
        for index, (mine, theirs) in enumerate(pairs):
            if len(flying) == IN_FLIGHT:
                self._land(flying, received)
            if self._verify:
                sent[index] = _hash(mine)
            flying.append((index, *self._start(mine, theirs)))
        while flying:
            self._land(flying, received)
        self._compare(sent, received)

    def _start(self, mine: torch.Tensor, theirs: torch.Tensor) -> tuple[dist.Work, dist.Work]:
        outgoing, incoming = dist.isend(mine, self._peer, self._group), dist.irecv(theirs, self._peer, self._group)
        assert outgoing is not None  # None only outside the group
        assert incoming is not None
        return outgoing, incoming

    def _land(self, flying: deque[tuple[int, dist.Work, dist.Work]], received: torch.Tensor) -> None:
        index, outgoing, incoming = flying.popleft()
        incoming.wait()
        if self._verify:
            received[index] = _hash(self._peers[index * CHUNK : (index + 1) * CHUNK])
        outgoing.wait()

    def _compare(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Exchange the senders' hashes, without which "complete" would only mean that something arrived."""
        expected = torch.zeros_like(sent)
        for work in self._start(sent, expected):
            work.wait()
        if not torch.equal(expected, received):
            raise RuntimeError("the exchange delivered other bytes than were sent")


def _hash(chunk: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(chunk.numpy().data) - 2**63  # into int64's range
