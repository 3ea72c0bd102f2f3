"""Torch's dynamic rendezvous with some habits changed, for as long as ``gemini run`` uses it; docs/decisions/022 has the reasons.

- A spare waits its turn. It steps forward only where no host of the job that still gives signs of life is missing, and a host that is left
  over steps back. A host's sign of life stays until it is too old, also while the host leaves its place to come to the next round.
- Nothing begins without a host that took part, as its state may live where nobody here can see it. The state of the rendezvous names such
  hosts, and nobody else takes the first place in a round: those of the first complete round, and a host that comes later once its workers
  have something that was committed. A launcher that is started again on such a host counts as that host, also after a reboot. One that
  ends takes its host off the list: where all have done so, others begin. The state also says which hosts have what was committed last, so
  that launchers which were started since, and their workers, miss those that are absent.
- A job stays as large as its state. Where only the same number of ranks can load it, a worker says so (`gemini_ft.launch.notes`), the hosts
  write it into the rendezvous, and further hosts wait as spares.
- Hosts look more often than once a second, and never take an older look for the present state. In its log lines torch names the calling
  method; here that name comes from the frame alone.
- A host is dead when what it writes has not changed for as long by the reader's monotonic clock; no other host's clock counts. Half of that
  is enough if the agent that leads the commits hears nothing of it either, while hosts come together or once this one has left a complete
  round. Then that host's launcher writes so into the state. Where a host is lost and no worker fails, as the network says nothing, those
  that train begin anew as soon as there is a spare.
- A spare whose imports are not over leaves its turn to others.
"""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torch_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _Action

from gemini_ft.hosts import lasting_name
from gemini_ft.launch.health import NAMES, HostHealth, Stay
from gemini_ft.launch.notes import FIXED, LACKS, Notes
from gemini_ft.launch.replaced import replaced

logger = logging.getLogger(__name__)

# Attributes of torch's rendezvous state:
_HOSTS = "gemini_hosts"  # the number of hosts that the job's state is made for
_WORLD = "gemini_world"  # a random name of the complete round: copies of it in two stores are one world
_MEMBERS = "gemini_members"  # the names of the hosts that have taken part and may be at work
_LOST = "gemini_lost"  # host that its agent's peers have lost, too -> its last sign of life: with a newer one it lives
_KEPT = "gemini_kept"  # stream -> the hosts that have what was committed of it last, in the words of `gemini_ft.launch.notes`
_ASKING = 0.2  # seconds between two questions to the agent
_LONG = 0.1  # seconds: while an agent does not answer, this host gives no sign of life
_TELLING = 30.0  # seconds until the agent is told the same again
_REST = 5.0  # seconds until the next question to an agent that took long
_QUICKEST = 0.05  # seconds between two looks in the smallest job
_HOSTS_PER_SECOND = 100  # in a look every host reads the states of all: large jobs keep torch's pace
_YIELDING = 3  # times the patience of other spares
_GRACE = 1.0  # seconds a spare waits longer than the others take to look, for hosts of which no sign of life can be seen
_SETTLING = 2.0  # seconds for the other hosts to come to another store after this one has; no host counts as dead before
_STUCK = 10.0  # seconds after which hosts that go on without a lost one are called together by a spare, as torch does at once
_TRIES = 3  # to write that this host leaves: in large jobs others write all the time
_WRITE = None  # an action that torch's loop does not know: it writes the state, and no sign of life
_STEPS = (_Action.ADD_TO_PARTICIPANTS, _Action.MARK_RENDEZVOUS_COMPLETE, _Action.REMOVE_FROM_REDUNDANCY_LIST)


@dataclass(kw_only=True)
class LaunchingHost:
    """The facts that this host's launcher knows of itself."""

    patience: float  # seconds for which it leaves an open round to others, unless it belongs to the job
    notes: Notes  # of its workers
    name: str = field(default_factory=lasting_name)
    has_taken_part: bool = False  # in a world that began
    world: str | None = None  # of the last complete round that it found its place in
    size: int = 0  # hosts of that round
    needs: int = 0  # hosts without which nothing begins
    hosts: int = 0  # of the job, at most; 0: not known
    tell: Callable[[int, int], bool] = lambda waiting, lacking: True  # tells this host's agent (`TellSpares`); whether it has heard
    _told: tuple[int, int] | None = None  # None: it has not heard, and is told nothing before `_tells_from`
    _tells_from: float = 0.0  # when the agent is told the same again; it may have been started since
    health: HostHealth | None = None
    lacked: int = 0  # how often its workers had found that the state lacks absent hosts, when it wished to join last
    is_warm: Callable[[], bool] = lambda: True  # whether its workers can begin without waiting for imports
    prepare: Callable[[], None] = lambda: None  # starts what it has in reserve as a spare

    def report(self, state: Any) -> None:
        """Tells the agent how many hosts wait as spares, and how many the job lacks; of one host without spares there is nothing to say."""
        lacking = max(0, (getattr(state, _HOSTS, None) or self.needs) - len(state.participants))
        found = (len(state.redundancy_list & state.last_heartbeats.keys()), lacking)
        if self.hosts == 1 and not found[0] and self._told is None:
            return
        if time.monotonic() >= self._tells_from or (self._told is not None and found != self._told):
            is_heard = self.tell(*found)
            self._told = found if is_heard else None
            self._tells_from = time.monotonic() + (_TELLING if is_heard else _REST)


class PatientJoin:
    """Torch's decision what to do next in order to join, with a spare that waits its turn; one per wish to join."""

    def __init__(self, join: Callable[[Any, float], Any], host: LaunchingHost, clock: Callable[[], float] = time.monotonic) -> None:
        self._join, self._host, self._clock = join, host, clock
        self._seen: tuple[int, bool] | None = None  # round, and whether it was complete
        self._since = 0.0
        self._said = self._said_alone = self._said_warm = False
        lacks = host.notes.count(LACKS)
        self._yields, host.lacked = lacks > host.lacked, lacks  # to hosts that may have the state

    def __call__(self, ctx: Any, deadline: float) -> Any:
        if self._host.health is not None and (why := self._host.health.stays_away(ctx.state, ctx.node)) is not None:
            return _idle(ctx) if why is Stay.JUDGED else _WRITE
        if self._yields and ctx.node not in ctx.state.participants:
            setattr(ctx.state, NAMES, {node: name for node, name in getattr(ctx.state, NAMES, {}).items() if node != ctx.node})
        self._host.needs = ctx.settings.min_nodes
        self._host.report(ctx.state)
        if not self._said_warm and ctx.node in ctx.state.redundancy_list and self._host.is_warm():
            self._said_warm = True
            self._host.prepare()
            logger.warning("this host waits as a spare, and is ready for its turn")
        action = self._wanted(ctx, deadline)
        if action not in _STEPS:
            return action
        if not self._is_of_the_job(ctx.state):
            return _idle(ctx)
        if action != _Action.REMOVE_FROM_REDUNDANCY_LIST:
            self._sign(ctx, completes=action == _Action.MARK_RENDEZVOUS_COMPLETE)
        return action

    def _is_of_the_job(self, state: Any) -> bool:
        """Whether this host, or one that has a place in the round, has taken part in the job; at its beginning none has."""
        members = members_of(state)
        if not members or self._host.has_taken_part or self._host.name in members or _took_part(state, state.participants):
            return True
        if not self._said_alone:
            self._said_alone = True
            logger.warning(
                "none of the hosts that have taken part in this job can be seen: this one begins nothing without them, since they may be "
                "at work where it cannot see them. If they are lost for good, start the command everywhere with another --rdzv-id; a host "
                "that comes back under another hostname needs the GEMINI_HOST_ID it had"
            )
        return False

    def _sign(self, ctx: Any, completes: bool) -> None:
        """Writes this host's name beside its place, its workers' words, and all names as members if that completes the first round."""
        state, participants = ctx.state, {*ctx.state.participants, ctx.node}
        kept = _kept(state, self._host)  # before this round has a name
        known = {node: name for node, name in getattr(state, NAMES, {}).items() if node in state.last_heartbeats}
        names = known | {ctx.node: self._host.name}
        setattr(state, NAMES, names)
        members = members_of(state) | ({self._host.name} if self._host.has_taken_part else set())
        if completes or len(participants) >= ctx.settings.max_nodes:
            members = members or frozenset(names[node] for node in participants if node in names)
            setattr(state, _WORLD, uuid.uuid4().hex)
            setattr(state, _LOST, {})
        setattr(state, _MEMBERS, members)
        setattr(state, _KEPT, kept)

    def _wanted(self, ctx: Any, deadline: float) -> Any:
        """The next step, as if hosts that are not seen were dead."""
        state = ctx.state
        if (limit := getattr(state, _HOSTS, None)) and ctx.settings.min_nodes != ctx.settings.max_nodes:
            if (action := self._within(limit, ctx)) is not None:
                return action
            ctx = _narrowed(ctx, limit)
        if state.complete and ctx.node in state.wait_list and len(state.participants) >= ctx.settings.max_nodes:
            return _Action.REMOVE_FROM_WAIT_LIST  # it is not needed any more: torch's next decision makes it a spare
        action = self._join(ctx, deadline)
        if action == _Action.ADD_TO_WAIT_LIST and not self._host.is_warm():
            return _idle(ctx)  # the job would stop for it, and wait for its imports
        if action == _Action.FINISH:
            self._host.has_taken_part |= self._host.name in members_of(state)
            self._host.world, self._host.size = world_of(state), len(state.participants)
            self._host.notes.learn(getattr(state, _KEPT, {}))
        is_new = action == _Action.ADD_TO_PARTICIPANTS and state.round > 0 and (self._yields or not self._host.has_taken_part)
        if not (is_new or action == _Action.REMOVE_FROM_REDUNDANCY_LIST) or self._is_its_turn(ctx):
            return action
        return _idle(ctx)

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

    def _is_its_turn(self, ctx: Any) -> bool:
        """Whether the hosts of the job have had their time: to join an open round, or to leave a complete one."""
        state = ctx.state
        now = (state.round, state.complete)
        if now != self._seen:
            self._seen, self._since = now, self._clock()
        waited = self._clock() - self._since
        if state.complete:
            return waited >= _STUCK
        living = state.last_heartbeats.keys() - state.participants.keys() - state.redundancy_list - {ctx.node}
        missing = ctx.settings.max_nodes - len(state.participants) - len(_took_part(state, living))
        is_ready = not self._yields and self._host.is_warm()  # else others come first, if they are
        patience = self._host.patience * (1 if is_ready else _YIELDING)
        if ctx.settings.min_nodes < ctx.settings.max_nodes:  # the others begin without it when the last call is over
            patience = min(patience, ctx.settings.timeout.last_call.total_seconds() / 2)
        return missing > 0 and waited >= patience


def world_of(state: Any) -> str | None:
    """The name of the last round that was completed; None: there was none, or it has no name."""
    return getattr(state, _WORLD, None)


def is_left_out(state: Any, node: Any, world: str | None) -> bool:
    """Whether the job has formed another world than this host's, and without it: the hosts of that one did not see it."""
    return bool(state.complete) and node not in state.participants and world is not None and world_of(state) not in (None, world)


def has_lost_one(state: Any, node: Any, host: LaunchingHost) -> bool:
    """Whether a host of the round in which this one is at work is lost, and a spare can take its place.

    Never where the job is over, or one that has left its place lives: that one comes back by itself.
    """
    is_at_work = bool(state.complete) and not state.closed and node in state.participants and world_of(state) == host.world
    if not is_at_work or len(state.participants) >= host.size or not state.redundancy_list or state.wait_list:
        return False
    return not _took_part(state, state.last_heartbeats.keys() - state.participants.keys() - state.redundancy_list)


def _is_over(host: LaunchingHost, state: Any) -> bool:
    """Whether hosts come together: no round is complete, or this host has left its place in the one that is, and the others stop soon."""
    if not state.complete:
        return True
    names = getattr(state, NAMES, {})
    return host.world is not None and host.world == world_of(state) and host.name not in map(names.get, state.participants)


def members_of(state: Any) -> frozenset[str]:
    """The names of the hosts that have taken part in the job of a rendezvous, and have not said that they ended."""
    return frozenset(getattr(state, _MEMBERS, ()))


def take_part(state: Any, node: Any, host: LaunchingHost) -> bool:
    """Writes what this host's workers have said, and its name, into the state of a complete round; returns whether anything was new."""
    if not state.complete or node not in state.participants or host.world != world_of(state):
        return False
    before = getattr(state, _KEPT, {}), members_of(state)
    kept = _kept(state, host)
    members = before[1] | ({host.name} if host.notes.keeps() or not kept else set())
    host.has_taken_part |= host.name in members
    setattr(state, _KEPT, kept)
    setattr(state, _MEMBERS, members)
    return (kept, members) != before


def _kept(state: Any, host: LaunchingHost) -> dict[str, str]:
    """Stream -> hosts with what was committed last: by this host's words in the present world, else the state, else its older words."""
    newer = host.notes.said() if host.world == world_of(state) else {}
    return {**host.notes.kept(), **getattr(state, _KEPT, {}), **newer}


def has_left(state: Any, name: str) -> bool:
    """Takes a host off the list of those that have taken part, as its workers have ended; False: it is not on it."""
    members = members_of(state)
    setattr(state, _MEMBERS, members - {name})
    return name in members


def _took_part(state: Any, nodes: Iterable[Any]) -> list[Any]:
    """Selects the launchers whose hosts have taken part in a complete round."""
    names, members = getattr(state, NAMES, {}), members_of(state)
    return [node for node in nodes if names.get(node) in members]


def _idle(ctx: Any) -> Any:
    return _Action.KEEP_ALIVE if torch_rendezvous._should_keep_alive(ctx) else _Action.SYNC


def _narrowed(ctx: Any, hosts: int) -> Any:
    """The context as if the job had been started for exactly ``hosts`` hosts."""
    settings = copy(ctx.settings)
    for name in ("min_nodes", "max_nodes"):
        object.__setattr__(settings, name, hosts)
    return SimpleNamespace(node=ctx.node, state=ctx.state, settings=settings)


def nodes_waiting(original: Callable[[Any], int], host: LaunchingHost, handler: Any) -> int:
    """The number of hosts that torch's launcher restarts its workers for: none if their state cannot follow.

    One if this host was left out, or if another is lost and there is a spare: where the network says nothing of that, workers wait for it.
    """
    waiting = original(handler)
    if is_left_out(handler._state_holder.state, handler._this_node, host.world):
        logger.warning("the job goes on without this host, which was cut off: it stops its workers, and waits as a spare")
        return 1
    if has_lost_one(handler._state_holder.state, handler._this_node, host):
        logger.warning("a host of this job gives no sign of life: all begin anew with a spare in its place")
        return 1
    host.report(handler._state_holder.state)
    is_fixed = host.notes.have(FIXED)
    with handler._heartbeat_lock:
        holder = handler._state_holder
        for _ in range(_TRIES):
            state, is_news = holder.state, take_part(holder.state, handler._this_node, host)
            if is_fixed and state.complete and handler._this_node in state.participants and not hasattr(state, _HOSTS):
                setattr(state, _HOSTS, len(state.participants))
                is_news = True
            if host.health is not None and handler._this_node in state.participants:
                is_news |= host.health.at_work(state, handler._this_node, max(0, host.size - len(state.participants)))
            if is_news:
                holder.mark_dirty()
                if holder.sync() and host.health is not None:
                    host.health.written()
            if host.health is None or not host.health.leaves:
                break
    if not is_fixed:
        return waiting
    return 0 if len(state.participants) >= getattr(state, _HOSTS, 1) else waiting  # else one of its hosts has been lost


def by_own_clock(
    holder: Any, unheard: Callable[[], Collection[str]] = tuple, is_over: Callable[[Any], bool] = lambda state: not state.complete
) -> Any:
    """Torch's class that keeps the state of the rendezvous and drops hosts without a sign of life; this one asks no other host's clock.

    A host that has just left its place lives: its action has come before the state is marked.

    Args:
        holder: the class.
        unheard: the names of the hosts of which this host's agent hears nothing.
        is_over: tells whether the round of a state is no longer at work.
    """

    class Holder(holder):  # type: ignore[misc]
        _present: frozenset[Any] = frozenset()  # the participants before the present action
        _seen: Mapping[Any, tuple[datetime, float]] = {}  # host -> what it wrote last, and when that was first read here
        _asks_from = 0.0

        def _sanitize(self) -> None:
            now, said = time.monotonic(), self._state.last_heartbeats
            self._seen = {host: old if (old := self._seen.get(host)) and old[0] == beat else (beat, now) for host, beat in said.items()}
            present, settled = datetime.now(UTC), getattr(self._backend, "moved_at", 0.0) + _SETTLING
            ages = {host: now - max(since, settled) for host, (_, since) in self._seen.items()}
            most = (self._settings.keep_alive_interval * self._settings.keep_alive_max_attempt).total_seconds()
            self._ask({host for host, age in ages.items() if most / 2 < age <= most}, now)
            lost = getattr(self._state, _LOST, {})
            ages |= {host: most + 1 for host in ages if lost.get(host) == said[host]}
            self._state.last_heartbeats = {host: present - timedelta(seconds=age) for host, age in ages.items()}
            super()._sanitize()
            self._state.last_heartbeats = {host: said[host] for host in self._state.last_heartbeats}
            self._present = frozenset(self._state.participants)

        def _ask(self, silent: Collection[Any], now: float) -> None:
            """Has hosts marked as lost that are silent both here and to the agents, while hosts come together."""
            state = self._state
            if not is_over(state) or now < self._asks_from or not (missed := _took_part(state, silent)):
                return
            try:
                names = unheard()
            except Exception:  # whatever an agent of another release answers: a recovery goes on without it
                logger.debug("this host's agent could not be asked which hosts it has lost", exc_info=True)
                names = ()
            self._asks_from = now + (_REST if time.monotonic() - now > _LONG else _ASKING)
            if lost := {host: state.last_heartbeats[host] for host in missed if getattr(state, NAMES)[host] in names}:
                setattr(state, _LOST, getattr(state, _LOST, {}) | lost)
                super().mark_dirty()

        def mark_dirty(self) -> None:
            for host in self._present - self._state.participants.keys():
                self._state.last_heartbeats.setdefault(host, datetime.now(UTC))
            super().mark_dirty()

    return Holder


def _due(ctx: Any, seconds: float) -> bool:
    """Whether this host must show that it lives: ``seconds`` later, at its next look, it is late. So it is when its clock was set back."""
    said = ctx.state.last_heartbeats.get(ctx.node)
    return said is not None and abs(datetime.now(UTC) - said) >= ctx.settings.keep_alive_interval - timedelta(seconds=seconds)


def pause(hosts: int) -> float:
    """Seconds between two looks at the others' states, in a job of ``hosts`` hosts."""
    return min(1.0, _QUICKEST + hosts / _HOSTS_PER_SECOND)


@contextmanager
def better_rendezvous(
    hosts: int,
    notes: Notes,
    unheard: Callable[[], Collection[str]] = tuple,
    tell: Callable[[int, int], bool] = lambda waiting, lacking: True,
    health: HostHealth | None = None,
) -> Iterator[LaunchingHost]:
    """Inside, torch's launcher joins a job of ``hosts`` hosts in the way described above; gives the facts of this one.

    Torch has no settings for that, so its classes and its functions are replaced.

    Args:
        hosts: of the job, at most.
        notes: of this host's workers.
        unheard: the names of the hosts of which this host's agent hears nothing.
        tell: tells that agent how many hosts wait as spares, and how many the job lacks; returns whether it has heard.
        health: of this host.
    """
    theirs: Any = torch_rendezvous
    join, delay, state = theirs._RendezvousJoinOp, theirs._delay, theirs._BackendRendezvousStateHolder
    handler = torch_rendezvous.DynamicRendezvousHandler
    waiting, interval = handler.num_nodes_waiting, pause(hosts)
    this = LaunchingHost(patience=interval + _GRACE, notes=notes, hosts=hosts, tell=tell, health=health)
    changes = {
        "_RendezvousJoinOp": lambda: PatientJoin(join(), this),
        "_delay": lambda seconds: delay(interval if seconds == 1 else seconds),
        "_BackendRendezvousStateHolder": partial(by_own_clock(state, unheard, partial(_is_over, this)), cache_duration=interval / 2),
        "_should_keep_alive": partial(_due, seconds=interval),
        "get_method_name": lambda depth=2: sys._getframe(depth).f_code.co_name,
    }
    with replaced(torch_rendezvous, **changes), replaced(handler, num_nodes_waiting=lambda self: nodes_waiting(waiting, this, self)):
        yield this
