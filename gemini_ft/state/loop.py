"""Checks the objects that a script gives beside its models, and names early what its loop has that no snapshot has."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gemini_ft.errors import ConfigError
from gemini_ft.state.carried import Carried
from gemini_ft.state.iterators import BatchSource, is_kept, is_plain_loader, unkept, wrappers
from gemini_ft.state.left_out import Generators, instances, left_out, not_saved
from gemini_ft.state.rng import GivenGenerator, is_generator
from gemini_ft.state.tensors import every_optimizer

_log = logging.getLogger("gemini_ft")
_BEGINS = "after a failure it begins anew"
_SOME = 24  # names in a warning
_COUNTS = (
    "this loop numbers its batches by enumerate(loader), or zip(range(n), loader): after a failure it counts from 0 again, in the middle "
    "of the epoch. Where the numbers matter, give enumerate(loader, loader.batches_done), or a range from there"
)
_AROUND = {  # name that `wrappers` finds -> the warning about it
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
    """Returns the object whose ``state_dict`` and ``load_state_dict`` keep ``item``: itself, or a wrapper around a random generator.

    ``item``: an object that the script has given. ``given``: how it was given, for errors: ``state['scheduler']``.

    Raises ConfigError: it lacks these methods, or they would not restore its position.
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
    """Looks at a loop at each of its steps, on one rank; warns of each thing once in a job, and never ends the loop.

    Args:
        state: the objects that were given beside the models, as `resume` has left them.
        has_resumed: whether the state was resumed: then the loop may go through the rest of an epoch without a step.
    """

    def __init__(self, state: Collection[Any] = (), *, has_resumed: bool = True) -> None:
        self.named: set[str] = set()  # the names that were said; its owner may put a set here that is part of snapshots
        self._failed: set[str] = set()
        self._has_resumed, self._is_first = has_resumed, True
        self._source = BatchSource(state)
        self._generators: Generators | None = None
        self._carried: Carried | None = None
        self._wrappers: Collection[Any] = ()  # of what was given, which may hold what was not
        self._callbacks: Mapping[str, Any] = {}  # of Fabric, by name

    def look(
        self,
        models: Collection[nn.Module],
        state: Mapping[str, Any],
        optimizers: Sequence[Any],  # the optimizers that were given; empty: schedulers and the like are not looked for
        scalars: Mapping[str, Any] = MappingProxyType({}),  # the loop's values that snapshots have, by name
        iteration: int = 0,
        has_stepped: bool = True,
    ) -> None:
        """Looks at the loop when a step has ended.

        ``has_stepped``: whether an optimizer has stepped, so that there may be a snapshot; without one it does not matter what differs.
        """
        self._safely("batches", self._look_at_batches, state.values())
        self._look_at_rest(models, [*models, *state.values(), scalars], optimizers, scalars, iteration, has_stepped)

    def look_beside(self, state: Mapping[str, Any], inner: Mapping[str, Any], iteration: int) -> None:
        """Looks at a loop of Fabric, and at its callbacks, apart from its batches. ``inner``: the state, without Fabric's wrappers."""
        models = [item for item in inner.values() if isinstance(item, nn.Module)]
        optimizers = [item for item in inner.values() if isinstance(item, Optimizer)]
        if self._is_first:
            note = " (Fabric's loaders have no batches_done: count in the state that is protected)"
            self._safely("batches", self._look_around, [*inner.values()], note)
        self._wrappers = [state, *state.values()]
        wrapped = [item for item in state.values() if isinstance(item, Optimizer)]
        found = {id(callback): callback for item in wrapped for callback in getattr(item, "_callbacks", ())}
        self._callbacks = {f"callbacks.{index}": callback for index, callback in enumerate(found.values())}
        self._look_at_rest(models, [*inner.values()], optimizers, state, iteration)

    def look_at_script(self, models: Collection[nn.Module], given: list[Any], *steps: Any) -> None:
        """Looks at a loop's variables and generators alone. ``steps``: its values that snapshots have, and the iteration."""
        self._safely("variables", self._look_at_variables, models, given, *steps)
        self._safely("generators", self._look_at_generators, given)

    def _look_at_rest(self, models: Collection[nn.Module], given: list[Any], optimizers: Sequence[Any], *steps: Any) -> None:
        self.look_at_script(models, [*given, *optimizers], *steps)
        if self._is_first and optimizers:
            self._safely("schedulers", self._look_at_others, given, optimizers)
        self._is_first = False

    def _safely(self, what: str, look: Callable[..., None], *given: Any) -> None:
        if what in self._failed:
            return
        try:
            look(*given)
        except Exception as error:  # an object of the script may raise anything when it is looked at
            self._failed.add(what)
            self._say(f"{what} of this loop that no snapshot has are not looked for any more, as an object cannot be looked at: {error!r}")

    def _say(self, text: str, names: Iterable[str] = ("",), *, level: int = logging.WARNING, between: str = ", ") -> None:
        """Logs ``text`` with the names that were not said before in the place of ``{}``; a text without ``{}`` once."""
        marks = {name or text.partition(":")[0]: name for name in names}
        fresh = {mark: name for mark, name in marks.items() if mark not in self.named}
        self.named.update(fresh)  # in place: its owner may have put it here
        if fresh:
            more = f" and {len(fresh) - _SOME} more" if len(fresh) > _SOME else ""
            _log.log(level, text.replace("{}", between.join([*fresh.values()][:_SOME]) + more))

    def _look_at_batches(self, loaders: Collection[Any]) -> None:
        is_ahead, is_elsewhere = self._source.is_ahead(loaders), self._source.has_changed(loaders)
        if is_ahead or (self._is_first and is_kept(loaders)):
            self._say(
                "this loop takes batches of a loader in `state` that later steps use (a list of batches, one fetched ahead), or makes "
                "several steps with one: a batch that is at hand is in no snapshot, and after a failure the loop goes on with the one "
                "behind it. Iterate the loader itself, and call step() once for what each turn takes, or keep such batches in an object in "
                "`state`"
            )
        if is_elsewhere and not self._is_first:
            self._say(
                "this loop no longer takes its batches from the loaders in `state`, which have come to their end: after a failure it goes "
                "on with others. Give each loader that it iterates as state, made once, before resume()"
            )
        if not self._is_first:
            return
        self._say(
            "this loop iterates a DataLoader (of a {}) that is not in `state`: after a failure its epoch begins anew, and other random "
            "numbers are drawn. Iterate loader = gemini_ft.resumable(loader), and give it as state={'loader': loader}",
            unkept(loaders),
        )
        if not self._has_resumed and self._source.is_another(loaders):
            self._say(
                "this loop's iteration of a loader in `state` is not the first one after resume(), which goes on where the loop was after "
                "a failure. Look into the data before resume(), and make the loop's iterators after it"
            )
        self._look_around(loaders)

    def _look_around(self, loaders: Collection[Any], note: str = "") -> None:
        """Warns of the iterators that the loop has put around its loaders (`enumerate`, `zip` and so on)."""
        around = wrappers(loaders)
        for said in dict.fromkeys(text for name, text in _AROUND.items() if name in around):
            self._say(said + note)

    def _look_at_variables(
        self,
        models: Collection[nn.Module],
        given: list[Any],
        scalars: Mapping[str, Any] = MappingProxyType({}),
        iteration: int = 0,
        has_stepped: bool = True,
    ) -> None:
        if not has_stepped:
            return
        if self._carried is None:
            self._carried = Carried(models, given, self._wrappers, self._callbacks)
        changes = self._carried.changed(scalars, iteration)
        self._say(
            f"this script changes {{}} while it trains, which no snapshot has: {_BEGINS}. If later steps depend on it, give numbers to "
            "step(name=value), or to the state of Fabric's protect, averages of the weights as a model beside the others, and other "
            "objects as `state`; under DeepSpeed, numbers to engine.gemini.client_state, and objects to engine.gemini.keep(name=...)",
            changes.carried,
        )
        self._say(
            f"this script iterates over an object that changes {{}}, and is not in `state`: {_BEGINS}. Iterate data = "
            "gemini_ft.resumable(data), and give it as state={'data': data}",
            changes.data,
        )
        self._say(f"this script adds to {{}}, which no snapshot has: {_BEGINS}", changes.added, level=logging.INFO)
        for name, error in changes.odd.items():
            self._say(f"it is not known whether {{}} changes while this script trains, as it cannot be looked at: {error!r}", [name])

    def _look_at_generators(self, given: list[Any]) -> None:
        if self._generators is None:
            self._generators = Generators(given, self._callbacks)
        self._say(
            f"this loop draws from the generator {{}}, which is in no snapshot: {_BEGINS}. Give it, "
            "state={'generator': generator}, or engine.gemini.keep(generator=generator)",
            self._generators.drawn_from(),
        )

    def _look_at_others(self, given: list[Any], optimizers: Sequence[Any]) -> None:
        self._say(
            f"this script has a {{}} that is in no snapshot: {_BEGINS}. Give it as state={{'scheduler': scheduler}}, a model beside the "
            "others",
            left_out(given, every_optimizer(optimizers).values()),
            between=", a ",
        )
        local_sgd = getattr(sys.modules.get("accelerate.local_sgd"), "LocalSGD", None)
        if local_sgd is not None and any(item.enabled for item in instances(local_sgd)):
            self._say(
                "this script averages its models by accelerate's LocalSGD, whose count of steps is in no snapshot: after a failure the "
                "averages come at other steps. Keep it by step(local=local_sgd.num_steps), and begin with local_sgd.num_steps = "
                "checkpointer.scalars.get('local', 0)"
            )
