"""A GPT of ten million parameters over four slow links: loss against seconds and tokens, by each way to exchange gradients.

    python benchmarks/pipelines_gpt.py --quick
    python benchmarks/pipelines_gpt.py

Losses and seconds are measured apart, and put together: each way trains once per seed on links without a limit, where a step has the loss
that it has on any link, and a few of its steps are timed at each rate. The text is the source of Python's standard library.
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

from common import HERE, clean_up_on_sigterm, print_result, table, versions, write_report
from gemini_ft.pipeline import load_rules
from gemini_ft.testing import Network
from pipelines import smooth
from pipelines_models import CONTEXT, GPT_BATCH
from sparse_sync import run_hosts

CONFIGS = HERE.parent / "configs"
ROWS: dict[str, dict[str, Any]] = {
    "DDP fp32": {"hook": "none"},
    "DDP bf16": {"hook": "bf16"},
    "PowerSGD (torch)": {"hook": "powersgd"},
    "Zen on embeddings": {"pipeline": str(CONFIGS / "pipeline_zen_embeddings.yaml")},
    "top-k 1 %": {"pipeline": [{"params": "*", "compress": {"method": "topk", "ratio": 0.01}}]},
    "DiLoCo": {"pipeline": str(CONFIGS / "pipeline_diloco.yaml")},
    "SparseLoCo": {"pipeline": str(CONFIGS / "pipeline_sparseloco.yaml")},
    "ring8": {"pipeline": [{"params": "*", "sync": "ring8"}]},
    "auto": {"pipeline": str(CONFIGS / "pipeline_auto.yaml")},
}
TIMEOUT = 7200.0
NEAR = 1.02  # times the last loss of DDP fp32: the target
COLOURS = ("#000000", "#888888", "#937860", "#55a868", "#8172b3", "#c44e52", "#dd8452", "#4c72b0", "#da8bc3")
WIDTH, HEIGHT, GAP = 420, 280, 70

Losses = Mapping[str, Sequence[Sequence[float]]]  # by row, of each seed
Seconds = Mapping[str, Mapping[str, Mapping[str, Any]]]  # by rate and row


def run(hosts: int, rate: str | None, row: str, **job: Any) -> dict[str, Any]:
    """One row on one network: nine models with their optimizers are too many to be in memory at once."""
    with Network(hosts, rate=rate) as network, tempfile.TemporaryDirectory() as folder:
        about = {"model": "gpt", "rows": [described(row)], "rounds": 0, "learn": 0, **job, "folder": folder}
        run_hosts(network, [str(HERE / "pipelines_worker.py"), json.dumps(about)], Path(folder), TIMEOUT)
        (found,) = json.loads(Path(folder, "result.json").read_text())
    print(f"{row}, {rate or 'no limit'}: {found['seconds']:.3f} s, {found['losses'][-1:]}", file=sys.stderr, flush=True)
    return dict(found)


def described(row: str) -> dict[str, Any]:
    rules = load_rules(ROWS[row].get("pipeline"))
    return {"name": row, "every": max((rule.every or 0 for rule in rules), default=0), **ROWS[row]}


def steps_to(target: float, losses: Sequence[float]) -> int | None:
    return next((number for number, loss in enumerate(smooth(losses), 1) if loss <= target), None)


def times(losses: Losses, seconds: Seconds) -> dict[str, dict[str, list[float | None]]]:
    """By rate and row, the seconds to the target of each seed; None: it was not reached."""
    targets = [NEAR * smooth(each)[-1] for each in losses["DDP fp32"]]
    return {
        rate: {
            row: [
                None if (steps := steps_to(target, each)) is None else steps * measured["seconds"]
                for target, each in zip(targets, losses[row], strict=True)
            ]
            for row, measured in rows.items()
        }
        for rate, rows in seconds.items()
    }


def report(losses: Losses, seconds: Seconds, hosts: int) -> str:
    found, tokens = times(losses, seconds), hosts * GPT_BATCH * CONTEXT
    parts = [
        f"{hosts} hosts, AdamW at 1e-3, {tokens} words a step. The target is {NEAR} times the last loss of DDP fp32 of the same seed, as "
        "means of 20 steps and all ranks. Seconds are those steps times the median seconds of a step at that rate, measured apart, in "
        "which local steps count a whole period. Processors are shared by all hosts, so computing takes longer than on hosts of their own.",
        "## Loss against tokens",
        table(
            ["row", "seeds", "last loss", "of each seed", "tokens to the target"],
            [
                [
                    row,
                    str(len(each)),
                    f"{statistics.fmean(smooth(one)[-1] for one in each):.3f}",
                    ", ".join(f"{smooth(one)[-1]:.3f}" for one in each),
                    ", ".join(
                        "not reached" if (steps := steps_to(NEAR * smooth(base)[-1], one)) is None else f"{steps * tokens:,}"
                        for base, one in zip(losses["DDP fp32"], each, strict=True)
                    ),
                ]
                for row, each in losses.items()
            ],
        ),
    ]
    for rate, rows in seconds.items():
        cells = [
            [
                row,
                f"{measured['seconds']:.3f}",
                "-" if measured["sent_bytes"] is None else f"{measured['sent_bytes'] / max(1, described(row)['every']) / 1e6:.2f}",
                measured["plan"] or "-",
                ", ".join("not reached" if each is None else f"{each:.0f}" for each in found[rate][row]),
            ]
            for row, measured in rows.items()
        ]
        head = ["row", "s per step", "MB per step and rank", "plan", "s to the target, by seed"]
        parts += [f"## {rate}", table(head, cells)]
    return "\n\n".join(parts)


def ratios(losses: Losses, seconds: Seconds) -> dict[str, float | None]:
    """For each rate DDP's time to the target over the best row's, and auto's over the best of the rows; None: not reached or not there."""
    out: dict[str, float | None] = {}
    for rate, rows in times(losses, seconds).items():
        known = {row: [one for one in each if one is not None] for row, each in rows.items()}
        reached = {row: statistics.fmean(known[row]) for row, each in rows.items() if len(known[row]) == len(each)}
        best = min(reached.values(), default=None)
        for name, top, bottom in (("ddp_over_best", reached.get("DDP fp32"), best), ("auto_over_best", reached.get("auto"), best)):
            out[f"{name}_{rate}"] = round(top / bottom, 3) if top is not None and bottom else None
    return out


def draw(losses: Losses, seconds: Seconds, hosts: int) -> str:
    """Loss against tokens, then against seconds at each rate, of the first seed, as an SVG."""
    tokens = float(hosts * GPT_BATCH * CONTEXT)
    scales = {"tokens": dict.fromkeys(losses, tokens)} | {
        f"seconds at {rate}": {row: measured["seconds"] for row, measured in rows.items()} for rate, rows in seconds.items()
    }
    curves = {row: smooth(each[0]) for row, each in losses.items()}
    low, high = min(map(min, curves.values())), max(curve[0] for curve in curves.values())
    panels = []
    for number, (title, scale) in enumerate(scales.items()):
        most = scale.get("DDP fp32", max(scale.values())) * len(curves["DDP fp32"])
        lines = [
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>',
            _text(0, -8, f"loss against {title}, up to {most:,.0f}"),
        ]
        for (row, curve), colour in zip(curves.items(), COLOURS, strict=False):
            places = [
                f"{WIDTH * scale[row] * step / most:.1f},{HEIGHT * (high - loss) / (high - low):.1f}"
                for step, loss in enumerate(curve, 1)
                if row in scale and scale[row] * step <= most
            ]
            lines.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}"/>')
        lines += [_text(-GAP + 25, 10, f"{high:.2f}"), _text(-GAP + 25, HEIGHT, f"{low:.2f}")]
        panels.append(f'<g transform="translate({GAP + number * (WIDTH + GAP)},30)">{"".join(lines)}</g>')
    legend = "".join(
        _text(GAP + 150 * number, HEIGHT + 60, row, colour) for number, (row, colour) in enumerate(zip(curves, COLOURS, strict=False))
    )
    size = f'width="{max(GAP + len(scales) * (WIDTH + GAP), GAP + 150 * len(curves))}" height="{HEIGHT + 80}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">{"".join(panels)}{legend}</svg>\n'


def _text(x: float, y: float, text: str, colour: str = "#000") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}">{text}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--rates", nargs="+", default=["50mbit", "200mbit", "1gbit"])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400, help="of each training")
    parser.add_argument("--rounds", type=int, default=3, help="times that steps are timed at each rate")
    parser.add_argument("--quick", action="store_true", help="two hosts, two ways, one rate and seed, eight steps; no report")
    arguments = parser.parse_args()
    clean_up_on_sigterm()
    if (reason := Network.unavailable()) is not None:
        sys.exit(f"no shaped links: {reason}")
    if arguments.quick:
        arguments.rows, arguments.rates, arguments.hosts = ["DDP fp32", "ring8"], ["1gbit"], 2
        arguments.seeds, arguments.steps, arguments.rounds = 1, 8, 1
    rows, hosts = list(dict.fromkeys(["DDP fp32", *arguments.rows])), arguments.hosts
    seconds = {rate: {row: run(hosts, rate, row, rounds=arguments.rounds) for row in rows} for rate in arguments.rates}
    losses = {row: [run(hosts, None, row, learn=arguments.steps, seed=seed)["losses"] for seed in range(arguments.seeds)] for row in rows}
    text = report(losses, seconds, hosts)
    print(text)
    if not arguments.quick:
        path = write_report("pipelines-gpt", "A GPT over four slow links", text, versions(["torch", "gemini-ft"]))
        path.with_suffix(".svg").write_text(draw(losses, seconds, hosts))
        print(path)
    results = {"losses": {row: [smooth(one)[-1] for one in each] for row, each in losses.items()}, "seconds": times(losses, seconds)}
    print_result("pipelines_gpt", results, ratios(losses, seconds))


if __name__ == "__main__":
    main()
