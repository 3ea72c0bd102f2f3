"""The position in one loader: all that is needed to continue with the batch that would have come next.

It is long because each way to a position (skip, replay, the loader's own state) reads and writes the one iteration that is under way.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from gemini_ft.errors import StateError, UnsupportedStateError
from gemini_ft.launch import notes
from gemini_ft.loaders.between import OF_WORKERS, Between
from gemini_ft.loaders.order import DrawnOrder, digest_of
from gemini_ft.loaders.parts import (
    DataResume,
    LoaderParts,
    Way,
    facts,
    goes_on_at_end,
    is_sized,
    is_stateful,
    is_torchdata,
    of_sampler,
    refuse_gone,
    split,
)
from gemini_ft.loaders.stripes import BATCHES, restriped, why_undivided
from gemini_ft.loaders.workers import RestoringInit, Stamped, StampingCollate, State, WorkerStates, end_at_once
from gemini_ft.state import iterators
from gemini_ft.state.iterators import Resumption
from gemini_ft.state.methods import set_anew
from gemini_ft.state.rng import (
    Randomness,
    generator_states,
    randomness,
    script_generators,
    script_states,
    set_generator_states,
    set_randomness,
    unchanged_randomness,
)

log = logging.getLogger(__name__)
_END = object()
_LOOKED_AT = 8  # indices
# Packages whose threads make no batches: event loops of remote files, loggers, progress bars, torch's for its workers, and this one's.
_BESIDE = frozenset({"asyncio", "gemini_ft", "logging", "multiprocessing", "tensorboard", "torch", "tqdm", "uvloop", "wandb"})


class Bookmark:
    """The position of one loader, and the way in which its next iteration gets there.

    ``method``: as of `gemini_ft.loaders.loader.make_resumable`; so are the others.

    Attributes:
        began_anew: whether the first iteration after a restart began at the first batch, because a whole one had been the step.
        was_empty: whether the first iteration after a restart has ended without a batch.
    """

    def __init__(
        self,
        loader: Any,
        base: Any,
        method: DataResume,
        *,
        ahead: Callable[[], int] | None,
        in_advance: Callable[[], bool] | None = None,
        epoch: Callable[[], int] | None,
        active: Callable[[], bool] | None,
        remade: bool,
        before_next: Callable[[Bookmark], None] | None = None,
        rests: bool = False,
    ) -> None:
        self.owner: object = None  # who has made the loader resumable
        self.starting = False  # the loader is being asked for an iterator that is watched
        self._base, self._ahead, self._epoch, self._active = base, ahead, epoch, active
        self._rests = rests
        self._num_workers: int = getattr(loader, "num_workers", 0)
        self._parts = LoaderParts(loader, base, epoch)
        self._between = Between(self._parts, rests=rests, insists=method == "skip")
        self._way: Way = self._parts.way(method, rests=rests)
        is_own = self._way == "replay" and hasattr(base, "__next__")
        anew = set_anew(base, "__iter__") if is_own else ()
        self._is_iterator = is_own and not anew  # it can be iterated only once, and each epoch takes the batches that follow
        self._made_anew = {f"dataset.{name}" for name in anew if not hasattr(loader, "dataset")}
        self._before_next = before_next
        self._insists = method == "skip"  # the user has declared that changes beside the generators do not matter
        self._remade = remade
        self.lenient = False  # see `gemini_ft.loaders.loader.make_resumable`
        self._takes_in_advance = in_advance or (lambda: ahead is not None and not is_sized(self._loader))
        self._resume: dict[str, Any] | None = None
        self._iterations = 0
        self._together, self._gone_on_before = Resumption(), 0
        self._lost_before: list[str] = []  # what the snapshot says that the data had lost, until an iteration goes on in its middle
        self._asks_in_vain = 0  # that follow from a restart
        self.began_anew = self.was_empty = False
        self.last_left = 0  # the number of the last iteration that another one has followed before its end
        self.is_counted_on = False  # whether the loop has asked how many batches the next iteration leaves out
        # The following describes the iteration that is under way.
        self._running = False
        self._over = False  # it has come to its end, or was left before that, but may be what a loop goes on with
        self._steps_before: int | None = 0  # the loop's count of steps when it began
        self._stepped = False  # there were steps between its beginning and its end
        self._ended = False  # it was not left before its end
        self._is_exhausted = False  # it was asked for a batch that it does not have, while Lightning goes on with longer loaders
        self._position: dict[str, Any] | None = None  # where it is to start; None: at its beginning
        self._facts: dict[str, Any] = {}  # the data that the position refers to
        self._begin: dict[str, Any] = {}  # the moment it was started
        self._first: dict[str, Any] | None = None  # the moment its first batch was asked for
        self._sampler: dict[str, Any] | None = None  # the moment the sampler was first asked
        self._asks = 0  # iterators that the sampler was asked for when it was started
        self._order: Mapping[str, str] = {}  # digests of what its sampler had changed, and cannot be kept, with its first index
        self._changed_later: list[str] = []  # what its sampler had changed otherwise when it came to its end
        self._drawn = DrawnOrder()
        self._loaded_again: list[str] = []  # what loading batches again has changed in the data, and cannot be kept
        self._draws = False  # its batches draw random numbers in this process
        self._drew = False  # its first batch drew random numbers in this process
        self._own_begin: Any = None
        self._taken = 0  # batches that came out of it, skipped ones included; of what is iterated once, in all iterations
        self._taken_before = 0  # those of earlier iterations among them
        self._given_from = 0  # the first one that this process's loop is given
        self.asked_by = 0  # the thread that has asked for the last one
        self._threads: set[threading.Thread] = set()  # there were these before it was started
        self._is_fed = False  # threads of its own make its batches, in advance: what they have drawn by now is left to them
        self._step_at = (0, 0)  # the place at the last step, where steps are told of
        self.held_back = 0  # batches that whoever asks for them has not passed on to the loop
        self._before_last: dict[str, Any] | None = None
        self._own_before_last: Any = None

    @property
    def _loader(self) -> Any:
        return self._parts.loader

    def state_dict(self) -> dict[str, Any]:
        """The position before the first batch that was not used, as plain data."""
        if self._resume is not None:
            return self._resume
        lost_here = self.lost_here if self._active is None and not self._may_lose else {}
        state: dict[str, Any] = {"gemini": 1, "iterations": self._iterations, "named": sorted(self._between.named), "lost_here": lost_here}
        if not self._is_iterator and (self._over or self._rests or not self._running):
            state |= {"left": self._between.state(), "stepped": self._stepped, "ended": self._ended}
        if not self._running or (self._rests and not self._is_iterator):
            return state
        ahead = self._ahead() if self._ahead and not self._is_exhausted else 0
        batches = self._taken - ahead
        lost = sorted(self._workers.lost if self._workers else () if self._num_workers else self._parts.data.changes().lost)
        if lost and not self._num_workers and self._draws and self._way == "skip" and not (self._insists or self.lenient):
            raise self._about_lost(lost)
        replayed = self._is_replayed(lost, batches)
        start = 0 if replayed else self._start_of(batches)
        # Before its first batch a dataset's state may still be that of an epoch which was left early.
        is_fresh = not batches and is_torchdata(self._base) and not self._num_workers
        own = None if self._way != "own" or replayed or is_fresh else self._own_before_last if ahead else self._own_state()
        return state | {
            "batches": batches,
            "before": self._taken_before,
            "start": start,
            "facts": self._facts,
            "begin": self._begin,
            "first": self._first,
            "sampler": self._sampler,
            "asks": self._asks,
            "order": {} if self._may_lose else self._order,
            "drawn": self._drawn.at(start),
            "drawn_ahead": (self._drawn.count, self._drawn.at(self._drawn.count)) if self._num_workers and self._sampler else None,
            "forked": self._between.forked,
            "ahead": ahead,
            "now": self._parts.present(),
            "lost": lost,
            "before_last": self._before_last if ahead else None,
            "workers": self._worker_states(start, batches),
            "own": own,
            "own_begin": self._own_begin if replayed else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next iteration start at the position ``state``; one that was not made here is passed to the loader."""
        if not is_position(state):
            self._base.load_state_dict(self._loader, state)
            return
        if (resize := iterators.resumption.resize) is not None:
            state = restriped(state, self._loader, self._way, resize, in_turn=self.lenient)
            state |= {"start": self._start_of(state["batches"])} if "batches" in state else {}
        under_way = "batches" in state
        self._running = False
        self._between.forget_workers()  # an iteration that came too early has left nothing behind
        self._over = False
        self._iterations = state["iterations"] - under_way
        self._together.to_go_on -= _goes_on(self._resume)
        self._together = iterators.resumption
        self._together.to_go_on += _goes_on(state)
        self._resume, self._step_at = state if under_way else None, (0, 0)
        self._between.named.update(state.get("named", ()))  # snapshots in storage may be older
        self._lost_before = [] if self._may_lose else [*state.get("lost_here", ())]
        if "left" in state:
            self._between.restore(state["left"])
            self._gone_on_before = self._together.gone_on

    def iterate(self, start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The batches of the iterator that ``start`` gives, from the position on.

        ``start`` is called here and not with the first batch: it starts the worker processes and draws their seeds.
        """
        if self._active is not None and not self._active():
            return self._beside(start)
        if self._running and not self._ended:
            self.last_left = self._iterations
        position, self._resume = self._resume, None
        if position is not None and self._begins_anew(position):
            self.began_anew = position["ended"] and self._together.gone_on <= self._gone_on_before
            position, self._iterations = None, self._iterations + 1
        if self._epoch is None:
            self._parts.tell_epoch(self._iterations)
        self._iterations += 1
        self._running, self._over, self._ended, self._is_exhausted = True, False, False, False
        self._steps_before = notes.step
        self._taken_before = position["before"] if position is not None else self._taken if self._is_iterator else 0
        self._given_from = position["batches"] if position is not None else self._taken_before
        if not (self._is_iterator or self._way == "own" or self._insists or self._remade):
            self._between.name_doubtful(but=self._order)
        if position is None:
            return self._from_the_beginning(start)
        if "left" in position:
            log.info("the snapshot was taken after an iteration of the data had ended, at batch %d: it goes on there", position["batches"])
        else:
            self._together.goes_on()
            self._together.gone_on += 1
            self._together.to_go_on -= 1
        self._lost_before = []
        if self._workers:
            self._workers.revived = False
        with unchanged_randomness():
            self._begin, self._first, self._sampler = position["begin"], position["first"], position["sampler"]
            already = self._taken if self._is_iterator else 0  # by an iteration that came too early
            self._taken = already if self._way == "replay" else position["start"]
            batches = self._from_the_position(start, position)
            self._load_again(batches, position["batches"])
            self._look_for_threads()
        self._loaded_again = [] if self._num_workers else self._parts.data.changes().lost
        if not position["ahead"] and not self._is_fed:
            self._put(position["now"], position)
        return self._batches_after(position, batches)

    def _begins_anew(self, position: dict[str, Any]) -> bool:
        """Whether an iteration that was over when the snapshot was taken is followed by another, and is not what the loop goes on with."""
        others_began = self._together.gone_on > self._gone_on_before  # that iteration was over by then
        return "left" in position and (others_began or not (self._together.to_go_on or position.get("stepped", True)))

    @property
    def batches_done(self) -> int:
        """How many batches the next iteration leaves out, because they were used before a failure."""
        self.is_counted_on = True
        then = self._resume
        return 0 if then is None or self.begins_anew else int(then["batches"] - then["before"])

    @property
    def begins_anew(self) -> bool:
        """Whether the next iteration begins at its first batch though a position was loaded, as the iteration was over by then."""
        return self._resume is not None and self._begins_anew(self._resume)

    @property
    def place(self) -> tuple[int, int]:
        """A value that changes with every batch, and whenever an iteration begins."""
        return self._iterations, self._taken

    def count_from(self, iterations: int) -> None:
        """Counts on from so many iterations, of which nothing else is put back: those of a validation, whose order depends on its epoch."""
        self._iterations = iterations

    @property
    def given(self) -> int:
        """How many batches this process's loop has been given by the iteration that is under way."""
        return self._taken - self._given_from - self.held_back

    @property
    def of_step(self) -> int:
        """How many batches of the iteration that is under way have come since the last `step_over`, or since it began or went on."""
        number, taken = self._step_at
        return self._taken - (taken if number == self._iterations else self._given_from)

    @property
    def is_at_end(self) -> bool:
        """Whether the iteration that is under way has no more batches, as far as its length is known."""
        return self._taken == self._facts.get(BATCHES)

    def step_over(self) -> None:
        """Ends a step with the batches so far."""
        self._step_at = self.place

    def why_undivided(self, loader: Any, rank: int, world_size: int) -> str:
        """See `gemini_ft.loaders.stripes.why_undivided`; ``loader``: what the loop iterates."""
        return why_undivided(loader, self._way, rank, world_size, in_turn=self.lenient)  # transformers' Trainer

    @property
    def is_under_way(self) -> bool:
        """Whether an iteration has begun, and has not come to its end or been left."""
        return self._running and not self._over

    def hand_workers_to(self, successor: Bookmark) -> None:
        """Lets another bookmark of the same loader follow the worker processes that live on from what the loader has served before."""
        if self._workers and self._workers.persistent and self._loader._iterator is not None:
            successor.follow(self._workers)

    def follow(self, workers: WorkerStates) -> None:
        """Follows worker processes that are there already."""
        self._between.workers = workers

    def _beside(self, start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The batches of an iteration beside the loop's, by the user's code or for validation; the loop's goes on unharmed."""
        present = getattr(self._loader, "_iterator", None)
        inner = start()
        if present is not None and not self._loader.persistent_workers:  # a loader of torchdata would give the state of the newest
            self._loader._iterator = present
        return (item.batch if isinstance(item, Stamped) else item for item in inner)

    def _from_the_beginning(self, start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        if self._is_iterator and self._begin:  # it goes on where it was, so that all of its batches count
            return self._batches(self._started(start))
        if lost := self._lost_before or self._lost_for_good():  # in a process that begins anew the snapshot says so
            raise UnsupportedStateError(
                f"the training data keeps what cannot be kept with a snapshot: {', '.join(lost[:5])} changed since the first epoch began, "
                "and an epoch that is resumed would not find it. Keep it in small plain attributes (numbers, lists, small tensors), give "
                "the loader state_dict and load_state_dict, or say with data_resume='skip' that batches do not depend on it"
            )
        self._begin, self._first, self._sampler, self._taken = self._parts.moment(), None, None, 0
        self._loaded_again = []
        self._facts = facts(self._loader)
        self._parts.data.mark()
        if self._workers and self._workers.persistent and self._between.forked is None:
            self._between.forked = self._begin["attributes"]
        if self._way == "own" and not self._num_workers and not self._rests:
            self._own_begin = self._own_state()
        return self._batches(self._started(start))

    def _from_the_position(self, start: Callable[[], Iterator[Any]], position: dict[str, Any]) -> Iterator[Any]:
        self._parts.go_back_to(self._begin)
        self._check(position)
        self._facts, self._between.forked = position["facts"], position["forked"]
        self._parts.data.mark()
        with self._between.as_forked(self._way != "own"):  # workers see at once what is written into shared memory
            if self._may_use_late(position):  # what the dataset then loads of its own counts more
                self._parts.put(position["before_last"] or position["now"], OF_WORKERS)
            own, self._own_begin = position["own"], position["own_begin"]
            if (own := self._own_begin if own is None else own) is not None and self._way == "own":
                self._base.load_state_dict(self._loader, copy.deepcopy(own))
            inner = self._started(start, position)
        if self._between.forked is not None:
            self._parts.born.give_back(self._begin["attributes"])
        self._drew = self._way == "own" and self._taken < position["batches"]
        if self._first is not None and (self._drew or self._way == "replay") and not self._is_fed:
            self._parts.go_back_to(self._first)
        return self._batches(inner)

    def _started(self, start: Callable[[], Iterator[Any]], position: dict[str, Any] | None = None) -> Iterator[Any]:
        self._position, self._asks = position, 0
        if self._workers:
            known = position if position is not None and position["start"] == self._taken else None
            self._workers.start(self._taken, known["workers"] if known else {}, position["lost"] if position else ())
        self.starting, self._is_fed, self._threads = True, False, {*threading.enumerate()}
        try:
            with goes_on_at_end(self._loader, is_resumed=position is not None):
                inner = self._between.start(start, new=self._way != "own")
            self._look_for_threads()
            if self._workers:
                self._workers.started()
            return inner
        finally:
            self.starting = False
            if position is not None:
                self._asks = position["asks"]

    def _look_for_threads(self) -> None:
        """Looks for threads that have come since the iteration was started, and may make its batches."""
        self._is_fed |= any(_may_feed(thread) for thread in threading.enumerate() if thread not in self._threads)

    def _batches(self, inner: Iterator[Any]) -> Iterator[Any]:
        return self._until_over(self._watched(inner), self._iterations)

    def _until_over(self, batches: Iterator[Any], number: int) -> Iterator[Any]:
        try:
            yield from batches
            self._ended = number == self._iterations
        finally:  # it is closed as well, when a loop that was left early forgets it
            if not self._over and number == self._iterations and self._active is None:
                self._over, self._stepped = True, notes.step != self._steps_before

    def _watched(self, inner: Iterator[Any]) -> Iterator[Any]:
        while True:
            if self._before_next is not None:
                self._before_next(self)
            # The first batch may come with what a sampler draws for the whole epoch.
            is_second = self._taken == 1 and self._way == "skip" and not self._num_workers
            is_first = self._first is None and self._way != "skip" and not self._num_workers
            before = self._randomness_beside() if is_first or is_second else None
            if is_first:
                self._first = self._parts.moment()
            if self._takes_in_advance():
                if not self._num_workers:  # random numbers matter only where this process makes the batch
                    self._before_last = self._parts.moment()
                if self._way == "own":
                    self._own_before_last = self._own_state()
            try:
                item = self._between.first_of(inner) if is_first and self._way == "replay" else next(inner)
            except StopIteration:
                # For Fabric the epoch is over. Lightning may be cycling through other, longer loaders.
                self._running = self._running and self._epoch is not None
                self._is_exhausted = True
                self._changed_later = [*split(self.lost_here)[1]]
                return
            if is_first and self._first is not None:
                self._drew = before != self._randomness_beside()
            if is_second:
                self._draws = before != self._randomness_beside()
            batch = self._workers.unpack(self._taken, item) if self._workers else item
            if self._workers and self._workers.persistent and self._workers.lost and not (self._insists or self.lenient):
                raise self._about_lost_in_workers()
            self._taken += 1
            self.asked_by = threading.get_ident()
            yield batch

    def _randomness_beside(self) -> Randomness:
        """The states of the process's generators, without those that the loader's own parts hold, which are kept with these."""
        return randomness(but=self._parts.generators.values())

    def _about_lost(self, lost: list[str]) -> UnsupportedStateError:
        return UnsupportedStateError(
            f"the dataset changes {', '.join(lost[:5])} from sample to sample, which cannot be kept, and draws from the process's "
            "generators, so that samples that are loaded again would differ. Keep it in small plain attributes (numbers, lists, small "
            "tensors), load in worker processes (num_workers), or say with data_resume='skip' that batches do not depend on it"
        )

    def _about_lost_in_workers(self) -> UnsupportedStateError:
        assert self._workers is not None
        return UnsupportedStateError(
            f"the dataset changes {', '.join(sorted(self._workers.lost)[:5])} in worker processes that live on from epoch to epoch, and no "
            "snapshot can have it. Give persistent_workers=False, so that each epoch begins without it; keep it in small plain attributes "
            "(numbers, lists, small tensors); or say with data_resume='skip' that batches do not depend on it"
        )

    def _load_again(self, batches: Iterator[Any], used: int) -> None:
        if self._taken < used:
            log.info("loading %d batches again, to go on with the data where it stood", used - self._taken)
        while self._taken < used:
            if next(batches, _END) is _END:
                raise StateError(
                    f"the training data ended after {self._taken} batches, but {used} had been used before the restart; "
                    "give the run the same data, or start it anew (resume='never')"
                )

    def _batches_after(self, position: dict[str, Any], batches: Iterator[Any]) -> Iterator[Any]:
        before_last = position["before_last"]
        for_data, for_sampler = split(position["lost_here"])
        refuse_gone(for_data, self.lost_now(for_data), only_there=bool(position["ahead"]))
        batches = self._drawn_again(batches, for_sampler)
        if before_last is not None:
            set_randomness(before_last["random"])
            self._put(before_last, position)
        for batch in itertools.islice(batches, position["ahead"]):
            self._put(position["now"], position)
            if self._may_use_late(position):  # and it has been used by now
                self._parts.put(position["now"], OF_WORKERS)
            yield batch
        yield from batches
        self.was_empty = self._taken == position["batches"]

    def _drawn_again(self, batches: Iterator[Any], lost: dict[str, str]) -> Iterator[Any]:
        """The same batches; a sampler may change what cannot be kept no earlier than when it is asked for the first of them."""
        for batch in batches:
            refuse_gone(lost, self.lost_now(lost), only_there=True)
            lost = {}
            yield batch

    def _lost_for_good(self) -> list[str]:
        """Paths of those that no later epoch makes again: a sampler that draws an order when it is asked, and keeps it, draws anew."""
        if not self._begin or self._may_lose:
            return []
        return [path for path in self.lost_here if not of_sampler(path) or path in self._changed_later]

    def _note_order(self, known: Mapping[str, str]) -> None:
        self._order, self._changed_later = {**split(self._parts.born.lost())[1], **known}, []

    def _noted(self, indices: Iterator[Any]) -> Iterator[Any]:
        self._drawn.go_on(0, 0)
        for number, index in enumerate(indices):
            if not number:
                self._note_order({})
            self._drawn.add(index)
            yield index

    def _compare_drawn(self, now: int | None, then: int | None, count: int) -> None:
        """Compares the digest of the first indices, which were drawn again, with the one of before the failure."""
        if None in (then, now) or then == now or self._insists:
            return
        why = (
            f"the sampler of the loader of a {type(getattr(self._loader, 'dataset', self._loader)).__name__} draws other indices than "
            f"before the failure where it is asked for the first {count} again: its order changes in the middle of an epoch, by an "
            "attribute that the training sets, or by numbers of the process. Let it change when an epoch begins, draw the order of an "
            "epoch at once, or say with data_resume='skip' that it does not matter"
        )
        if not (self._may_lose or self._between.named):
            raise StateError(why)
        log.warning("%s", why)

    def _go_on_drawing(self, indices: Iterator[Any], ahead: tuple[int, int | None]) -> Iterator[Any]:
        """The indices that follow; those that had been drawn ahead of the batches before the failure are compared as well."""
        count, then = ahead
        for index in indices:
            self._drawn.add(index)
            if self._drawn.count == count:
                self._compare_drawn(self._drawn.at(count), then, count)
            yield index
        if self._drawn.count < count:
            self._compare_drawn(0, then, count)

    def _drawing(self) -> tuple[Any, ...]:
        """The states of all generators that a sampler in this process may draw from."""
        return randomness(), generator_states(self._parts.generators)

    def _put(self, then: dict[str, Any], position: dict[str, Any]) -> None:
        """Puts the loader's parts as they were, unless states of their own count more."""
        if self._way != "own" or (isinstance(self._loader, DataLoader) and not self._may_use_late(position)):
            self._parts.put(then)

    def _may_use_late(self, position: dict[str, Any]) -> bool:
        """Whether parts in this process have states of their own, which count more and may be used as late as by the first batch."""
        is_dataset = isinstance(self._loader, DataLoader)
        return is_dataset and self._way == "own" and bool(position["start"]) and not self._num_workers

    def asked(self, sampler: Any) -> Iterator[Any]:
        """Answers the loader when it asks its sampler for an iterator; samplers that draw when they are asked must draw right here.

        DataLoaders ask twice when they start, and use the second iterator; with persistent workers of an earlier epoch they
        ask once. Those are gone after a restart, so that there is one more question, which is answered like the first.
        """
        self._asks += 1
        if self._asks_in_vain:
            self._asks_in_vain = 0
            return iter(())
        with self._between.as_here():
            if self._position is None or self._asks <= self._position["asks"]:
                indices = self._indices(iter(sampler))
            else:
                with unchanged_randomness():
                    self._parts.go_back_to(self._begin, samplers_only=True)
                    indices = self._indices(iter(sampler))
        if self._workers and self._workers.seeded_from is None:
            self._workers.seeded_from = self._between.seed_source()
        return self._between.drawn_here(indices)

    def _indices(self, inner: Iterator[Any]) -> Iterator[Any]:
        """The sampler's indices from the position on; remembers from which moment they can be drawn again."""
        position, self._position = self._position, None
        if position is None or position["sampler"] is None:
            self._sampler = self._parts.moment()
            yield from self._noted(inner)
            return
        first, present = self._taken, self._parts.present()
        # The first batch is made, in this process, with what the order has left of the generators.
        with unchanged_randomness() if first or self._num_workers else nullcontext():
            self._parts.go_back_to(position["sampler"], samplers_only=bool(first or self._workers))
            before = script_states()
            drawn = [*itertools.islice(inner, 1)]
            order = {} if self._may_lose else position.get("order", {})  # snapshots in storage may be older
            refuse_gone(order, self.lost_now(order))
            self._note_order(order)
            # One that draws each index when it is asked for it, in the process that trains, goes on with the generators as they are.
            is_anew = first > 1 and not self._num_workers
            while len(drawn) < first:
                before_next = self._drawing() if is_anew and len(drawn) <= _LOOKED_AT else None
                if (index := next(inner, _END)) is _END:
                    break
                is_anew = is_anew and (before_next is None or before_next != self._drawing())
                drawn.append(index)
            now, then = digest_of(drawn[:first]), position.get("drawn")
            if not is_anew:
                self._compare_drawn(now if len(drawn) >= first else 0, then, first)
            self._drawn.go_on(first, now if then is None else then)
            used = {name: state for name, state in script_states().items() if state != before.get(name)}
        if first and not self._num_workers:
            self._parts.put(present)
        else:  # indices are drawn ahead of the batches: the sampler goes on with the script's generators from here
            set_generator_states(script_generators(), used)
        # With nothing to skip, the first index belongs to that moment.
        yield from self._go_on_drawing(itertools.chain([] if first else drawn, inner), position.get("drawn_ahead") or (0, None))

    def for_workers(self) -> dict[str, Any]:
        """The loader's collate_fn and worker_init_fn, extended by what keeps the workers' states."""
        if self._workers is None:
            return {}
        collate = StampingCollate(self._loader.collate_fn)
        changes: dict[str, Any] = {
            "collate_fn": collate,
            "worker_init_fn": RestoringInit(self._loader.worker_init_fn, collate, self._workers.at_start()),
        }
        if self._workers.take_revived():
            self._asks_in_vain = 1  # the new iterator's first one, which it never uses; the workers' own was there already
            changes["generator"] = torch.Generator()
            set_generator_states({"": changes["generator"]}, {"": self._workers.seeded_from})
        else:  # a sampler may draw before the seed is drawn
            self._workers.seeded_from = None if self.watches_indices else self._between.seed_source()
        return changes

    def follow_workers(self, iterator: Any) -> None:
        """Follows the worker processes that were started for ``iterator``."""
        end_at_once(iterator)
        if self._workers:
            self._workers.follow(iterator)

    @property
    def _workers(self) -> WorkerStates | None:
        return self._between.workers

    @property
    def way(self) -> Way:
        """The way in which the next iteration gets to the position; see `gemini_ft.loaders.loader`."""
        return self._way

    @property
    def own_objects(self) -> list[Any]:
        """The objects of data in this process that has a state of its own: after a restart it may use that as late as by the next batch."""
        return self._parts.born.objects(OF_WORKERS) if self._way == "own" and not self._num_workers else []

    def changed(self) -> tuple[list[str], list[str]]:
        """Paths of attributes of the data that have changed since the first epoch began: those that are kept, and the others."""
        lost = [*self.lost_here, *sorted(self._workers.lost if self._workers else ())]
        return [*self._parts.born.changes().each()], lost

    @property
    def _may_lose(self) -> bool:
        """Whether batches do without attributes of the data that cannot be kept, or are not to be refused for them."""
        return self._way == "own" or self._insists or self._remade or self.lenient or self._rests

    @property
    def lost_here(self) -> dict[str, str]:
        """Digests of attributes of the data that have changed in this process since the first epoch began, and cannot be kept, by path.

        Without an order that the sampler, or a loader that is its own iterator, has made for this epoch, which is made again.
        """
        lost = self._parts.born.lost()
        return {path: now for path, now in lost.items() if self._order.get(path) != now and path not in self._made_anew}

    def lost_now(self, then: Mapping[str, str]) -> dict[str, str]:
        """The digests of all that have changed, and of those among ``then`` that are as they were, whether they seem to have or not.

        Another list may lie where the one before was, so that it seems to be the same. What loading batches again has changed is as it was
        even where it is not equal: it may have times in it, or what a validation of the same data has added.
        """
        if not then:
            return {}
        lost = self._parts.born.lost()
        again = {path: then[path] for path in self._loaded_again if path in then and path in lost}
        return lost | again | {path: now for path, now in self._parts.born.digests(then).items() if now == then[path]}

    @property
    def watches_indices(self) -> bool:
        """Whether the sampler is asked through `indices`; a loader that restores its own position wants the sampler itself."""
        return self.starting and self._way != "own"

    @property
    def own_position(self) -> Any:
        """The state that the loader itself gives, for files that are read without gemini-ft."""
        return self._own_state() if is_stateful(self._base) else None

    def _check(self, position: dict[str, Any]) -> None:
        """Refuses a position in other data."""
        then, now = position["facts"], facts(self._loader)
        if differing := [f"{name} was {then[name]} and is {now[name]}" for name in then if then[name] != now[name]]:
            raise StateError(
                f"the position in the training data, after {position['batches']} batches, is of another loader: {'; '.join(differing)}. "
                "Give the run the data that it had (what makes it may depend on attributes of module and datamodule, and on "
                "current_epoch), or start anew (resume='never')"
            )

    def _own_state(self) -> Any:
        return copy.deepcopy(self._base.state_dict(self._loader))

    def _is_replayed(self, lost: list[str], batches: int) -> bool:
        """Whether the way to the position leads through all batches of the epoch."""
        if self._way == "own":
            # Of persistent workers torchdata knows where they ended the epoch before, until each has made a batch of this one.
            if self._workers and self._workers.persistent and batches < self._num_workers:
                return True
            # The random numbers that an iteration draws before its first batch (for an order, say) cannot be told from those that
            # the batch itself draws. Only torchdata's samplers have generators of their own.
            keeps_order = is_torchdata(self._base) and not isinstance(self._loader.dataset, IterableDataset)
            return not keeps_order and (self._workers.drew if self._workers else self._drew)
        return self._way == "replay" or (bool(lost) and not self._insists)

    def _worker_states(self, start: int, batches: int) -> dict[int, State]:
        if self._workers is None:
            return {}
        if self._way == "own" and start:
            return self._workers.after(batches)
        return self._workers.before(start) if start or self._workers.persistent else {}

    def _start_of(self, batches: int) -> int:
        """The batch that an iteration starts with so as to reach position ``batches``; those between are loaded."""
        if self._way == "replay":
            return 0
        return self._workers.whole_rounds(batches) if self._workers and self._way == "skip" else batches


def _goes_on(position: dict[str, Any] | None) -> bool:
    """Whether an iteration is to go on in its middle."""
    return position is not None and "batches" in position and "left" not in position


def _may_feed(thread: threading.Thread) -> bool:
    """Whether a thread may make batches, by the package of what it runs."""
    work = getattr(thread, "_target", None) or type(thread).run
    return str(getattr(work, "__module__", "")).partition(".")[0] not in _BESIDE


def is_position(state: Any) -> bool:
    """Whether ``state`` comes from a loader that was made resumable here."""
    return isinstance(state, dict) and "gemini" in state
