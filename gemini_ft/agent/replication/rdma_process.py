"""The process beside an agent that reads slots of other hosts by RDMA, and lets theirs read those of this host (NIXL, over UCX).

It is a process of its own as it loads a library in C++ that maps slots, and that takes in whatever the fabric brings, without any proof of
who has sent it. What it has read counts for nothing before the agent has checked its tag (`gemini_ft.agent.replication.rdma`).

It hears, in packets of msgpack: ``slot, key`` with the slot's descriptor; ``peer, metadata``; ``pull, number, peer, address, key, position,
nbytes``; ``drop, key``. It says ``slot, key, address, metadata`` and ``pulled, number, error``. It ends with the socket, or with the agent.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys
from typing import Any

import msgpack

from gemini_ft.agent.memory.slot_memory import address_of

PACKET = 128 * 1024  # bytes of the longest one: what a process tells of itself and its slots
_LOOK = 0.0005  # seconds between looks at what is under way
_PR_SET_PDEATHSIG = 1


class _Slots:
    """The slots that are mapped here, and the pulls into them."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._socket = sock
        self._nixl = nixl_agent(name, nixl_agent_config(backends=["UCX"], enable_prog_thread=True))
        self._mapped: dict[str, tuple[mmap.mmap, int, Any]] = {}  # key -> its memory, address and registration
        self.pulls: dict[int, Any] = {}  # number -> the transfer

    def hear(self, packet: bytes, fds: list[int]) -> None:
        kind, *given = msgpack.unpackb(packet)
        getattr(self, f"_{kind}")(*given, *fds)

    def look(self) -> None:
        """Reports the pulls that are over."""
        for number, transfer in list(self.pulls.items()):
            try:
                state = self._nixl.check_xfer_state(transfer)
            except Exception as error:  # of the library's own kinds
                state = str(error) or type(error).__name__
            if state != "PROC":
                self._ended(number, "" if state == "DONE" else str(state))

    def _slot(self, key: str, fd: int) -> None:
        nbytes = os.fstat(fd).st_size
        memory = mmap.mmap(fd, nbytes)
        os.close(fd)
        address = address_of(memory)
        self._mapped[key] = memory, address, self._nixl.register_memory([(address, nbytes, 0, "")], "DRAM")
        self._say("slot", key, address, self._nixl.get_agent_metadata())

    def _drop(self, key: str) -> None:
        memory, _, registration = self._mapped.pop(key)
        self._nixl.deregister_memory(registration)
        memory.close()

    def _peer(self, metadata: bytes) -> None:
        self._nixl.add_remote_agent(metadata)

    def _pull(self, number: int, peer: str, address: int, key: str, position: int, nbytes: int) -> None:
        here, there = ([(at, nbytes, 0)] for at in (self._mapped[key][1] + position, address))
        descriptions = [self._nixl.get_xfer_descs(each, "DRAM") for each in (here, there)]
        try:
            self.pulls[number] = transfer = self._nixl.initialize_xfer("READ", *descriptions, peer)
            self._nixl.transfer(transfer)
        except Exception as error:  # of the library's own kinds
            self._ended(number, str(error) or type(error).__name__)

    def _ended(self, number: int, error: str) -> None:
        if (transfer := self.pulls.pop(number, None)) is not None:
            self._nixl.release_xfer_handle(transfer)
        self._say("pulled", number, error)

    def _say(self, *words: Any) -> None:
        self._socket.settimeout(None)  # an agent that is busy for a moment may not cost its process
        self._socket.send(msgpack.packb(words))


def main(fd: int, name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # what maps slots must not outlive the agent
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a scheduler's notice to all processes, whose last copies travel after it
    with socket.socket(fileno=fd) as sock:
        slots = _Slots(sock, name)
        while True:
            sock.settimeout(_LOOK if slots.pulls else None)
            try:
                packet, fds, _, _ = socket.recv_fds(sock, PACKET, 1)
            except TimeoutError:
                slots.look()
                continue
            if not packet:
                return
            slots.hear(packet, fds)
            slots.look()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
