"""Processor seconds per GB of every deed that a byte of state goes through, and what the size of a slice and of a socket's buffer changes.

Each deed is done over and over on one thread, with nothing else at work, by the code that does it in a run. checkpoint_overhead.py sets
them beside what whole rows took: what is left is Python, page faults, and caches that training and network fill for themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import mmap
import multiprocessing
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import common

PACKAGES = ("torch", "gemini-ft", "xxhash", "cryptography")
CHUNK = 8 * 2**20
SIZE = 24 * CHUNK  # larger than the caches
ROUNDS, QUICK_ROUNDS = 7, 3
SLICES = tuple(2**power for power in range(16, 23))  # 64 KiB to 4 MiB
CHUNKS = tuple(2**power for power in range(20, 26, 2))  # 1 to 16 MiB
_HUGE = 2 * 2**20  # so much more is mapped that all of the tensor may lie in whole huge pages
_MAP_HUGETLB = 0x40000
BUFFERS = (256 * 2**10, 2**20, 4 * 2**20)  # asked of the kernel in place of its own choice
# Row -> how often each deed is done to a byte of distinct state, with one copy at a peer.
DEEDS: Mapping[str, Mapping[str, int]] = {
    "gemini": {"copy and hash": 1, "lane: send": 1, "lane: receive": 1},
    "gemini_plain": {"copy and hash": 1, "send": 1, "receive": 1, "verify": 1},
    "floor": {"copy": 1, "send": 1, "receive": 1},
    "floor_verified": {"copy": 1, "send": 1, "receive": 1, "hash": 2},
    "lm_resiliency": {"copy": 1, "send": 1, "receive": 1},
}


DEEDS_TOLD = (
    "Processor seconds per GB of one deed alone, on one thread, memory larger than the caches and its pages there. `copy and hash` hashes "
    f"each chunk of {CHUNK >> 20} MiB right after its copy; `verify` hashes slices that are still in the core's cache, and `tag` is "
    "AES-GMAC over such. "
    "`lane: send` and `lane: receive` are the project's own ends of a connection in two processes: socket and tag, at the "
    "receiver the hash as well. `send` and `receive` are bare sockets. All of it TCP over loopback."
)


def measured() -> dict[str, tuple[float, float]]:
    """The costs of all deeds, as a fresh process finds them: deed -> seconds per GB in user mode and in the kernel."""
    argv = [sys.executable, "-W", "ignore", __file__, "--deeds"]
    run = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(run.stdout.splitlines()[-1])["results"]["deeds"]
    return {name: (user, kernel) for name, (user, kernel) in found.items()}


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
            DEEDS_TOLD,
            common.table(["deed", "user", "kernel"], unit),
            "The same per GB of distinct state as rows took it, all processes together, beside the sum of what must be done. The rest is "
            "Python, page faults, commits, and caches that training fills for itself meanwhile.",
            common.table(header, lines),
        ]
    )


def _timed(deed: Callable[[], object], rounds: int, beside: Callable[[], None] | None = None) -> tuple[float, float]:
    """Medians of user and kernel seconds per GB of this thread, while another one does what is ``beside`` it."""
    found = []
    for _ in range(rounds):
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


def _deeds(rounds: int) -> dict[str, tuple[float, float]]:
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
    sources = [
        Source(TensorSpec(name=name, dtype="float32", shape=tuple(value.shape), group=(0,)), value, False)
        for name, value in tensors.items()
    ]
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

    found = {
        "copy": _timed(copy, rounds),
        "hash": _timed(lambda: [checksum(slot.view[at : at + CHUNK]) for at in range(0, SIZE, CHUNK)], rounds),
        "copy and hash": _timed(lambda: copy(checksum), rounds),
        "send": _timed(send, rounds, receive),
        "receive": _timed(receive, rounds, send),
        "verify": _timed(lambda: [checksum(piece) for _ in range(0, SIZE, SLICE)], rounds),
        "tag": _timed(tag, rounds),
    }
    ends = lane(rounds)
    return found | {f"lane: {name}": (ends[name]["user"], ends[name]["kernel"]) for name in ("send", "receive")}


# --------------------------------------------------------------------------- pages


def pages(rounds: int) -> dict[str, tuple[float, float]]:
    """Copies a slot's bytes into several kinds of memory pages: kind -> seconds per GB in user mode and in the kernel.

    An update in place stands for the optimizer, which writes every byte of the state once it is restored.
    """
    import torch

    torch.set_num_threads(1)
    fd = os.memfd_create("pages")
    os.ftruncate(fd, SIZE)
    shared = mmap.mmap(fd, SIZE)
    slot = torch.frombuffer(shared, dtype=torch.float32)
    slot.fill_(1.0)
    there = torch.empty_like(slot).fill_(0.0)

    def fresh(huge: bool) -> torch.Tensor:
        memory = mmap.mmap(-1, SIZE + _HUGE)
        if huge:
            memory.madvise(mmap.MADV_HUGEPAGE)
        copied: torch.Tensor = _tensor(memory).copy_(slot)
        return copied

    def private_and_update() -> None:
        _tensor(mmap.mmap(fd, SIZE, flags=mmap.MAP_PRIVATE)).add_(1.0)

    found = {
        "copy into pages that are there": _timed(lambda: there.copy_(slot), rounds),
        "copy into fresh pages of 4 KiB": _timed(lambda: fresh(huge=False), rounds),
        "copy into fresh huge pages": _timed(lambda: fresh(huge=True), rounds),
        "copy into fresh pages of 4 KiB, then an update": _timed(lambda: fresh(huge=False).add_(1.0), rounds),
        "copy into fresh huge pages, then an update": _timed(lambda: fresh(huge=True).add_(1.0), rounds),
        "map the slot privately, then an update": _timed(private_and_update, rounds),
    }
    if (reserved := _reserved()) is not None:
        _tensor(reserved).copy_(slot)
        found["copy into reserved huge pages (MAP_HUGETLB)"] = _timed(lambda: _tensor(reserved).copy_(slot), rounds)
    return found


def _tensor(memory: mmap.mmap) -> Any:
    import torch

    return torch.frombuffer(memory, dtype=torch.float32, count=SIZE // 4)


def _reserved() -> mmap.mmap | None:
    """Memory of huge pages that the administrator has reserved; None: there are not enough of them."""
    try:
        return mmap.mmap(-1, SIZE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_HUGETLB)
    except OSError:
        return None


# --------------------------------------------------------------------------- a lane between two processes


def lane(
    rounds: int, slice_bytes: int | None = None, chunk_bytes: int = CHUNK, buffer_bytes: int | None = None
) -> dict[str, dict[str, float]]:
    """Measures both ends of a lane (`gemini_ft.wire.lane`), in two processes on loopback.

    Args:
        rounds: how often the memory is sent; the figures are medians.
        slice_bytes: bytes that are sealed and sent, or received and checked, at a time; None: as the project has it.
        chunk_bytes: bytes of a payload.
        buffer_bytes: what is asked of the kernel for the buffers of both sockets; None: it decides.

    Returns:
        ``send`` and ``receive`` -> seconds per GB in user mode (``user``) and in the ``kernel``, and from begin to end (``wall``).
    """
    mine, theirs = _connected(buffer_bytes)
    process = multiprocessing.get_context("spawn")
    here, there = process.Pipe()
    other = process.Process(target=_end_of_lane, args=(theirs, False, rounds, slice_bytes, chunk_bytes, there))
    other.start()
    theirs.close()
    there.close()  # so that its death ends a wait for its word
    with contextlib.closing(mine):
        here.recv()  # it is there
        sent = _end_of_lane(mine, True, rounds, slice_bytes, chunk_bytes)
        received = here.recv()
    other.join()
    return {"send": sent, "receive": received}


@functools.cache
def _ours(code: Any) -> int:
    """The slice of the project, before any other was set."""
    return int(code.SLICE)


def _end_of_lane(
    sock: socket.socket, sends: bool, rounds: int, slice_bytes: int | None, chunk_bytes: int, to: Connection | None = None
) -> dict[str, float]:
    from gemini_ft.wire import lane as code

    code.SLICE = slice_bytes or _ours(code)
    memory = memoryview(mmap.mmap(-1, SIZE))
    memory[:] = bytes(range(256)) * (SIZE // 256)
    chunks = [memory[at : at + chunk_bytes] for at in range(0, SIZE, chunk_bytes)]

    end, found = code.BlockingLane(sock, bytes(code.KEY_BYTES), dialled=sends, encrypt=False, peer="the other end"), []

    def all_chunks() -> None:
        for chunk in chunks:
            if sends:
                end.send(chunk, True)
            else:
                end.receive([chunk], len(chunk))

    if to is not None:
        to.send("ready")
    for _ in range(rounds):
        before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        all_chunks()
        ended, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        found.append((after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime, ended - begun))
    each = zip(("user", "kernel", "wall"), zip(*found, strict=True), strict=True)
    result = {name: round(statistics.median(values) / SIZE * 1e9, 4) for name, values in each}
    if to is not None:
        to.send(result)
    return result


def sizes(rounds: int) -> dict[str, dict[str, common.Spread]]:
    """One size changed at a time, in random order: what was changed -> seconds per GB, ``cpu`` of both ends and ``wall``."""
    asked: dict[str, dict[str, int]] = {"as the project has it": {}}
    asked |= {f"slice of {size >> 10} KiB": {"slice_bytes": size} for size in SLICES}
    asked |= {f"chunk of {size >> 20} MiB": {"chunk_bytes": size} for size in CHUNKS}
    asked |= {f"buffers of {size >> 10} KiB": {"buffer_bytes": size} for size in BUFFERS}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in asked}
    for _ in range(rounds):
        for name in random.sample(list(asked), len(asked)):
            ends = lane(2, **asked[name])
            found[name].append((sum(end["user"] + end["kernel"] for end in ends.values()), ends["receive"]["wall"]))
    return {
        name: {"cpu": common.interval([cpu for cpu, _ in each]), "wall": common.interval([wall for _, wall in each])}
        for name, each in found.items()
    }


def _connected(buffer_bytes: int | None = None) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        ends = mine, server.accept()[0]
    for end, option in zip(ends, (socket.SO_SNDBUF, socket.SO_RCVBUF), strict=True):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if buffer_bytes is not None:
            end.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)
    return ends


def report(
    deeds: Mapping[str, tuple[float, float]],
    found: Mapping[str, Mapping[str, common.Spread]],
    of_pages: Mapping[str, tuple[float, float]],
) -> str:
    """The body of the dated report."""
    lines = [[name, *(common.spread(each[key], 3) for key in ("cpu", "wall"))] for name, each in found.items()]
    return "\n\n".join(
        [
            DEEDS_TOLD,
            common.table(["deed", "user", "kernel"], [[name, f"{user:.3f}", f"{kernel:.3f}"] for name, (user, kernel) in deeds.items()]),
            "## Slices, chunks, buffers",
            f"A lane between two processes, {SIZE >> 20} MiB sent per round, one size changed at a time, in random order: processor "
            "seconds of both ends per GB, and seconds from the first to the last byte; medians over rounds and their 95 % intervals.",
            common.table(["what", "processor", "wall"], lines),
            "## Pages",
            "Processor seconds per GB of a copy out of a slot (a memfd), by the pages that it goes into; an update in place stands for the "
            "optimizer, which writes every byte of the state once it is restored.",
            common.table(["what", "user", "kernel"], [[name, f"{user:.3f}", f"{kernel:.3f}"] for name, (user, kernel) in of_pages.items()]),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds: under a minute, writes no report")
    parser.add_argument("--deeds", action="store_true", help="the deeds alone, no report")
    arguments = parser.parse_args()
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    deeds = _deeds(rounds)
    changed = {} if arguments.deeds else sizes(1 if arguments.quick else rounds)
    of_pages = {} if arguments.deeds else pages(rounds)
    if changed and not arguments.quick:
        path = common.write_report("byte-costs", "What a byte costs", report(deeds, changed, of_pages), common.versions(PACKAGES))
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
    whole = {name: sum(costs) for name, costs in deeds.items()}
    ratios = {
        "hashed_copy_vs_copy": common.ratio(whole["copy and hash"], whole["copy"]),
        "lane_vs_sockets": common.ratio(whole["lane: send"] + whole["lane: receive"], whole["send"] + whole["receive"]),
    }
    if changed:
        best = min(each["cpu"][0] for each in changed.values())
        ratios["our_sizes_vs_best"] = common.ratio(changed["as the project has it"]["cpu"][0], best)
    if of_pages:
        copied, mapped = (sum(of_pages[f"{way}, then an update"]) for way in ("copy into fresh huge pages", "map the slot privately"))
        ratios["mapped_vs_copied"] = common.ratio(mapped, copied)
    common.print_result("byte_costs", {"deeds": deeds, "sizes": changed, "pages": of_pages}, ratios)


if __name__ == "__main__":
    main()
