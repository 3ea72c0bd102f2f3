"""Measures what compressing gradients costs on a CPU, and on which networks it pays.

1. Codecs alone, one thread: encode and decode of 1, 16 and 128 MB in 1, 30 and 300 tensors, fused and layer by layer; encoders beside
   the same methods in the textbook's few lines of torch (compression_textbook.py), PowerSGD beside torch's hook.
2. Four emulated hosts behind links of 200 Mbit/s, 1 Gbit/s and as fast as the machine is: the time of one synchronisation, beside
   torch's fp16, bf16 and PowerSGD hooks; and the rate at which a method is as fast as bf16.

See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import common
from gemini_ft.testing import Network

WORKER = str(common.HERE / "compression_worker.py")
PACKAGES = ("torch", "numpy", "gemini-ft")
HOSTS = 4
UNSHAPED = "unshaped"
RATES = {"200mbit": 200e6 / 8, "1gbit": 1e9 / 8}  # bytes per second


@dataclass(frozen=True)
class Plan:
    """Sizes in MB, numbers of tensors, rounds that are timed."""

    cells: tuple[tuple[float, int], ...]  # of part 1
    encode: tuple[float, int]  # whose encoders the ratios compare
    fused: tuple[float, int]  # whose fused and layered exchanges, and PowerSGD, the ratios compare
    rounds: int
    link: tuple[float, int]  # of part 2
    link_rounds: int
    rates: tuple[str, ...]
    timeout: float


FULL = Plan(
    cells=tuple((size, count) for size in (1, 16, 128) for count in (1, 30, 300)),
    encode=(16, 1),
    fused=(16, 300),
    rounds=5,
    link=(16, 100),
    link_rounds=5,
    rates=("200mbit", "1gbit", UNSHAPED),
    timeout=3600,
)
QUICK = Plan(cells=((1, 1), (1, 300)), encode=(1, 1), fused=(1, 300), rounds=3, link=(1, 20), link_rounds=2, rates=("1gbit",), timeout=300)

Table = dict[str, dict[str, float]]


def codecs(plan: Plan, methods: Sequence[str]) -> dict[str, Table]:
    """Part 1, by cell."""
    found = {}
    for megabytes, count in plan.cells:
        print(f"codecs: {megabytes:g} MB in {count} tensors", file=sys.stderr, flush=True)
        done = subprocess.run(_command("codecs", megabytes, count, plan.rounds, methods), env=_env(), stdout=subprocess.PIPE, check=True)
        found[_cell(megabytes, count)] = json.loads(done.stdout)
    return found


def links(plan: Plan, methods: Sequence[str]) -> dict[str, Table]:
    """Part 2, by rate; empty where this machine cannot have a network."""
    if (reason := Network.unavailable()) is not None:
        print(f"no shaped links: {reason}", file=sys.stderr)
        return {}
    return {rate: _link(plan, rate, methods) for rate in plan.rates}


def _link(plan: Plan, rate: str, methods: Sequence[str]) -> Table:
    print(f"link: {rate}", file=sys.stderr, flush=True)
    with Network(HOSTS, rate=None if rate == UNSHAPED else rate) as network:
        ranks = []
        for rank, host in enumerate(network.hosts):
            env = _env(RANK=str(rank), WORLD_SIZE=str(HOSTS), MASTER_ADDR=network.address(network.hosts[0]), MASTER_PORT="29500")
            command = _command("link", *plan.link, plan.link_rounds, methods)
            ranks.append(network.run(host, command, env={**env, "GLOO_SOCKET_IFNAME": "eth0"}, stdout=subprocess.PIPE))
        until = time.monotonic() + plan.timeout
        outputs = [rank.communicate(timeout=max(1.0, until - time.monotonic()))[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise common.TrialError(f"ranks ended with {[rank.returncode for rank in ranks]}")
    found: Table = json.loads(outputs[0])
    return found


def _command(part: str, megabytes: float, count: int, rounds: int, methods: Sequence[str]) -> list[str]:
    sizes = ["--megabytes", str(megabytes), "--tensors", str(count), "--rounds", str(rounds)]
    return [sys.executable, WORKER, part, *sizes, *(["--methods", *methods] if methods else [])]


def _env(**variables: str) -> dict[str, str]:
    return {**os.environ, **common.one_thread(), **variables}


def _cell(megabytes: float, count: int) -> str:
    return f"{megabytes:g} MB in {count}"


def ratios(plan: Plan, alone: Mapping[str, Table], linked: Mapping[str, Table]) -> dict[str, float | None]:
    """Above 1: better than what it is compared with."""
    found: dict[str, float | None] = {}
    encode, fused = alone.get(_cell(*plan.encode), {}), alone.get(_cell(*plan.fused), {})
    if "powersgd" in fused:
        found["powersgd_vs_torch"] = common.ratio(fused["powersgd"]["torch"], fused["powersgd"]["fused"])
    for name, row in encode.items():
        if "textbook" in row:
            found[f"encode_vs_textbook_{name}"] = common.ratio(row["textbook"], row["encode"])
    for name, row in fused.items():
        found[f"fused_vs_layerwise_{name}"] = common.ratio(row["layered"], row["fused"])
    for rate, table in linked.items():
        for name, row in table.items():
            label = name.replace(" ", "_").replace("+", "_")
            found[f"iteration_vs_bf16_{label}_{rate}"] = common.ratio(_bf16(table), row["total"])
    return found


def _bf16(table: Table) -> float | None:
    """The better of ours and torch's hook."""
    return min((table[name]["total"] for name in ("bf16", "torch bf16 hook") if name in table), default=None)


def break_even(name: str, linked: Mapping[str, Table]) -> str:
    """The rate at which a method is as fast as bf16: between slower links where it wins and faster ones where it does not.

    From the times on the two shaped links, by a straight line over seconds per byte.
    """
    known = [rate for rate in RATES if rate in linked and name in linked[rate] and "bf16" in linked[rate] and name != "bf16"]
    gains = {1 / RATES[rate]: linked[rate]["bf16"]["total"] - linked[rate][name]["total"] for rate in known}
    if len(gains) < 2:
        return "-"
    (fast, gain_fast), (slow, gain_slow) = sorted(gains.items())
    slope = (gain_slow - gain_fast) / (slow - fast)
    if slope <= 0 and gain_slow * gain_fast >= 0:
        return "never" if gain_slow < 0 else "always"
    at = fast - gain_fast / slope
    return "always" if at <= 0 else f"{'above ' if slope < 0 else ''}{8 / at / 1e6:.0f} Mbit/s"


def report(plan: Plan, alone: Mapping[str, Table], linked: Mapping[str, Table]) -> str:
    """The tables of a report."""
    parts = []
    for cell, table in alone.items():
        header = ["method", "encode ms", "textbook ms", "decode ms", "fused ms", "layer by layer ms", "bytes"]
        keys = ("encode", "textbook", "decode", "fused", "layered")
        rows = [[name, *(_ms(row.get(key)) for key in keys), f"{row['nbytes']:.0f}"] for name, row in table.items()]
        torch_hook = f"\n\ntorch's PowerSGD hook: {_ms(table['powersgd']['torch'])} ms" if "powersgd" in table else ""
        parts.append(f"## Codecs, {cell} tensors\n\n{common.table(header, rows)}{torch_hook}")
    if linked:
        names = list(next(iter(linked.values())))
        header = ["method", *(f"{rate}: total (encode, collective, decode) ms" for rate in linked), "as fast as bf16 at"]
        rows = [[name, *(_phases(table[name]) for table in linked.values()), break_even(name, linked)] for name in names]
        parts.append(f"## {HOSTS} hosts, {_cell(*plan.link)} tensors\n\n{common.table(header, rows)}")
    return "\n\n".join([_summary(ratios(plan, alone, linked)), *parts])


def _summary(found: Mapping[str, float | None]) -> str:
    """The ratios, a line for each method."""
    columns = sorted({_place(name)[0] for name in found}, key=[_place(name)[0] for name in found].index)
    cells = {_place(name): value for name, value in found.items()}
    names = dict.fromkeys(_place(name)[1] for name in found)
    rows = [[name, *("-" if (value := cells.get((column, name))) is None else f"{value:.2f}" for column in columns)] for name in names]
    return f"## Ratios: above 1 is better\n\n{common.table(['method', *columns], rows)}"


def _place(ratio: str) -> tuple[str, str]:
    """The column and the method of a ratio's name."""
    for kind in ("encode_vs_textbook", "fused_vs_layerwise", "iteration_vs_bf16"):
        if ratio.startswith(kind):
            method = ratio.removeprefix(f"{kind}_")
            rate = next((f"_{rate}" for rate in (*RATES, UNSHAPED) if method.endswith(f"_{rate}")), "")
            return kind + rate, method.removesuffix(rate)
    method, _, other = ratio.partition("_vs_")
    return f"vs_{other}", method


def _phases(row: Mapping[str, float]) -> str:
    phases = ", ".join(_ms(row[key]) for key in ("encode", "collective", "decode") if key in row)
    return f"{_ms(row['total'])} ({phases})" if phases else _ms(row["total"])


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, one rate, no report")
    parser.add_argument("--methods", nargs="*", default=[], help="only these")
    parser.add_argument("--parts", nargs="*", choices=["codecs", "links"], default=["codecs", "links"])
    arguments = parser.parse_args()
    common.clean_up_on_sigterm()
    plan = QUICK if arguments.quick else FULL
    alone = codecs(plan, arguments.methods) if "codecs" in arguments.parts else {}
    linked = links(plan, [*arguments.methods, "bf16"] if arguments.methods else []) if "links" in arguments.parts else {}
    text = report(plan, alone, linked)
    print(text)
    if not arguments.quick:
        print(common.write_report("compression", "Gradient compression", text, common.versions(PACKAGES)))
    results: dict[str, Any] = {"codecs": alone, "links": linked}
    common.print_result("compression", results, ratios(plan, alone, linked))


if __name__ == "__main__":
    main()
