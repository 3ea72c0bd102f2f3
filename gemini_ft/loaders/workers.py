"""Captures the states of a DataLoader's worker processes with every batch, and restores them after a restart.

Augmentation in a worker draws from that worker's generators, and a dataset may remember something from one sample to the
next. With both at hand, a restarted loader goes on after the last batch instead of loading all batches of the epoch again.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info
from torch.utils.data._utils.worker import _IterableDatasetStopIteration

from gemini_ft.state.remembered import OF_STREAMS, Attributes, Values
from gemini_ft.state.rng import (
    Randomness,
    generator_states,
    private_generators,
    randomness,
    script_generators,
    set_generator_states,
    set_randomness,
)

# Of one worker: its process's generators; attributes that differ from those it was started with; private generators, by path.
State = tuple[Randomness, Values, dict[str, Any]]


class Stamped(NamedTuple):
    """A batch on its way out of a worker. A named tuple, because torch's memory pinning goes through those."""

    batch: Any
    worker: int
    state: State | None  # None: as it was after this worker's batch before
    lost: list[str]  # attributes that have changed and cannot be kept
    drew: bool  # whether this worker's first batch drew random numbers


class StampingCollate:
    """Calls the loader's collate function and adds the state that its worker is in afterwards."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._last: State | None = None
        self._attributes: Attributes | None = None
        self._generators: dict[str, Any] = {}
        self._roots: dict[str, Any] = {}
        self._at_begin: Randomness | None = None
        self._drew: bool | None = None

    def begin(self, dataset: Any, state: State | None) -> None:
        """Restores ``state`` in the worker, before its first sample."""
        script_generators()  # looks for them, in the worker's own process
        self._roots = {"dataset": dataset, "collate": self._collate}
        self._generators = private_generators(**self._roots)
        self._attributes = Attributes(self._roots, lambda _: OF_STREAMS, shared=False)
        if state is not None:
            set_randomness(state[0])
            self._attributes.give_back(state[1])
            set_generator_states(self._generators, dict(*state[2:]))  # snapshots in storage may be older
        self._at_begin = randomness()

    def __call__(self, samples: Any) -> Stamped:
        batch = self._collate(samples)
        info, now = get_worker_info(), randomness()
        kept, lost = self._attributes.changes() if self._attributes is not None else ({}, [])
        lost += [f"{path} (a generator)" for path in private_generators(**self._roots).keys() - self._generators.keys() if path not in lost]
        private = generator_states(self._generators)
        changed = bool(kept) or self._last is None or bool(self._last[1]) or (now, private) != (self._last[0], self._last[2])
        self._last = (now, kept, private)
        if self._drew is None:
            self._drew = now != self._at_begin
        return Stamped(batch, info.id if info else 0, self._last if changed else None, lost, self._drew)


class RestoringInit:
    """Calls the loader's own worker_init_fn, then puts the worker into the state it was in before the restart."""

    def __init__(self, init: Callable[[int], None] | None, collate: StampingCollate, states: Mapping[int, State]) -> None:
        self._init, self._collate, self._states = init, collate, states

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        info = get_worker_info()
        assert info is not None
        self._collate.begin(info.dataset, self._states.get(worker))


class WorkerStates:
    """The main process's record of what its workers sent.

    Batch ``k`` of an epoch comes from worker ``k % workers``. So a loader can only go on from a multiple of
    ``workers`` without the workers changing their roles, and two rounds of states are kept.

    Persistent workers enter an epoch with the states they had at the end of the one before, after batches too that they had loaded in
    advance and that were thrown away when the next one began.

    ``seeded_from``: the state of the generator that their seed was drawn from, which is all there is of a worker that has made nothing yet;
    None before they are started.
    """

    def __init__(self, workers: int, persistent: bool) -> None:
        self._workers, self.persistent = workers, persistent
        self.lost: set[str] = set()  # attributes that have changed in a worker and cannot be kept
        self.drew = False  # whether the first batch of any worker drew random numbers
        self.revived = False  # whether the workers that will be started next were resting before a restart
        self.seeded_from: bytes | None = None
        self._first = 0
        self._rounds: deque[tuple[int, int, State]] = deque(maxlen=2 * workers)  # batch, worker, state after it
        self._latest: dict[int, State] = {}
        self._arrived: dict[int, State] = {}  # with the last batch that came from each worker, used or not
        self._at_start: dict[int, State] = {}

    def start(self, first: int, states: Mapping[int, State], lost: Iterable[str] = ()) -> None:
        """Begins an iteration with batch ``first`` of the epoch, its workers in ``states`` where those are given."""
        self._arrived = {**self._arrived, **states} if self.persistent else dict(states)
        self._latest, self._at_start = dict(self._arrived), dict(self._arrived)
        self._first = first
        self.lost, self.drew = set(lost), False
        self._rounds.clear()

    def follow(self, iterator: Any) -> None:
        """Records the states that come from the persistent workers of ``iterator``, which is made only once."""
        if not self.persistent:
            return
        get_data, early = type(iterator)._get_data, deque[Any]()
        followed = weakref.ref(iterator)  # which refers to these functions: see `reference`

        def noted() -> Any:
            data = get_data(followed())
            item = _item_of(data)
            if isinstance(item, Stamped) and item.state is not None:
                self._arrived[item.worker] = item.state
            return data

        def settle() -> None:
            there: Any = followed()
            tasks = {index: info[0] for index, info in there._task_info.items() if len(info) == 1 and there._workers_status[info[0]]}
            for data in early:
                _cross_off(tasks, data)
            while tasks:
                early.append(noted())
                _cross_off(tasks, early[-1])

        iterator._get_data = lambda: early.popleft() if early else noted()
        iterator._gemini_settle = settle

    def started(self) -> None:
        """Ends the beginning of an iteration, in which persistent workers hand over what they had loaded in vain."""
        if self.persistent:
            self._latest, self._at_start = dict(self._arrived), dict(self._arrived)

    def resting(self, iterator: Any) -> dict[int, State]:
        """The states of persistent workers between two iterations.

        If the one before was left early, they may still be making batches of it, which the next one would wait for: it is waited for here.
        What has come is kept, so that whoever goes on with ``iterator`` finds it.
        """
        if (settle := getattr(iterator, "_gemini_settle", None)) is not None:
            settle()
        return dict(self._arrived)

    def revive(self, states: Mapping[int, State], seeded_from: bytes | None) -> None:
        """Makes the next iteration start workers in the place of those that were ``resting`` before a restart."""
        self._arrived, self.seeded_from, self.revived = dict(states), seeded_from, True

    def take_revived(self) -> bool:
        """Whether the workers that are being started were resting before a restart."""
        revived, self.revived = self.revived, False
        return revived

    def at_start(self) -> dict[int, State]:
        """The states in which the workers began, as far as their seeds do not say it."""
        return dict(self._at_start)

    def unpack(self, batch: int, item: Any) -> Any:
        """The batch itself; the state that came with it is remembered. ``batch`` counts from the start of the epoch."""
        if not isinstance(item, Stamped):
            return item
        self.lost.update(item.lost)
        self.drew = self.drew or item.drew
        if item.state is not None:
            self._latest[item.worker] = item.state
        self._rounds.append((batch, item.worker, self._latest[item.worker]))
        return item.batch

    def whole_rounds(self, batches: int) -> int:
        """The last batch not after ``batches`` from which the workers can go on."""
        return batches - batches % self._workers

    def before(self, batch: int) -> dict[int, State]:
        """The states in which the workers go on from ``batch``, a multiple of their number."""
        if batch == self._first:
            return self.at_start()
        return {worker: state for index, worker, state in self._rounds if batch - self._workers <= index < batch}

    def after(self, batch: int) -> dict[int, State]:
        """The states of the workers after the last batch before ``batch`` that each has made."""
        states = self.at_start()
        for index, worker, state in self._rounds:
            if index < batch:
                states[worker] = state
        return states


def end_at_once(iterator: Any) -> None:
    """Lets the worker processes of ``iterator`` end at once when it is freed as part of a cycle.

    The collector of cycles closes queues that only the cycle refers to before it asks the iterator to end its workers; without them
    torch waits 5 s for each worker.
    """
    vital = [vars(iterator).get(name) for name in ("_index_queues", "_worker_result_queue", "_workers_done_event", "_workers")]
    weakref.finalize(iterator, vital.clear).atexit = False


def _item_of(data: Any) -> Any:
    """The batch, or the word of its end, in what came from a worker; torchdata's add worker and state."""
    item = data[1]
    return item[0] if isinstance(item, tuple) and not isinstance(item, Stamped) else item


def _cross_off(tasks: dict[int, int], data: Any) -> None:
    """Removes from ``tasks`` (number -> worker) what a worker has answered: all of its own if it has come to the end of its data."""
    tasks.pop(data[0], None)
    if isinstance(item := _item_of(data), _IterableDatasetStopIteration):
        for index in [index for index, worker in tasks.items() if worker == item.worker_id]:
            del tasks[index]
