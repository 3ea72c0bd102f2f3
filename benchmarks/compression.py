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
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    rounds: int
    link: tuple[float, int]  # of part 2
    link_rounds: int
    rates: tuple[str, ...]
    timeout: float


FULL = Plan(
    cells=tuple((size, count) for size in (1, 16, 128) for count in (1, 30, 300)),
    rounds=5,
    link=(16, 100),
    link_rounds=5,
    rates=("200mbit", "1gbit", UNSHAPED),
    timeout=3600,
)
QUICK = Plan(cells=((1, 1), (1, 300)), rounds=3, link=(1, 20), link_rounds=2, rates=("1gbit",), timeout=300)

Table = dict[str, dict[str, list[float]]]  # method -> figure -> one per round


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


@dataclass(frozen=True)
class Quotient:
    """A ratio in one cell, round by round; above 1: better than what it is compared with."""

    name: str
    where: str
    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return common.spread((self.middle, self.low, self.high), 2)


def quotients(alone: Mapping[str, Table], linked: Mapping[str, Table]) -> Iterator[Quotient]:
    """Every ratio in every cell."""
    for cell, table in alone.items():
        for name, row in table.items():
            for kind, top, bottom in (("encode_vs_textbook", "textbook", "encode"), ("fused_vs_layerwise", "layered", "fused")):
                if top in row:
                    yield Quotient(f"{kind}_{name}", cell, *_over(row[top], row[bottom]))
            if "torch" in row:
                yield Quotient("powersgd_vs_torch", cell, *_over(row["torch"], row["fused"]))
    for rate, table in linked.items():
        for name, row in table.items():
            label = name.replace(" ", "_").replace("+", "_")
            for bf16 in _bf16(table):
                yield Quotient(f"iteration_vs_bf16_{label}_{rate}", rate, *_over(bf16["total"], row["total"]))


def _over(top: Sequence[float], bottom: Sequence[float]) -> tuple[float, float, float]:
    return common.interval([one / two for one, two in zip(top, bottom, strict=False)])


def ratios(alone: Mapping[str, Table], linked: Mapping[str, Table]) -> dict[str, float]:
    """The worst cell of each."""
    return {name: round(cell.middle, 3) for name, cell in worst(quotients(alone, linked)).items()}


def worst(cells: Iterable[Quotient]) -> dict[str, Quotient]:
    """By name, the cell with the least ratio."""
    found: dict[str, Quotient] = {}
    for cell in cells:
        if cell.name not in found or cell.middle < found[cell.name].middle:
            found[cell.name] = cell
    return found


def _bf16(table: Table) -> list[dict[str, list[float]]]:
    """The better of ours and torch's hook, if there is one."""
    rows = [table[name] for name in ("bf16", "torch bf16 hook") if name in table]
    return [min(rows, key=lambda row: statistics.median(row["total"]))] if rows else []


def break_even(name: str, linked: Mapping[str, Table]) -> str:
    """The rate at which a method is as fast as bf16: between slower links where it wins and faster ones where it does not.

    From the times on the two shaped links, by a straight line over seconds per byte.
    """
    known = [rate for rate in RATES if rate in linked and name in linked[rate] and "bf16" in linked[rate] and name != "bf16"]
    median = statistics.median
    gains = {1 / RATES[rate]: median(linked[rate]["bf16"]["total"]) - median(linked[rate][name]["total"]) for rate in known}
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
        rows = [
            [name, *(_ms(row.get(key)) for key in keys), f"{statistics.median(row['nbytes']):.0f}"] for name, row in sorted(table.items())
        ]
        torch_hook = f"\n\ntorch's PowerSGD hook: {_ms(table['powersgd']['torch'])} ms" if "powersgd" in table else ""
        parts.append(f"## Codecs, {cell} tensors\n\n{common.table(header, rows)}{torch_hook}")
    if linked:
        names = list(next(iter(linked.values())))
        header = ["method", *(f"{rate}: total (encode, collective, decode) ms" for rate in linked), "as fast as bf16 at"]
        rows = [[name, *(_phases(table[name]) for table in linked.values()), break_even(name, linked)] for name in names]
        parts.append(f"## {HOSTS} hosts, {_cell(*plan.link)} tensors\n\n{common.table(header, rows)}")
    return "\n\n".join([_summary(list(quotients(alone, linked))), *parts])


def _summary(cells: Sequence[Quotient]) -> str:
    """The worst cell of each ratio, a line for each method; then all of them."""
    found = {name: str(cell) + ("" if cell.name.startswith("iteration") else f", {cell.where}") for name, cell in worst(cells).items()}
    columns = sorted({_place(name)[0] for name in found}, key=[_place(name)[0] for name in found].index)
    texts = {_place(name): text for name, text in found.items()}
    names = dict.fromkeys(_place(name)[1] for name in found)
    rows = [[name, *(texts.get((column, name), "-") for column in columns)] for name in names]
    every = [[cell.name, cell.where, str(cell)] for cell in cells]
    parts = ["## Ratios, worst cell (95 %): above 1 is better", common.table(["method", *columns], rows)]
    return "\n\n".join([*parts, "## Ratios, cell by cell", common.table(["ratio", "where", "median (95 %)"], every)])


def _place(ratio: str) -> tuple[str, str]:
    """The column and the method of a ratio's name."""
    for kind in ("encode_vs_textbook", "fused_vs_layerwise", "iteration_vs_bf16"):
        if ratio.startswith(kind):
            method = ratio.removeprefix(f"{kind}_")
            rate = next((f"_{rate}" for rate in (*RATES, UNSHAPED) if method.endswith(f"_{rate}")), "")
            return kind + rate, method.removesuffix(rate)
    method, _, other = ratio.partition("_vs_")
    return f"vs_{other}", method


def _phases(row: Mapping[str, Sequence[float]]) -> str:
    phases = ", ".join(_ms(row[key]) for key in ("encode", "collective", "decode") if key in row)
    return f"{_ms(row['total'])} ({phases})" if phases else _ms(row["total"])


def _ms(seconds: Sequence[float] | None) -> str:
    """The median."""
    return "-" if seconds is None else f"{1000 * statistics.median(seconds):.2f}"


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
    results: dict[str, Any] = {"codecs": _medians(alone), "links": _medians(linked)}
    common.print_result("compression", results, ratios(alone, linked))


def _medians(tables: Mapping[str, Table]) -> dict[str, dict[str, dict[str, float]]]:
    return {
        place: {name: {key: statistics.median(each) for key, each in row.items()} for name, row in table.items()}
        for place, table in tables.items()
    }


if __name__ == "__main__":
    main()
