"""Gradient pipelines on shaped links, beside DDP, its own hooks, layer-wise compression and tuned buckets. See README.md.

python benchmarks/pipelines.py --quick
python benchmarks/pipelines.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import HERE, clean_up_on_sigterm, interval, print_result, table, versions, write_report
from gemini_ft.testing import Network
from sparse_sync import run_hosts

METHODS: dict[str, dict[str, Any]] = {
    "topk 1 %": {"method": "topk", "ratio": 0.01},
    "efsignsgd": {"method": "efsignsgd"},
}
BUCKETS = ("64KiB", "256KiB", "1MiB", "25MiB")
PEERS = {"DDP fp32": "none", "DDP bf16 hook": "bf16", "DDP PowerSGD hook": "powersgd"}
FUSIONS = ("cupcake", "espresso", "auto")
TIMEOUT = 1800.0
PACKAGES = ("torch", "numpy", "gemini-ft")
PAPER = "Cupcake, MLSys 2023: up to 2.30 over layer-wise compression (8 V100, PCIe), at most 1.12 over the best bucket size"


def rows_of(model: str, methods: Sequence[str], buckets: Sequence[str], fusions: Sequence[str] = FUSIONS) -> list[dict[str, Any]]:
    """Everything that is compared on one network, by name."""
    rows: list[dict[str, Any]] = [{"name": name, "hook": hook} for name, hook in PEERS.items()]
    rows.append(_row("bf16, cupcake", "*", {"compress": "bf16", "fusion": "cupcake"}))
    rows.append(_row("PowerSGD, cupcake", "*", {"compress": {"method": "powersgd", "rank": 2}, "fusion": "cupcake"}))
    for name in methods:
        compress = METHODS[name]
        rows.append(_row(f"{name}, layer-wise", "*", {"compress": compress, "fusion": "layer-wise"}))
        rows += [_row(f"{name}, buckets of {size}", "*", {"compress": compress, "fusion": {"bucket": size}}) for size in buckets]
        for fusion in fusions:
            quality = {"quality": "any"} if fusion == "auto" else {}
            rows.append(_row(f"{name}, {fusion}", "*", {"compress": compress, "fusion": fusion, **quality}))
    if model == "transformer":
        for name in methods:
            rest = {"params": "*", "compress": METHODS[name], "fusion": "cupcake"}
            rows.append({"name": f"Zen + {name}, cupcake", "pipeline": [{"params": "embedding*", "sync": "zen"}, rest]})
    return rows


def _row(name: str, params: str, rule: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "pipeline": [{"params": params, **rule}]}


def run(hosts: int, rate: str | None, job: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Runs `pipelines_worker` on one network and returns its measurements, by row."""
    with Network(hosts, rate=rate) as network, tempfile.TemporaryDirectory() as folder:
        run_hosts(network, [str(HERE / "pipelines_worker.py"), json.dumps({**job, "folder": folder})], Path(folder), TIMEOUT)
        return {row["name"]: row for row in json.loads(Path(folder, "result.json").read_text())}


Instance = tuple[str, int, str]  # model, hosts, rate


def ratios(found: Mapping[Instance, Mapping[str, Mapping[str, Any]]], methods: Sequence[str]) -> dict[str, float | None]:
    """The ratios that the report shows; above 1 the row is better than its rival. Pairs that were not measured are left out."""
    out: dict[str, float | None] = {}
    kinds: dict[str, list[float]] = {"cupcake_vs_layerwise": [], "cupcake_vs_best_bucket": [], "auto_vs_bf16": [], "auto_vs_espresso": []}
    for (model, hosts, rate), rows in found.items():
        for name in methods:
            for kind, rounds in compared(rows, name).items():
                value = round(statistics.median(rounds), 3)
                out[f"{kind}_{name.partition(' ')[0]}_{model}_{hosts}_{rate}"] = value
                kinds[kind].append(value)
    for kind, values in kinds.items():
        if values:
            out[kind] = min(values)
    for name, espresso in (("predicted_vs_measured", False), ("predicted_vs_measured_espresso", True)):
        errors = predictions(found, espresso)
        farthest: float | None = max(errors, key=_distance, default=None)
        out[name] = round(farthest, 3) if farthest is not None else None
    return out


def _distance(quotient: float) -> float:
    """How far from 1, in whichever direction."""
    return max(quotient, 1 / quotient)


def predictions(found: Mapping[Instance, Mapping[str, Mapping[str, Any]]], espresso: bool) -> list[float]:
    """Predicted over measured, of Espresso's rows or of all others."""
    every = [(name, row) for rows in found.values() for name, row in rows.items() if row["predicted"] and row["exchanged"]]
    return [float(row["predicted"]) / row["exchanged"] for name, row in every if name.endswith("espresso") == espresso]


def compared(rows: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, list[float]]:
    """The ratios of one method on one network, round by round."""
    layerwise, cupcake, auto, espresso, bf16 = (
        rows.get(row) for row in (f"{name}, layer-wise", f"{name}, cupcake", f"{name}, auto", f"{name}, espresso", "DDP bf16 hook")
    )
    buckets = [row for label, row in rows.items() if label.startswith(f"{name}, buckets")]
    found = {}
    if layerwise and cupcake:
        found["cupcake_vs_layerwise"] = _over(layerwise, cupcake)
    if buckets and cupcake:
        found["cupcake_vs_best_bucket"] = over_best(buckets, cupcake["rounds"])
    if auto and bf16:
        found["auto_vs_bf16"] = _over(bf16, auto)
    if auto and espresso:
        found["auto_vs_espresso"] = _over(espresso, auto)
    return found


def _over(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[float]:
    return [first / second for first, second in zip(one["rounds"], other["rounds"], strict=True)]


def over_best(buckets: Sequence[Mapping[str, Any]], rounds: Sequence[float]) -> list[float]:
    """Time of the best bucket size over that of ``rounds``: the size is chosen by every second round, and compared in the others.

    The least of several noisy figures is less than what any of them stands for; who tunes by hand pays for that as well.
    """
    tuned = min(buckets, key=lambda row: statistics.median(row["rounds"][::2]))
    return [theirs / own for theirs, own in zip(tuned["rounds"][1::2], rounds[1::2], strict=True)]


def report(
    found: Mapping[Instance, Mapping[str, Mapping[str, Any]]], learned: Mapping[str, Mapping[str, Any]], methods: Sequence[str]
) -> str:
    parts = [f"Beside: {PAPER}.", "## Ratios: above 1 the first is worse", _ratios(found, methods)]
    for (model, hosts, rate), rows in found.items():
        fp32, bf16 = (rows[name]["seconds"] if name in rows else None for name in ("DDP fp32", "DDP bf16 hook"))
        cells = [
            [
                name,
                f"{1e3 * row['seconds']:.1f}",
                *("-" if other is None else f"{other / row['seconds']:.2f}" for other in (fp32, bf16)),
                row["plan"] or "-",
                "-" if row["sent_bytes"] is None else f"{row['sent_bytes'] / 1e3:.0f}",
                "-" if not row["predicted"] else f"{1e3 * row['predicted']:.1f} / {1e3 * row['exchanged']:.1f}",
            ]
            for name, row in rows.items()
        ]
        head = ["row", "ms per step", "DDP fp32 / it", "DDP bf16 / it", "plan", "kB per step", "predicted / measured ms"]
        parts.append(f"## {model}, {hosts} hosts, {rate}\n\n{table(head, cells)}")
    for model, rows in learned.items():
        parts.append(f"## {model}: time to the target loss\n\n{_learned(model, rows, found)}")
    return "\n\n".join(parts)


def _ratios(found: Mapping[Instance, Mapping[str, Mapping[str, Any]]], methods: Sequence[str]) -> str:
    """Every ratio on every network, with its 95 % interval, and what was predicted."""
    rows = []
    for (model, hosts, rate), here in found.items():
        for name in methods:
            for kind, rounds in compared(here, name).items():
                middle, low, high = interval(rounds)
                rows.append(
                    [kind, f"{name}, {model}, {hosts} hosts, {rate}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}", str(len(rounds))]
                )
    for kind, each in (("Espresso", predictions(found, True)), ("all others", predictions(found, False))):
        if each:
            rows.append(
                [
                    f"predicted / measured, {kind}",
                    "all",
                    f"{statistics.median(each):.3f}",
                    f"{min(each):.3f} to {max(each):.3f} (range)",
                    "",
                ]
            )
    return table(["ratio", "where", "median", "95 %", "rounds"], rows)


def _learned(model: str, rows: Mapping[str, Any], found: Mapping[Instance, Mapping[str, Mapping[str, Any]]]) -> str:
    """Steps are counted once; a step takes what it takes on each network."""
    target = smooth(rows["DDP fp32"]["losses"])[-1] * 1.02
    places = [where for where in found if where[0] == model and where[1] == 4]
    cells = []
    for name, row in rows.items():
        curve = smooth(row["losses"])
        steps = next((number + 1 for number, loss in enumerate(curve) if loss <= target), None)
        times = ["-" if steps is None else f"{steps * found[where][name]['seconds']:.1f}" for where in places]
        cells.append([name, "not reached" if steps is None else str(steps), f"{curve[-1]:.3f}", *times])
    head = ["row", "steps", "last loss", *(f"s, {hosts} hosts, {rate}" for _, hosts, rate in places)]
    return f"Target: 1.02 times the last loss of DDP fp32, {target:.3f} (mean over ranks and 20 steps).\n\n" + table(head, cells)


def smooth(losses: Sequence[float], width: int = 20) -> list[float]:
    """Means over the last steps."""
    return [sum(losses[max(0, end - width) : end]) / min(width, end) for end in range(1, len(losses) + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model on two hosts, no report")
    parser.add_argument("--models", nargs="*", default=["resnet", "transformer"])
    parser.add_argument("--hosts", nargs="*", type=int, default=[4, 8])
    parser.add_argument("--rates", nargs="*", default=["200mbit", "1gbit"])
    parser.add_argument("--methods", nargs="*", default=["topk 1 %"], choices=list(METHODS))
    parser.add_argument("--rows", nargs="*", default=[""], help="only rows whose names contain one of these; --learn wants all")
    parser.add_argument("--rounds", type=int, default=6, help="at least 2")
    parser.add_argument("--learn", type=int, default=200, help="steps towards the target loss; 0: none")
    arguments = parser.parse_args()
    clean_up_on_sigterm()
    if (reason := Network.unavailable()) is not None:
        sys.exit(f"no shaped links: {reason}")
    buckets: tuple[str, ...] = BUCKETS
    if arguments.quick:
        arguments.models, arguments.hosts, arguments.rates, arguments.methods = ["resnet"], [2], ["200mbit"], ["topk 1 %"]
        arguments.rounds, arguments.learn, buckets = 2, 0, ("256KiB", "4MiB")
    found: dict[Instance, Any] = {}
    for model in arguments.models:
        for hosts in arguments.hosts:
            fusions = FUSIONS if hosts <= 4 else ("cupcake", "auto")  # every tensor for itself, which eight hosts on few cores do not stand
            rows = rows_of(model, arguments.methods, buckets, fusions)
            rows = [row for row in rows if any(part in row["name"] for part in arguments.rows)]
            job = {"model": model, "rows": rows, "rounds": arguments.rounds, "learn": 0}
            for rate in arguments.rates:
                print(f"{model}, {hosts} hosts, {rate}", file=sys.stderr, flush=True)
                found[model, hosts, rate] = run(hosts, rate, job)
    learned = {}
    for model in arguments.models if arguments.learn and 4 in arguments.hosts else []:
        print(f"{model}: losses", file=sys.stderr, flush=True)
        rows = [row for row in rows_of(model, arguments.methods, (), ("cupcake", "auto")) if "layer-wise" not in row["name"]]
        learned[model] = run(4, None, {"model": model, "rows": rows, "rounds": 0, "learn": arguments.learn})
    text = report(found, learned, arguments.methods)
    print(text)
    if not arguments.quick:
        print(write_report("pipelines", "Gradient pipelines", text, versions(PACKAGES)))
    results = {f"{model}, {hosts} hosts, {rate}": rows for (model, hosts, rate), rows in found.items()}
    print_result("pipelines", results, ratios(found, arguments.methods))


if __name__ == "__main__":
    main()
