"""A small training loop for tests of loaders: stopped and resumed in a new process, it must see the same batches as undisturbed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from gemini_ft.launch import notes
from gemini_ft.loaders.loader import make_resumable
from gemini_ft.state import codec
from gemini_ft.state.rng import randomness, set_randomness

SAMPLES, BATCH, EPOCHS = 23, 4, 3


class Noisy(Dataset[torch.Tensor]):
    """Each sample is augmented from all three global generators, as users do."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


class Stream(IterableDataset[torch.Tensor]):
    """An iterable dataset without a length, split over the workers and augmented."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        for index in range(info.id if info else 0, SAMPLES, info.num_workers if info else 1):
            yield torch.tensor([float(index), random.random()], dtype=torch.float64)


class OwnEpochs(Sampler[int]):
    """Counts its epochs by itself, as samplers do that are never told."""

    def __init__(self) -> None:
        self.rounds = 0

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(5 + self.rounds)
        self.rounds += 1
        yield from torch.randperm(SAMPLES, generator=generator).tolist()

    def __len__(self) -> int:
        return SAMPLES


class Job:
    """Trains on a loader: after each batch it draws from the generators, as dropout does.

    Args:
        make: makes the loader.
        resumable: whether it is made resumable, with ``options``.
        seed: of this process.
        in_advance: whether one batch is taken before it is used, as Lightning does where the length is unknown.
        limit: batches of an epoch, if they are fewer than the loader has.
        meanwhile: what the loop does with the loader after a batch (epoch, number).
    """

    def __init__(
        self,
        make: Callable[[], Any],
        resumable: bool,
        seed: int = 1,
        in_advance: bool = False,
        limit: int | None = None,
        meanwhile: Callable[[Any, tuple[int, int]], None] | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.seen: list[str] = []
        self.loader = make()
        self._meanwhile = meanwhile
        self._in_advance, self._limit, self._ready, self._epoch = in_advance, limit, list[Any](), [0]
        ready, epoch = self._ready, self._epoch  # and not this object, which refers to the loader: its workers are to end with it
        if resumable:
            ahead = (lambda: len(ready)) if in_advance else None
            self.loader = make_resumable(self.loader, ahead=ahead, epoch=lambda: epoch[0], **options)

    def run(self, epochs: range, stop: tuple[int, int] | None = None, first: Any = None) -> Any:
        """Train; stop before batch ``stop`` (epoch, index) and give the state there, or go on from ``first``, such a state."""
        for epoch in epochs:
            self._epoch[0] = epoch
            if first is None:
                for part in (getattr(self.loader, "sampler", None), getattr(self.loader, "dataset", None)):
                    if callable(set_epoch := getattr(part, "set_epoch", None)):
                        set_epoch(epoch)
            if first is not None:
                self.loader.load_state_dict(first["loader"])
            batches, index = self._fetched(iter(self.loader)), 0
            if first is not None:
                set_randomness(first["random"])
                index, first = first["index"], None
            while True:
                if stop == (epoch, index):
                    return {"loader": self.loader.state_dict(), "random": randomness(), "index": index}
                if index == self._limit or (batch := next(batches, None)) is None:
                    break
                index += 1
                noise = torch.rand(()).item() + random.random() + np.random.rand()
                values = [value.hex() for value in torch.as_tensor(batch).double().flatten().tolist()]
                self.seen.append(f"{epoch}/{index}: {values} {noise.hex()}")
                notes.step = (notes.step or 0) + 1  # as a Checkpointer counts them
                if self._meanwhile is not None:
                    self._meanwhile(self.loader, (epoch, index))
        return None

    def _fetched(self, inner: Iterator[Any]) -> Iterator[Any]:
        self._ready.clear()
        if not self._in_advance:
            return inner
        self._ready.extend([batch] if (batch := next(inner, None)) is not None else [])
        return self._with_the_next(inner)

    def _with_the_next(self, inner: Iterator[Any]) -> Iterator[Any]:
        while self._ready:
            batch = self._ready.pop()
            self._ready.extend([following] if (following := next(inner, None)) is not None else [])
            yield batch


def check_going_on(make: Callable[[], Any], stop: tuple[int, int], **options: Any) -> None:
    """Stopped at ``stop`` and taken up in a new life, the training sees what it would have seen."""
    how = {name: value for name, value in options.items() if name in ("in_advance", "limit", "meanwhile")}
    plain = Job(make, resumable=False, **how)
    plain.run(range(EPOCHS))
    before = Job(make, resumable=True, **options)
    state = codec.decode(codec.encode(before.run(range(EPOCHS), stop)))
    after = Job(make, resumable=True, seed=99, **options)  # a new process: other seeds, other states
    after.run(range(stop[0], EPOCHS), first=state)
    got = before.seen + after.seen
    assert len(got) == len(plain.seen), f"{len(before.seen)} and {len(after.seen)} batches in place of {len(plain.seen)}"
    for expected, found in zip(plain.seen, got, strict=True):
        assert found == expected, f"{found} in place of {expected}"


def shuffled(dataset: Dataset[torch.Tensor], **options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(dataset, BATCH, shuffle=True, **options)
