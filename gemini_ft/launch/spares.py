"""Torch's dynamic rendezvous with four habits changed, for as long as ``gemini run`` uses it.

A spare waits its turn. Torch lets a waiting host compete with the job's own hosts when these come together again after a
failure. A host that loses its place takes its memory away, and is then taken for a new host that wants to join, for
which torch restarts the whole job: with three hosts and one spare a killed worker cost up to 50 s, or restarts without
end. Here others step forward only when the hosts that are left have had time to take their places again, and a host
that is left over steps back.

A job stays as large as its state. With ``--nnodes 1:4`` torch restarts a healthy job for every host that comes. State that only the
same number of ranks can load would be lost by that, so a worker with such state says so (`gemini_ft.launch.notes`), the hosts write
it into the rendezvous, and further hosts wait as spares.

Hosts look more often. Torch's look once a second for what the others have done, several times in a row, and take what
they saw within the last second for the present.

No clock decides which host lives. Torch compares the time that a host writes with a sign of life with the reader's own: hosts whose
clocks are seconds apart took each other for dead for ever, and a clock that was set cost a restart. Here a host is dead when what it
writes has not changed for as long by the reader's monotonic clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torch_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _Action

logger = logging.getLogger(__name__)

_CHANGED = ("_RendezvousJoinOp", "_delay", "_BackendRendezvousStateHolder", "_should_keep_alive")
_JOIN, _DELAY, _STATE, _DUE = _CHANGED  # torch's names
_HOSTS = "gemini_hosts"  # attribute of torch's rendezvous state: the number of hosts that the job's state is made for
_QUICKEST = 0.05  # seconds between two looks in the smallest job
_HOSTS_PER_SECOND = 100  # in a look every host reads the states of all: large jobs keep torch's pace
_GRACE = 1.0  # seconds a spare waits longer than the others take to look
_SETTLING = 2.0  # seconds for the other hosts to come to another store after this one has; nobody is dead before
_STUCK = 10.0  # seconds after which hosts that go on without a lost one are called together by a spare, as torch does at once


@dataclass
class Host:
    """The facts that this host's launcher knows of itself."""

    patience: float  # seconds for which it leaves an open round to others, unless it belongs to the job
    has_taken_part: bool = False
    is_fixed: Callable[[], bool] = lambda: False  # whether the state of its workers can be loaded by the same number of ranks only


class PatientJoin:
    """Torch's decision what to do next in order to join, with a spare that waits its turn; one per wish to join.

    Args:
        join: torch's own.
        host: that wishes to join.
        clock: monotonic, seconds.
    """

    def __init__(self, join: Callable[[Any, float], Any], host: Host, clock: Callable[[], float] = time.monotonic) -> None:
        self._join, self._host, self._clock = join, host, clock
        self._seen: tuple[int, bool] | None = None  # round, and whether it was complete
        self._since = 0.0
        self._said = False

    def __call__(self, ctx: Any, deadline: float) -> Any:
        state = ctx.state
        if (limit := getattr(state, _HOSTS, None)) and ctx.settings.min_nodes != ctx.settings.max_nodes:
            if (action := self._within(limit, ctx)) is not None:
                return action
            ctx = _narrowed(ctx, limit)
        if state.complete and ctx.node in state.wait_list and len(state.participants) >= ctx.settings.max_nodes:
            return _Action.REMOVE_FROM_WAIT_LIST  # it is not needed any more: torch's next decision makes it a spare
        action = self._join(ctx, deadline)
        if action == _Action.FINISH:
            self._host.has_taken_part = True
        is_new = action == _Action.ADD_TO_PARTICIPANTS and state.round > 0 and not self._host.has_taken_part
        if not (is_new or action == _Action.REMOVE_FROM_REDUNDANCY_LIST) or self._is_its_turn(state):
            return action
        return _Action.KEEP_ALIVE if torch_rendezvous._should_keep_alive(ctx) else _Action.SYNC

    def _within(self, limit: int, ctx: Any) -> Any:
        """The decision for a job whose state is made for ``limit`` hosts, where torch would decide otherwise; else None."""
        state, here = ctx.state, ctx.node in ctx.state.participants
        if limit < ctx.settings.max_nodes and not here and len(state.participants) >= limit and not self._said:
            self._said = True
            logger.warning("the job's state is made for %d hosts: this one waits as a spare", limit)
        if state.complete or not here:
            return None
        if len(state.participants) > limit and not self._host.has_taken_part:
            return _Action.REMOVE_FROM_PARTICIPANTS
        return _Action.MARK_RENDEZVOUS_COMPLETE if len(state.participants) == limit else None  # torch would wait for more

    def _is_its_turn(self, state: Any) -> bool:
        """Whether the hosts of the job have had their time: to join an open round, or to leave a complete one."""
        now = (state.round, state.complete)
        if now != self._seen:
            self._seen, self._since = now, self._clock()
        return self._clock() - self._since >= (_STUCK if state.complete else self._host.patience)


def _narrowed(ctx: Any, hosts: int) -> Any:
    """The context as if the job had been started for exactly ``hosts`` hosts."""
    settings = copy(ctx.settings)
    for name in ("min_nodes", "max_nodes"):
        object.__setattr__(settings, name, hosts)
    return SimpleNamespace(node=ctx.node, state=ctx.state, settings=settings)


def _waiting(original: Callable[[Any], int], host: Host, handler: Any) -> int:
    """The number of hosts that torch's launcher restarts its workers for: none if their state cannot follow."""
    waiting = original(handler)
    if not host.is_fixed():
        return waiting
    with handler._heartbeat_lock:
        holder = handler._state_holder
        state = holder.state
        if state.complete and handler._this_node in state.participants and not hasattr(state, _HOSTS):
            setattr(state, _HOSTS, len(state.participants))
            holder.mark_dirty()
            holder.sync()
    return 0 if len(state.participants) >= getattr(state, _HOSTS, 1) else waiting  # else one of its hosts has been lost


def _by_own_clock(holder: Any) -> Any:
    """Torch's class that keeps the state of the rendezvous and drops hosts without a sign of life; this one asks no other host's clock."""

    class Holder(holder):  # type: ignore[misc]
        _seen: Mapping[Any, tuple[datetime, float]] = {}  # host -> what it wrote last, and when that was first read here

        def _sanitize(self) -> None:
            now, said = time.monotonic(), self._state.last_heartbeats
            self._seen = {host: old if (old := self._seen.get(host)) and old[0] == beat else (beat, now) for host, beat in said.items()}
            present, settled = datetime.now(UTC), getattr(self._backend, "moved_at", 0.0) + _SETTLING
            ages = {host: now - max(since, settled) for host, (_, since) in self._seen.items()}
            self._state.last_heartbeats = {host: present - timedelta(seconds=age) for host, age in ages.items()}
            super()._sanitize()
            self._state.last_heartbeats = {host: said[host] for host in self._state.last_heartbeats}

    return Holder


def _due(ctx: Any) -> bool:
    """Whether this host must show that it lives, which it also must when its clock has been set back."""
    said = ctx.state.last_heartbeats.get(ctx.node)
    return said is not None and abs(datetime.now(UTC) - said) >= ctx.settings.keep_alive_interval


def pause(hosts: int) -> float:
    """Seconds between two looks at the others' states, in a job of ``hosts`` hosts."""
    return min(1.0, _QUICKEST + hosts / _HOSTS_PER_SECOND)


@contextmanager
def better_rendezvous(hosts: int, is_fixed: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Inside, torch's launcher joins a job of ``hosts`` hosts in the way described above; ``is_fixed`` as in `Host`.

    Torch has no settings for that, so its classes and its functions are replaced.
    """
    originals = {name: getattr(torch_rendezvous, name, None) for name in _CHANGED}
    join, delay, state, due = originals.values()
    handler = torch_rendezvous.DynamicRendezvousHandler
    waiting = handler.num_nodes_waiting
    if join is None or delay is None or state is None or due is None:
        logger.warning("spares may displace hosts of the job, as this version of torch brings hosts together in an unknown way")
        yield
        return
    this, interval = Host(pause(hosts) + _GRACE, is_fixed=is_fixed), pause(hosts)
    changed = {
        _JOIN: lambda: PatientJoin(join(), this),
        _DELAY: lambda seconds: delay(interval if seconds == 1 else seconds),
        _STATE: partial(_by_own_clock(state), cache_duration=interval / 2),
        _DUE: _due,
    }
    for name, value in changed.items():
        setattr(torch_rendezvous, name, value)
    handler.num_nodes_waiting = lambda self: _waiting(waiting, this, self)  # type: ignore[method-assign]
    try:
        yield
    finally:
        handler.num_nodes_waiting = waiting  # type: ignore[method-assign]
        for name, value in originals.items():
            setattr(torch_rendezvous, name, value)
