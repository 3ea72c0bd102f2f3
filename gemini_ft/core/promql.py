"""The part of Prometheus's query language that alert rules need, on samples in memory. Pure; times are arguments, in seconds.

Results are those of Prometheus, with its extrapolation at the ends of a range. What this part lacks is refused.
"""

from __future__ import annotations

import math
import operator
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from gemini_ft.errors import ConfigError

NAME = "__name__"
Labels = frozenset[tuple[str, str]]  # of one series; the figure's name is one of them
Vector = dict[Labels, float]
Value = float | Vector
Points = Sequence[tuple[float, float]]  # time, value
Sample = tuple[str, Mapping[str, str], float]  # name, labels, value

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TOKEN = re.compile(r'\s*(\d+[smhd]\b|\d+(?:\.\d+)?|[A-Za-z_]\w*|"[^"]*"|[=!<>]=|\S)')
_LEVELS = (("and", "unless"), ("==", "!=", ">", "<", ">=", "<="), ("+", "-"), ("*", "/"))  # the loosest first
_FOLDS: dict[str, Callable[[list[float]], float]] = {"sum": math.fsum, "max": max}


class History:
    """The samples of all targets in the last ``kept`` seconds."""

    def __init__(self, kept: float) -> None:
        self.kept = kept
        self._series: dict[Labels, deque[tuple[float, float]]] = {}
        self._looked: dict[str, float] = {}  # target -> when it was asked last

    def add(self, at: float, answers: Mapping[str, Iterable[Sample] | None]) -> None:
        """Records the answers of targets; None: one has not answered."""
        self._looked |= dict.fromkeys(answers, at)
        for instance, samples in answers.items():
            for name, labels, value in [("up", {}, float(samples is not None)), *(samples or ())]:
                of = frozenset({**labels, NAME: name, "instance": instance, "job": "gemini"}.items())
                self._series.setdefault(of, deque()).append((at, value))
        for of, points in list(self._series.items()):
            while points and points[0][0] <= at - self.kept:
                points.popleft()
            if not points:
                del self._series[of]

    def forget(self, target: str) -> None:
        self._looked.pop(target, None)
        self._series = {of: points for of, points in self._series.items() if ("instance", target) not in of}

    def newest(self, labels: Labels) -> Vector:
        """Returns the values of the series with these labels that the last answer of their target had."""
        found = {of: points[-1] for of, points in self._series.items() if of >= labels}
        return {of: value for of, (at, value) in found.items() if at == self._looked[dict(of)["instance"]]}

    def within(self, labels: Labels, begin: float) -> dict[Labels, Points]:
        """Returns the samples after ``begin`` of the series with these labels."""
        found = {of: [point for point in points if point[0] > begin] for of, points in self._series.items() if of >= labels}
        return {of: points for of, points in found.items() if points}


def evaluate(text: str, history: History, at: float) -> Value:
    """Returns the result of a query at a time; a vector has the labels of each result.

    Raises ConfigError: it is no query, or uses what this part of the language lacks.
    """
    evaluation = _Evaluation(text, history, at)
    found = evaluation.joined()
    evaluation.take("")
    return found


def seconds_of(text: str) -> float:
    """Returns the seconds of a duration, such as ``10m``. Raises ConfigError: it is none."""
    if re.fullmatch(r"\d+[smhd]", text) is None:
        raise ConfigError(f"{text!r} is no duration: a number and one of s, m, h, d")
    return float(int(text[:-1]) * _UNITS[text[-1]])


class _Evaluation:
    """Reads one query from the loosest operators down to selectors, and computes it meanwhile."""

    def __init__(self, text: str, history: History, at: float) -> None:
        self._text, self._tokens = " ".join(text.split()), [*_TOKEN.findall(text), ""]
        self._history, self._at = history, at

    def take(self, *wanted: str) -> str:
        """Returns the next token, which must be one of ``wanted`` if there are any."""
        token = self._tokens[0]
        if wanted and token not in wanted:
            raise ConfigError(f"{self._text}: {token or 'the end'!r} is not understood here; Prometheus knows more of its language")
        return self._tokens.pop(0) if token else ""

    def _names(self) -> frozenset[str]:
        self.take("(")
        names = set[str]()
        while (token := self.take()) != ")":
            names.add(token)
            if self._tokens[0] != ")":
                self.take(",")
        return frozenset(names)

    def joined(self, level: int = 0) -> Value:
        """Returns the value of operands that are joined by the operators of a level, or of tighter ones."""
        if level == len(_LEVELS):
            return self._operand()
        left = self.joined(level + 1)
        while self._tokens[0] in _LEVELS[level]:
            name, on = self.take(), None
            if self._tokens[0] == "on":
                self.take()
                on = self._names()
                for word in ("group_left", "(", ")") if level else ():  # the labels of the left side stay; else they would go
                    self.take(word)
            left = _join(name, on, left, self.joined(level + 1))
        return left

    def _operand(self) -> Value:
        token = self.take()
        if token == "(":
            inner = self.joined()
            self.take(")")
            return inner
        if token and token[0].isdigit():
            return float(token)
        if token in _FOLDS:
            by = self._names() if self._tokens[0] == "by" and self.take() else frozenset[str]()
            groups = defaultdict[Labels, list[float]](list)
            for labels, value in vector(self._arguments(1)[0]).items():
                groups[_matched(labels, by)].append(value)
            return {labels: float(_FOLDS[token](values)) for labels, values in groups.items()}
        if token == "time":
            self._arguments(0)
            return self._at
        if token == "clamp":
            inner, least, most = map(vector, self._arguments(3))
            (low,), (high,) = least.values(), most.values()
            return {without_name(labels): max(low, min(high, value)) for labels, value in inner.items()}
        if token in _OVER_TIME:
            self.take("(")
            labels = self._labels(self.take())
            self.take("[")
            if (span := seconds_of(self.take())) > self._history.kept:
                raise ConfigError(f"{self._text}: only the last {self._history.kept:g} s are kept, and {span:g} s are asked for")
            begin = self._at - span
            self.take("]")
            self.take(")")
            read = {of: _OVER_TIME[token](points, begin, self._at) for of, points in self._history.within(labels, begin).items()}
            return {without_name(of): value for of, value in read.items() if value is not None}
        if not token.isidentifier() or self._tokens[0] == "(":
            self._tokens.insert(0, token)
            self.take("a figure")
        return self._history.newest(self._labels(token))

    def _arguments(self, number: int) -> list[Value]:
        self.take("(")
        found = [self.joined() for place in range(number) if not place or self.take(",")]
        self.take(")")
        return found

    def _labels(self, name: str) -> Labels:
        labels = {NAME: name}
        if self._tokens[0] == "{":
            self.take()
            while (label := self.take()) != "}":
                self.take("=")
                labels[label] = self.take().strip('"')
                self.take(",") if self._tokens[0] != "}" else None
        return frozenset(labels.items())


def without_name(labels: Labels) -> Labels:
    """Returns the labels beside the figure's name."""
    return frozenset(label for label in labels if label[0] != NAME)


def _matched(labels: Labels, on: frozenset[str] | None) -> Labels:
    return without_name(labels) if on is None else frozenset(label for label in labels if label[0] in on)


def vector(value: Value) -> Vector:
    """Returns a value as a vector: a number is one without labels."""
    return value if isinstance(value, dict) else {frozenset(): value}


def _join(name: str, on: frozenset[str] | None, left: Value, right: Value) -> Value:
    others = {_matched(labels, on): value for labels, value in vector(right).items()}
    if name in _LEVELS[0]:
        return {labels: value for labels, value in vector(left).items() if (_matched(labels, on) in others) == (name == "and")}
    calculated = _CALCULATED[name]
    if isinstance(left, float):
        if isinstance(right, float):
            return float(calculated(left, right))
        pairs = [(labels, left, value, value) for labels, value in right.items()]
    else:
        theirs = {labels: right if isinstance(right, float) else others.get(_matched(labels, on)) for labels in left}
        pairs = [(labels, value, other, value) for labels, value in left.items() if (other := theirs[labels]) is not None]
    if name in _LEVELS[1]:
        return {labels: kept for labels, one, other, kept in pairs if calculated(one, other)}
    return {without_name(labels): calculated(one, other) for labels, one, other, _ in pairs}


def _divided(one: float, other: float) -> float:
    if other:
        return one / other
    return math.nan if not one or math.isnan(one) else math.copysign(math.inf, one)


_CALCULATED: dict[str, Callable[[float, float], float]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divided,
}


def _increase(points: Points, begin: float, end: float, per: float = 1.0) -> float | None:
    """The increase of a counter, which may begin anew, extrapolated to the whole range unless its samples end far from an end of it."""
    (first, low), (last, high) = points[0], points[-1]
    if last <= first:  # there is one sample; or the clock was set back
        return None
    grown = high - low + sum(before for (_, before), (_, after) in pairwise(points) if after < before)
    mean = (last - first) / (len(points) - 1)
    before, after = (gap if gap < 1.1 * mean else mean / 2 for gap in (first - begin, end - last))
    if grown > 0 and low >= 0:  # it was not below 0 before
        before = min(before, (last - first) * low / grown)
    return grown * ((last - first + before + after) / (last - first) / per)


_OVER_TIME: dict[str, Callable[[Points, float, float], float | None]] = {
    "increase": _increase,
    "rate": lambda points, begin, end: _increase(points, begin, end, end - begin),
    "max_over_time": lambda points, _, __: max(value for _, value in points),
}
