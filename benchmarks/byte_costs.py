"""Processor seconds per GB of every deed that a byte of state goes through; run alone, it prints them as one line of JSON.

Each deed is done over and over on one thread, with nothing else at work, by the code that does it in a run. checkpoint_overhead.py sets
them beside what whole rows took: what is left is Python, page faults, and caches that training and network fill for themselves.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import common

CHUNK = 8 * 2**20
SIZE = 24 * CHUNK  # larger than the caches
ROUNDS = 7
# Row -> how often each deed is done to a byte of distinct state, with one copy at a peer.
DEEDS: Mapping[str, Mapping[str, int]] = {
    "gemini": {"copy and hash": 1, "send": 1, "receive": 1, "verify": 1, "tag": 2},
    "gemini_plain": {"copy and hash": 1, "send": 1, "receive": 1, "verify": 1},
    "floor": {"copy": 1, "send": 1, "receive": 1},
    "floor_verified": {"copy": 1, "send": 1, "receive": 1, "hash": 2},
    "lm_resiliency": {"copy": 1, "send": 1, "receive": 1},
}


def measured() -> dict[str, tuple[float, float]]:
    """The same costs, as a fresh process finds them: deed -> seconds per GB in user mode and in the kernel."""
    run = subprocess.run([sys.executable, "-W", "ignore", __file__], capture_output=True, text=True, timeout=300, check=True)
    return {name: (user, kernel) for name, (user, kernel) in json.loads(run.stdout.splitlines()[-1]).items()}


def section(costs: Mapping[str, tuple[float, float]], results: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> str:
    """The section of the report: what each deed costs, and how far that explains what rows took."""
    unit = [[name, f"{user:.3f}", f"{kernel:.3f}"] for name, (user, kernel) in costs.items()]
    lines = []
    for size, rows in results.items():
        for name, deeds in DEEDS.items():
            if (whole := rows.get(name, {}).get("cpu_s_per_gb")) is None:
                continue
            known = sum(times * sum(costs[deed]) for deed, times in deeds.items())
            modes = [f"{rows[name][f'{whose}_{mode}']:.2f}" for whose in ("ranks", "others") for mode in ("user", "kernel")]
            said = " + ".join(f"{times} x {deed}" if times > 1 else deed for deed, times in deeds.items())
            lines.append([f"{size} MB", name, f"{whole:.2f}", *modes, said, f"{known:.2f}", f"{whole - known:.2f}"])
    header = ["size", "row", "measured", "ranks: user", "kernel", "others: user", "kernel", "deeds", "their sum", "rest"]
    return "\n\n".join(
        [
            "## Where the processor time goes",
            "Processor seconds per GB of one deed alone, on one thread, memory larger than the caches and its pages there; `copy and hash` "
            "and `verify` hash what is in the cache, `tag` is AES-GMAC. Sockets are TCP over loopback.",
            common.table(["deed", "user", "kernel"], unit),
            "The same per GB of distinct state as rows took it, all processes together, beside the sum of what must be done. The rest is "
            "Python, page faults, commits, and caches that training fills for itself meanwhile.",
            common.table(header, lines),
        ]
    )


def _timed(deed: Callable[[], object], beside: Callable[[], None] | None = None) -> tuple[float, float]:
    """Medians of user and kernel seconds per GB of this thread, while another one does what is ``beside`` it."""
    found = []
    for _ in range(ROUNDS):
        other = threading.Thread(target=beside) if beside is not None else None
        if other is not None:
            other.start()
        before = resource.getrusage(resource.RUSAGE_THREAD)
        deed()
        after = resource.getrusage(resource.RUSAGE_THREAD)
        if other is not None:
            other.join()
        found.append((after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime))
    user, kernel = (statistics.median(each) / SIZE * 1e9 for each in zip(*found, strict=True))
    return round(user, 4), round(kernel, 4)


def _measure() -> dict[str, tuple[float, float]]:
    import torch

    from gemini_ft.core.layout import TensorSpec, build_layout
    from gemini_ft.core.roots import checksum
    from gemini_ft.state.copy_plan import CopyPlan, MappedSlot
    from gemini_ft.state.tensors import Source
    from gemini_ft.wire.lane import KEY_BYTES, SLICE, Seal

    torch.set_num_threads(1)
    fd = os.memfd_create("byte costs")
    os.ftruncate(fd, SIZE)
    slot = MappedSlot(fd, 0, SIZE)
    slot.prefault()
    tensors = {f"layer {i}": torch.randn(CHUNK // 8) for i in range(2 * SIZE // CHUNK)}
    sources = [Source(TensorSpec(name, "float32", tuple(value.shape), (0,)), value, False) for name, value in tensors.items()]
    plan = CopyPlan(sources, build_layout([source.spec for source in sources], 0, 1), CHUNK)
    target = memoryview(mmap.mmap(-1, SIZE))
    target[:] = slot.view
    seal, piece = Seal(bytes(KEY_BYTES // 2)), slot.view[:SLICE]
    mine, theirs = _connected()

    def copy(then: Callable[[memoryview], object] = lambda chunk: None) -> None:
        for number, batch in enumerate(plan.batches):
            slot.write(number, batch)
            then(slot.view[number * CHUNK : (number + 1) * CHUNK])

    def send() -> None:
        at = 0
        while at < SIZE:
            at += mine.send(slot.view[at : at + SLICE])

    def receive() -> None:
        at = 0
        while at < SIZE:
            at += theirs.recv_into(target[at : at + SLICE])

    def tag() -> None:
        for _ in range(0, SIZE, SLICE):
            seal.add(piece)

    return {
        "copy": _timed(copy),
        "hash": _timed(lambda: [checksum(slot.view[at : at + CHUNK]) for at in range(0, SIZE, CHUNK)]),
        "copy and hash": _timed(lambda: copy(checksum)),
        "send": _timed(send, receive),
        "receive": _timed(receive, send),
        "verify": _timed(lambda: [checksum(piece) for _ in range(0, SIZE, SLICE)]),
        "tag": _timed(tag),
    }


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        return mine, server.accept()[0]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(json.dumps(_measure()))
