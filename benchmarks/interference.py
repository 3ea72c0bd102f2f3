"""Measures what replication costs a training job whose network is slow: nothing, if it waits for the network to be idle.

Hosts are network namespaces whose links are shaped in both directions; the job's communication is real. One job alternates between
blocks of steps without checkpoints and with them, in every way that is compared. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
from gemini_ft.testing import EmulatedHosts, Network
from interference_plot import draw
from interference_worker import Plan

PACKAGES = ("torch", "gemini-ft")
MODES = ("blocking", "naive", "unpipelined", "pipelined", "scheduled")
MEGABIT = {"1gbit": 1000, "200mbit": 200}
WEIGHTS = 24_000_000  # bytes of all layers where links have 1 Gbit/s; at other rates less, so that steps take as long
PAPER = {"blocking": 1.101, "unpipelined": 1.035, "scheduled": 1.0}  # GEMINI, figure 16: GPT-2 40B on p3dn
_T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31}  # two-sided, by degrees of freedom


@dataclasses.dataclass(frozen=True)
class Case:
    """One job on one network."""

    job: str
    hosts: int
    rate: str
    compute: str = "sleep"

    def __str__(self) -> str:
        real = ", real compute" if self.compute == "product" else ""
        return f"{self.job}, {self.hosts} hosts, {self.rate}/s{real}"

    def plan(self, modes: Sequence[str], rounds: int, block: int, window: int) -> Plan:
        """Layers as large as the link carries while one layer is computed, and some idle time left."""
        weights = WEIGHTS * MEGABIT[self.rate] // 1000
        layers, forward, backward, states = (8, 0.025, 0.06, 3) if self.job == "ddp" else (3, 0.09, 0.22, 2)
        layer = weights // layers // (4 * self.hosts) * 4 * self.hosts
        return Plan(
            job=self.job,
            layers=layers,
            layer_bytes=layer,
            state_bytes=states * layer * layers // self.hosts // 4 * 4,
            forward=forward,
            backward=backward,
            update=0.02,
            compute=self.compute,
            modes=list(modes),
            rounds=rounds,
            block=block,
            window=window,
            buffer_bytes=max(2**20, weights // 6),
        )


CASES = [
    *(Case(job, hosts, rate) for rate in ("1gbit", "200mbit") for hosts in (4, 8) for job in ("zero3", "ddp")),
    Case("ddp", 4, "200mbit", "product"),
]
ABLATION = (4, "1gbit")  # where the variant with sub-buffers stands beside the one without
QUICK = [Case("zero3", 2, "200mbit")]


def measure(case: Case, plan: Plan, timeout: float) -> dict[str, Any]:
    """Run one job; what its rank 0 found."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps(dataclasses.asdict(plan)))
        program = [str(common.HERE / "interference_worker.py"), str(folder / "plan.json"), str(folder / "results.json")]
        env = {**common.one_thread(), "GLOO_SOCKET_IFNAME": "eth0"}
        with (
            Network(case.hosts, rate=case.rate) as network,
            EmulatedHosts(case.hosts, program, folder, env=env, network=network) as hosts,
        ):
            hosts.finish(timeout)
        found: dict[str, Any] = json.loads((folder / "results.json").read_text())
        return found


def summary(found: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """The figures of one case."""
    modes = {mode: mode_summary(pairs, found["figures"][mode]) for mode, pairs in found["pairs"].items()}
    none = common.median(seconds for pairs in found["pairs"].values() for without, _ in pairs for seconds in without)
    return {
        "none_s": none,
        "observed_vs_bare": common.ratio(none, common.median(found["bare"])),
        "cpu": round(found["cpu"], 2),
        "state_bytes": plan.state_bytes,
        "modes": modes,
    }


def mode_summary(pairs: Sequence[tuple[Sequence[float], Sequence[float]]], figures: Mapping[str, Any]) -> dict[str, Any]:
    """One mode against the blocks without checkpoints that went before its own."""
    ratios = [statistics.fmean(with_) / statistics.fmean(without) for without, with_ in pairs]
    spread = statistics.stdev(ratios) * _T95.get(len(ratios) - 1, 2.0) / len(ratios) ** 0.5 if len(ratios) > 1 else None
    expected, travelled = common.median(figures["expected"]), common.median(figures["travelled"])
    sent = sum(figures["nbytes"])
    return {
        "vs_none": round(statistics.fmean(ratios), 4),
        "ci95": round(spread, 4) if spread is not None else None,
        "interval": figures["interval"],
        "skipped": figures["skipped"],
        "complete_s": common.median(figures["commit_seconds"]),
        "in_its_step": round(sum(lag == 0 for lag in figures["lag"]) / max(1, len(figures["lag"])), 3),
        "stall_s": common.median(figures["blocked"]),
        "outside": round(sum(figures["outside"]) / sent, 3) if sent else None,
        "spans": common.median(figures["spans"]),
        "travelled_s": travelled,
        "predicted_vs_measured": common.ratio(expected, travelled),
    }


def ratios(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """The worst ratio of each mode over all cases whose compute is a sleep, and the median of the predictions' ratios."""
    cases = [result for name, result in results.items() if "real compute" not in name]
    out = {f"{mode}_vs_none": _worst(each["modes"][mode]["vs_none"] for each in cases if mode in each["modes"]) for mode in MODES}
    predicted = [case["modes"]["scheduled"]["predicted_vs_measured"] for case in cases if "scheduled" in case["modes"]]
    out["predicted_vs_measured"] = common.median(value for value in predicted if value is not None)
    return out


def _worst(values: Iterable[float]) -> float | None:
    return max(values, default=None)


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    header = (
        "mode",
        "iteration / none",
        "95 %",
        "interval",
        "complete s",
        "in its step",
        "stall ms",
        "outside",
        "spans",
        "predicted / measured",
    )
    parts = []
    for name, case in results.items():
        rows = [_row(mode, figures) for mode, figures in case["modes"].items()]
        facts = (
            f"a step without checkpoints {case['none_s']:.3f} s ({case['observed_vs_bare']} of one before and after gemini-ft was there), "
            f"{case['state_bytes'] / 1e6:.1f} MB of state per rank, {case['cpu']:.0%} of the processors in use"
        )
        parts.append(f"## {name}\n\n{facts}\n\n{common.table(header, rows)}")
    return "\n\n".join(parts)


def _row(mode: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    def show(value: float | None, digits: int, scale: float = 1.0) -> str:
        return "" if value is None else f"{value * scale:.{digits}f}"

    return (
        mode,
        show(figures["vs_none"], 4),
        "± " + show(figures["ci95"], 4),
        str(figures["interval"]),
        show(figures["complete_s"], 3),
        f"{figures['in_its_step']:.0%}",
        show(figures["stall_s"], 1, 1000),
        "" if figures["outside"] is None else f"{figures['outside']:.1%}",
        show(figures["spans"], 0),
        show(figures["predicted_vs_measured"], 2),
    )


def report(results: Mapping[str, Mapping[str, Any]], ratio: Mapping[str, float | None], picture: str | None) -> str:
    """The body of the dated report."""
    paper = ", ".join(f"{mode} {value}" for mode, value in PAPER.items())
    parts = [
        "Hosts are network namespaces on one machine, links shaped in both directions (tbf). Communication is real gloo; computation is "
        "a sleep, so that two cores measure the network and not themselves, except where it says real compute. Each mode's blocks of "
        "steps are compared with the blocks without checkpoints just before them, in the same processes (A-B-A-B); `95 %` is the "
        "interval of the mean of these ratios. `complete` is from the end of a step until every replica of it is verified and committed, "
        "`in its step` the share of snapshots that were committed before the next step ended, `outside` the share of bytes that "
        "travelled while the network was in use, `predicted` the cost model's time for a replica against the clock.",
        f"The paper's figures for a step (GPT-2 40B, 100 Gbit/s): {paper}.",
        table(results),
        common.table(("ratio", "value"), [(name, str(value)) for name, value in ratio.items()]),
    ]
    if picture is not None:
        parts.insert(2, f"![One rank's steps: collectives of the training, idle network, and when replicas were sent]({picture})")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two hosts, few steps: under a minute, no report")
    parser.add_argument(
        "--cases", nargs="+", type=int, metavar="N", help=f"which, of: {', '.join(f'{i} ({c})' for i, c in enumerate(CASES))}"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    common.clean_up_on_sigterm()
    if (reason := Network.unavailable()) is not None:
        sys.exit(f"no network of emulated hosts on this machine: {reason}")

    cases = QUICK if arguments.quick else [CASES[number] for number in arguments.cases or range(len(CASES))]
    modes = ["blocking", "scheduled"] if arguments.quick else arguments.modes
    size = (1, 3, 4) if arguments.quick else (arguments.rounds, 4, 10)
    results, timeline = {}, None
    for case in cases:
        plan = case.plan([mode for mode in modes if mode != "pipelined" or (case.hosts, case.rate) == ABLATION], *size)
        found = measure(case, plan, 900)
        results[str(case)] = summary(found, plan)
        timeline = timeline or found["timeline"]
        print(f"{case}: " + ", ".join(f"{m} {f['vs_none']}" for m, f in results[str(case)]["modes"].items()), file=sys.stderr, flush=True)
    ratio = ratios(results)
    if not arguments.quick:
        picture = draw(timeline, common.RESULTS, "interference") if timeline is not None else None
        title = "Replication beside training, on slow links"
        path = common.write_report("interference", title, report(results, ratio, picture), common.versions(PACKAGES))
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
    common.print_result("interference", results, ratio)


if __name__ == "__main__":
    main()
