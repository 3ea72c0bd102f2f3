"""NIXL's agent, as far as `gemini_ft.agent.replication.rdma_process` calls it. Addresses are real ones, and reads go through /proc/PID/mem.

The file that FABRIC names, once it is there, says what the fabric does from then on: ``changes`` one bit of each piece, ``hangs``,
``fails``, or ``dies`` with the process that reads.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
from pathlib import Path
from typing import Any

_PR_SET_PTRACER = 0x59616D61
Places = list[tuple[int, int, int]]  # address, bytes, device


def nixl_agent_config(**_: Any) -> None: ...


class nixl_agent:
    def __init__(self, name: str, _config: None) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1))
        self._name, self._numbers = name, itertools.count()
        self._slots: dict[int, int] = {}  # address -> bytes
        self._peers: dict[str, tuple[int, list[list[int]]]] = {}  # name -> its process, and its slots
        self._transfers: dict[int, tuple[Places, Places, str]] = {}

    def register_memory(self, places: list[tuple[int, int, int, str]], _kind: str) -> int:
        ((address, nbytes, _, _),) = places
        self._slots[address] = nbytes
        return address

    def deregister_memory(self, address: int) -> None:
        del self._slots[address]

    def get_agent_metadata(self) -> bytes:
        return json.dumps([self._name, os.getpid(), sorted(self._slots.items())]).encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name, pid, slots = json.loads(metadata)
        self._peers[name] = pid, slots
        return str(name).encode()

    def get_xfer_descs(self, places: Places, _kind: str) -> Places:
        return places

    def initialize_xfer(self, deed: str, here: Places, there: Places, peer: str) -> int:
        for (address, nbytes, _), slots in ((here[0], self._slots.items()), (there[0], self._peers[peer][1])):
            if deed != "READ" or not any(start <= address and address + nbytes <= start + length for start, length in slots):
                raise RuntimeError("NIXL_ERR_NOT_FOUND")
        self._transfers[number := next(self._numbers)] = here, there, peer
        return number

    def transfer(self, _number: int) -> str:
        return "PROC"

    def check_xfer_state(self, number: int) -> str:
        ((to, nbytes, _),), ((at, _, _),), peer = self._transfers[number]
        fabric = Path(os.environ["FABRIC"])
        does = fabric.read_text() if fabric.exists() else ""
        if does == "dies":
            os._exit(9)
        if does in ("hangs", "fails"):
            return {"hangs": "PROC", "fails": "ERR"}[does]
        with open(f"/proc/{self._peers[peer][0]}/mem", "rb", buffering=0) as memory:
            memory.seek(at)
            bits = bytearray(memory.read(nbytes))
        bits[nbytes // 2] ^= does == "changes"
        ctypes.memmove(to, bytes(bits), nbytes)
        return "DONE"

    def release_xfer_handle(self, number: int) -> None:
        del self._transfers[number]
