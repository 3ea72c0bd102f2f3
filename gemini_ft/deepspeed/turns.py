"""The engines of one process that a script steps in turns: those of a GAN, or of an actor and its critic.

A failure between the steps of two engines leaves one of them a step ahead. So, as soon as the order of their steps is known, all of them
are saved at the end of a turn, when the last one has stepped; and after a failure all of them resume the end of the same turn. A script
with one engine makes turns of one step.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gemini_ft.errors import RecoveryError
from gemini_ft.state.loop import LoopWatch

if TYPE_CHECKING:
    from gemini_ft.deepspeed.protection import Protection

_log = logging.getLogger("gemini_ft")
_LONGEST = 32  # steps of a turn: an engine that is trained alone for longer does not wait for the others


class Turns:
    """Decides when the engines that are open are saved, and makes those that resume agree on one moment.

    Attributes:
        open: the engines' protections.
        watch: looks at the script's loop.
        order: the engines that make the first step and the last one of a turn, by the names of their streams; None: not known (yet).
    """

    def __init__(self) -> None:
        self.open: weakref.WeakSet[Protection] = weakref.WeakSet()
        self.watch = LoopWatch()
        self.order: tuple[str, str] | None = None
        self._turn: list[str] = []  # the engines that have stepped since the last turn ended
        self._has_warned = False

    def stepped(self, protection: Protection) -> None:
        """Records that an engine's step is over, and ends the turn with it where that was the last one."""
        self._turn.append(protection.name)
        first, last = self.order or (self._turn[0], "")
        if len(self.open) == 1 or self._has_warned:
            self._end([protection])
        elif self.order is None and {each.name for each in self.open} <= {*self._turn}:
            self.order = first, protection.name
            self._end(self.open)
        elif self._turn[0] != first:
            self._has_warned = True
            _log.warning(
                "the engines of this script do not step in the same order each time, so each is saved after its own steps: a failure "
                "between the steps of two may leave one ahead. If one is trained after the other, that is right; else set "
                "engine.gemini.deferred = True for each, and call engine.gemini.save() for each at the end of the iteration"
            )
            self._end([each for each in self.open if each.name in self._turn])
        elif protection.name == last:
            self._end(self.open)
        elif len(self._turn) > _LONGEST:
            del self._turn[1]
            protection.ends_turn()

    def _end(self, ending: Iterable[Protection]) -> None:
        self._turn.clear()
        ending = [*ending]
        if len(ending) > 1 and any(each.is_updated for each in ending):
            number = max(each.number if each.is_updated else each.next_number() for each in ending)
            is_due = any(each.checkpointer.due(each.iteration, number) for each in ending)
            for each in ending:
                each.reaches(number, is_due)
        for each in ending:
            each.ends_turn()

    def beside(self, protection: Protection) -> dict[str, Any]:
        """Returns the numbers of the other engines' last updates, and the order of the turns, for a snapshot of one engine."""
        return {"steps": {each.name: each.number for each in self.open if each is not protection}, "order": self.order}

    def join(self, protection: Protection) -> None:
        """Takes an engine in; the order of the turns is another one then."""
        self.open.add(protection)
        self._begin_anew()

    def leave(self, protection: Protection, finished: bool) -> None:
        """Takes an engine out; where its training has finished and it waits for the end of a turn, it is saved."""
        if finished and protection.name in self._turn:
            protection.ends_turn()
        self.open.discard(protection)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.order, self._has_warned = None, False
        self._turn.clear()

    def agree(self) -> None:
        """Takes engines that are ahead of what another one has resumed back to an older snapshot. Collective.

        The newest snapshot says which ones of the others were there when it was taken; where one of these is lost, it is not used.

        Raises:
            RecoveryError: there is no older one.
        """
        while found := {each.name: each for each in self.open if each.found is not None}:
            newest = max(_moment(each) for each in found.values())
            last = [each for each in found.values() if _moment(each) == newest]
            steps = {each.name: each.iteration for each in self.open}
            ahead = [each for each in last if any(steps.get(name, then) < then for name, then in _beside(each)["steps"].items())]
            if not ahead:
                order = _beside(last[0])["order"]
                self.order = (order[0], order[1]) if order else None
                last[0].put_back_generators()
                return
            for each in sorted(ahead, key=lambda each: each.name):
                _log.warning("engine %s goes back from step %d, which the others of this script do not have", each.name, steps[each.name])
                each.resume(before=steps[each.name])
                if each.found is None:
                    raise RecoveryError(
                        f"engine {each.name} was resumed at step {steps[each.name]}, and another engine of this script has no snapshot of "
                        "that moment; there is no older one. Begin anew: GEMINI_RESUME=never"
                    )


def _beside(protection: Protection) -> dict[str, Any]:
    found = protection.found
    return found.extras.get("beside", {"steps": {}, "order": None}) if found is not None else {}  # snapshots in storage may be older


def _moment(protection: Protection) -> int:
    """A number that grows with each step of any engine."""
    others: dict[str, int] = _beside(protection)["steps"]
    return (protection.found.iteration if protection.found is not None else 0) + sum(others.values())


turns = Turns()
