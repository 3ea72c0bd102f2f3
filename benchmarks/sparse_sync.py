"""Every scheme of gemini_ft.sync on shaped links, beside its formula. See README.md.

python benchmarks/sparse_sync.py --quick
python benchmarks/sparse_sync.py
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from common import HERE, clean_up_on_sigterm, command_line, interval, one_thread, print_result, ratio, spread, table, versions, write_report
from curves import TRACE, draw
from gemini_ft.testing import Network

TRACES = ("LSTM", "DeepFM", "NMT", "DGC", "DGC, elements")
FIXED = (
    "dense",
    "agsparse",
    "ssar-recursive-doubling",
    "ssar-split-allgather",
    "dsar-split-allgather",
    "sparse-ps",
    "omnireduce",
    "zen",
)
TORCH = "torch, sparse"  # torch's own all-reduce of sparse tensors
RIVALS = (*FIXED, TORCH)  # that Zen is compared with
SCHEMES = (*RIVALS, "zen, paper's hashing", "auto")
AIMS = {  # ratio: (aim, what the paper has at 25 Gbit/s)
    "zen_vs_formula": ("at most 1.25", ""),
    "zen_vs_formula_1g": ("at most 1.4", ""),
    "zen_vs_best_other": ("over 1 where its formula is the least", ""),
    "zen_vs_torch_sparse": ("over 1", ""),
    "zen_vs_dense_lstm": ("", "6.77"),
    "zen_vs_dense_deepfm": ("", "2.10"),
    "zen_vs_dense_dgc": ("", "3.4"),
    "zen_vs_dense_of_formula": ("at least 0.85", ""),
    "auto_vs_best_fixed": ("at most 1.05", ""),
}
CPU_BOUND = 0.8
PORT = 29400
TIMEOUT = 3600.0  # seconds for one network
EXAMPLE_HOSTS, EXAMPLE_STEPS = 8, 10
EXAMPLE_PATHS = ("DDP, dense", "DDP, sparse", "Zen")
EXAMPLE = HERE.parent / "examples" / "zen_language_model.py"


def run_hosts(network: Network, command: Sequence[str], folder: Path, timeout: float) -> str:
    """Run it as one rank per host; the output of rank 0."""
    hosts = network.hosts
    meet = {"WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": network.address(hosts[0]), "MASTER_PORT": str(PORT)}
    ranks = []
    for rank, host in enumerate(hosts):
        env = {**os.environ, **one_thread(), **meet, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "eth0"}
        with open(folder / f"log{rank}", "wb") as log:
            ranks.append(network.run(host, [sys.executable, *command], env=env, stdout=log, stderr=subprocess.STDOUT))
    until = time.monotonic() + timeout
    while any(process.poll() is None for process in ranks) and time.monotonic() < until:
        if any(process.poll() for process in ranks):
            break
        time.sleep(0.1)
    failed = [rank for rank, process in enumerate(ranks) if process.poll() != 0]
    if failed:
        text = (folder / f"log{failed[0]}").read_text(errors="replace")[-3000:]
        raise RuntimeError(f"ranks {failed} failed or were not done after {timeout:.0f} s\n{text}")
    return (folder / "log0").read_text(errors="replace")


def measure(hosts: int, rate: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All points of one network, and the traces' figures with each."""
    with Network(hosts, rate=rate) as network, tempfile.TemporaryDirectory() as folder:
        job = {
            "rows": arguments.rows,
            "width": arguments.width,
            "bits": bits(rate),
            "traces": arguments.traces,
            "schemes": arguments.schemes,
            "budget": arguments.budget,
            "folder": folder,
        }
        run_hosts(network, [str(HERE / "sparse_sync_worker.py"), json.dumps(job)], Path(folder), TIMEOUT)
        found = json.loads(Path(folder, "result.json").read_text())
    for point in found["points"]:
        point |= {"hosts": hosts, "rate": rate, "about": found["traces"][point["trace"]]}
    points: list[dict[str, Any]] = found["points"]
    return points


def end_to_end(rate: str, runs: int) -> dict[str, list[float]]:
    """Seconds per step of the LSTM example by path, a figure per run; paths come in another order in each run, dense in the first only."""
    found: dict[str, list[float]] = {}
    for number in range(runs):
        paths = EXAMPLE_PATHS if number == 0 else EXAMPLE_PATHS[1:]
        order = random.Random(number).sample(paths, len(paths))
        command = [str(EXAMPLE), f"--steps={EXAMPLE_STEPS}", "--vocabulary=100000", "--width=256", "--batch=32", "--paths", *order]
        with Network(EXAMPLE_HOSTS, rate=rate) as network, tempfile.TemporaryDirectory() as folder:
            output = run_hosts(network, command, Path(folder), TIMEOUT)
        for path, seconds in re.findall(r"^(DDP, dense|DDP, sparse|Zen) +[\d.]+ +([\d.]+) ", output, re.MULTILINE):
            found.setdefault(path, []).append(float(seconds))
    return found


def bits(rate: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([kmg])bit", rate).groups()  # type: ignore[union-attr]
    return float(number) * {"k": 1e3, "m": 1e6, "g": 1e9}[unit]


# -- ratios


Point: TypeAlias = dict[str, Any]  # a sparse_sync_worker.Point, with hosts, rate and the trace's figures


@dataclass(frozen=True)
class Quotient:
    """A ratio at one point, of the same rounds; ``busy`` is the larger share of the processors of the two."""

    where: str
    middle: float
    low: float
    high: float
    busy: float

    def __str__(self) -> str:
        return spread((self.middle, self.low, self.high), 3)


class Points:
    """The measured points, to be looked up by scheme and conditions."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.all = list(points)

    def of(self, scheme: str, **where: Any) -> list[Point]:
        """The points of a scheme."""
        return [point for point in self.all if point["scheme"] == scheme and all(point[key] == value for key, value in where.items())]

    def beside(self, point: Point, schemes: Iterable[str]) -> list[Point]:
        """Other schemes on the same trace and network."""
        same = ("hosts", "rate", "trace")
        others = [each for each in self.all if each["scheme"] in schemes and all(each[key] == point[key] for key in same)]
        return [each for each in others if each["scheme"] != point["scheme"]]


def over(point: Point, other: Point, scale: float = 1.0) -> Quotient:
    """Time of one scheme divided by another's and by ``scale``, round by round."""
    rounds = [one / two / scale for one, two in zip(point["times"], other["times"], strict=False)]
    return Quotient(where(point), *interval(rounds), max(point["cpu"], other["cpu"]))


def over_formula(point: Point) -> Quotient:
    return Quotient(where(point), *interval([each / point["formula_seconds"] for each in point["times"]]), point["cpu"])


def where(point: Point) -> str:
    return f"{point['trace']}, {point['hosts']} hosts, {point['rate']}"


def quotients(points: Points) -> dict[str, list[Quotient]]:
    """Every ratio at every point that has it."""
    found: dict[str, list[Quotient]] = {name: [] for name in AIMS}
    for rate, name in (("200mbit", "zen_vs_formula"), ("1gbit", "zen_vs_formula_1g")):
        found[name] = [over_formula(point) for point in points.of("zen", rate=rate, hosts=8)]
    for point in points.of("zen"):
        if (rivals := points.beside(point, RIVALS)) and point["formula_seconds"] <= min(each["formula_seconds"] for each in rivals):
            found["zen_vs_best_other"].append(over(_fastest(rivals), point))
        found["zen_vs_torch_sparse"] += [over(other, point) for other in points.beside(point, [TORCH])]
        for dense in points.beside(point, ["dense"]):
            found["zen_vs_dense_of_formula"].append(over(dense, point, dense["formula_seconds"] / point["formula_seconds"]))
            name = f"zen_vs_dense_{point['trace'].lower()}"
            if (point["rate"], point["hosts"]) == ("200mbit", 8) and name in found:
                found[name].append(over(dense, point))
    for point in points.of("auto"):
        if rivals := points.beside(point, FIXED):
            found["auto_vs_best_fixed"].append(over(point, _fastest(rivals)))
    return found


def _fastest(points: Sequence[Point]) -> Point:
    return min(points, key=lambda point: float(point["seconds"]))


def worst(name: str, found: Iterable[Quotient]) -> Quotient | None:
    """The largest of those that should be small, the smallest of the others."""
    pick = max if "at most" in AIMS[name][0] else min
    return pick(found, key=lambda each: each.middle, default=None)


def ratios(points: Points) -> dict[str, float | None]:
    """The worst point of each, those that lack processors too."""
    cells = {name: worst(name, found) for name, found in quotients(points).items()}
    return {name: round(cell.middle, 3) if cell is not None else None for name, cell in cells.items()}


# -- the report


Steps: TypeAlias = dict[str, dict[str, list[float]]]  # of the example: rate -> path -> seconds per step of each run


def gain(runs: dict[str, list[float]]) -> tuple[float, float, float]:
    """DDP's sparse path over Zen, run by run, with its 95 % interval."""
    return interval([sparse / zen for sparse, zen in zip(runs["DDP, sparse"], runs["Zen"], strict=True)])


def _example(steps: Steps) -> str:
    rows = []
    for rate, runs in steps.items():
        middle, low, high = gain(runs)
        rows += [[rate, path, f"{statistics.median(times):.4f}", str(len(times)), ""] for path, times in runs.items()]
        rows.append([rate, "DDP, sparse / Zen", "", "", f"{middle:.3f} ({low:.3f} to {high:.3f})"])
    pays = [rate for rate, runs in steps.items() if gain(runs)[1] >= 1]
    text = f"Zen is at least as fast as DDP's sparse path, by the whole interval, at: {', '.join(pays) or 'none of these rates'}."
    return f"{text}\n\n{table(['rate', 'path', 's per step', 'runs', 'ratio (95 %)'], rows)}"


def report(points: Points, steps: Steps) -> str:
    parts = []
    for hosts, rate in sorted({(point["hosts"], point["rate"]) for point in points.all}):
        here = [point for point in points.all if (point["hosts"], point["rate"]) == (hosts, rate)]
        parts += [f"## {hosts} hosts, {rate}", _times(points, here)]
    if points.all:
        parts += ["## Ratios", _ratios(points), "## Where Zen is not the fastest", _not_first(points)]
        parts += ["## The traces", _traces(points.all), "## Hashing", _hashing(points.all)]
    if steps:
        parts += [f"## The LSTM example, {EXAMPLE_HOSTS} hosts", _example(steps)]
    return "\n\n".join(parts)


def _ratios(points: Points) -> str:
    """The worst points, and the worst of those that do not lack processors."""
    rows = []
    for name, found in quotients(points).items():
        cell, quiet = worst(name, found), worst(name, [each for each in found if each.busy < CPU_BOUND])
        figures = [str(cell), cell.where, _cpu(cell.busy)] if cell is not None else ["", "", ""]
        rows.append([name, *figures, str(quiet) if quiet is not None else "none", *AIMS[name]])
    return table(["ratio", "worst (95 %)", "where", "CPU", "worst, not CPU-bound", "aim", "the paper"], rows)


def _not_first(points: Points) -> str:
    """Every point, whether it lacks processors or not."""
    rows = []
    for point in points.of("zen"):
        rivals = points.beside(point, RIVALS)
        if rivals and (first := _fastest(rivals))["seconds"] < point["seconds"]:
            found = over(point, first)
            by_formula = point["formula_seconds"] / first["formula_seconds"]
            rows.append([found.where, first["scheme"], str(found), f"{by_formula:.3f}", _cpu(found.busy)])
    header = ["where", "fastest", "Zen / it (95 %)", "by formula", "CPU"]
    return f"{len(rows)} of {len(points.of('zen'))} points.\n\n{table(header, rows)}"


def _cpu(share: float) -> str:
    return f"{share:.0%}" + (" CPU-bound" if share >= CPU_BOUND else "")


def _times(points: Points, here: Sequence[dict[str, Any]]) -> str:
    rows = []
    for point in here:
        dense = next((each["seconds"] for each in [point, *points.beside(point, ["dense"])] if each["scheme"] == "dense"), None)
        others = [each["seconds"] for each in points.beside(point, RIVALS)]
        rows.append(
            [
                point["trace"],
                point["scheme"] + (f" ({point['chosen']})" if point["chosen"] else ""),
                f"{point['seconds']:.4f}",
                f"{point['formula_seconds']:.4f}",
                f"{point['seconds'] / point['formula_seconds']:.3f}",
                f"{point['mbytes']:.2f}",
                f"{point['formula_mbytes']:.2f}",
                str(ratio(dense, point["seconds"])),
                str(ratio(min(others, default=None), point["seconds"])),
                _cpu(point["cpu"]),
            ]
        )
    header = ["trace", "scheme", "s", "formula", "s / formula", "MB sent", "formula", "dense / it", "best other / it", "CPU"]
    return table(header, rows)


def _traces(points: Sequence[dict[str, Any]]) -> str:
    seen = {(point["trace"], point["hosts"]): point["about"] for point in points}
    rows = [
        [
            trace,
            str(hosts),
            f"{about['rows']} x {about['width']}",
            *(f"{about[key]:.4f}" for key in ("density", "sum")),
            *(f"{about[key]:.2f}" for key in ("densification", "overlap", "push skew", "pull skew")),
            about["published"],
        ]
        for (trace, hosts), about in seen.items()
    ]
    header = ["trace", "hosts", "size", "density", "of the sum", "densification", "overlap", "push skew", "pull skew", "published"]
    return table(header, rows)


def _hashing(points: Sequence[dict[str, Any]]) -> str:
    seen = {(point["trace"], point["hosts"]): point["about"]["hashing"] for point in points}
    form = {"push": ".3f", "pull": ".3f", "ms": ".2f", "table": "", "slots": "", "collisions": ".3f"}
    rows = [
        [trace, str(hosts), name, *(f"{found[key]:{digits}}" if key in found else "" for key, digits in form.items())]
        for (trace, hosts), each in seen.items()
        for name, found in each.items()
    ]
    return table(["trace", "hosts", "parts", "push imbalance", "pull imbalance", "ms", "table, bytes", "slots, bytes", "collisions"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 hosts, two traces, a small gradient; writes no report")
    parser.add_argument("--hosts", type=int, nargs="*", default=[4, 8, 16], help="none: the LSTM example alone")
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit"])
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds, by its formula, that a scheme is measured on a trace")
    parser.add_argument("--example-rates", nargs="*", default=["1gbit", "500mbit", "200mbit"], help="of the LSTM example, on 8 hosts")
    parser.add_argument("--example-runs", type=int, default=5, help="of the LSTM example at each rate")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.hosts, arguments.rates, arguments.traces = [4], ["200mbit"], ["LSTM", "DGC, elements"]
        arguments.rows, arguments.budget, arguments.example_rates = 5_000, 0.5, []
    if (reason := Network.unavailable()) is not None:
        sys.exit(f"no network of hosts here: {reason}")
    clean_up_on_sigterm()
    measured = []
    for hosts in arguments.hosts:
        for rate in arguments.rates:
            measured += measure(hosts, rate, arguments)
            print(_times(Points(measured), [each for each in measured if (each["hosts"], each["rate"]) == (hosts, rate)]), flush=True)
    points = Points(measured)
    steps = {rate: end_to_end(rate, arguments.example_runs) for rate in arguments.example_rates}
    print(report(points, steps))
    if not arguments.quick:
        path = write_report("sparse-sync", "Sparse gradient synchronisation", report(points, steps), versions(["torch", "numpy"]))
        if measured and TRACE in arguments.traces:
            path.with_suffix(".svg").write_text(draw(measured))
        print(f"{command_line()}: {path.name}")
    results = {f"{each['scheme']}, {each['trace']}, {each['hosts']} hosts, {each['rate']}": each["seconds"] for each in measured}
    results |= {f"example, {path}, {rate}": statistics.median(times) for rate, runs in steps.items() for path, times in runs.items()}
    examples = {f"example_ddp_sparse_vs_zen_{rate}": round(gain(runs)[0], 3) for rate, runs in steps.items()}
    print_result("sparse_sync", results, {**ratios(points), **examples})


if __name__ == "__main__":
    main()
