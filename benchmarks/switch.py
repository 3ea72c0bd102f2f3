"""Schemes that go through a switch against their formulas and against those that need none, on shaped links, with losses. See README.md.

python benchmarks/switch.py --quick
python benchmarks/switch.py
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from common import HERE, clean_up_on_sigterm, interval, one_thread, print_result, table, versions, write_report
from gemini_ft.testing import Network
from gemini_ft.testing.network import HUB
from sparse_sync import CPU_BOUND, bits, run_hosts

Point: TypeAlias = dict[str, Any]  # a switch_worker.Point, with hosts and rate

AIMS = {
    "switchml_vs_ring": "at most 0.65 with 8 workers at 200 Mbit/s",
    "switchml_vs_formula": "at most 1.15",
    "omnireduce_streaming_vs_colocated": "below 1 where its formula is",
    "fpisa_vs_switchml": "",
    "switchml_lossy_vs_lossless": "at most 1.5 at 1 %",
}
BLOCK_BYTES = 1024  # a row of the gradients, and a block of OmniReduce
PORT = 29600
SEED = 1
TIMEOUT = 900.0  # seconds for one network


def measure(hosts: int, rate: str, arguments: argparse.Namespace) -> list[Point]:
    """All points of one network."""
    with Network(hosts, rate=rate) as network, tempfile.TemporaryDirectory() as folder:
        job = {
            "rows": int(arguments.megabytes * 1e6) // BLOCK_BYTES,
            "bits": bits(rate),
            "densities": arguments.densities,
            "losses": arguments.losses,
            "budget": arguments.budget,
            "least": arguments.least,
            "most": arguments.most,
            "seed": SEED,
            "key": secrets.token_hex(32),
            "folder": folder,
        }
        job |= start_switches(network, arguments, job["key"])
        run_hosts(network, [str(HERE / "switch_worker.py"), json.dumps(job)], Path(folder), TIMEOUT)
        points: list[Point] = json.loads(Path(folder, "result.json").read_text())
    return [point | {"hosts": hosts, "rate": rate} for point in points]


def start_switches(network: Network, arguments: argparse.Namespace, key: str) -> dict[str, Any]:
    """A switch on the hub for each loss, and one that the hosts have a part each of: addresses and process ids."""
    count = arguments.parts
    places = {str(loss): [(HUB, PORT + number * count + part) for part in range(count)] for number, loss in enumerate(arguments.losses)}
    places["hosts"] = [(host, PORT) for host in network.hosts]
    running: dict[str, list[subprocess.Popen[str]]] = {name: [] for name in places}
    for name, parts in places.items():
        for part, (host, port) in enumerate(parts):
            loss = 0.0 if name == "hosts" else float(name)
            job = {"port": port, "part": part, "parts": len(parts), "loss": loss, "seed": SEED + part, "key": key}
            command = [sys.executable, str(HERE / "lossy_switch.py"), json.dumps(job)]
            options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "env": {**os.environ, **one_thread()}}
            running[name].append(network.run(host, command, **options))
    for process in (process for parts in running.values() for process in parts):
        if process.stdout is None or process.stdout.readline() != "ready\n":
            raise RuntimeError("a switch did not start")
    addresses = {name: ",".join(f"{network.address(host)}:{port}" for host, port in parts) for name, parts in places.items()}
    return {"switches": addresses, "pids": {name: [process.pid for process in parts] for name, parts in running.items()}}


# -- ratios


@dataclass(frozen=True)
class Quotient:
    """A ratio on one network, round by round; ``formula`` is what the formulas say."""

    name: str
    where: str
    formula: float
    busy: float
    rounds: Sequence[float]


def quotients(points: Sequence[Point]) -> Iterator[Quotient]:
    for point in points:
        scheme, lossless = point["scheme"], point["loss"] == 0
        if scheme == "switchml" and lossless:
            yield from _against("switchml_vs_ring", point, _beside(points, point, "ring"))
            rounds = [seconds / point["formula"] for seconds in point["seconds"] if seconds is not None]
            yield Quotient("switchml_vs_formula", _where(point), 1.0, point["busy"], rounds)
        elif scheme == "switchml":
            yield from _against("switchml_lossy_vs_lossless", point, _beside(points, point, "switchml"))
        elif scheme == "omnireduce-streaming" and lossless:
            yield from _against("omnireduce_streaming_vs_colocated", point, _beside(points, point, "omnireduce"))
        elif scheme == "fpisa" and lossless:
            yield from _against("fpisa_vs_switchml", point, _beside(points, point, "switchml"))


def _against(name: str, point: Point, other: Point | None) -> Iterator[Quotient]:
    if other is not None and (rounds := _paired(point, other)):
        yield Quotient(name, _where(point), point["formula"] / other["formula"], max(point["busy"], other["busy"]), rounds)


def _beside(points: Sequence[Point], point: Point, scheme: str, density: float | None = None) -> Point | None:
    """Another scheme without losses on the same network, and of the same density unless another is given."""
    wanted = (point["hosts"], point["rate"], point["density"] if density is None else density, 0.0, scheme)
    return next((each for each in points if tuple(each[key] for key in ("hosts", "rate", "density", "loss", "scheme")) == wanted), None)


def _paired(point: Point, other: Point) -> list[float]:
    """Quotients of the same round."""
    both = zip(point["seconds"], other["seconds"], strict=True)
    return [one / two for one, two in both if one is not None and two is not None]


def _where(point: Point) -> str:
    words = [f"{point['hosts']} workers, {point['rate']}"]
    words += [f"density {point['density']:.0%}"] if point["density"] < 1 else []
    words += [f"loss {point['loss']:.1%}"] if point["loss"] else []
    return ", ".join(words)


def ratios(points: Sequence[Point]) -> dict[str, float | None]:
    """The worst network, density and loss of each, those that lack processors too."""
    found: dict[str, float | None] = dict.fromkeys(AIMS)
    for each in quotients(points):
        middle = round(statistics.median(each.rounds), 3) if each.rounds else None
        found[each.name] = max((value for value in (found[each.name], middle) if value is not None), default=None)
    return found


# -- the report


def report(points: Sequence[Point], arguments: argparse.Namespace) -> str:
    starved = [each for each in quotients(points) if each.busy >= CPU_BOUND]
    parts = [
        f"Gradients of {arguments.megabytes:g} MB of float32. The switch is on the hub, whose ports are as fast as all workers' links "
        "together. Losses are drawn by a seed where datagrams are received, at the workers and at the switch; the ring, Zen and the block "
        "format travel by TCP, without losses. Formulas are those of `gemini_ft.sync.costs` without latency; those of the switch "
        "count headers, the others values only. Rounds are in random order; "
        "seconds are the slowest worker's, medians; 95 % intervals are of the median. *CPU* is of all processors of the machine, which "
        f"workers and switch share; from {CPU_BOUND:.0%} on a figure says more about this machine than about the scheme.",
        "## Ratios, worst network",
        table(["ratio", "worst", "aim"], [[name, str(value), AIMS[name]] for name, value in ratios(points).items()]),
        f"{len(starved)} of {len(list(quotients(points)))} ratios lack processors.",
        "## Ratios, network by network",
        _ratio_table(points),
    ]
    for hosts, rate in dict.fromkeys((point["hosts"], point["rate"]) for point in points):
        here = [point for point in points if (point["hosts"], point["rate"]) == (hosts, rate)]
        parts += [f"## {hosts} workers, {rate}", _times(here), _latency(here)]
    return "\n\n".join(part for part in parts if part)


def _ratio_table(points: Sequence[Point]) -> str:
    rows = []
    for each in sorted(quotients(points), key=lambda each: list(AIMS).index(each.name)):
        if each.rounds:
            middle, low, high = interval(each.rounds)
            figures = [f"{middle:.3f}", f"{low:.3f} to {high:.3f}", f"{each.formula:.3f}", str(len(each.rounds))]
            rows.append([each.name, each.where, *figures, _cpu(each.busy)])
    return table(["ratio", "where", "median", "95 %", "by formula", "rounds", "CPU"], rows)


def _times(here: Sequence[Point]) -> str:
    rows = []
    for point in here:
        kept = [seconds for seconds in point["seconds"] if seconds is not None]
        if not kept:
            rows.append([f"{point['density']:.0%}", point["scheme"], f"{point['loss']:.1%}", "never by the switch"])
            continue
        middle, low, high = interval(kept)
        ring = _beside(here, point, "ring", density=1.0)
        again, switch = point["again"], point["switch_cpu"]
        rows.append(
            [
                f"{point['density']:.0%}",
                point["scheme"],
                f"{point['loss']:.1%}" if again is not None else "",
                f"{middle:.4f}",
                f"{low:.4f} to {high:.4f}",
                f"{point['formula']:.4f}",
                f"{middle / point['formula']:.2f}",
                f"{1 / statistics.median(_paired(point, ring)):.2f}" if ring is not None else "",
                f"{1e3 * point['cpu']:.1f}",
                f"{1e3 * switch:.1f}" if switch is not None else "",
                _cpu(point["busy"]),
                f"{again:.0f}" if again is not None else "",
                str(len(point["seconds"]) - len(kept)),
            ]
        )
    header = ["density", "scheme", "loss", "s", "95 %", "formula", "s / formula", "ring / it", "ms CPU, worker", "ms CPU, switch", "CPU"]
    return table([*header, "sent again", "rounds without switch"], rows)


def _cpu(share: float) -> str:
    return f"{share:.0%}" + (" CPU-bound" if share >= CPU_BOUND else "")


def _latency(here: Sequence[Point]) -> str:
    """From a packet to its sum."""
    rows = [
        [point["scheme"], f"{point['loss']:.1%}", *(f"{1e3 * each:.2f}" if each else "" for each in (point["slot"], point["alone"]))]
        for point in here
        if point["slot"] is not None
    ]
    return table(["scheme", "loss", "ms per slot, all in use", "ms per slot, one in use"], rows) if rows else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 workers at 200 Mbit/s, a small gradient; writes no report")
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit"])
    parser.add_argument("--densities", type=float, nargs="+", default=[1.0, 0.1, 0.01], help="share of rows that a worker has")
    parser.add_argument("--losses", type=float, nargs="+", default=[0.0, 0.001, 0.01], help="share of datagrams, in each direction")
    parser.add_argument("--megabytes", type=float, default=8.0, help="of the dense gradient")
    parser.add_argument("--parts", type=int, default=1, help="processes of a switch")
    parser.add_argument("--budget", type=float, default=180.0, help="seconds of rounds on one network")
    parser.add_argument("--least", type=int, default=7, help="rounds, however long they take")
    parser.add_argument("--most", type=int, default=30, help="rounds")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.hosts, arguments.rates, arguments.megabytes, arguments.budget = [4], ["200mbit"], 2.0, 10.0
        arguments.least, arguments.most = 3, 10
    if 0.0 not in arguments.losses or not all(0 <= loss < 1 for loss in arguments.losses):
        parser.error(f"--losses {arguments.losses}: give shares below 1, and 0 among them, which all others are compared with")
    if not all(0 < density <= 1 for density in arguments.densities):
        parser.error(f"--densities {arguments.densities}: give shares above 0 and up to 1")
    if (reason := Network.unavailable()) is not None:
        sys.exit(f"no network of hosts here: {reason}")
    clean_up_on_sigterm()
    points: list[Point] = []
    for rate in arguments.rates:
        for hosts in arguments.hosts:
            points += (found := measure(hosts, rate, arguments))
            print(f"{hosts} workers, {rate}\n\n{_times(found)}\n\n{_latency(found)}\n", flush=True)
    print(_ratio_table(points))
    if not arguments.quick:
        path = write_report("switch", "A switch in software", report(points, arguments), versions(["torch", "numpy", "cryptography"]))
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
    results = {f"{point['scheme']}, {_where(point)}": statistics.median(_kept(point)) for point in points if _kept(point)}
    print_result("switch", results, ratios(points))


def _kept(point: Point) -> list[float]:
    return [seconds for seconds in point["seconds"] if seconds is not None]


if __name__ == "__main__":
    main()
