"""The engines of one process: those of a GAN, or of an actor and its critic. Each is saved, and resumed, by itself."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

import torch.distributed as dist

from gemini_ft.state.loop import LoopWatch

if TYPE_CHECKING:
    from gemini_ft.deepspeed.protection import Protection

_log = logging.getLogger("gemini_ft")


class Engines:
    """Knows the engines that are open, for what is said about all of them and for the random generators, which they share."""

    def __init__(self) -> None:
        self.open: weakref.WeakSet[Protection] = weakref.WeakSet()  # the engines' protections
        self.watch = LoopWatch()  # looks at the script's loop
        self._stepped: list[str] = []  # names, in the order of the first steps
        self._has_warned = False

    def in_order(self) -> list[Protection]:
        """Returns the engines that are open, in the same order on all ranks."""
        return sorted(self.open, key=lambda each: each.name)

    def stepped(self, protection: Protection) -> None:
        """Warns, once, where engines step by turns: a failure between two steps leaves one of them ahead."""
        if protection.deferred or self._has_warned:
            return
        if protection.name not in self._stepped:
            self._stepped.append(protection.name)
        elif protection.name != self._stepped[-1]:
            self._has_warned = True
            if dist.get_rank() == 0:
                _log.warning(
                    "this script steps several engines by turns, and each is saved after its own steps: a failure between the steps of two "
                    "leaves one of them ahead, and what other engines' steps write into one (BatchNorm) is not in its snapshot. Set "
                    "engine.gemini.deferred = True for each, and call engine.gemini.save() of one after the other at the end of the "
                    "iteration: only a failure between these calls leaves one ahead then (docs/deepspeed.md)"
                )

    def others(self, protection: Protection) -> dict[str, int]:
        """Returns the numbers of the other engines' last updates, for a snapshot of one engine."""
        return {each.name: each.number for each in self.in_order() if each is not protection}

    def put_back_generators(self, resumed: Protection) -> None:
        """Gives the random generators the states that they had at the newest of the snapshots that have been resumed."""
        found = [each for each in self.in_order() if each.found is not None and each is not resumed]
        newest = max([resumed, *found], key=_moment)
        newest.put_back_generators()
        then = _others(newest)
        late = [each for each in [resumed, *found] if then.get(each.name, 0) > _step(each)]
        if late and dist.get_rank() == 0:
            _log.warning(
                "ENGINES GO ON FROM DIFFERENT MOMENTS: in the newest snapshot, that of %s, there were %s. A failure came between the "
                "snapshots of two engines, or one of them was left out (with on_late='wait' none is)",
                newest.name,
                ", ".join(f"{then[each.name]} steps of {each.name}, which goes on from {_step(each)}" for each in late),
            )


def _moment(protection: Protection) -> int:
    """A number that grows with each step of any engine."""
    return _step(protection) + sum(_others(protection).values())


def _step(protection: Protection) -> int:
    assert protection.found is not None
    return protection.found.iteration


def _others(protection: Protection) -> dict[str, int]:
    """The numbers of the other engines' last updates when the snapshot that an engine goes on from was taken."""
    assert protection.found is not None
    others: dict[str, int] = protection.found.extras.get("others", {})  # snapshots in storage may be older
    return others


engines = Engines()
