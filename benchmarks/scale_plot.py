"""The curves of `scale.py` as an SVG: processor time, messages and memory against hosts, all axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, GAP = 330, 240, 70, 40, 60
COLOURS = "#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3"
Points = Mapping[int, float]  # hosts -> value


@dataclass(frozen=True)
class Panel:
    """One diagram.

    Attributes:
        title: the quantity and its unit.
        curves: name -> points; values of 0 are left out.
        aim: hosts and the value that is not to be exceeded there; None: there is none.
    """

    title: str
    curves: Mapping[str, Points]
    aim: tuple[int, float] | None = None


def draw(panels: Sequence[Panel], path: Path) -> None:
    parts = [
        _panel(panel, LEFT + number % 2 * (WIDTH + LEFT + 20), TOP + number // 2 * (HEIGHT + GAP + 40))
        for number, panel in enumerate(panels)
    ]
    rows = -(-len(panels) // 2)
    size = f'width="{2 * (WIDTH + LEFT + 20) + 20}" height="{TOP + rows * (HEIGHT + GAP + 40)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    path.write_text(f'{head}<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n')


def _panel(panel: Panel, left: float, top: float) -> str:
    shown = {name: {hosts: value for hosts, value in points.items() if value > 0} for name, points in panel.curves.items()}
    hosts = sorted({each for points in shown.values() for each in points} | ({panel.aim[0]} if panel.aim else set()))
    values = [value for points in shown.values() for value in points.values()] + ([panel.aim[1]] if panel.aim else [])
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def x(count: float) -> float:
        return WIDTH * math.log(count / hosts[0]) / math.log(hosts[-1] / hosts[0]) if len(hosts) > 1 else WIDTH / 2

    def y(value: float) -> float:
        return HEIGHT * (1 - (math.log10(value) - low) / max(1, high - low))

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>', _text(0, -10, f"{panel.title}; hosts of 8 ranks")]
    parts += [_text(x(each) - 10, HEIGHT + 15, str(each)) for each in hosts if each in (16, 128, 1000, 10000)]
    for power in range(low, high + 1):
        height = y(10.0**power)
        parts.append(f'<line x2="{WIDTH}" y1="{height:.1f}" y2="{height:.1f}" stroke="#ddd"/>{_text(-45, height + 4, f"{10.0**power:g}")}')
    for (name, points), colour, row in zip(shown.items(), COLOURS, range(len(COLOURS)), strict=False):
        line = " ".join(f"{x(each):.1f},{y(value):.1f}" for each, value in sorted(points.items()))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        parts += [f'<circle cx="{x(each):.1f}" cy="{y(value):.1f}" r="3" fill="{colour}"/>' for each, value in points.items()]
        parts.append(_text(row % 2 * 175, HEIGHT + 32 + 14 * (row // 2), name, colour))
    if panel.aim is not None:
        parts.append(f'<path d="M{x(panel.aim[0]) - 8:.1f} {y(panel.aim[1]):.1f}h16" stroke="#000" stroke-width="2"/>')
        parts.append(_text(x(panel.aim[0]) - 40, y(panel.aim[1]) - 5, "at most"))
    return f'<g transform="translate({left},{top})">{"".join(parts)}</g>'


def _text(x: float, y: float, text: str, colour: str = "#000") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}">{text}</text>'
