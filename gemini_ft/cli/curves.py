"""A picture of distributions as SVG, without a library for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import log10

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
