"""Measures what a snapshot of every step costs a GPT that trains on a GPU: time per step, time the training thread stands still, commits.

    python benchmarks/gpu/overhead.py                          # needs a CUDA device; a report
    python benchmarks/gpu/overhead.py --quick                  # one round
    python benchmarks/gpu/overhead.py --tiny                   # on a CPU too: to see that this file runs

Cells: state of 1, 4 and 16 GB (fp32 weights and AdamW's, bf16 autocast), one rank with one copy, two ranks that are two hosts with two, and
a loop that reads its loss at every step or never, so that the host runs ahead of the device. Rows, in random order: nothing; the same bytes
copied to pinned memory beside each step by the loop's own thread, without checksums or commits; gemini-ft with default options, and where
it is asked for (`gemini_profiled`) with a profile of what the training thread does in it; torch's
`async_save` with pinned, asynchronous staging into memory (a new one begins when the last is over); lm-resiliency and nvidia-resiliency-ext
where they are installed. A step's time is the device's own; `host_ms` in the results is where the training thread's time goes: median and
worst of each phase. The physical limit of a copy is the rate to pinned memory, measured with nothing else running.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import json
import os
import pstats
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import gemini_ft
from gemini_ft import accelerator

PACKAGES = ("torch", "gemini-ft")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One job.

    Attributes:
        gigabytes: of state, about.
        width, layers, batch: of the GPT; a sequence has 1024 tokens.
        ranks: each is a host of its own; there are as many copies.
        reads: whether the loop reads its loss at every step.
        warm_up: steps of each block that do not count: slots get their pages, Python's collector goes over what is new, and how long
            copies take becomes known.
    """

    gigabytes: float
    width: int
    layers: int
    batch: int
    ranks: int = 1
    reads: bool = True
    warm_up: int = 12

    @property
    def name(self) -> str:
        return f"{self.gigabytes:g}GB_{self.ranks}rank{'s' * (self.ranks > 1)}_{'reads_loss' if self.reads else 'runs_ahead'}"


ONE: dict[str, Any] = {"gigabytes": 1, "width": 768, "layers": 8, "batch": 32}
FOUR: dict[str, Any] = {"gigabytes": 4, "width": 1024, "layers": 24, "batch": 16}
SIXTEEN: dict[str, Any] = {"gigabytes": 16, "width": 2048, "layers": 24, "batch": 8, "warm_up": 30}
CELLS = [Cell(**FOUR), Cell(**FOUR, reads=False), Cell(**SIXTEEN), Cell(**FOUR, ranks=2, warm_up=60), Cell(**ONE), Cell(**ONE, reads=False)]
TINY = [Cell(gigabytes=0.01, width=64, layers=2, batch=1), Cell(gigabytes=0.01, width=64, layers=2, batch=1, ranks=2)]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        added: torch.Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return added


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.last = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.last(self.blocks(self.words(tokens)))
        return F.cross_entropy(F.linear(x[:, :-1], self.words.weight).flatten(0, 1), tokens[:, 1:].flatten())


class Nothing:
    """No snapshots."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.done = 0  # snapshots that are complete
        self.blocked: list[float] = []  # seconds of each step

    def before_update(self) -> None:
        """Returns when the update may be made."""

    def step(self) -> None:
        """Takes a snapshot."""

    def figures(self, steps: int) -> dict[str, Any]:
        """Figures of the last ``steps`` steps."""
        return {}

    def close(self) -> None:
        """Ends it."""


class Copies(Nothing):
    """A snapshot's bytes go to pinned memory beside every step, and the next update waits for them on the device."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # pinned memory, state
        self._queue: Any = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._copied: Any = None

    def before_update(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def step(self) -> None:
        if self._queue is None:
            return
        if not self._pairs:
            tensors = [*self.model.state_dict().values(), *(value for each in self.optimizer.state.values() for value in each.values())]
            self._memory = torch.empty(sum(each.nbytes + 64 for each in tensors), dtype=torch.uint8)
            accelerator.pin(tensors[0].device, self._memory.data_ptr(), self._memory.nbytes)
            at = 0
            for each in tensors:
                self._pairs.append((self._memory[at : at + each.nbytes].view(each.dtype).view(each.shape), each))
                at += -(-each.nbytes // 64) * 64
        self._queue.wait_stream(torch.cuda.current_stream())
        nbytes = 0
        with torch.cuda.stream(self._queue):
            for target, source in self._pairs:
                target.copy_(source, non_blocking=True)
                nbytes += source.nbytes
                if nbytes >= 2**26:
                    accelerator.give_way(self._queue, source.device)
                    nbytes = 0
        self._copied = self._queue.record_event()

    def close(self) -> None:
        if self._pairs:
            torch.cuda.synchronize()
            accelerator.unpin(self._pairs[0][1].device, self._memory.data_ptr())


class Gemini(Nothing):
    """Default options; of each rank its own state."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        run = f"overhead-{os.environ['OVERHEAD_RUN']}-{uuid.uuid4().hex[:8] if not dist.is_initialized() else next(_blocks)}"
        copies = dist.get_world_size() if dist.is_initialized() else 1
        self._checkpointer = gemini_ft.Checkpointer(model, optimizer, replicated=False, run_id=run, replicas=copies)
        self._checkpointer.resume()

    def step(self) -> None:
        self._checkpointer.step()

    def figures(self, steps: int) -> dict[str, Any]:
        stats = self._checkpointer.stats
        self._checkpointer.flush()
        commits = [seconds for iteration, seconds in stats.commit_seconds.items() if iteration > stats.snapshots - steps]
        blocked = stats.blocked[-steps:]
        return {
            "committed": len(commits) / steps,
            "complete_s": common.median(commits) if commits else None,
            "blocked_s": statistics.median(blocked),
            "blocked_worst_s": max(blocked),
            "state_bytes": stats.shard_bytes,
            "travelled": [_brief(each) for travels in stats.traffic.values() for each in travels][-3:],
        }

    def close(self) -> None:
        self._checkpointer.close()


class ProfiledGemini(Gemini):
    """The same, with a profile of what the training thread does in it; its times are those of Python under a profiler."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self._profile = cProfile.Profile()

    def step(self) -> None:
        self._profile.runcall(super().step)

    def close(self) -> None:
        super().close()
        pstats.Stats(self._profile, stream=sys.stderr).strip_dirs().sort_stats("tottime").print_stats(25)


def _brief(travelled: Any) -> dict[str, Any]:
    """A snapshot's way to a peer: bytes, those outside of idle spans, how many slices went in spans, seconds, and those expected."""
    return {
        "nbytes": travelled.nbytes,
        "outside": travelled.outside,
        "spans": len(travelled.spans),
        "seconds": round(travelled.seconds, 3),
        "expected": travelled.expected,
    }


class AsyncSave(Nothing):
    """torch.distributed.checkpoint, staged asynchronously into pinned memory and written to a folder in memory."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._folder = tempfile.mkdtemp(dir="/dev/shm")
        self._stager = DefaultStager(StagingOptions(True, torch.cuda.is_available(), True, torch.cuda.is_available()))
        self._saving: Any = None
        self._seconds = 0.0

    def before_update(self) -> None:
        begin = time.perf_counter()
        if self._saving is not None:
            self._saving.staging_completion.result()
        self._seconds += time.perf_counter() - begin

    def step(self) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        begin = time.perf_counter()
        if self._saving is None or self._saving.upload_completion.done():
            self.done += self._saving is not None
            state = {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}
            writer = FileSystemWriter(self._folder, overwrite=True)
            self._saving = async_save(
                state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.THREAD, async_stager=self._stager, no_dist=True
            )
        self.blocked.append(self._seconds + time.perf_counter() - begin)
        self._seconds = 0.0

    def figures(self, steps: int) -> dict[str, Any]:
        blocked = self.blocked[-steps:]
        return {"committed": self.done / len(self.blocked), "blocked_s": statistics.median(blocked), "blocked_worst_s": max(blocked)}

    def close(self) -> None:
        if self._saving is not None:
            self._saving.upload_completion.result()
        self._stager.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class LmResiliency(Nothing):
    """lm-resiliency: pinned memory of the trainer, and of a peer where there is one; every step, chunks of its default size."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        from lm_resiliency.checkpointing.config import InMemoryCkptConfig
        from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager

        self._folder = tempfile.mkdtemp(dir="/dev/shm")
        config = InMemoryCkptConfig(interval=1, replication_jump=1, disk_flush_interval=0, disk_folder=self._folder)
        self._manager = InMemoryCheckpointManager(config)
        self._completed: dict[int, float] = {}
        self._begun: dict[int, float] = {}

    def before_update(self) -> None:
        begin = time.perf_counter()
        self._manager.maybe_wait()
        self.blocked.append(time.perf_counter() - begin)

    def step(self) -> None:
        from peers.lmr import watch

        begin, number = time.perf_counter(), len(self._begun) + 1
        state = self.optimizer.state_dict()["state"].values()
        tensors = [
            *self.model.state_dict().values(),
            *(value for each in state for value in each.values() if isinstance(value, torch.Tensor)),
        ]
        self._begun[number] = time.monotonic()
        self._manager.save_tensors(tensors, number)
        if dist.is_initialized():
            watch(self._manager, number, self._completed)
        else:
            threading.Thread(target=self._watch, args=(number, self._manager._completion_thread), daemon=True).start()
        self.blocked[-1] += time.perf_counter() - begin

    def _watch(self, number: int, capture: threading.Thread | None) -> None:
        if capture is not None:
            capture.join()
            self._completed[number] = time.monotonic()

    def figures(self, steps: int) -> dict[str, Any]:
        self._manager.finalize_replication()
        time.sleep(0.1)
        blocked, last = self.blocked[-steps:], len(self._begun)
        took = [end - self._begun[number] for number, end in self._completed.items() if number > last - steps]
        figures = {"committed": len(took) / steps, "blocked_s": statistics.median(blocked), "blocked_worst_s": max(blocked)}
        return figures | ({"complete_s": statistics.median(took)} if took else {})

    def close(self) -> None:
        self._manager.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Nvrx(Nothing):
    """nvidia-resiliency-ext's local checkpoints into a folder in memory, asynchronous; a new one begins when the last is over."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

        self._is_alone = not dist.is_initialized()
        self._folder = tempfile.mkdtemp(dir="/dev/shm")
        if self._is_alone:  # it needs a group
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        self._manager = LocalCheckpointManager(self._folder)
        self._queue = AsyncCallsQueue()

    def step(self) -> None:
        from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict

        begin = time.perf_counter()
        self._queue.maybe_finalize_async_calls(blocking=False)
        if not self._queue.get_num_unfinalized_calls():
            self.done += len(self.blocked) > 0
            state = BasicTensorAwareStateDict({"model": self.model.state_dict(), "optim": self.optimizer.state_dict()["state"]})
            self._queue.schedule_async_request(self._manager.save(state, len(self.blocked), is_async=True))
        self.blocked.append(time.perf_counter() - begin)

    def figures(self, steps: int) -> dict[str, Any]:
        blocked = self.blocked[-steps:]
        return {"committed": self.done / len(self.blocked), "blocked_s": statistics.median(blocked), "blocked_worst_s": max(blocked)}

    def close(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True)
        self._queue.close()
        if self._is_alone:
            dist.destroy_process_group()
        shutil.rmtree(self._folder, ignore_errors=True)


ROWS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Nothing]] = {
    "none": Nothing,
    "copies": Copies,
    "gemini": Gemini,
    "gemini_profiled": ProfiledGemini,
    "async_save": AsyncSave,
    "lm_resiliency": LmResiliency,
    "nvrx": Nvrx,
}
WITH_PEERS = ("none", "copies", "gemini", "gemini_profiled", "lm_resiliency")  # that keep copies on another host
_blocks: Iterator[int] = iter(range(1000))


class HostTimes:
    """Where the training thread's time goes: seconds of each phase of each step, and of Python's collector."""

    def __init__(self) -> None:
        self.phases: dict[str, list[float]] = {}
        self.collected: list[float] = []
        self._begin = self._collecting = time.perf_counter()
        gc.callbacks.append(self._note)

    def restart(self) -> None:
        self.phases, self.collected, self._begin = {}, [], time.perf_counter()

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        self.phases.setdefault(phase, []).append(now - self._begin)
        self._begin = now

    def _note(self, when: str, _: Any) -> None:
        if when == "start":
            self._collecting = time.perf_counter()
        else:
            self.collected.append(time.perf_counter() - self._collecting)

    def figures(self) -> dict[str, Any]:
        """Milliseconds: of each phase the median and the worst, of the collector all and the worst."""
        gc.callbacks.remove(self._note)
        host = {name: [round(1e3 * statistics.median(each), 1), round(1e3 * max(each), 1)] for name, each in self.phases.items()}
        return host | {"collector": [round(1e3 * sum(self.collected), 1), round(1e3 * max(self.collected, default=0), 1)]}


class Clock:
    """The device's own time at the end of each step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter() if self._device.type == "cpu" else torch.cuda.current_stream().record_event(_timed()))

    def seconds(self) -> list[float]:
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if self._device.type == "cpu":
            return [after - before for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairs]


def _timed() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def block(name: str, cell: Cell, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, steps: int) -> dict[str, Any]:
    """One row for ``steps`` steps: the seconds of each, and its figures."""
    row, clock, times = ROWS[name](model, optimizer), Clock(tokens.device), HostTimes()
    try:
        for number in range(cell.warm_up + steps + 1):
            if number == cell.warm_up:
                times.restart()
            with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
                loss = model(tokens)
            loss.backward()
            times.end("passes")
            row.before_update()
            optimizer.step()
            times.end("update")
            optimizer.zero_grad()
            if number >= cell.warm_up:
                clock.mark()
            row.step()
            times.end("snapshot")
            if cell.reads:
                loss.item()
            times.end("read")
        return {"steps": clock.seconds(), "host_ms": times.figures(), **row.figures(steps)}
    finally:
        row.close()


def rank(number: int, cell: Cell, rows: list[str], rounds: int, steps: int, folder: str) -> None:
    """Measures one cell on one rank; writes what it found."""
    os.environ |= {"GEMINI_HOST_ID": f"host{number}", "GEMINI_LOG_DIR": folder, "GLOO_SOCKET_IFNAME": "lo"}
    if cell.ranks > 1:
        store = dist.FileStore(f"{folder}/store", cell.ranks)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=number, world_size=cell.ranks)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(number)
    model = GPT(cell.width, cell.layers, 256 if device.type == "cpu" else 32768).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    tokens = torch.randint(0, 256, (cell.batch, 64 if device.type == "cpu" else 1024), device=device)
    order = random.Random(7)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name in order.sample(rows, len(rows)):
            try:
                found[name].append(block(name, cell, model, optimizer, tokens, steps))
            except Exception:  # of a peer: its row says so
                if name in ("none", "gemini"):
                    raise
                found[name].append({"error": traceback.format_exc()[-600:]})
            if number == 0:  # at once: the rest may be cut off
                print(f"{cell.name}, {name}: {json.dumps(found[name][-1])}", file=sys.stderr, flush=True)
    Path(folder, f"found-{number}").write_text(json.dumps({"rows": found, "pinned": pinned_rate(device)}))


def pinned_rate(device: torch.device, nbytes: int = 2**30) -> float:
    """Bytes per second from the device to pinned memory, with nothing else running."""
    if device.type == "cpu":
        return 0.0
    source, target = torch.empty(nbytes, dtype=torch.uint8, device=device), torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target.copy_(source)
    begin = time.perf_counter()
    target.copy_(source)
    return nbytes / (time.perf_counter() - begin)


def measure(cell: Cell, rows: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """The figures of a cell: of several ranks the worst."""
    os.environ["OVERHEAD_RUN"] = uuid.uuid4().hex[:8]
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank, (cell, rows, rounds, steps, folder), nprocs=cell.ranks)
        told = [json.loads(Path(folder, f"found-{number}").read_text()) for number in range(cell.ranks)]
    results: dict[str, Any] = {"pinned_bytes_per_s": max(each["pinned"] for each in told)}
    for name in rows:
        blocks = [each for one in told for each in one["rows"][name]]
        if errors := [each["error"] for each in blocks if "error" in each]:
            results[name] = {"error": errors[0]}
            continue
        times = [seconds for each in blocks for seconds in each["steps"]]
        results[name] = {"step_s": statistics.mean(times), "median_s": statistics.median(times), "worst_s": max(times)}
        results[name]["blocks"] = [statistics.mean(each["steps"]) for each in blocks]
        results[name]["host_ms"] = [each["host_ms"] for each in blocks]
        if travelled := [each["travelled"] for each in blocks if each.get("travelled")]:
            results[name]["travelled"] = travelled
        for key, worst in (("committed", min), ("complete_s", max), ("blocked_s", max), ("blocked_worst_s", max), ("state_bytes", max)):
            values = [each[key] for each in blocks if each.get(key) is not None]
            if values:
                results[name][key] = worst(values)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round: no report")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU too: no report")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=[name for name in ROWS if name != "gemini_profiled"])
    parser.add_argument("--cells", nargs="+", help="names of cells, for example 4GB_1rank_reads_loss")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.tiny:
        sys.exit("needs a CUDA device; --tiny runs on a CPU")
    brief = arguments.quick or arguments.tiny
    cells = [each for each in (TINY if arguments.tiny else CELLS) if each.name in (arguments.cells or [each.name])]
    rounds, steps = (1, 3) if arguments.tiny else (1, arguments.steps) if arguments.quick else (arguments.rounds, arguments.steps)
    results, ratios, broken = {}, {}, list[str]()
    for cell in cells:
        rows = [name for name in arguments.rows if cell.ranks == 1 or name in WITH_PEERS]
        try:
            found = measure(cell, rows, rounds, steps) | {"cell": asdict(cell)}
        except Exception:  # the other cells may do
            traceback.print_exc()
            broken.append(cell.name)
            continue
        results[cell.name] = found
        for name in rows[1:]:
            if "error" not in found[name]:
                ratios[f"step_{name}_vs_none_{cell.name}"] = common.ratio(found[name]["step_s"], found["none"]["step_s"])
        print(_table({cell.name: found}), file=sys.stderr, flush=True)
    table = _table(results)
    if not brief:
        body = f"Device: {torch.cuda.get_device_name()}. {rounds} rounds of {steps} steps.\n\n{table}"
        path = common.write_report("gpu-overhead", "Snapshots of a GPT on a GPU", body, common.versions(PACKAGES))
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
    common.print_result("gpu_overhead", results, ratios)
    if broken:
        sys.exit(f"failed: {', '.join(broken)}")


def _table(results: dict[str, Any]) -> str:
    head = ("cell", "row", "step s", "of none", "blocks", "worst s", "blocked ms", "worst", "committed", "complete s", "pinned GB/s")
    lines = []
    for cell, found in results.items():
        for name in (row for row in ROWS if row in found):
            each, base = found[name], found["none"].get("step_s", 0)
            if "error" in each:
                lines.append((cell, name, each["error"].strip().splitlines()[-1][:80], *[""] * 8))
                continue
            spread = " ".join(f"{value / base:.3f}" for value in each["blocks"])
            blocked = [f"{1000 * each[key]:.1f}" if key in each else "" for key in ("blocked_s", "blocked_worst_s")]
            share = f"{each['committed']:.2f}" if "committed" in each else ""
            complete = f"{each['complete_s']:.3f}" if "complete_s" in each else ""
            pinned = f"{found['pinned_bytes_per_s'] / 1e9:.1f}"
            step, ratio, worst = f"{each['step_s']:.4f}", f"{each['step_s'] / base:.3f}", f"{each['worst_s']:.4f}"
            lines.append((cell, name, step, ratio, spread, worst, *blocked, share, complete, pinned))
    return common.table(head, lines)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
