"""Loaders that fetch batches before they give them out, as accelerate's do around a DataLoader of their own, ``base_dataloader``.

When a snapshot is taken, batches of later steps have been fetched already. So the position is noted before each batch is fetched, and so
are the random numbers with which it is made.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from gemini_ft.errors import ConfigError
from gemini_ft.loaders.bookmark import Bookmark
from gemini_ft.loaders.loader import bookmark_of, itself, make_resumable
from gemini_ft.loaders.parts import DataResume, is_stateful
from gemini_ft.state.rng import randomness, set_randomness

_log = logging.getLogger("gemini_ft")


class FetchedAhead:
    """The positions before the batches of an epoch, by their numbers in it.

    Args:
        loader: iterates a DataLoader, or is one.
        every: how many batches there are from one that may be the first after a snapshot to the next.
        only_first: whether only the first batch of an epoch can be the first one after a snapshot.
        method: as of `gemini_ft.loaders.loader.make_resumable`; so is ``lenient``.
    """

    def __init__(self, loader: Any, every: int = 1, only_first: bool = False, method: DataResume = "auto", lenient: bool = False) -> None:
        self._every, self._only_first, self._method, self._lenient = every, only_first, method, lenient
        self._stay = every if only_first else 0  # accelerate may fill up the last batches with the first ones
        self._positions: dict[int, dict[str, Any]] = {}
        self._random: dict[int, Any] = {}  # the state of the process's generators before each batch
        self._then: dict[int, Any] = {}  # as `_random`, of batches that had been fetched when the snapshot was taken, and are not yet again
        self._has_warned = False
        self._present: Any = None  # the state of the generators for all else, while such a batch is fetched
        self.follow(loader)

    def follow(self, loader: Any) -> None:
        """Follows a loader, in place of the one before."""
        base = base_of(loader)
        sampler = _seedable_sampler(base)
        if sampler is not None and sampler.generator is None:  # else the first iteration makes it
            sampler.generator = torch.Generator(device=torch.get_default_device())
        if base is not loader and not is_stateful(type(base)):
            loader._update_state_dict = _nothing  # else accelerate asks the resumable loader for its state with each batch
        make_resumable(base, self._method, before_next=self._before, epoch=no_epoch, owner=self, lenient=self._lenient)

    def before(self, number: int) -> dict[str, Any] | None:
        """The position before a batch, with the random numbers of it and of later ones that have been fetched; None: it has not been."""
        position = self._positions.get(0 if self._only_first else number)
        if position is None:
            return None
        return {"position": position, "random": {at: state for at, state in self._random.items() if at >= number or at < self._stay}}

    def go_to(self, loader: Any, found: Mapping[str, Any]) -> None:
        """Lets the next iteration of a followed loader begin at a result of `before`."""
        bookmark = bookmark_of(base_of(loader))
        assert bookmark is not None
        bookmark.load_state_dict(found["position"])
        self._then = dict(found["random"])

    def settle(self) -> None:
        """Puts the process's generators back, once a batch has come again that had been fetched before the snapshot was taken."""
        if self._present is not None:
            set_randomness(self._present)
            self._present = None

    def _name(self, lost: Collection[str] | None) -> None:
        """Says once what changes and cannot be kept, where that is no reason to refuse the loader."""
        if lost and self._lenient and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the training data keeps what no snapshot can have (%s changes): after a failure its batches may be others than without "
                "one. Keep it in small plain attributes (numbers, lists, small tensors), or give the loader a state of its own",
                ", ".join([*lost][:5]),
            )

    def forget(self) -> None:
        """Lets the next iteration begin with random numbers of its own."""
        self._then = {}

    def _before(self, bookmark: Bookmark) -> None:
        _, number = bookmark.place
        self.settle()
        if number in self._then:
            self._present = randomness()
            set_randomness(self._then.pop(number))
        if number == 0:
            self._positions.clear()
            self._random.clear()
        if number == 0 or not (self._only_first or number % self._every):
            self._positions[number] = bookmark.state_dict()
            self._name(self._positions[number].get("lost"))
        self._random[number] = randomness()
        for old in [at for at in self._random if self._stay <= at < number - 2 * self._every]:
            del self._random[old]
            if not self._only_first:
                self._positions.pop(old, None)


class ResumableAdapter:
    """A loader that fetches one batch ahead, with a state for plain loops (`gemini_ft.loaders.resumable`)."""

    def __init__(self, loader: Any, method: DataResume) -> None:
        if type(loader).__name__ == "DataLoaderDispatcher":
            raise ConfigError(
                "this loader of accelerate lets rank 0 fetch the batches of all ranks, and cannot be resumed; give "
                "DataLoaderConfiguration(dispatch_batches=False), with a dataset that is divided among the ranks, or skip what is done by "
                "accelerate.skip_first_batches"
            )
        if getattr(loader, "use_stateful_dataloader", False):
            raise ConfigError(
                "this loader of accelerate keeps a position of its own (use_stateful_dataloader), beside which batches are not made as "
                "they were; leave that option out, as gemini_ft.resumable keeps the position"
            )
        self._loader, self._ahead = loader, FetchedAhead(loader, method=method)
        self._given: int | None = None  # batches of the last iteration that were given out; None: it came to its end, or there was none
        self._was_left = False  # that iteration was left before its end
        self._found: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The position before the first batch that was not given out."""
        if self._found is not None:
            return self._found
        ahead = self._ahead.before(self._given) if self._given is not None else None
        if ahead is None:
            ahead = {"position": self._gemini.state_dict(), "random": {}}
        elif self._was_left:
            present = self._gemini.state_dict()
            ahead["position"] = ahead["position"] | {name: present[name] for name in ("left", "stepped", "ended") if name in present}
        return {"given": self._given, "epoch": getattr(self._loader, "iteration", None), **ahead}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next iteration begin at a position."""
        self._found = state
        self._ahead.go_to(self._loader, state)
        if state["epoch"] is not None:
            self._loader.iteration = state["epoch"]

    def __iter__(self) -> Iterator[Any]:
        found, self._found = self._found, None
        if found is not None and self._gemini.begins_anew:
            found = None
            self._ahead.forget()
        begins = self._given = found["given"] or 0 if found is not None else 0
        self._was_left, self._gemini.held_back = False, 1
        try:
            for batch in self._loader:
                self._ahead.settle()
                self._given += 1
                self._gemini.held_back = 1 if self._gemini.is_under_way else 0
                yield batch
            self._ahead.settle()
            if found is not None and begins == self._given and begins and self._loader.iteration == found["epoch"]:
                self._loader.iteration += 1  # accelerate counts no epoch without a batch
            self._given = None
        finally:
            self._was_left = self._given is not None

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_loader", "_ahead", "_given", "_was_left", "_found"):
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return itself, (self._loader,)  # copied or pickled it is accelerate's own


def is_adapter(loader: Any) -> bool:
    """Whether a loader iterates a DataLoader of its own, a batch ahead."""
    return isinstance(getattr(loader, "base_dataloader", None), DataLoader)


def no_epoch() -> Any:
    """Returns nothing: samplers hear their epoch from the loop, before and after a failure."""
    return None


def base_of(loader: Any) -> Any:
    """The loader that one iterates, or itself."""
    return getattr(loader, "base_dataloader", loader)


def _nothing() -> None:
    """Does nothing, in place of what accelerate would."""


def _seedable_sampler(base: Any) -> Any:
    """The sampler of accelerate that seeds a generator of its own anew in each epoch."""
    sampler = base.batch_sampler if isinstance(base, DataLoader) else None
    while sampler is not None and type(sampler).__name__ != "SeedableRandomSampler":
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return sampler
