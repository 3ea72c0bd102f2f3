"""A sharded job that shrinks and grows (`elastic: batch`, FSDP2): bytes that each host reads against those that it needs, and seconds.

Beside it torch.distributed.checkpoint loads the same state on the other number of ranks, from files in the page cache.
See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import common

PACKAGES = ("torch", "gemini-ft")
BLOCKS = 8  # of which the model is made: a product up and one down, as in a transformer
CHUNK = 8 << 20  # bytes that are verified together, as `chunk_bytes` is by default
CHANGES = ((4, 3), (3, 4))


def worker(folder: Path, megabytes: int) -> None:
    """One rank: resumes, loads the same from files, says what both took, and trains until it is lost or told to end."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, DistributedSampler

    import gemini_ft
    from gemini_ft.recovery import restore

    torch.set_num_threads(1)
    spans: list[tuple[int, int]] = []

    class Noting(restore.Scatter):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            spans.append((self.start // CHUNK, -(-self.stop // CHUNK)))

    restore.Scatter = Noting  # type: ignore[assignment,misc]
    gemini_ft.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    width = int((megabytes * 1e6 / 12 / BLOCKS / 8) ** 0.5) // 12 * 12  # weights and two moments, of 4 bytes; 8 x width x width in a block
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(BLOCKS)))
    mesh = init_device_mesh("cpu", (world,))
    for block in (*model, model):
        fully_shard(block, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.zeros(10**5, 1)
    loader = gemini_ft.resumable(DataLoader(data, 1, sampler=DistributedSampler(data, world, rank)))  # type: ignore[arg-type]
    checkpointer = gemini_ft.Checkpointer(model, optimizer, state={"loader": loader}, elastic="batch", interval=1)
    checkpointer.accumulation = 12 // world
    if start := checkpointer.resume():
        stats, files = checkpointer.stats, folder / "files"
        weights, moments = get_state_dict(model, optimizer)
        dist.barrier()
        begin = time.perf_counter()
        load({"model": weights, "optim": moments}, checkpoint_id=files)
        found = {
            "start": start,
            "world": world,
            "rank": rank,
            "needed": sum(stats.restored.values()),
            "read": sum(stop - low for low, stop in spans) * CHUNK,
            "seconds": stats.restore_seconds,
            "dcp": time.perf_counter() - begin,
        }
        (folder / f"resumed.{start}.{rank}").write_text(json.dumps(found))
    for number, batch in enumerate(loader, loader.batches_done + 1):
        (model(batch.expand(1, width)).square().mean() / checkpointer.accumulation).backward()
        if number % checkpointer.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            if number == checkpointer.accumulation and not start:
                weights, moments = get_state_dict(model, optimizer)
                save({"model": weights, "optim": moments}, checkpoint_id=folder / "files")
            if (checkpointer.stats.committed or 0) > start:
                (folder / f"committed.{world}.{rank}").touch()
            is_over = torch.tensor(float((folder / "end").exists()))
            dist.all_reduce(is_over)
            if is_over:
                break
    checkpointer.close()


def trial(megabytes: int) -> dict[str, dict[str, float]]:
    """One job of four hosts that loses one, and gets another; per change: bytes and seconds, of the rank with most."""
    from gemini_ft.testing import EmulatedHosts

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = ["--nnodes=3:4", "--rdzv-conf=is_host=0,last_call_timeout=1", __file__, "--worker", name, "--megabytes", str(megabytes)]
        with EmulatedHosts(4, program, folder, env=common.one_thread()) as hosts:

            def committed(world: int) -> bool:
                return len([*folder.glob(f"committed.{world}.*")]) == world

            hosts.wait_for(lambda: committed(4), 300)
            hosts.kill("host3")
            hosts.wait_for(lambda: committed(3), 300)
            for done in folder.glob("committed.4.*"):
                done.unlink()
            hosts.add()
            hosts.wait_for(lambda: committed(4), 300)
            (folder / "end").touch()
            hosts.finish(300)
        said = [json.loads(each.read_text()) for each in folder.glob("resumed.*")]
    found = {}
    for then, now in CHANGES:
        ranks = [each for each in said if each["world"] == now]
        found[f"{then} to {now}"] = {key: max(each[key] for each in ranks) for key in ("needed", "read", "seconds", "dcp")}
    return found


def main() -> None:
    """Measure, write the report, print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one job of 64 MB, no report")
    parser.add_argument("--megabytes", type=int, default=1000, help="of the whole state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker, options.megabytes)
        return
    megabytes, rounds = (64, 1) if options.quick else (options.megabytes, options.rounds)
    trials = [trial(megabytes) for _ in range(rounds)]
    results = {
        change: {key: statistics.median(each[change][key] for each in trials) for key in ("needed", "read", "seconds", "dcp")}
        for change in trials[0]
    }
    ratios = {f"{change}, read": common.ratio(found["read"], found["needed"]) for change, found in results.items()}
    ratios |= {f"{change}, seconds against DCP": common.ratio(found["seconds"], found["dcp"]) for change, found in results.items()}
    if not options.quick:
        rows = [
            (change, *(f"{found[key] / 1e6:.1f}" for key in ("needed", "read")), *(f"{found[key]:.2f}" for key in ("seconds", "dcp")))
            for change, found in results.items()
        ]
        header = ("ranks", "needed, MB", "read in whole chunks, MB", "seconds", "DCP from the page cache, seconds")
        body = (
            f"{megabytes} MB of weights and moments, {rounds} jobs of four emulated hosts with a rank each; of each change the rank with "
            f"most, medians. Load average at the end: {os.getloadavg()[0]:.0f}."
        )
        common.write_report(
            "resharding", "Another number of ranks under FSDP2", f"{body}\n\n{common.table(header, rows)}", common.versions(PACKAGES)
        )
    common.print_result("resharding", results, ratios)


if __name__ == "__main__":
    main()
