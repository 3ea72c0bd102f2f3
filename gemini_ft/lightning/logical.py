"""Logical ranks under the Trainer (``elastic: exact``): a worker takes a batch of each of its own in turn, which the Trainer accumulates.

From the fetch of a batch to the end of its last hook the process has the random generators of that batch's logical rank, and from
``training_step`` to ``on_after_backward`` its buffers and gradients, too. The optimizer's step has the job's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from gemini_ft.errors import ConfigError, StateError, UnsupportedStateError
from gemini_ft.lightning import compat, trainer_loops
from gemini_ft.loaders import resumable
from gemini_ft.state.logical import LogicalRank, LogicalRanks
from gemini_ft.state.remembered import OF_LOADERS, Attributes
from gemini_ft.state.rng import private_generators

_OUT = "(docs/elastic.md#bit-for-bit)"


class Turns:
    """The logical ranks of a fit, and the batches that they take in turn.

    Attributes:
        ranks: made by the Checkpointer with the first batch, when model, optimizer and loader stand.

    Raises:
        ConfigError: the workers cannot carry as many each.
    """

    def __init__(self, trainer: Any, count: int | None) -> None:
        workers = trainer.world_size
        if not count or count % workers:
            raise ConfigError(
                f"elastic='exact' with logical_ranks={count} under Lightning: give GeminiStrategy(logical_ranks=N), where N is the largest "
                f"number of workers that there will be, and start a number of workers that divides it, not {workers}"
            )
        self.count = count
        self.carried: int = count // workers
        self.ranks: LogicalRanks | None = None
        self._trainer = trainer
        self._rank: LogicalRank | None = None  # whose batch is under way
        self._data: Any = None
        self._held, self._drawn = contextlib.ExitStack(), contextlib.ExitStack()
        self._epoch: Iterator[Any] | None = None  # its turns
        self.dealt: _Dealt | None = None
        self._loss: Any = None  # of the batch under way, before it is divided
        self._resting: Any = None  # generators while a validation draws
        trainer.accumulate_grad_batches *= self.carried
        self._end = trainer_loops.around_each_batch(trainer, self._advance)

    def end(self) -> None:
        """Follows the Trainer no longer."""
        self._end()
        self._trainer.accumulate_grad_batches //= self.carried

    # -- data

    def deal(self, loader: Any) -> Any:
        """The loader of a worker: a batch of each of its logical ranks in turn, out of what Lightning would have dealt out to workers.

        Raises ConfigError: it is not a plain DataLoader with a DistributedSampler.
        """
        sampler = getattr(loader, "sampler", None)
        drawing = private_generators(dataset=getattr(loader, "dataset", None), collate_fn=getattr(loader, "collate_fn", None))
        if (
            type(loader) is not DataLoader
            or type(sampler) is not DistributedSampler
            or type(loader.batch_sampler) is not BatchSampler
            or loader.generator is not None
            or drawing
        ):
            raise ConfigError(
                "elastic='exact' under Lightning is for a DataLoader of a map-style dataset, with a DistributedSampler or shuffle= alone, "
                f"and without generators of its own {sorted(drawing)}; this is a {type(loader).__qualname__} with a "
                f"{type(sampler).__qualname__} {_OUT}"
            )
        self._data = Attributes({"dataset": loader.dataset, "collate_fn": loader.collate_fn}, lambda _: OF_LOADERS)
        self.dealt = _Dealt(self, loader)
        return self.dealt

    # -- a batch

    def _advance(self, advance: Callable[[Any], None], fetcher: Any) -> None:
        self._rank = None
        try:
            advance(fetcher)
        except StopIteration:
            raise StateError(
                "elastic='exact': on_train_batch_start ended an epoch early, which logical ranks cannot; leave it out"
            ) from None
        finally:
            self._drawn.close()
        self._end_epoch()

    def _end_epoch(self) -> None:
        """Lets iterations of the loaders come to their end after the last batch, unless none was taken."""
        if self._rank is not None and trainer_loops.is_last_batch(self._trainer):
            next(self.epoch(), None)

    def begin(self) -> None:
        """Begins an epoch; the first one, or one that is resumed, with its first batch, when all has been put back."""
        self._epoch = None if self.ranks is None else self.ranks.batches(trainer_loops.epoch(self._trainer))

    def epoch(self) -> Iterator[Any]:
        """The turns of the epoch."""
        if self._epoch is None:
            self.begin()
        assert self._epoch is not None
        return self._epoch

    def enter(self, rank: LogicalRank) -> None:
        """Has a logical rank's generators in place until its batch is over, or the optimizer steps."""
        self._rank = rank
        self._drawn.enter_context(rank.drawing())

    def forward(self, training_step: Callable[..., Any], batch: Any, *number: int) -> Any:
        """Computes a batch's loss as its logical rank; the number is that of the turn, the same on any number of workers."""
        assert self._rank is not None
        self._held.enter_context(self._rank.holding())
        output = training_step(batch, *(each // self.carried for each in number))
        self._loss = output["loss"] if isinstance(output, Mapping) else output
        if self._loss is None:
            raise StateError("elastic='exact': training_step returned None; give each batch a loss")
        return output

    def backward(self, backward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Computes gradients; the loss is divided as if each worker carried one logical rank."""
        result = backward(self._loss / (self._trainer.accumulate_grad_batches // self.carried), *arguments, **named)
        self._loss = None
        self._held.close()
        return result

    def reduce(self) -> None:
        """Leaves the logical rank for the optimizer's step, and gives all workers the mean of the gradients."""
        assert self.ranks is not None
        self._drawn.close()
        self.ranks.reduce()

    def stepped(self) -> None:
        """Goes back to the logical rank, whose batch is not over."""
        assert self._rank is not None
        self.enter(self._rank)

    # -- beside the batches

    def rest(self) -> None:
        """Remembers the job's generators, from which a validation draws as often as the workers have batches of it."""
        self._resting = self.ranks.generators() if self.ranks is not None else None

    def go_on(self) -> None:
        if self.ranks is not None and self._resting is not None:
            self.ranks.set_generators(self._resting)

    def state_dict(self) -> dict[str, Any]:
        """The logical ranks of this worker. Raises UnsupportedStateError: they share what the training data have changed."""
        assert self.ranks is not None
        changes = self._data.changes()
        if changed := sorted({*changes.each(), *changes.lost}):
            raise UnsupportedStateError(
                f"elastic='exact': {', '.join(changed[:8])} changed as batches were made, and would be one for all logical ranks that a "
                f"worker carries; leave the data as they are {_OUT}"
            )
        return self.ranks.state_dict()

    def refuse(self) -> None:
        """Refuses by name what cannot be carried. Raises ConfigError."""
        trainer = self._trainer
        callbacks = {kind.__name__ for callback in trainer.callbacks for kind in type(callback).__mro__}
        why = {name: name in callbacks for name in ("EarlyStopping", "WeightAveraging", "BatchSizeFinder", "LearningRateFinder")}
        why |= {
            f"precision {trainer.precision!r}": type(trainer.precision_plugin).__name__ not in ("Precision", "DoublePrecision"),
            "ReduceLROnPlateau": any(config.reduce_on_plateau for config in trainer.strategy.lr_scheduler_configs),
            "LBFGS": any(type(optimizer).__name__ == "LBFGS" for optimizer in trainer.strategy.optimizers),
            "torch.compile": getattr(trainer.lightning_module, "_compiler_ctx", None) is not None,
            "a communication hook": compat.ddp_hook(trainer.strategy) is not None,
            "gradient_pipeline": trainer.strategy.gemini_rules is not None,
        }
        if found := [name for name, is_there in why.items() if is_there]:
            raise ConfigError(f"elastic='exact' under Lightning does not go with {', '.join(found)}; leave that out, or elastic {_OUT}")


class _Dealt:
    """A worker's batches of an epoch, for Lightning."""

    def __init__(self, turns: Turns, loader: DataLoader[Any]) -> None:
        self._turns, self._loader = turns, loader
        self.dataset, self.batch_size = loader.dataset, loader.batch_size

    def of(self, number: int) -> Any:
        """The loader of one logical rank."""
        loader, dealt = self._loader, self._loader.sampler
        assert isinstance(dealt, DistributedSampler)
        sampler = DistributedSampler[Any](
            loader.dataset, self._turns.count, number, shuffle=dealt.shuffle, seed=dealt.seed, drop_last=dealt.drop_last
        )
        names = ("batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn")
        options = {name: getattr(loader, name) for name in names}
        return resumable(DataLoader(loader.dataset, sampler=sampler, **options))

    def __len__(self) -> int:
        return self._turns.carried * len(self.of(0))

    def __iter__(self) -> Iterator[Any]:
        self._turns.begin()  # at once, so that a snapshot of the step before has the epoch begun, as with Lightning's loaders
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        for turn in self._turns.epoch():
            for rank, batch in turn:
                self._turns.enter(rank)
                yield batch
