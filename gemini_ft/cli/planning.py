"""``gemini simulate``, ``plan`` and ``pipeline``: what to expect of a cluster, and of rules for gradients, before a job runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from math import inf, log10
from pathlib import Path
from typing import Any

from gemini_ft.config import parse_bytes
from gemini_ft.core.forecast import DAY, Cluster, Forecast, ReplicaChoice, best, choices, forecast, lost_work, quantile, wasted_time
from gemini_ft.core.placement import describe, part_sizes, place, survival_probability
from gemini_ft.core.words import table
from gemini_ft.errors import ConfigError


def simulate(arguments: Sequence[str]) -> int:
    """``gemini simulate --hosts 16 --state 1.2TB ...``."""
    parser = _parser("gemini simulate", "Let a job fail at random for a month, many times, and say how much work is lost.")
    parser.add_argument("--replicas", type=int, default=2, help="copies of every shard, the own one included (default: 2)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the distribution of lost work")
    options = parser.parse_args(arguments)
    cluster = _cluster(options, options.replicas)
    found = forecast(cluster, _days(options), _runs(options), options.seed)
    if options.svg is not None:
        title = f"Work lost per failure: {cluster.hosts} hosts, {cluster.replicas} replicas"
        curves = {"in memory": lost_work(found.memory), "storage alone, best interval": lost_work(found.storage)}
        try:
            options.svg.write_text(distributions(title, {name: values for name, values in curves.items() if values}))
        except OSError as error:
            raise ConfigError(f"--svg {options.svg}: cannot be written ({error.strerror})") from None
    print(json.dumps(_document(cluster, found), indent=2) if options.json else _shown(cluster, found))
    return 0


def plan(arguments: Sequence[str]) -> int:
    """``gemini plan --hosts 16 --state 1.2TB --memory 500GB ...``."""
    parser = _parser("gemini plan", "Choose replicas and intervals for a cluster, and say what to expect.")
    parser.add_argument("--memory", type=nbytes, required=True, help="of each host that copies may take, such as 500GB")
    options = parser.parse_args(arguments)
    offered = choices(_cluster(options, 1), options.memory, _days(options), _runs(options), options.seed)
    chosen = best(offered)
    if options.json:
        documents = [_document(choice.cluster, choice.found) | {"fits": choice.fits} for choice in offered]
        print(json.dumps({"replicas": chosen.cluster.replicas if chosen is not None else None, "choices": documents}, indent=2))
    else:
        print(_planned(offered, chosen, options.memory))
    return 0 if chosen is not None else 1


def pipeline(arguments: Sequence[str]) -> int:
    """``gemini pipeline CONFIG --model module:function``: the rule of each parameter, and the cost of each rule."""
    parser = argparse.ArgumentParser(
        prog="gemini pipeline", description="Show how a gradient pipeline treats each parameter of a model, and what that costs."
    )
    parser.add_argument("config", help="YAML or JSON file with a gradient_pipeline (a DeepSpeed configuration, for example)")
    parser.add_argument("--model", required=True, metavar="MODULE:FUNCTION", help="called without arguments, it returns the nn.Module")
    parser.add_argument("--ranks", type=int, default=8, help="workers (default: 8)")
    parser.add_argument("--rate", type=rate, default="1gbit", help="of each worker's link, such as 200mbit or 25gbit (default: 1gbit)")
    parser.add_argument("--latency", type=float, default=50.0, help="of a message, in microseconds, for the dense patterns (default: 50)")
    parser.add_argument("--step", type=float, help="seconds that a step computes, to compare whole steps with other rules")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    from gemini_ft.cli.pipeline_costs import show  # torch comes with it, and takes seconds that --help does without

    show(options)
    return 0


# -- options ----------------------------------------------------------------------------------------


def _parser(prog: str, text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=text)
    add = parser.add_argument
    add("--hosts", type=int, required=True, help="machines of the job")
    add("--ranks", type=int, default=8, help="ranks per host (default: 8)")
    add("--state", type=nbytes, required=True, help="of the whole job, such as 1.2TB: 12 bytes per parameter with Adam in mixed precision")
    add("--step", type=seconds, required=True, help="time of an optimizer step, such as 62s")
    add("--bandwidth", type=rate, required=True, help="of a host's link, each way, such as 100gbit")
    add("--host-failures", type=float, default=0.015, help="per host and day that take its memory (default: 0.015)")
    add("--process-failures", type=float, default=0.015, help="per host and day that leave its memory (default: 0.015)")
    add("--domain", type=int, default=0, help="hosts per failure domain, such as a rack (default: there are none)")
    add("--domain-failures", type=float, default=0.0, help="per domain and day (default: 0)")
    add("--restart", type=seconds, default=60.0, help="from a failed process until the state is loaded (default: 60s)")
    add("--replace", type=seconds, default=300.0, help="the same where a host is replaced (default: 5min)")
    add("--storage-bandwidth", type=rate, default=0.0, help="of the whole job to storage, such as 20gbit (default: nothing is stored)")
    add("--storage-interval", type=seconds, default=10800.0, help="between checkpoints from memory to storage (default: 3h)")
    add("--days", type=float, default=30.0, help="length of a run (default: 30)")
    add("--runs", type=int, default=20, help="runs (default: 20)")
    add("--seed", type=int, default=1, help="of the random failures (default: 1)")
    add("--json", action="store_true", help="for programs")
    return parser


def _cluster(options: argparse.Namespace, replicas: int) -> Cluster:
    given = {name: value for name, value in vars(options).items() if name in Cluster.__dataclass_fields__}
    return Cluster(**{**given, "replicas": replicas})


def _days(options: argparse.Namespace) -> float:
    if not options.days > 0:
        raise ConfigError(f"--days {options.days:g}: must be more than 0")
    return float(options.days)


def _runs(options: argparse.Namespace) -> int:
    if options.runs < 1:
        raise ConfigError(f"--runs {options.runs}: must be at least 1")
    return int(options.runs)


# -- what is shown ----------------------------------------------------------------------------------


def _document(cluster: Cluster, found: Forecast) -> dict[str, Any]:
    ways = {"memory": found.memory, "storage_alone": found.storage}
    return {
        "cluster": asdict(cluster),
        "days": found.days,
        "runs": len(found.memory),
        "failures_per_day": cluster.failures_per_day,
        "memory_per_host": cluster.memory,
        "sent_per_host_and_snapshot": cluster.share * (cluster.replicas - 1),
        "replication_seconds": cluster.replication,
        "steps_per_snapshot": cluster.every,
        "fallback_probability": found.fallback_probability,
        "fallbacks_per_run": found.fallbacks_per_run,
        "best_storage_interval": cluster.best_storage_interval if cluster.best_storage_interval != inf else None,
        "ways": {
            name: {
                "effective_training_ratio": found.ratio(runs),
                "lost_work": {f"p{round(100 * q)}": quantile(lost_work(runs), q) for q in (0.5, 0.9, 0.99, 1.0)},
            }
            for name, runs in ways.items()
            if runs
        },
    }


def _shown(cluster: Cluster, found: Forecast) -> str:
    names = [f"{number:06}" for number in range(cluster.hosts)]
    domains = {name: f"domain {number // cluster.domain}" for number, name in enumerate(names)} if cluster.domain else None
    placed = place(names, cluster.replicas, domains)
    rows: list[Sequence[str]] = [("", "effective training", "lost per failure: median", "90 %", "99 %", "most")]
    ways = {"in memory": found.memory, f"storage alone, every {_time(cluster.best_storage_interval)}": found.storage}
    for name, runs in ways.items():
        if runs:
            lost = lost_work(runs)
            rows.append((name, f"{found.ratio(runs):.1%}", *(_time(quantile(lost, q)) for q in (0.5, 0.9, 0.99, 1.0))))
    formula = wasted_time(cluster.replication, cluster.every * cluster.step, 0.0)
    return "\n".join(
        [
            describe(placed, domains),
            f"{cluster.failures_per_day:.2g} failures per day; {len(found.memory)} runs of {found.days:g} days.",
            "",
            table(rows),
            "",
            f"Every {_steps(cluster.every)} a snapshot; its replicas have arrived {_time(cluster.replication)} later. "
            f"By formula a failure loses {_time(formula)} of work.",
            f"Memory per host: {_size(cluster.memory)}; sent and received per host and snapshot: "
            f"{_size(cluster.share * (cluster.replicas - 1))}.",
            f"A month of this kind falls back to {'storage' if cluster.storage_bandwidth else 'the beginning'} with "
            f"{found.fallback_probability:.0%} ({found.fallbacks_per_run:.2g} times on average).",
        ]
    )


def _planned(offered: Sequence[ReplicaChoice], chosen: ReplicaChoice | None, memory: float) -> str:
    rows = [("replicas", "memory per host", "effective training", "months with a fallback", "steps per snapshot", "")]
    for choice in offered:
        cluster, found = choice.cluster, choice.found
        mark = "chosen" if choice is chosen else "" if choice.fits else "does not fit"
        rows.append(
            (str(cluster.replicas), _size(cluster.memory), f"{found.ratio(found.memory):.2%}", f"{found.fallback_probability:.0%}",
             str(cluster.every), mark)
        )  # fmt: skip
    if chosen is None:
        least = min(choice.cluster.memory for choice in offered)
        return (
            f"{table(rows)}\n\nNothing fits into {_size(memory)} per host: one copy takes {_size(least)}. More hosts would share the state."
        )
    cluster = chosen.cluster
    lines = [f"replicas: {cluster.replicas}", f"memory_limit: at least {_size(cluster.memory)} per host"]
    if cluster.hosts > cluster.replicas > 1:
        survived = float(survival_probability(part_sizes(cluster.hosts, cluster.replicas), cluster.replicas, cluster.replicas))
        lines.append(f"{cluster.replicas} hosts lost at the same time: survived with {survived:.2%}")
    if cluster.storage_bandwidth:
        stored = max(cluster.storage_interval, cluster.upload)
        lines.append(f"storage: every {_time(stored)}; a whole upload takes {_time(cluster.upload)}")
    else:
        lines.append("storage: none was given; what memory does not survive begins anew")
    return "\n".join([table(rows), "", *lines])


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _time(seconds: float) -> str:
    if seconds == inf:
        return "never"
    unit, size = next((unit, size) for unit, size in (("d", DAY), ("h", 3600.0), ("min", 60.0), ("s", 0.0)) if seconds >= 2 * size)
    return f"{seconds / (size or 1.0):.1f} {unit}"


def _size(nbytes: float) -> str:
    unit, size = next((unit, size) for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("B", 1.0)) if nbytes >= size or size == 1.0)
    return f"{nbytes / size:.1f} {unit}"


_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720, 400, 60, 60, 40, 20
_COLOURS = ("#1b6ca8", "#c8553d", "#5b8c5a", "#7d5ba6")
_TICKS = ((1.0, "1 s"), (10.0, "10 s"), (60.0, "1 min"), (600.0, "10 min"), (3600.0, "1 h"), (6 * 3600.0, "6 h"), (86400.0, "1 day"))


def distributions(title: str, curves: Mapping[str, Sequence[float]]) -> str:
    """For each name, which part of its sorted values (seconds, on a logarithmic axis) is at most so large."""
    most = max((values[-1] for values in curves.values() if values), default=1.0)
    right = next((at for at, _ in _TICKS if at >= most), max(most, _TICKS[-1][0]))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for at, name in _TICKS:
        if at <= right:
            parts.append(_line(_x(at, right), _y(0), _x(at, right), _y(1)))
            parts.append(f'<text x="{_x(at, right):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{name}</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(_line(_LEFT, _y(share), _WIDTH - _RIGHT, _y(share)))
        parts.append(f'<text x="{_LEFT - 8}" y="{_y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for number, (name, values) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        corners = " ".join(f"{_x(value, right):.1f},{_y((i + 1) / len(values)):.1f}" for i, value in _thinned(values))
        parts.append(f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{_LEFT + 260 * number}" y="{_HEIGHT - 14}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _thinned(values: Sequence[float]) -> list[tuple[int, float]]:
    """At most a few hundred of them, the last included."""
    step = max(1, len(values) // 300)
    kept = list(enumerate(values))[::step]
    return kept if not values or kept[-1][0] == len(values) - 1 else [*kept, (len(values) - 1, values[-1])]


def _x(value: float, right: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * log10(max(1.0, value)) / max(1e-9, log10(right))


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * share


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def nbytes(text: str) -> float:
    """Bytes, from a number and a unit."""
    try:
        return float(parse_bytes(text))  # type: ignore[arg-type]
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give a number and a unit, such as 1.2TB or 500GiB") from None


def rate(text: str) -> float:
    """Bits per second, from a number and a unit."""
    return _number(text.strip().removesuffix("/s"), _RATES, "rate", "100gbit or 200mbit")


def seconds(text: str) -> float:
    """Seconds, from a number and a unit."""
    return _number(text, _TIMES, "time", "62s, 5min, 3h or 2d")


def _number(text: str, units: dict[str, float], what: str, example: str) -> float:
    digits = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(digits) :].strip().lower()
    try:
        return float(digits) * units[unit]
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}; give a number and a unit, such as {example}") from None
