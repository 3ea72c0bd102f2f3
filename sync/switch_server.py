"""The switch: a process that adds up packets of workers. Sockets and clock; what it decides is in `Jobs` and `Slots`."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from .switch_control import MARK, Envelope
from .switch_jobs import Jobs, Limits, SwitchJob
from .switch_packets import GIVEN, SUMMED, SWITCH, Array, Packets, decode, encode
from .switch_udp import Datagrams, await_any


class Server:
    """Serves on one socket.

    Args:
        listening: a bound UDP socket.
        key: shared with all workers.
        part, parts: of the slots that this switch has, from 0 on.

    Attributes:
        jobs: at present.
        counts: datagrams that were dropped before they came to a job, by reason.
    """

    def __init__(self, listening: socket.socket, key: bytes, limits: Limits | None = None, part: int = 0, parts: int = 1) -> None:
        self._socket = Datagrams(listening)
        self._envelope = Envelope(key)
        self.jobs = Jobs(key, secrets.token_hex(16), limits or Limits(), part, parts)
        self.counts: Counter[str] = Counter()

    def report(self) -> dict[str, int]:
        """The counts of all jobs and of what was dropped."""
        return {**self.jobs.counts(), **self.counts}

    def serve(self, stop: socket.socket) -> None:
        """Serves until ``stop`` can be read."""
        while True:
            if stop.fileno() in await_any([self._socket, stop]):
                return
            self.take(self._socket.receive(), time.monotonic())

    def take(self, received: Sequence[tuple[Array, Any]], now: float) -> None:
        """Takes what has come. Sums that it completes are sent together: the fewer batches there are, the less work they make."""
        by_sender: dict[tuple[Any, int], list[Array]] = {}
        for datagrams, sender in received:
            if bytes(datagrams[0, : len(MARK)]) == MARK:
                for datagram in datagrams:
                    self._control(bytes(datagram), sender, now)
            else:
                by_sender.setdefault((sender, datagrams.shape[1]), []).append(datagrams)
        complete: dict[SwitchJob, list[Packets]] = {}
        for (sender, _), parts in by_sender.items():
            self._add(np.concatenate(parts) if len(parts) > 1 else parts[0], sender, now, complete)
        for job, sums in complete.items():
            self._send(job, sums, list(job.members.values()))

    def _add(self, datagrams: Array, sender: Any, now: float, complete: dict[SwitchJob, list[Packets]]) -> None:
        found = self.jobs.find(sender)
        if found is None:
            self.counts["stranger"] += len(datagrams)
            return
        job, rank = found
        packets, wrong = decode(datagrams, GIVEN, rank, self.jobs.part, job.key)
        if packets.values is not None and packets.values.shape[1] != job.nbytes:
            wrong, packets = wrong + len(packets), packets.pick(packets.slots < 0)
        self.counts["forged"] += wrong
        if len(packets):
            job.heard = now
        outcome = job.slots.take(rank, packets)
        self._send(job, outcome.again, [sender])
        complete.setdefault(job, []).extend(outcome.everybody)

    def _send(self, job: SwitchJob, sums: Sequence[Packets], addresses: Sequence[Any]) -> None:
        for each in Packets.join(sums):
            datagrams = encode(each, SUMMED, SWITCH, self.jobs.part, job.key)
            for address in addresses:
                self._try_to_send(datagrams, address)

    def _control(self, datagram: bytes, address: Any, now: float) -> None:
        message = self._envelope.open(datagram)
        if message is None:
            self.counts["forged"] += 1
        elif (reply := self.jobs.control(message, address, now)) is not None:
            with contextlib.suppress(OSError):
                self._socket.socket.sendto(self._envelope.seal(reply), address)

    def _try_to_send(self, datagrams: Array, address: Any) -> None:
        try:
            self._socket.send(datagrams, address)
        except OSError:  # no way there: as if they were lost on the way
            self.counts["unsent"] += len(datagrams)
