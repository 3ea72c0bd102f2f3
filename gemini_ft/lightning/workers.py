"""Random states of a DataLoader's worker processes: sent along with every batch, and given back after a restart.

Augmentation in a worker draws from that worker's generators. With their states at hand, a restarted loader goes on
after the last batch instead of loading all batches of the epoch again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from gemini_ft.rng import Randomness, randomness, set_randomness


class Stamped(NamedTuple):
    """A batch on its way out of a worker. A named tuple, because torch's memory pinning goes through those."""

    batch: Any
    worker: int
    randomness: Randomness | None  # None: as it was after this worker's batch before


class StampingCollate:
    """Calls the loader's collate function and adds the state that its worker's generators are in afterwards."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._last: Randomness | None = None

    def __call__(self, samples: Any) -> Stamped:
        batch = self._collate(samples)
        info, now = get_worker_info(), randomness()
        changed, self._last = now != self._last, now
        return Stamped(batch, info.id if info else 0, now if changed else None)


class RestoringInit:
    """Calls the loader's own worker_init_fn, then puts the worker's generators where they were before the restart."""

    def __init__(self, init: Callable[[int], None] | None, states: Mapping[int, Randomness]) -> None:
        self._init = init
        self._states = states

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        if worker in self._states:
            set_randomness(self._states[worker])


class WorkerStates:
    """The main process's record of what its workers sent.

    Batch ``k`` of an epoch comes from worker ``k % workers``. So a loader can only go on from a multiple of
    ``workers`` without the workers changing their roles, and two rounds of states are kept.

    Persistent workers enter an epoch with the states they had at the end of the one before. Those are known only if
    that epoch was used to its end: of batches that were loaded in advance and thrown away nothing arrives here.
    """

    def __init__(self, workers: int, persistent: bool) -> None:
        self._workers, self._persistent = workers, persistent
        self._first = 0
        self._revived = False
        self._rounds: deque[tuple[int, int, Randomness]] = deque(maxlen=2 * workers)  # batch, worker, state after it
        self._latest: dict[int, Randomness] = {}
        self._at_start: dict[int, Randomness] = {}

    def start(self, first: int, states: Mapping[int, Randomness]) -> None:
        """An iteration begins with batch ``first`` of the epoch, its workers in ``states`` where those are given."""
        self._latest = {**self._latest, **states} if self._persistent else dict(states)
        self._at_start = dict(self._latest)
        self._first = first
        self._rounds.clear()

    def resting(self) -> dict[int, Randomness]:
        """The states of persistent workers between two iterations."""
        return dict(self._latest)

    def revive(self, states: Mapping[int, Randomness]) -> None:
        """The next iteration starts new workers in the place of those that were ``resting`` before a restart."""
        self._latest, self._revived = dict(states), True

    def take_revived(self) -> bool:
        """Whether the workers that are being started are such ones."""
        revived, self._revived = self._revived, False
        return revived

    def at_start(self) -> dict[int, Randomness]:
        """The states in which the workers began, as far as their seeds do not say it."""
        return dict(self._at_start)

    def unpack(self, batch: int, item: Any) -> Any:
        """The batch itself; what came with it is remembered. ``batch`` counts from the start of the epoch."""
        if not isinstance(item, Stamped):
            return item
        if item.randomness is not None:
            self._latest[item.worker] = item.randomness
        self._rounds.append((batch, item.worker, self._latest[item.worker]))
        return item.batch

    def whole_rounds(self, batches: int) -> int:
        """The last batch not after ``batches`` from which the workers can go on."""
        return batches - batches % self._workers

    def before(self, batch: int) -> dict[int, Randomness]:
        """The states in which the workers go on from ``batch``, a multiple of their number."""
        if batch == self._first:
            return self.at_start()
        return {worker: state for index, worker, state in self._rounds if batch - self._workers <= index < batch}
