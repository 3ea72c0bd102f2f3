"""Every scheme of gemini_ft.sync on shaped links, beside its formula. See README.md.

python benchmarks/sparse_sync.py --quick
python benchmarks/sparse_sync.py
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common import HERE, clean_up_on_sigterm, command_line, one_thread, print_result, ratio, table, versions, write_report
from curves import TRACE, draw
from gemini_ft.testing import Network

TRACES = ("LSTM", "DeepFM", "NMT", "DGC")
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
SCHEMES = (*FIXED, "zen, paper's hashing", "auto")
AIMS = {  # ratio: (aim, what the paper has at 25 Gbit/s)
    "zen_vs_formula": ("at most 1.25", ""),
    "zen_vs_formula_1g": ("at most 1.4", ""),
    "zen_vs_best_other": ("over 1", ""),
    "zen_vs_dense_lstm": ("", "6.77"),
    "zen_vs_dense_deepfm": ("", "2.10"),
    "zen_vs_dense_dgc": ("", "3.4"),
    "zen_vs_dense_of_formula": ("at least 0.85", ""),
    "auto_vs_best_fixed": ("at most 1.05", ""),
}
CPU_BOUND = 0.8
PORT = 29400
TIMEOUT = 3600.0  # seconds for one network
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


def end_to_end(hosts: int, rate: str, steps: int) -> dict[str, float]:
    """Seconds per step of the LSTM example, by path."""
    command = [str(EXAMPLE), f"--steps={steps}", "--vocabulary=100000", "--width=256", "--batch=32"]
    with Network(hosts, rate=rate) as network, tempfile.TemporaryDirectory() as folder:
        output = run_hosts(network, command, Path(folder), TIMEOUT)
    rows = re.findall(r"^(DDP, dense|DDP, sparse|Zen) +[\d.]+ +([\d.]+) ", output, re.MULTILINE)
    return {path: float(seconds) for path, seconds in rows}


def bits(rate: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([kmg])bit", rate).groups()  # type: ignore[union-attr]
    return float(number) * {"k": 1e3, "m": 1e6, "g": 1e9}[unit]


# -- ratios


class Points:
    """The measured points, to be looked up by scheme and conditions."""

    def __init__(self, points: Sequence[dict[str, Any]]) -> None:
        self.all = list(points)

    def of(self, scheme: str, **where: Any) -> list[dict[str, Any]]:
        """The points of a scheme that are not CPU-bound."""
        return [
            point
            for point in self.all
            if point["scheme"] == scheme and point["cpu"] < CPU_BOUND and all(point[key] == value for key, value in where.items())
        ]

    def beside(self, point: dict[str, Any], schemes: Iterable[str]) -> list[dict[str, Any]]:
        """Other schemes on the same trace and network."""
        same = ("hosts", "rate", "trace")
        return [each for each in self.all if each["scheme"] in schemes and all(each[key] == point[key] for key in same)]


def ratios(points: Points) -> dict[str, float | None]:
    found: dict[str, float | None] = {
        "zen_vs_formula": _most(_against_formula(point) for point in points.of("zen", rate="200mbit", hosts=8)),
        "zen_vs_formula_1g": _most(_against_formula(point) for point in points.of("zen", rate="1gbit", hosts=8)),
    }
    others = [name for name in FIXED if name != "zen"]
    leads, of_formula = [], []
    for point in points.of("zen"):
        rivals = points.beside(point, others)
        if rivals and point["formula_seconds"] <= min(rival["formula_seconds"] for rival in rivals):
            leads.append(ratio(min(rival["seconds"] for rival in rivals), point["seconds"]))
        for dense in points.beside(point, ["dense"]):
            measured, formula = (dense[key] / point[key] for key in ("seconds", "formula_seconds"))
            of_formula.append(ratio(measured, formula))
    found["zen_vs_best_other"] = _least(leads)
    for trace in ("LSTM", "DeepFM", "DGC"):
        gains = [
            ratio(dense["seconds"], point["seconds"])
            for point in points.of("zen", rate="200mbit", hosts=8, trace=trace)
            for dense in points.beside(point, ["dense"])
        ]
        found[f"zen_vs_dense_{trace.lower()}"] = _least(gains)
    found["zen_vs_dense_of_formula"] = _least(of_formula)
    found["auto_vs_best_fixed"] = _most(
        ratio(point["seconds"], min(rival["seconds"] for rival in points.beside(point, FIXED))) for point in points.of("auto")
    )
    return found


def _against_formula(point: dict[str, Any]) -> float | None:
    return ratio(point["seconds"], point["formula_seconds"])


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


# -- the report


def report(points: Points, steps: dict[str, float]) -> str:
    parts = []
    for hosts, rate in sorted({(point["hosts"], point["rate"]) for point in points.all}):
        here = [point for point in points.all if (point["hosts"], point["rate"]) == (hosts, rate)]
        parts += [f"## {hosts} hosts, {rate}", _times(points, here)]
    rows = [[name, str(value), *AIMS[name]] for name, value in ratios(points).items()]
    parts += ["## Ratios", table(["ratio", "measured", "aim", "the paper"], rows)]
    parts += ["## The traces", _traces(points.all), "## Hashing", _hashing(points.all)]
    if steps:
        rows = [[path, f"{seconds:.4f}", f"{seconds / steps['Zen']:.2f}"] for path, seconds in steps.items()]
        parts += ["## The LSTM example, 8 hosts, 1gbit", table(["path", "s per step", "against Zen"], rows)]
    return "\n\n".join(parts)


def _times(points: Points, here: Sequence[dict[str, Any]]) -> str:
    rows = []
    for point in here:
        dense = next((each["seconds"] for each in points.beside(point, ["dense"])), None)
        others = [each["seconds"] for each in points.beside(point, FIXED) if each["scheme"] != point["scheme"]]
        rows.append(
            [
                point["trace"],
                point["scheme"] + (f" ({point['chosen']})" if point["chosen"] else ""),
                f"{point['seconds']:.4f}",
                f"{point['formula_seconds']:.4f}",
                f"{_against_formula(point)}",
                f"{point['mbytes']:.2f}",
                f"{point['formula_mbytes']:.2f}",
                str(ratio(dense, point["seconds"])),
                str(ratio(min(others, default=None), point["seconds"])),
                f"{point['cpu']:.0%}" + (" CPU-bound" if point["cpu"] >= CPU_BOUND else ""),
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
    parser.add_argument("--quick", action="store_true", help="4 hosts, one trace, a small gradient; writes no report")
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit"])
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds, by its formula, that a scheme is measured on a trace")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.hosts, arguments.rates, arguments.traces, arguments.rows, arguments.budget = [4], ["200mbit"], ["LSTM"], 20_000, 1.0
    if (reason := Network.unavailable()) is not None:
        sys.exit(f"no network of hosts here: {reason}")
    clean_up_on_sigterm()
    measured = []
    for hosts in arguments.hosts:
        for rate in arguments.rates:
            measured += measure(hosts, rate, arguments)
            print(_times(Points(measured), [each for each in measured if (each["hosts"], each["rate"]) == (hosts, rate)]), flush=True)
    points = Points(measured)
    steps = {} if arguments.quick else end_to_end(8, "1gbit", 10)
    print("\n\n".join([_traces(measured), _hashing(measured)]))
    if not arguments.quick:
        path = write_report("sparse-sync", "Sparse gradient synchronisation", report(points, steps), versions(["torch", "numpy"]))
        if TRACE in arguments.traces:
            path.with_suffix(".svg").write_text(draw(measured))
        print(f"{command_line()}: {path.name}")
    results = {f"{each['scheme']}, {each['trace']}, {each['hosts']} hosts, {each['rate']}": each["seconds"] for each in measured}
    print_result("sparse_sync", results | {f"example, {path}": seconds for path, seconds in steps.items()}, ratios(points))


if __name__ == "__main__":
    main()
