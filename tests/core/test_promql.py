"""The part of Prometheus's language that is known here: results, and what is refused."""

from __future__ import annotations

import math

import pytest

from gemini_ft.core.promql import History, evaluate, seconds_of
from gemini_ft.errors import ConfigError


def history() -> History:
    """Two targets, asked every ten seconds until 100; a counter that begins anew at 60, and one target that is away at the end."""
    found = History(1000)
    for at in range(0, 101, 10):
        counter = at if at < 60 else at - 60
        a = [("gemini_c_total", {"stream": "x"}, counter), ("gemini_g", {"stream": "x"}, 5.0), ("gemini_w", {}, 2.0)]
        b = [("gemini_g", {"stream": "x"}, 1.0), ("gemini_g", {"stream": "y"}, 2.0), ("gemini_w", {}, 0.0)]
        found.add(float(at), {"a": [(name, of, float(value)) for name, of, value in a], "b": b if at < 90 else None})
    return found


def results(text: str) -> dict[tuple[str, ...], float]:
    found = evaluate(text, history(), 105.0)
    assert isinstance(found, dict)
    return {tuple(sorted(value for name, value in of if name != "job")): value for of, value in found.items()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gemini_g", {("a", "gemini_g", "x"): 5}),  # that of b is gone with its last answer
        ('up{job="gemini"}', {("a", "up"): 1, ("b", "up"): 0}),
        ('up{instance="b"} == 0', {("b", "up"): 0}),
        ("max_over_time(up[1m])", {("a",): 1, ("b",): 1}),
        ("max_over_time(up[15s])", {("a",): 1, ("b",): 0}),
        ("time() - gemini_g > 99", {("a", "x"): 100}),
        ("time() - gemini_g > 100", {}),
        ("100 < time() - gemini_g * 0 + 1", {("a", "x"): 106}),
        ("clamp(gemini_g, 6, 7)", {("a", "x"): 6}),
        ("gemini_g > clamp(gemini_g * 20, 1, 4)", {("a", "gemini_g", "x"): 5}),
        ("gemini_g and on (instance) gemini_w", {("a", "gemini_g", "x"): 5}),
        ("gemini_g unless on (instance) gemini_w", {}),
        ("gemini_g and on () (sum(gemini_w) > 2)", {}),
        ("gemini_g / on (instance) group_left () (gemini_w > 0)", {("a", "x"): 2.5}),
        ("gemini_g / on (instance) group_left () (gemini_w > 2)", {}),
        ("sum by (stream) (gemini_g + 2 * 3)", {("x",): 11}),
        ("max(gemini_g)", {(): 5}),
        ("gemini_g / 0", {("a", "x"): math.inf}),
        ("increase(gemini_c_total[95s])", {("a", "x"): pytest.approx((40 - 20 + 50) * (80 + 10 + 5) / 80)}),
        ("rate(gemini_c_total[95s]) * 95", {("a", "x"): pytest.approx((40 - 20 + 50) * (80 + 10 + 5) / 80)}),
        ("increase(gemini_c_total[9s])", {}),  # one sample is no increase
    ],
)
def test_a_query(text: str, expected: dict[tuple[str, ...], float]) -> None:
    assert results(text) == expected


def test_nothing_is_not_a_number() -> None:
    assert all(math.isnan(value) for value in results("(gemini_g - gemini_g) / 0").values())
    assert results("(gemini_g - gemini_g) / 0 > 0") == {}


def test_a_clock_that_is_set_back_or_stands_is_no_increase() -> None:
    for second in (50.0, 40.0):
        found = History(1000)
        for at in (50.0, second):
            found.add(at, {"a": [("gemini_c_total", {}, 1.0)]})
        assert evaluate("rate(gemini_c_total[1m])", found, 60.0) == {}


def test_samples_are_kept_for_a_time() -> None:
    found = History(25)
    for at in (0.0, 10.0, 20.0, 30.0):
        found.add(at, {"a": [("gemini_c_total", {}, at), *([("gemini_gone", {}, 1.0)] if not at else [])]})
    (value,) = evaluate("increase(gemini_c_total[25s])", found, 30.0).values()  # type: ignore[union-attr]
    assert value == pytest.approx(20 + 5 + 0)
    assert len(found.within(frozenset(), 0.0)) == 2  # with that of up


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gemini_g >",
        "gemini_g) > 1",
        "(gemini_g > 1",
        "avg(gemini_g)",
        "histogram_quantile(0.9, gemini_g)",
        "gemini_g offset 5m",
        "gemini_g[5m]",
        "increase(gemini_c_total)",
        "increase(gemini_c_total[1y])",
        "gemini_g / on (instance) gemini_w",
        "gemini_g / on (instance) group_left (job) gemini_w",
        'gemini_g{stream=~"x"}',
        "gemini_g or gemini_w",
        "gemini_g > bool 1",
        "clamp(gemini_g, 1)",
    ],
)
def test_what_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not understood here|is no duration"):
        evaluate(text, History(1.0), 0.0)


def test_durations() -> None:
    assert [seconds_of(text) for text in ("0s", "90s", "10m", "1h", "2d")] == [0, 90, 600, 3600, 172800]
    with pytest.raises(ConfigError, match="'10' is no duration: a number and one of s, m, h, d"):
        seconds_of("10")
