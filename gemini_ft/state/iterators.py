"""Loaders that a plain loop takes its batches from, while no snapshot has their positions."""

from __future__ import annotations

import gc
import inspect
import itertools
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as torch_loaders

from gemini_ft.errors import StateError
from gemini_ft.state.left_out import instances
from gemini_ft.state.loop_turns import turns_at
from gemini_ft.state.script import script_frames, variables_of
from gemini_ft.state.worlds import Resize

_log = logging.getLogger("gemini_ft")
_COUNTERS = (type(iter(range(0))), itertools.count)


@dataclass(kw_only=True)
class Resumption:
    """The iterations of all loaders that one Checkpointer has resumed.

    ``random``: torch's generator of the process as it was put back, until the first step, or until the first iteration goes on.
    """

    gone_on: int = 0  # how many have gone on where they stood
    to_go_on: int = 0  # how many have a position to go on at, and have not begun
    resize: Resize | None = None  # where the snapshot is of another number of ranks, these numbers
    random: torch.Tensor | None = None

    def note_resume(self) -> None:
        """Records that all has been put back, the process's generators too."""
        self.random = torch.get_rng_state()

    def goes_on(self) -> None:
        """Names, where an iteration goes on in its middle, a seed that the loop has set again, as it does when an epoch begins.

        Only the seed that was in force, and of which numbers had been drawn: one that differs may be that of the next step.
        """
        then, self.random = self.random, None
        if then is None or (dist.is_initialized() and dist.get_rank()):
            return
        now, seeded = torch.get_rng_state(), torch.Generator().manual_seed(torch.initial_seed()).get_state()
        if torch.equal(now, seeded) and not torch.equal(now, then) and _seed_of(then) == torch.initial_seed():
            _log.warning(
                "this loop has set the seed %d again between its resume and the batch with which an epoch goes on in its middle: if it "
                "does so when an epoch begins, what it draws from here on (dropout) is other than without a failure. Set it where an epoch "
                "begins at its first batch: in a plain loop, `if loader.batches_done == 0:`",
                torch.initial_seed(),
            )


resumption = Resumption()  # of the Checkpointer of this process that has resumed last


def is_plain_loader(value: Any) -> bool:
    """Whether a value is a DataLoader that is not resumable (`gemini_ft.loaders`)."""
    return isinstance(value, DataLoader) and getattr(value, "_gemini", None) is None


def unkept(state: Iterable[Any], *, generators: bool = False) -> list[str]:
    """The datasets, by their types, of DataLoaders that are being iterated and are not in ``state``.

    Args:
        state: what is kept.
        generators: also name those with a generator of their own: what they draw is no concern of the process's generators, and a loop that
            makes them sees to it.
    """
    known = {id(dataset) for value in state if (dataset := _attribute(value, "dataset")) is not None}
    iterators = instances(torch_loaders._SingleProcessDataLoaderIter, torch_loaders._MultiProcessingDataLoaderIter)
    strangers = [each for each in iterators if id(each._dataset) not in known and (generators or not _has_generator(each))]
    return sorted({type(each._dataset).__qualname__ for each in strangers})


def check_epochs(state: Iterable[Any], *, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compares the epoch that a resumed loop counts, at its first step, with the one in which its loaders have gone on.

    Args:
        state: what the loop has given as ``state=``, its loaders among it.
        then: the scalars of the snapshot.
        now: those of the first step after it.

    Raises StateError: the loop has gone through an epoch again that was over.
    """
    marks = [*_marks(state).values()]
    epochs = [name for name in ("epoch", "current_epoch") if name in then]
    if any(mark.began_anew for mark in marks) and (same := [name for name in epochs if name in now and now[name] == then[name]]):
        raise StateError(
            f"the snapshot was taken after a whole epoch, by step({same[0]}={then[same[0]]!r}), and the resumed loop has gone through that "
            f"epoch again; where step() comes once after each epoch, give it the next one's number, step({same[0]}=epoch + 1), and where "
            "the loop has made a list of the epoch's batches, which no snapshot has, iterate the loader itself"
        )
    if any(mark.was_empty for mark in marks) and not epochs:
        _log.warning(
            "the snapshot was taken at the last batch of an epoch, so that the first iteration of the data had no batches, for what a loop "
            "does after an epoch. A loop that counts its epochs from the number of steps has an epoch less now: give step(epoch=epoch), "
            "and begin with range(checkpointer.scalars.get('epoch', 0), epochs)"
        )


class BatchSource:
    """Where the steps of a loop take their batches from: as long as they do, from the loaders in its ``state``.

    ``state``: what the loop has given, as `resume` has left it.
    """

    def __init__(self, state: Iterable[Any] = ()) -> None:
        self._begun = {key: mark.place[0] for key, mark in _marks(state).items()}
        self._given: dict[int, tuple[int, list[int]]] = {}  # the iteration under way, and its batches by each of its first steps
        self._left: dict[int, int] = {}  # the last iteration whose first step left batches
        self._places: list[Any] = []
        self._was_fed = False  # a step was made inside an iteration
        self._strange = 0  # steps in a row

    def is_another(self, state: Iterable[Any]) -> bool:
        """Whether a loop's first step is in an iteration from before `resume`, or the loop has left one since: what goes on is the first.

        A loop may use several iterations up before its first step: it accumulates, or cycles through a short loader.
        """
        marks = [(self._begun.get(key, 0), mark) for key, mark in _marks(state).items()]
        return any(mark.is_under_way and (mark.place[0] <= begun or mark.last_left > begun) for begun, mark in marks)

    def is_ahead(self, state: Iterable[Any]) -> bool:
        """Whether, as of this step, the loop has batches that it goes on with; to be asked at every step, before `has_changed`.

        The first step of an iteration shows it: one that takes more batches than the next ones has left some for these. Two of these tell
        how many a step takes, as one alone may have taken what was left of an epoch. Where the first batches were skipped, or looked at,
        it is the same, so that only two iterations in a row that begin like this are believed. What another thread has asked for is ahead.
        """
        marks = _marks(state)
        here = threading.get_ident()
        if any(mark.is_under_way and mark.given and mark.asked_by != here for mark in marks.values()):
            return True
        is_fed = [mark.place for mark in marks.values()] != self._places
        found = False
        for key, mark in marks.items():
            number, given = self._given.get(key, (0, []))
            given = [*(given if number == mark.place[0] else ()), mark.given]
            self._given[key] = mark.place[0], given[:3]
            match given:
                case [first, second]:
                    found |= 0 < first == second and not is_fed
                case [first, second, third] if first > second - first == third - second > 0:
                    found |= self._left.get(key) == number - 1
                    self._left[key] = number
        return found

    def has_changed(self, state: Iterable[Any]) -> bool:
        """Whether, as of this step, the loop goes on without the loaders that it began with; to be asked at every step.

        One step after the end of an epoch belongs to it: gradients that were left, an evaluation.
        """
        marks = [*_marks(state).values()]
        before, self._places = self._places, [mark.place for mark in marks]
        is_inside = any(mark.is_under_way for mark in marks)
        self._was_fed = self._was_fed or is_inside
        self._strange = self._strange + 1 if self._was_fed and not is_inside and self._places == before else 0
        return self._strange == 2


def is_kept(state: Iterable[Any]) -> bool:
    """Whether the steps of a loop are made in turns of an inner one that read what an outer loop has taken from a loader in ``state``."""
    loaders = _marks(state)
    for frame in script_frames() if loaders else ():
        variables = variables_of(frame) if len(turns := turns_at(frame) or ()) > 1 else {}
        for outer, inner in itertools.combinations(turns, 2):
            if outer.target & inner.uses and any(id(variables.get(name)) in loaders for name in outer.iterated):
                return True
    return False


def wrappers(state: Iterable[Any]) -> set[str]:
    """Names what the loop has put around iterations of loaders in ``state``, and no snapshot has: "cycle", a "chain" of passes through one
    loader, and what counts ("enumerate", "islice", a "zip" with a range) and knows nothing of the batches that a resume leaves out.
    """
    found = set[str]()
    if not (loaders := _marks(state)):
        return found
    for wrapper in gc.get_objects():
        if type(wrapper) not in (enumerate, itertools.chain, itertools.cycle, itertools.islice, zip):
            continue
        inner = gc.get_referents(wrapper)
        if type(wrapper) is itertools.chain:
            chained = [id(each) for group in gc.get_referents(*inner) if type(group) in (list, tuple) for each in group]
            found |= {"chain"} if any(chained.count(each) > 1 for each in loaders) else set()
            continue
        if type(wrapper) is zip:
            inner = [each for group in inner if isinstance(group, tuple) for each in group]
            if not any(isinstance(each, _COUNTERS) for each in inner):
                continue
        marks = [loaders[each] for item in inner for each in _sources(item) if each in loaders]
        if any(type(wrapper) is itertools.cycle or not mark.is_counted_on for mark in marks):
            found.add(type(wrapper).__name__)
    return found


def _sources(iterator: Any) -> Iterator[int]:
    """The ids of what an iterator takes its items from, as far as that is a loader, a progress bar's and Fabric's too."""
    frame = iterator.gi_frame if isinstance(iterator, GeneratorType) else None
    for item in (iterator, *(variables_of(frame).values() if frame is not None else ())):
        yield from (id(inspect.getattr_static(item, name, None)) for name in ("_loader", "_dataloader", "iterable"))


def _marks(state: Iterable[Any]) -> dict[int, Any]:
    """The bookmarks of the loaders in ``state``, by the ids of these."""
    return {id(value): mark for value in state if (mark := _attribute(value, "_gemini")) is not None}


def _seed_of(state: torch.Tensor) -> int:
    """The seed that a state of torch's generator comes from."""
    generator = torch.Generator()
    generator.set_state(state)
    return generator.initial_seed()


def _attribute(value: Any, name: str) -> Any:
    """An attribute of an object that may hand on what it is asked for, and raise anything where that is not there; None then."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _has_generator(iterator: Any) -> bool:
    """Whether a loader draws its order, and the seed that each iteration has, from generators of its own."""
    if any(loader.generator is None for loader in instances(DataLoader) if loader.dataset is iterator._dataset):
        return False
    indices = iterator._index_sampler
    while (inner := getattr(indices, "batch_sampler", None) or getattr(indices, "sampler", None)) is not None:
        indices = inner  # a library's shard of a batch sampler has one inside
    return getattr(indices, "generator", None) is not None
