"""What a script gives beside its models, and what its loop has that no snapshot has, which is named while nothing has failed yet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gemini_ft.errors import ConfigError
from gemini_ft.state.carried import Carried
from gemini_ft.state.iterators import BatchSource, is_plain_loader, unkept, wrappers
from gemini_ft.state.left_out import Generators, left_out, not_saved
from gemini_ft.state.rng import GivenGenerator, is_generator
from gemini_ft.state.tensors import every_optimizer

_log = logging.getLogger("gemini_ft")
_BEGINS = "after a failure it begins anew"
_SOME = 8  # names in a warning
_COUNTS = (
    "this loop numbers its batches by enumerate(loader), or zip(range(n), loader): after a failure it counts from 0 again, in the middle "
    "of the epoch. Where the numbers matter, give enumerate(loader, loader.batches_done), or a range from there"
)
_AROUND = {  # what `wrappers` finds -> what is said of it
    "enumerate": _COUNTS,
    "zip": _COUNTS,
    "islice": "this loop limits its batches by itertools.islice(loader, n): after a failure in the middle of the epoch it takes n more. "
    "Give islice(loader, n - loader.batches_done)",
    "chain": "this loop goes through a loader several times by itertools.chain: after a failure it makes all of these passes again. Count "
    "them, `for epoch in range(checkpointer.scalars.get('epoch', 0), epochs):`, with step(epoch=epoch)",
    "cycle": "this loop iterates itertools.cycle(loader), which keeps the batches of the first epoch where no snapshot has them: after a "
    "failure it goes on with others. Iterate the loader again, by `while True:` around `for batch in loader:`",
}


def keepable(item: Any, given: str) -> Any:
    """The object whose ``state_dict`` and ``load_state_dict`` keep ``item``: itself, or a wrapper around a random generator.

    Args:
        item: what the script has given.
        given: how it was given, for errors: ``state['scheduler']``.

    Raises:
        ConfigError: it lacks these methods, or would not go on where it was by them.
    """
    if is_generator(item):
        return GivenGenerator(item)
    kind = type(item).__qualname__
    if is_plain_loader(item):
        raise ConfigError(
            f"{given} is a {kind} that draws other random numbers when it is iterated again after a failure; give "
            "gemini_ft.resumable(loader), here and to the loop, which goes on with the very batch"
        )
    if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
        raise ConfigError(
            f"{given} is a {kind}; what is given here has the methods state_dict and load_state_dict, or is a random generator. Of a "
            "loader give gemini_ft.resumable(loader); a plain loop gives plain values to step(name=value), for checkpointer.scalars"
        )
    if isinstance(item, nn.Module) and (lost := not_saved(item)):
        raise ConfigError(
            f"{given} is a {kind} whose state_dict() lacks {', '.join(lost)}; call its persistent(True), or give it as a model beside the "
            "others, Checkpointer({'model': model, 'metric': metric}, optimizer), which keeps all of it"
        )
    return item


class LoopWatch:
    """Looks at a loop at each of its steps, on one rank; says each thing once, and never ends the loop.

    Args:
        state: what was given beside the models, as `resume` has left it.
        has_resumed: whether it was resumed: then the loop may go through what is left of an epoch without a step.
    """

    def __init__(self, state: Collection[Any] = (), *, has_resumed: bool = True) -> None:
        self._has_failed, self._has_resumed = False, has_resumed
        self._is_ahead = False
        self._source = BatchSource(state)
        self._generators: Generators | None = None
        self._carried: Carried | None = None

    def look(
        self,
        models: Collection[nn.Module],
        state: Mapping[str, Any],
        optimizers: Sequence[Any],
        scalars: Mapping[str, Any] = MappingProxyType({}),
        iteration: int = 0,
    ) -> None:
        """Looks as of a step that ends now.

        Args:
            models: those that were given.
            state: what was given beside them.
            optimizers: those that were given; none: what belongs to them is not looked for.
            scalars: the loop's values that snapshots have.
            iteration: the number of steps so far.
        """
        self._safely(lambda: self._look(models, state.values(), optimizers, scalars, iteration))

    def look_beside(self, state: Mapping[str, Any], inner: Mapping[str, Any], iteration: int) -> None:
        """Looks at what a loop of Fabric has beside its data.

        Args:
            state: what was given, counters and other plain values among it.
            inner: the same, without Fabric's wrappers.
            iteration: the number of steps so far.
        """
        models = [item for item in inner.values() if isinstance(item, nn.Module)]
        optimizers = [item for item in inner.values() if isinstance(item, Optimizer)]
        given = [state, *state.values(), *inner.values()]
        is_first = self._carried is None
        self._safely(lambda: self._look_beside(models, given, optimizers, state, iteration))
        if is_first:
            self._safely(
                lambda: _look_around([*inner.values()], " (Fabric's loaders have no batches_done: count in the state that is protected)")
            )

    def _safely(self, look: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            look()
        except Exception as error:  # any object of the script's may raise anything when it is looked at
            self._has_failed = True
            _log.warning("what this loop has that no snapshot has is not looked for any more, as an object cannot be looked at: %r", error)

    def _look(
        self,
        models: Collection[nn.Module],
        loaders: Collection[Any],
        optimizers: Sequence[Any],
        scalars: Mapping[str, Any],
        iteration: int,
    ) -> None:
        is_ahead, is_elsewhere = self._source.is_ahead(loaders), self._source.has_changed(loaders)
        if is_ahead and not self._is_ahead:
            self._is_ahead = True
            _log.warning(
                "this loop takes batches of a loader in `state` that later steps use (a list of batches, one fetched ahead), or makes "
                "several steps with one: a batch that is at hand is in no snapshot, and after a failure the loop goes on with the one "
                "behind it. Iterate the loader itself, and call step() once for what each turn takes, or keep such batches in an object in "
                "`state`"
            )
        is_first = self._carried is None
        self._look_beside(models, [*models, *loaders], optimizers, scalars, iteration)
        if is_first:
            self._look_first(loaders)
        elif is_elsewhere:
            _log.warning(
                "this loop no longer takes its batches from the loaders in `state`, which have come to their end: after a failure it goes "
                "on with others. Give each loader that it iterates as state, made once, before resume()"
            )

    def _look_beside(
        self, models: Collection[nn.Module], given: list[Any], optimizers: Sequence[Any], scalars: Mapping[str, Any], iteration: int
    ) -> None:
        """Names what the script has beside its data; ``given`` are models and objects with a state of their own."""
        if self._carried is None or self._generators is None:
            self._carried, self._generators = Carried(models, [*given, *optimizers]), Generators(given)
            if optimizers and (others := left_out(given, every_optimizer(optimizers).values())):
                _log.warning(
                    "this script has a %s that is in no snapshot: %s. Give it as state={'scheduler': scheduler}, a model beside the others",
                    *(", a ".join(others), _BEGINS),
                )
        carried, added = self._carried.changed(scalars, iteration)
        if carried:
            _log.warning(
                "this script changes %s while it trains, which no snapshot has: %s. If later steps depend on it, give numbers to "
                "step(name=value), or to the state of Fabric's protect, averages of the weights as a model beside the others, and other "
                "objects as `state`",
                *(", ".join(carried[:_SOME]), _BEGINS),
            )
        if added:
            _log.info("this script adds to %s, which no snapshot has: %s", ", ".join(added[:_SOME]), _BEGINS)
        if drawn := self._generators.drawn_from():
            _log.warning(
                "this loop draws from the generator %s, which is in no snapshot: %s. Give it, state={'generator': generator}",
                *(", ".join(drawn), _BEGINS),
            )

    def _look_first(self, loaders: Collection[Any]) -> None:
        if found := unkept(loaders):
            _log.warning(
                "this loop iterates a DataLoader (of a %s) that is not in `state`: after a failure its epoch begins anew, and other random "
                "numbers are drawn. Iterate loader = gemini_ft.resumable(loader), and give it as state={'loader': loader}",
                ", ".join(found),
            )
        if not self._has_resumed and self._source.is_another(loaders):
            _log.warning(
                "this loop's iteration of a loader in `state` is not the first one after resume(), which goes on where the loop was after "
                "a failure. Look into the data before resume(), and make the loop's iterators after it"
            )
        _look_around(loaders)


def _look_around(loaders: Collection[Any], note: str = "") -> None:
    """Names what the loop has put around the iterations of its loaders."""
    around = wrappers(loaders)
    for said in dict.fromkeys(text for name, text in _AROUND.items() if name in around):
        _log.warning(said + note)
