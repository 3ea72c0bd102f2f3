"""Time against hosts, measured and by formula, as an SVG: one panel per rate, LSTM trace, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gemini_ft.sync.costs import FORMULAS, Link, Traffic, seconds
from traces import TRACES

HOSTS = [2**power for power in range(2, 11)]
TRACE = "LSTM"
WIDTH, HEIGHT, LEFT, TOP = 420, 300, 60, 30
COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#000000")
SECONDS = (1e-2, 1e3)


def on_paper(hosts: int, rows: int, width: int) -> Traffic:
    """The trace over so many hosts, by its law instead of by drawing from it."""
    expected = TRACES[TRACE].tokens(rows)
    present = {count: -np.expm1(-expected * count) for count in {1, hosts, *(1 << power for power in range(hosts.bit_length() - 1))}}

    def fullest(count: int) -> float:
        return float(max(part.mean() for part in np.array_split(present[count], hosts)))

    densities = {count: float(each.mean()) for count, each in present.items()}
    return Traffic(
        ranks=hosts,
        nbytes=4 * rows * width,
        unit=4 * width,
        densities=densities,
        push_skew=fullest(1) / densities[1],
        pull_skew=fullest(hosts) / densities[hosts],
        push_blocks=fullest(1),  # a block is a row of 256 values
        pull_blocks=fullest(hosts),
    )


def draw(points: Sequence[dict[str, Any]]) -> str:
    """Lines are formulas; dots what was measured."""
    rates = sorted({point["rate"] for point in points}, reverse=True)
    about = points[0]["about"]
    panels = []
    for number, rate in enumerate(rates):
        here = [point for point in points if point["rate"] == rate and point["trace"] == TRACE]
        panels.append(f'<g transform="translate({LEFT + number * (WIDTH + LEFT)},{TOP})">{_panel(rate, here, about)}</g>')
    places = [(LEFT + 250 * (index % 4), HEIGHT + 85 + 16 * (index // 4)) for index in range(len(FORMULAS))]
    legend = "".join(_text(*place, name, colour) for place, name, colour in zip(places, FORMULAS, COLOURS, strict=True))
    size = f'width="{max(1000, LEFT + len(rates) * (WIDTH + LEFT))}" height="{HEIGHT + 130}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return f"{head}{''.join(panels)}{legend}</svg>\n"


def _panel(rate: str, points: Sequence[dict[str, Any]], about: dict[str, Any]) -> str:
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>',
        _text(0, -8, f"{TRACE}, {rate}: seconds against hosts", "#000"),
    ]
    parts += [_text(_x(hosts) - 8, HEIGHT + 16, str(hosts), "#000") for hosts in HOSTS]
    parts += [_text(-45, _y(10.0**power) + 4, f"{10.0**power:g} s", "#000") for power in range(-2, 4)]
    link = Link(alpha=0.0, beta=_beta(points))
    traffic = {hosts: on_paper(hosts, about["rows"], about["width"]) for hosts in HOSTS}
    for name, colour in zip(FORMULAS, COLOURS, strict=True):
        line = " ".join(f"{_x(hosts):.1f},{_y(seconds(name, traffic[hosts], link)):.1f}" for hosts in HOSTS)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        for point in points:
            if point["scheme"] == name:
                parts.append(f'<circle cx="{_x(point["hosts"]):.1f}" cy="{_y(point["seconds"]):.1f}" r="3" fill="{colour}"/>')
    return "".join(parts)


def _beta(points: Sequence[dict[str, Any]]) -> float:
    """Seconds per byte of the link on which these were measured."""
    return float(points[0]["formula_seconds"] / points[0]["formula_mbytes"] / 1e6)


def _x(hosts: float) -> float:
    return WIDTH * math.log(hosts / HOSTS[0]) / math.log(HOSTS[-1] / HOSTS[0])


def _y(time: float) -> float:
    low, high = (math.log(each) for each in SECONDS)
    return HEIGHT * (1 - (math.log(time) - low) / (high - low))


def _text(x: float, y: float, text: str, colour: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}">{text}</text>'
