"""Names the ranks that are slow: for long, and by so much that the others wait for them. Pure.

Where all ranks do the same between two collectives, each waits in these for the slowest, and the time that a rank spends outside of all of
them is its own. Ranks report medians of a few steps, so that a validation, an upload or a long batch in one of them counts for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from gemini_ft.core.words import named

WINDOW = 8  # steps of a report; the first of three slow ones may begin with up to half a window of quick steps: 28 steps at most
_IN_A_ROW = 3  # windows after which a rank is slow, or is not any more
_PART = 0.1  # of a step; a rank that is slower by less is not worth a word
_LEAST = 0.005  # seconds; nor is one that is slower by less than this
_KEPT = 4  # windows that wait for reports of some ranks; older ones are given up


@dataclass(frozen=True, kw_only=True)
class WorkTime:
    """A rank's time in one step, the median of a window, in seconds."""

    step: float  # all of it
    alone: float  # the part for which none of its collectives was under way


class WorkWindow:
    """Collects the times of one rank's steps."""

    def __init__(self) -> None:
        self._steps, self._alone = list[float](), list[float]()
        self._at: int | None = None

    def add(self, iteration: int, step: float, alone: float) -> WorkTime | None:
        """Takes the times of the step that ends at ``iteration``, in seconds.

        Returns:
            The medians, if a window of more than half its steps ends here: at multiples of ``WINDOW`` where iterations follow each other.
        """
        before, self._at = self._at, iteration
        self._steps.append(step)
        self._alone.append(alone)
        if before is None or iteration // WINDOW == before // WINDOW:
            return None
        steps, alones, self._steps, self._alone = self._steps, self._alone, [], []
        return WorkTime(step=median(steps), alone=median(alones)) if len(steps) > WINDOW // 2 else None


class StragglerWatch:
    """Compares the ranks of a job, at the leader of its commits.

    Args:
        factor: how many times as long as the median of all ranks a slow one works alone; 0: none is ever slow.
        slow: the ranks that were slow when the leader before this one was lost, as far as is known.
    """

    def __init__(self, hosts: Sequence[str], factor: float, slow: Iterable[int] = ()) -> None:
        self._hosts, self._factor = hosts, factor
        self.slow: frozenset[int] = frozenset(slow) & frozenset(range(len(hosts)))  # the ranks that are slow now
        self._windows: dict[int, dict[int, WorkTime]] = {}  # end of the window -> rank -> its times
        self._streaks = dict.fromkeys(range(len(hosts)), 0)  # windows in a row that contradict `slow`

    def add(self, host: str, window: int, ranks: Mapping[int, WorkTime]) -> str | None:
        """Takes what a host reports of its own ranks for a window, named by its last iteration; returns what to say if ``slow`` changes."""
        if not self._factor or len(self._hosts) < 2:
            return None
        found = self._windows.setdefault(window, {})
        found |= {rank: times for rank, times in ranks.items() if rank in self._streaks and self._hosts[rank] == host}
        if len(found) < len(self._hosts):
            self._windows = dict(sorted(self._windows.items())[-_KEPT:])
            return None
        self._windows = {end: each for end, each in self._windows.items() if end > window}
        return self._judge(window, found)

    def _judge(self, window: int, found: Mapping[int, WorkTime]) -> str | None:
        usual = median_low(times.alone for times in found.values())
        late = {r for r, of in found.items() if of.alone > self._factor * usual and of.alone - usual > max(_LEAST, _PART * of.step)}
        for rank in found:
            self._streaks[rank] = self._streaks[rank] + 1 if (rank in late) != (rank in self.slow) else 0
        changed = {rank for rank, streak in self._streaks.items() if streak >= _IN_A_ROW}
        if not changed:
            return None
        self._streaks |= dict.fromkeys(changed, 0)
        begun, self.slow = changed - self.slow, self.slow ^ changed
        said = []
        if begun:
            since = window - _IN_A_ROW * WINDOW + 1
            span = dict.fromkeys(f"{of(found[rank].alone for rank in begun):.3g}" for of in (min, max))
            said.append(
                f"stragglers: since step {since} all ranks wait for {self._names(begun)}, which work{'s' * (len(begun) == 1)} "
                f"{' to '.join(span)} s of each step outside of collectives; {usual:.3g} s is usual"
            )
        if over := changed - begun:
            said.append(f"no straggler any more: {self._names(over)}")
        return "; ".join(said)

    @property
    def text(self) -> str:
        """Which ranks are slow now, in words."""
        return f"stragglers: {self._names(self.slow)}" if self.slow else "no rank is a straggler"

    def _names(self, ranks: Collection[int]) -> str:
        return named([f"rank {rank} (host {self._hosts[rank]})" for rank in sorted(ranks)])
