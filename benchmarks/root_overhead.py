"""The cost of a shard's root: one snapshot laid down with it and without it, in turns.

A round copies a shard into a slot chunk by chunk, takes a checksum of each, and finishes the slot, as worker and agent do
together. With the root, the worker forms it and the agent compares it with its own. The order within a round is drawn, and
differences are taken within rounds. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from unittest import mock

import common
from gemini_ft.agent.memory import slot_memory as slots
from gemini_ft.core.roots import checksum, layout_digest, shard_root
from gemini_ft.core.versions import Incarnation, Version

MIB = 2**20
CHUNK = 4 * MIB
EXTRAS = 16 * 1024
LAYOUT = bytes(64 * 1024)  # of some thousand tensors
SETTLED = 3  # rounds before the first that counts


def snapshot(slot: slots.SlotMemory, source: memoryview, version: Version, form: Callable[..., str]) -> float:
    """Seconds of one snapshot, whose root ``form`` forms, on both sides."""
    shape = slot.shape
    begin = time.perf_counter()
    checksums = []
    for index, (offset, nbytes) in enumerate(slot.cuts(EXTRAS)):
        slot.data(offset, nbytes)[:] = source[offset : offset + nbytes]
        checksums.append(checksum(slot.data(offset, nbytes)))
        slot.put_chunk(index, offset, nbytes, checksums[-1])
    with mock.patch.object(slots, "shard_root", form):
        root = form(shape.owner, version, shape.layout_digest, (shape.data_bytes, EXTRAS, shape.chunk_bytes), checksums)
        assert slot.finish(version, EXTRAS, root)
    return time.perf_counter() - begin


def without(*_: object) -> str:
    """Stands in for the root, and computes nothing."""
    return "none"


def interval(values: Sequence[float], chance: random.Random, draws: int = 2000) -> tuple[float, float]:
    """The interval in which the median lies with 95 % certainty, found by drawing the values anew (bootstrap)."""
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(draws))
    return medians[draws // 40], medians[-draws // 40]


def measure(size: int, rounds: int, chance: random.Random) -> dict[str, float]:
    shape = slots.SlotShape(
        run="run",
        stream="main",
        owner=0,
        world_size=1,
        layout_hash="hash",
        layout=LAYOUT,
        data_bytes=size,
        extras_capacity=EXTRAS,
        chunk_bytes=CHUNK,
    )
    slot, source = slots.SlotMemory.create(shape), memoryview(random.Random(1).randbytes(MIB) * (size // MIB) + bytes(EXTRAS))
    differences, plain = [], []
    for number in range(SETTLED + rounds):
        version = Version(Incarnation(1, "nonce"), number)
        kinds: list[Callable[..., str]] = [shard_root, without]
        chance.shuffle(kinds)
        took = {kind: snapshot(slot, source, version, kind) for kind in kinds}
        if number >= SETTLED:
            differences.append(took[shard_root] - took[without])
            plain.append(took[without])
    checksums = [chunk[2] for chunk in slot.chunks.values()]
    alone = []
    for _ in range(SETTLED + rounds):
        begin = time.perf_counter()
        shard_root(0, version, shape.layout_digest, (size, EXTRAS, CHUNK), checksums)
        alone.append(time.perf_counter() - begin)
    slot.close()
    low, high = interval(differences, chance)
    base = statistics.median(plain)
    found = {"snapshot_ms": 1e3 * base, "difference_ms": 1e3 * statistics.median(differences), "low_ms": 1e3 * low, "high_ms": 1e3 * high}
    return found | {"root_us": 1e6 * statistics.median(alone), "root_share": statistics.median(alone) / base}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small shard, no report")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    sizes = [64 * MIB] if options.quick else [16 * MIB, 256 * MIB, 1024 * MIB]
    chance = random.Random(0)
    layout_digest(LAYOUT)
    found = {f"{size // MIB} MiB": measure(size, 20 if options.quick else options.rounds, chance) for size in sizes}
    header = ["shard", "snapshot without root, ms", "with root minus without, ms (median)", "95 % interval, ms", "one root alone, us"]
    rows = [
        [name, f"{f['snapshot_ms']:.2f}", f"{f['difference_ms']:+.3f}", f"{f['low_ms']:+.3f} to {f['high_ms']:+.3f}", f"{f['root_us']:.1f}"]
        for name, f in found.items()
    ]
    body = f"{options.rounds} paired rounds per size, chunks of {CHUNK // MIB} MiB.\n\n{common.table(header, rows)}"
    if not options.quick:
        path = common.write_report(
            "root-overhead", "The root of a shard: what it costs per snapshot", body, common.versions(("torch", "gemini-ft", "xxhash"))
        )
        print(f"report: {path}", file=sys.stderr)
    common.print_result("root_overhead", found, {f"root_share {name}": f["root_share"] for name, f in found.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
