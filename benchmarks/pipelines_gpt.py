"""A GPT of ten million parameters over four slow links: loss against seconds and tokens, by each way to exchange gradients.

    python benchmarks/pipelines_gpt.py --quick
    python benchmarks/pipelines_gpt.py losses       # may share the machine with others
    python benchmarks/pipelines_gpt.py seconds      # wants a quiet machine
    python benchmarks/pipelines_gpt.py              # what is missing of both, one training on a slow link as a check, and the report

A step has the same loss on any link, so each way trains once per seed, on links without a limit, and a few of its steps are timed at each
rate; the report puts both together. Finished cells are kept in a file, and used again while code, configuration, torch and Python stay the
same, and, where seconds are measured, the machine. With ``--also COMMIT`` the cells that were measured at that commit count too, but for
those of ``auto``, though the code has changed since: the report names them, and their first losses are computed again. The text is the
source of Python's standard library.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from math import isclose
from pathlib import Path
from typing import Any

import gemini_ft
from common import (
    HERE,
    MARK,
    RESULTS,
    clean_up_on_sigterm,
    hardware,
    interval,
    print_result,
    revision,
    spread,
    table,
    versions,
    wait_until_quiet,
    write_report,
)
from gemini_ft.pipeline import load_rules
from gemini_ft.testing import Network
from pipelines import smooth
from pipelines_models import CONTEXT, GPT_BATCH
from sparse_sync import run_hosts

CONFIGS = HERE.parent / "configs"
BASE, AUTO, TO_LOSS = "DDP fp32", "auto", "auto, quality: loss"
TRAINED_AS = {"bf16": "DDP bf16", "ring8": "ring8", "DiLoCo": "DiLoCo"}  # plan of `auto` -> the row that has its losses; else `BASE`
AGAIN = 30  # losses of a kept cell that are computed again
ROWS: dict[str, dict[str, Any]] = {
    BASE: {"hook": "none"},
    "DDP bf16": {"hook": "bf16"},
    "PowerSGD (torch)": {"hook": "powersgd"},
    "Zen on embeddings": {"pipeline": str(CONFIGS / "pipeline_zen_embeddings.yaml")},
    "top-k 1 %": {"pipeline": [{"params": "*", "compress": {"method": "topk", "ratio": 0.01}}]},
    "DiLoCo": {"pipeline": str(CONFIGS / "pipeline_diloco.yaml")},
    "SparseLoCo": {"pipeline": str(CONFIGS / "pipeline_sparseloco.yaml")},
    "ring8": {"pipeline": [{"params": "*", "sync": "ring8"}]},
    AUTO: {"pipeline": str(CONFIGS / "pipeline_auto.yaml")},
    TO_LOSS: {"pipeline": [{"params": "*", "fusion": "auto", "quality": "loss"}]},
}
PARTS = ("losses", "seconds", "report")
CHECKED = "SparseLoCo", "200mbit"  # the cell that is run from end to end as well
STEPS = 150
TIMEOUT = 7200.0
NEAR = 1.02  # times DDP's loss: the target
QUIET = 0.1  # of the machine that other programs may take while steps are timed
COLOURS = ("#000000", "#888888", "#937860", "#55a868", "#8172b3", "#c44e52", "#dd8452", "#4c72b0", "#da8bc3", "#ccb974")
WIDTH, HEIGHT, GAP = 420, 280, 70

Losses = Mapping[str, Sequence[Sequence[float]]]  # by row, of each seed
Visits = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]  # by rate and row


class Cells:
    """The measured cells, in a file with a line of JSON for each; an interrupted program goes on with the next one.

    Args:
        also: a commit whose cells count though the code has changed since.

    Attributes:
        commits: by which the cells that were asked for have been measured.
        older: rows that have such cells.
    """

    def __init__(self, path: Path, also: str | None = None) -> None:
        self._path = path
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]  # of a line whose writer was killed, only a part may be there
        if len(whole) < len(text):
            os.truncate(path, len(whole))
        self._known: dict[str, dict[str, Any]] = {json.dumps(line["about"]): line for line in map(json.loads, whole.splitlines())}
        lines = [line for line in self._known.values() if line["commit"] == also and line["about"]["row"] not in (AUTO, TO_LOSS)]
        self._older = {_but_code(line["about"]): line for line in lines}
        self.commits, self.older = set[str](), set[str]()

    def measured(self, about: Mapping[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The cell, from the file if it has been measured with the same code."""
        if (line := self._known.get(json.dumps(about))) is None and (line := self._older.get(_but_code(about))) is not None:
            self.older.add(about["row"])
        if line is None:
            line = self._known[json.dumps(about)] = {"about": about, "commit": revision(), "found": measure()}
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        self.commits.add(line["commit"])
        found: dict[str, Any] = line["found"]
        return found


def _but_code(about: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in about.items() if name != "code"})


def about(part: str, row: str, hosts: int, **job: Any) -> dict[str, Any]:
    """All that a cell depends on: plain data, by which it is found again."""
    machine = {} if part == "losses" else {name: hardware()[name] for name in ("cpu", "cores")}
    return {"part": part, "row": row, "hosts": hosts, **job, **machine, "code": code_of(row)}


def code_of(row: str) -> str:
    """A digest of the code and of the configuration behind a row, without docstrings and comments, and of versions."""
    package = Path(gemini_ft.__file__).parent
    paths = [HERE / "pipelines_worker.py", HERE / "pipelines_models.py", package / "testing" / "network.py"]
    parts = [
        json.dumps(versions(["torch"])),
        _bare(inspect.getsource(run_hosts)),
        json.dumps(described(row), sort_keys=True).replace(str(CONFIGS), ""),
    ]
    if (pipeline := ROWS[row].get("pipeline")) is not None:
        parts.append(str(load_rules(pipeline)))
        folders = [package / "pipeline", package.parent / "sync", package.parent / "compression"]
        paths += [path for folder in folders for path in sorted(folder.glob("*.py"))]
        paths += [package / name for name in ("trials.py", "ordered.py")]
    return blake2b("\n".join([*parts, *(_bare(path.read_text()) for path in paths)]).encode(), digest_size=8).hexdigest()


def _bare(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


def run(hosts: int, rate: str | None, row: str, **job: Any) -> dict[str, Any]:
    """One row on one network: nine models with their optimizers are too many to be in memory at once."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    with Network(hosts, rate=rate) as network, tempfile.TemporaryDirectory() as folder:
        asked = {"model": "gpt", "rows": [described(row)], "rounds": 0, "learn": 0, **job, "folder": folder, "mark": mark}
        run_hosts(network, [str(HERE / "pipelines_worker.py"), json.dumps(asked)], Path(folder), TIMEOUT)
        (found,) = json.loads(Path(folder, "result.json").read_text())
    print(f"{row}, {rate or 'no limit'}: {found['seconds']:.3f} s, {found['losses'][-1:]}", file=sys.stderr, flush=True)
    return dict(found)


def described(row: str) -> dict[str, Any]:
    rules = load_rules(ROWS[row].get("pipeline"))
    return {"name": row, "every": max((rule.apart.every or 0 for rule in rules), default=0), **ROWS[row]}


# -- the parts


def trainings(cells: Cells, options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """The loss of each step, by row and seed; ``auto`` is trained as what it chooses, which depends on the links."""
    found: dict[str, list[list[float]]] = {row: [] for row in options.rows if row not in (AUTO, TO_LOSS)}
    for seed, row in itertools.product(range(options.seeds), found):
        cell = about("losses", row, options.hosts, seed=seed, steps=options.steps)
        found[row].append(cells.measured(cell, partial(run, options.hosts, None, row, learn=options.steps, seed=seed))["losses"])
    return found


def timings(cells: Cells, options: argparse.Namespace) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The visits of each cell, all of them in an order that is drawn."""
    every = [*itertools.product(range(options.visits), options.rates, options.rows)]
    found: dict[str, dict[str, list[dict[str, Any]]]] = {rate: {row: [] for row in options.rows} for rate in options.rates}
    for visit, rate, row in random.Random(0).sample(every, len(every)):
        cell = about("seconds", row, options.hosts, rate=rate, visit=visit, rounds=options.rounds)
        found[rate][row].append(cells.measured(cell, partial(_timed, options, rate, row)))
    return found


def _timed(options: argparse.Namespace, rate: str, row: str) -> dict[str, Any]:
    wait_until_quiet(QUIET, options.patience)
    return run(options.hosts, rate, row, rounds=options.rounds)


def checked(cells: Cells, options: argparse.Namespace) -> dict[str, Any] | None:
    """One training on a slow link, with its losses and its seconds; None: its row or its rate is not asked for."""
    row, rate = CHECKED
    if row not in options.rows or rate not in options.rates:
        return None
    cell = about("check", row, options.hosts, rate=rate, steps=options.steps)
    return cells.measured(cell, lambda: run(options.hosts, rate, row, learn=options.steps, seed=0))


# -- what follows from them


def trained_as(row: str, visits: Sequence[Mapping[str, Any]]) -> str:
    """The row that has its losses: of ``auto``, the one that it has chosen."""
    if row not in (AUTO, TO_LOSS):
        return row
    return next((other for plan, other in TRAINED_AS.items() if visits[0]["plan"].startswith(plan)), BASE)


def steps_to(target: float, losses: Sequence[float]) -> int | None:
    return next((number for number, loss in enumerate(smooth(losses), 1) if loss <= target), None)


def targets(losses: Losses) -> list[float]:
    """By seed, a loss that DDP has after two thirds of its steps: others may need more of them than it does."""
    return [NEAR * smooth(each)[2 * len(each) // 3] for each in losses[BASE]]


def seconds_of(visits: Sequence[Mapping[str, Any]]) -> list[float]:
    return [seconds for visit in visits for seconds in visit["rounds"]]


def times(losses: Losses, seconds: Visits) -> dict[str, dict[str, list[float | None]]]:
    """By rate and row, the seconds to the target of each seed; None: it was not reached."""
    return {
        rate: {
            row: [
                None if (steps := steps_to(target, each)) is None else steps * statistics.median(seconds_of(visits))
                for target, each in zip(targets(losses), losses[trained_as(row, visits)], strict=True)
            ]
            for row, visits in rows.items()
        }
        for rate, rows in seconds.items()
    }


def again(cells: Cells, losses: Losses, options: argparse.Namespace) -> dict[str, bool]:
    """By row whose cells are of older code, whether the present one gives the same first losses.

    They are sums over ranks in float32, whose order, and with it the last bits, depends on how many are summed up at once.
    """
    found = {}
    for row in sorted(cells.older):
        cell = about("again", row, options.hosts, steps=AGAIN)
        now = cells.measured(cell, partial(run, options.hosts, None, row, learn=AGAIN, seed=0))["losses"]
        found[row] = all(isclose(one, other, rel_tol=2**-22) for one, other in zip(now, losses[row][0][:AGAIN], strict=True))
    return found


def kept(found: Mapping[str, bool], also: str) -> str:
    odd = [row for row, is_same in found.items() if not is_same]
    same = "the present code has the same first losses, but for the last bits of sums over ranks"
    said = f"BUT THE FIRST LOSSES OF {', '.join(odd)} ARE OTHERS NOW" if odd else same
    cells = f"Cells of {', '.join(found)} are those of {also}, by code that has changed since (`git diff {also}`)"
    return f"{cells}; {said} ({AGAIN} steps, seed 0)."


def report(losses: Losses, seconds: Visits, check: Mapping[str, Any] | None, commits: Iterable[str], options: argparse.Namespace) -> str:
    found, tokens = times(losses, seconds), options.hosts * GPT_BATCH * CONTEXT
    parts = [
        f"{options.hosts} hosts, AdamW at 1e-3, {tokens} words a step, {options.steps} steps. The target is {NEAR} times the loss that "
        f"{BASE} of the same seed has after {2 * options.steps // 3} steps. Losses are means of 20 steps and all ranks; they were computed "
        "on links without a limit, while other programs may have run, and `auto` has those of the row that it chose at the rate. "
        "Seconds are the steps to the target times the median seconds of a step at that rate, measured apart, local steps in whole "
        "periods, the cells in an order that was drawn; intervals are of the median (95 %). *Others* is the largest share of the machine "
        "that other programs took meanwhile. Processors are shared by all hosts, so computing takes longer than on hosts of their own. "
        f"Cells are kept while their code is the same; those here were measured at {', '.join(sorted(commits))}.",
    ]
    if check is not None:
        row, rate = CHECKED
        expected = options.steps * statistics.median(seconds_of(seconds[rate][row]))
        same = "the losses above, bit for bit" if check["losses"] == losses[row][0] else "OTHER LOSSES than above"
        parts.append(
            f"As a check, {row} was trained from end to end at {rate}: it had {same}, and took {options.steps * check['seconds']:.0f} s; "
            f"steps times seconds are {expected:.0f} s."
        )
    parts += [
        "## Loss against tokens",
        table(
            ["row", "last loss", "of each seed", "tokens to the target"],
            [
                [
                    row,
                    f"{statistics.fmean(smooth(one)[-1] for one in each):.3f}",
                    ", ".join(f"{smooth(one)[-1]:.3f}" for one in each),
                    ", ".join(
                        "not reached" if (steps := steps_to(target, one)) is None else f"{steps * tokens:,}"
                        for target, one in zip(targets(losses), each, strict=True)
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
                spread(interval(seconds_of(visits)), 3),
                "-" if (sent := visits[0]["sent_bytes"]) is None else f"{sent / _period(row, visits) / 1e6:.2f}",
                " / ".join(dict.fromkeys(visit["plan"] or "-" for visit in visits)),
                f"{max(visit['choosing'] for visit in visits):.0f}" if row in (AUTO, TO_LOSS) else "-",
                f"{max(visit['foreign'] for visit in visits):.0%}",
                ", ".join("not reached" if each is None else f"{each:.0f}" for each in found[rate][row]),
            ]
            for row, visits in rows.items()
        ]
        head = ["row", "s per step", "MB per step and rank", "plan", "s to choose", "others", "s to the target, by seed"]
        parts += [f"## {rate}", table(head, cells)]
    return "\n\n".join(parts)


def _period(row: str, visits: Sequence[Mapping[str, Any]]) -> int:
    """Steps of which one sends something."""
    return int(max(1, described(trained_as(row, visits))["every"]))


def ratios(losses: Losses, seconds: Visits) -> dict[str, float | None]:
    """For each rate DDP's time to the target over the best row's, and those of both rows of auto; None: not reached or not there.

    That of ``quality: loss`` is over the best of all rows, the other one over the best of those that train as DDP does.
    """
    alike = {BASE, *TRAINED_AS.values(), "Zen on embeddings"} - {"DiLoCo"}
    out: dict[str, float | None] = {}
    for rate, rows in times(losses, seconds).items():
        reached = {row: statistics.fmean(each) for row, each in rows.items() if None not in each}  # type: ignore[arg-type]
        others = {row: value for row, value in reached.items() if row not in (AUTO, TO_LOSS)}
        best, best_alike = min(others.values(), default=None), min((others[row] for row in alike & others.keys()), default=None)
        pairs = {"ddp_over_best": (BASE, best), "auto_to_loss_over_best": (TO_LOSS, best), "auto_over_best_alike": (AUTO, best_alike)}
        for name, (row, bottom) in pairs.items():
            out[f"{name}_{rate}"] = round(reached[row] / bottom, 3) if row in reached and bottom else None
    return out


def draw(losses: Losses, seconds: Visits, hosts: int) -> str:
    """Loss against tokens, then against seconds at each rate, of the first seed, as an SVG."""
    curves = {row: smooth(each[0]) for row, each in losses.items()}
    panels = [("tokens", {row: (float(hosts * GPT_BATCH * CONTEXT), curve) for row, curve in curves.items()})]
    for rate, rows in seconds.items():
        scaled = {row: (statistics.median(seconds_of(visits)), curves[trained_as(row, visits)]) for row, visits in rows.items()}
        panels.append((f"seconds at {rate}", scaled))
    low, high = min(map(min, curves.values())), max(curve[0] for curve in curves.values())
    drawn = []
    for number, (title, lines) in enumerate(panels):
        most = lines[BASE][0] * len(curves[BASE])
        parts = [
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>',
            _text(0, -8, f"loss against {title}, up to {most:,.0f}"),
        ]
        for row, (scale, curve) in lines.items():
            places = [
                f"{WIDTH * scale * step / most:.1f},{HEIGHT * (high - loss) / (high - low):.1f}"
                for step, loss in enumerate(curve, 1)
                if scale * step <= most
            ]
            parts.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{_colour(row)}"/>')
        parts += [_text(-GAP + 25, 10, f"{high:.2f}"), _text(-GAP + 25, HEIGHT, f"{low:.2f}")]
        drawn.append(f'<g transform="translate({GAP + number * (WIDTH + GAP)},30)">{"".join(parts)}</g>')
    names = list(dict.fromkeys([*losses, *itertools.chain(*seconds.values())]))
    legend = "".join(_text(GAP + 150 * number, HEIGHT + 60, row, _colour(row)) for number, row in enumerate(names))
    size = f'width="{max(GAP + len(panels) * (WIDTH + GAP), GAP + 150 * len(names))}" height="{HEIGHT + 80}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">{"".join(drawn)}{legend}</svg>\n'


def _colour(row: str) -> str:
    return COLOURS[list(ROWS).index(row)]


def _text(x: float, y: float, text: str, colour: str = "#000") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}">{text}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="losses|seconds|report", help="all, if none is given")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--rates", nargs="+", default=["50mbit", "200mbit", "1gbit"])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each training")
    parser.add_argument("--visits", type=int, default=2, help="times that each way begins anew at each rate, to be timed")
    parser.add_argument("--rounds", type=int, default=3, help="times that steps are timed in each visit")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds to wait for a quiet machine before each visit")
    parser.add_argument("--cells", type=Path, default=RESULTS / "pipelines-gpt.jsonl", help="the file that keeps what has been measured")
    parser.add_argument("--also", metavar="COMMIT", help="whose cells count though the code has changed since, but for auto's")
    parser.add_argument("--quick", action="store_true", help="two hosts, two ways, one rate, eight steps; nothing is kept")
    options = parser.parse_args()
    if odd := set(options.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(odd))}: parts are {', '.join(PARTS)}")
    clean_up_on_sigterm()
    if (reason := Network.unavailable()) is not None:
        sys.exit(f"no shaped links: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        if options.quick:
            options.rows, options.rates, options.hosts = [BASE, "ring8"], ["1gbit"], 2
            options.seeds, options.steps, options.visits, options.rounds, options.patience = 1, 8, 1, 1, 0.0
            options.cells = Path(folder, "cells.jsonl")
        like = TRAINED_AS.values() if {AUTO, TO_LOSS} & {*options.rows} else ()
        options.rows = [row for row in ROWS if row in {BASE, *like, *options.rows}]
        cells, parts = Cells(options.cells, options.also), options.parts or PARTS
        if "losses" in parts:
            trainings(cells, options)
        if "seconds" in parts:
            timings(cells, options)
        if "report" in parts:
            finish(cells, options)


def finish(cells: Cells, options: argparse.Namespace) -> None:
    """Measures what is still missing, and puts everything together."""
    losses, seconds, check = trainings(cells, options), timings(cells, options), checked(cells, options)
    checks = kept(again(cells, losses, options), options.also) if cells.older else None
    text = report(losses, seconds, check, cells.commits, options)
    text = f"{text}\n\n{checks}" if checks is not None else text
    print(text)
    if not options.quick:
        path = write_report("pipelines-gpt", "A GPT over four slow links", text, versions(["torch", "gemini-ft"]))
        path.with_suffix(".svg").write_text(draw(losses, seconds, options.hosts))
        print(path)
    results = {"losses": {row: [smooth(one)[-1] for one in each] for row, each in losses.items()}, "seconds": times(losses, seconds)}
    print_result("pipelines_gpt", results, ratios(losses, seconds))


if __name__ == "__main__":
    main()
