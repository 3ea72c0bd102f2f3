"""Makes DataLoaders continue, after a restart, with the batch that would have come next, bit for bit.

Lightning starts a resumed epoch at its first batch again. Three ways lead further, and each loader gets one of them:

skip    the sampler is advanced and no sample is loaded; the generators are put where they were, those of the worker
        processes included, and so are small plain attributes of the dataset. For map-style datasets.
replay  the batches of the epoch are loaded again and dropped. For iterable datasets, loaders with an iteration of
        their own, and map-style datasets that hold private generators in worker processes, or have been seen to change
        what cannot be kept.
own     the loader is given the state that it gave itself. For loaders with ``state_dict`` and ``load_state_dict``, and for
        torchdata's StatefulDataLoader if its dataset has them.

Whatever happens on the way to the next batch leaves the random state of this process as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from gemini_ft.loaders.bookmark import Bookmark
from gemini_ft.loaders.parts import DataResume


def make_resumable(
    loader: Any,  # DataLoader, or any iterable of batches
    method: DataResume = "auto",
    *,
    ahead: Callable[[], int] | None = None,
    in_advance: Callable[[], bool] | None = None,
    epoch: Callable[[], int] | None = None,
    active: Callable[[], bool] | None = None,
    remade: bool = False,  # whether a hook that is called again makes anew what the epochs before have left behind in the data
    lenient: bool = False,  # whether the loader is not refused for what cannot be kept: the state says it, under "lost"
    before_next: Callable[[Bookmark], None] | None = None,  # called whenever the loop asks for its next batch
    owner: object = None,
    rests: bool = False,  # whether its iterations are over whenever its state is asked for, as those of validations are
) -> Any:
    """Gives ``loader`` the methods ``state_dict`` and ``load_state_dict``, and an iteration that heeds them.

    A DataLoader stays the same object: its class is exchanged for a subclass of it, so that all that Lightning and
    users ask of a DataLoader still holds. Any other iterable is wrapped. A state of its own that the loader has already
    becomes part of the position.

    Args:
        method: "skip" or "replay" where both are possible; "auto" takes "skip" where it is known to be exact. "skip" also says
            that batches do not depend on attributes that change and cannot be kept, such as caches.
        ahead: how many batches were taken but not yet used. Lightning takes one in advance if the length is unknown.
        in_advance: whether batches are taken in advance now. None: they are if ``ahead`` is given and the length is unknown. Of several
            loaders that Lightning iterates together, one of unknown length is enough.
        epoch: the epoch, for samplers that do not tell theirs. None: the number of iterations before is the epoch,
            and the samplers are told (Fabric, which would start at 0 again after a restart).
        active: whether an iteration that starts now is to be watched; the same loader may also serve validation.
        owner: whoever asks; a loader that it has made resumable before stays as it is, with all that is known of the epochs before.
    """
    former = bookmark_of(loader)
    if former is not None and owner is not None and former.owner is owner:
        return loader
    if isinstance(loader, ResumableIterable):
        loader = loader.iterable
    base = _plain_class(loader)
    bookmark = Bookmark(
        loader,
        base,
        method,
        ahead=ahead,
        in_advance=in_advance,
        epoch=epoch,
        active=active,
        remade=remade,
        before_next=before_next,
        rests=rests,
    )
    bookmark.lenient, bookmark.owner = lenient, owner
    if former is not None:
        former.hand_workers_to(bookmark)
    if not isinstance(loader, DataLoader):
        return ResumableIterable(loader, bookmark)
    loader.__class__ = _resumable_class(base)
    loader._gemini = bookmark
    return loader


def bookmark_of(loader: Any) -> Bookmark | None:
    """The bookmark of a loader that was made resumable."""
    return getattr(loader, "_gemini", None)


class ResumableIterable:
    """An iterable of batches that is not a DataLoader; it gets back to a position by replay."""

    def __init__(self, iterable: Iterable[Any], bookmark: Bookmark) -> None:
        self.iterable = iterable
        self.state_dict = bookmark.state_dict
        self.load_state_dict = bookmark.load_state_dict
        self._gemini = bookmark

    def __iter__(self) -> Iterator[Any]:
        return _Batches(self._gemini.iterate(lambda: iter(self.iterable)), self)

    @property
    def batches_done(self) -> int:
        """How many batches the next iteration leaves out, because they were used before a failure."""
        return self._gemini.batches_done

    def __len__(self) -> int:
        return len(self.iterable)  # type: ignore[arg-type]  # the TypeError of an iterable without a length is right

    def __getattr__(self, name: str) -> Any:
        return getattr(self.iterable, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return itself, (self.iterable,)  # copied or pickled it is the user's own


class _Batches:
    """An iteration under way, which keeps its loader alive. One that is copied or pickled, with Lightning's loops, has come to its end."""

    def __init__(self, batches: Iterator[Any], loader: Any) -> None:
        self._batches, self._loader = batches, loader

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def __reduce__(self) -> tuple[Any, ...]:
        return iter, ((),)


class _Sampler:
    """A loader's sampler as its iterators see it."""

    def __init__(self, inner: Any, bookmark: Bookmark) -> None:
        self._inner, self._gemini = inner, bookmark

    def __iter__(self) -> Iterator[Any]:
        return self._gemini.asked(self._inner)

    def __len__(self) -> int:
        return len(self._inner)


@functools.cache
def _resumable_class(base: Any) -> Any:
    # A mixin beside `base` would be neater, but then `loader.__class__ = ...` fails: "object layout differs".
    class Resumable(base):  # type: ignore[misc]
        _gemini: Bookmark | None = None

        def __iter__(self) -> Iterator[Any]:
            start = super().__iter__
            return _Batches(self._gemini.iterate(start), self) if self._gemini else start()

        @property
        def _index_sampler(self) -> Any:
            sampler = super()._index_sampler
            return _Sampler(sampler, self._gemini) if self._gemini and self._gemini.watches_indices else sampler

        def _get_iterator(self) -> Any:
            if self._gemini is None or not self._gemini.starting:
                return super()._get_iterator()
            changes = self._gemini.for_workers()
            saved = {name: getattr(self, name) for name in changes}
            self.__dict__.update(changes)
            try:
                iterator = super()._get_iterator()
                self._gemini.follow_workers(iterator)
                return iterator
            finally:
                self.__dict__.update(saved)

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Pickled (with its Trainer, after a fit) it is the loader that the user made."""
            state = {name: value for name, value in vars(self).items() if name != "_gemini"}
            return _empty, (base,), state

        @property
        def batches_done(self) -> int:
            return self._gemini.batches_done if self._gemini else 0

        def state_dict(self) -> dict[str, Any]:
            return self._gemini.state_dict() if self._gemini else {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self._gemini:
                self._gemini.load_state_dict(state)

    Resumable.__name__ = Resumable.__qualname__ = f"Resumable{base.__name__}"
    return Resumable


def itself(iterable: Any) -> Any:
    """The loader in whose place a wrapper is copied or pickled."""
    return iterable


def _empty(kind: Any) -> Any:
    return kind.__new__(kind)


def _plain_class(loader: Any) -> Any:
    """The class the loader had before it was made resumable."""
    kind = type(loader)
    return kind.__base__ if "_gemini" in vars(kind) else kind
