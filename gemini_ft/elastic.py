"""Torch's dynamic rendezvous with two habits changed, for as long as ``gemini run`` uses it.

A spare waits its turn. Torch lets a waiting host compete with the job's own hosts when these come together again after a
failure. A host that loses its place takes its memory away, and is then taken for a new host that wants to join, for
which torch restarts the whole job: with three hosts and one spare a killed worker cost up to 50 s, or restarts without
end. Here others step forward only when the hosts that are left have had time to take their places again, and a host
that is left over steps back.

Hosts look more often. Torch's look once a second for what the others have done, several times in a row, and take what
they saw within the last second for the present.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torch_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _Action

logger = logging.getLogger(__name__)

_JOIN, _DELAY, _STATE = _CHANGED = ("_RendezvousJoinOp", "_delay", "_BackendRendezvousStateHolder")  # torch's names
_QUICKEST = 0.05  # seconds between two looks in the smallest job
_HOSTS_PER_SECOND = 100  # in a look every host reads the states of all: large jobs keep torch's pace
_GRACE = 1.0  # seconds a spare waits longer than the others take to look
_STUCK = 10.0  # seconds after which hosts that go on without a lost one are called together by a spare, as torch does at once


@dataclass
class Host:
    """What this host's launcher knows of itself."""

    patience: float  # seconds for which it leaves an open round to others, unless it belongs to the job
    has_taken_part: bool = False


class PatientJoin:
    """Torch's decision what to do next in order to join, with a spare that waits its turn; one per wish to join.

    Args:
        join: torch's own.
        host: who wishes to join.
        clock: monotonic, seconds.
    """

    def __init__(self, join: Callable[[Any, float], Any], host: Host, clock: Callable[[], float] = time.monotonic) -> None:
        self._join, self._host, self._clock = join, host, clock
        self._seen: tuple[int, bool] | None = None  # round, and whether it was complete
        self._since = 0.0

    def __call__(self, ctx: Any, deadline: float) -> Any:
        state = ctx.state
        if state.complete and ctx.node in state.wait_list and len(state.participants) >= ctx.settings.max_nodes:
            return _Action.REMOVE_FROM_WAIT_LIST  # nobody needs it any more: torch's next decision makes it a spare
        action = self._join(ctx, deadline)
        if action == _Action.FINISH:
            self._host.has_taken_part = True
        is_new = action == _Action.ADD_TO_PARTICIPANTS and state.round > 0 and not self._host.has_taken_part
        if not (is_new or action == _Action.REMOVE_FROM_REDUNDANCY_LIST) or self._is_its_turn(state):
            return action
        return _Action.KEEP_ALIVE if torch_rendezvous._should_keep_alive(ctx) else _Action.SYNC

    def _is_its_turn(self, state: Any) -> bool:
        """Whether the hosts of the job have had their time: to join an open round, or to leave a complete one."""
        now = (state.round, state.complete)
        if now != self._seen:
            self._seen, self._since = now, self._clock()
        return self._clock() - self._since >= (_STUCK if state.complete else self._host.patience)


def pause(hosts: int) -> float:
    """Seconds between two looks at the others' states, in a job of so many hosts."""
    return min(1.0, _QUICKEST + hosts / _HOSTS_PER_SECOND)


@contextmanager
def better_rendezvous(hosts: int) -> Iterator[None]:
    """Inside, torch's launcher joins a job of ``hosts`` hosts in the way described above.

    Torch has no settings for that, so its classes and its function are replaced.
    """
    originals = {name: getattr(torch_rendezvous, name, None) for name in _CHANGED}
    join, delay, state = originals.values()
    if join is None or delay is None or state is None:
        logger.warning("spares may displace hosts of the job: this version of torch brings hosts together in a way not known here")
        yield
        return
    this, interval = Host(pause(hosts) + _GRACE), pause(hosts)
    changed = {
        _JOIN: lambda: PatientJoin(join(), this),
        _DELAY: lambda seconds: delay(interval if seconds == 1 else seconds),
        _STATE: partial(state, cache_duration=interval / 2),
    }
    for name, value in changed.items():
        setattr(torch_rendezvous, name, value)
    try:
        yield
    finally:
        for name, value in originals.items():
            setattr(torch_rendezvous, name, value)
