"""Datagrams that are lost by a seed, and a switch that loses some of what comes to it; both for benchmarks/switch.py.

As a program it takes a JSON object with port, part, parts, loss, seed and key (hexadecimal); it serves until it is killed.
"""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

import numpy as np

from gemini_ft.sync.switch_packets import Array, Datagrams
from gemini_ft.sync.switch_server import SwitchServer


class Lossy(Datagrams):
    """Loses a share of the datagrams that come: the n-th one of a socket is lost or not by the seed. It has used the link by then.

    Attributes:
        lost: datagrams so far.
    """

    def __init__(self, bound: socket.socket, loss: float, seed: int) -> None:
        super().__init__(bound)
        self._loss, self._random = loss, np.random.default_rng(seed)
        self.lost = 0

    def receive(self) -> list[tuple[Array, Any]]:
        found = []
        for datagrams, sender in super().receive():
            kept = self._random.random(len(datagrams)) >= self._loss
            self.lost += int((~kept).sum())
            if kept.any():
                found.append((datagrams if kept.all() else datagrams[kept], sender))
        return found


def main() -> None:
    job = json.loads(sys.argv[1])
    listening = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listening.bind(("0.0.0.0", job["port"]))
    server = SwitchServer(listening, bytes.fromhex(job["key"]), part=job["part"], parts=job["parts"])
    if job["loss"]:
        server._socket = Lossy(listening, job["loss"], job["seed"])
    stop, _held = socket.socketpair()
    print("ready", flush=True)
    server.serve(stop)


if __name__ == "__main__":
    main()
