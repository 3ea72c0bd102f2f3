"""A rendezvous that outlives its store: launchers know several places for one, and go on at another, or at one that came back empty.

Every launcher reads the whole state of torch's c10d rendezvous about once a second. So one that loses the store finds another, and writes
there what it has seen last, unless one of the others has done so (docs/decisions/023). Workers have stores of their own and notice nothing.
While no store can be reached, they go on training, and a launcher waits only where it needs the others: to begin, and after a failure.

``--rdzv-endpoint A:29400,B:29400``: the hosts that A and B name serve a store each. Every change of the store counts a generation up,
which the new one keeps. Of several that are alive that of the highest generation counts, and among equals the first in the order of the
endpoints. A launcher that does not find the others where it is looks for that one.

A network that falls apart leaves a store on each side. A host that has never taken part in the job carries no rendezvous to another
store. At the first start no host has taken part, and every store is asked before one is used. Where hosts that took part are on both
sides, both may go on; as soon as they can see each other, one of them ends.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters, c10d_rendezvous_backend
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from gemini_ft.hosts import lasting_name
from gemini_ft.launch.replaced import replaced
from gemini_ft.launch.spares import has_left, members_of, world_of
from gemini_ft.ordered import on_thread

_log = logging.getLogger(__name__)
T = TypeVar("T")
S = TypeVar("S", bound="tuple[Any, ...] | None")

_GENERATION = "gemini.generation."  # and the rendezvous' id: key of a store's generation
_REACH_SECONDS = 2.0  # for a connection to a store
_REACH = timedelta(seconds=_REACH_SECONDS)
ANSWER_SECONDS = 5.0  # for its answer: torch would wait for minutes where a host is cut off
_READ_SECONDS = 60  # torch's own default, for what the launchers exchange in a round
LOOK_SECONDS = 5.0  # between two looks for a better store, in a round that is not complete
_RETRY_SECONDS = 0.5
PROBE_SECONDS = 4.0  # for all stores to be found; one that is not is left to the next look
_NAMING_SECONDS = 40.0  # for a connection by torch, where it waits for three name servers in turn
_SAID_SECONDS = 10.0  # after which a launcher says for what it waits
_THREAD = "gemini-store"  # the name of threads that torch's code may keep
_PARTING_SECONDS = 2.0  # for which a store is served after the end, so that others, which look once a second, learn of it


@dataclass(frozen=True, kw_only=True)
class ReachedStore:
    """A store that could be reached."""

    generation: int  # -1: it has not been used
    number: int  # of its endpoint
    store: TCPStore

    @property
    def rank(self) -> tuple[int, int]:
        """The greater, the better."""
        return self.generation, -self.number


_Probes = dict[int, tuple[float, Future[ReachedStore]]]  # of an endpoint: when it began (monotonic clock), and what comes of it


class OvertakenError(SignalException):
    """Another part of this job goes on, and this one ends: the others' rendezvous stays open, as after a signal."""

    def __init__(self, message: str) -> None:
        super().__init__(message, signal.SIGTERM)


class Standby:
    """The state of a rendezvous, as torch's `C10dRendezvousBackend` keeps it, in whichever store is there.

    Args:
        run: the rendezvous' id.
        endpoints: (host, port) in the order of preference, the same on all hosts.
        patience: seconds to wait for the first store.
        read_seconds: for what the launchers exchange by way of a store, beside the state.

    Raises RendezvousConnectionError: there was none in that time.

    Attributes:
        endpoints: as given.
        store: the present one.
        moved_at: when this launcher came to it, in seconds of the monotonic clock; 0: it is the first one.
        patience: seconds to look for another store where it is needed.
        overtaken: why this part of the job has to end; empty: it does not.
    """

    name = "c10d"

    def __init__(self, run: str, endpoints: Sequence[tuple[str, int]], patience: float, read_seconds: int = _READ_SECONDS) -> None:
        self._run, self.endpoints, self._read_seconds = run, endpoints, read_seconds
        self._generation = 0
        self._last: bytes | None = None  # the state as it was read or written last
        self._looked_at = self._answered_at = time.monotonic()
        self._said = False
        self.moved_at, self.patience, self.overtaken = 0.0, patience, ""
        self._number = 0
        self._probes: _Probes = {}
        self._probes_beside: _Probes = {}  # of `look_beside`, which may be under way when a store is lost
        self._beside = threading.Thread()
        self._beats: dict[int, dict[Any, Any]] = {}  # of the hosts that were seen at another store, by its endpoint
        self._begin(patience)

    def _begin(self, patience: float) -> None:
        """Goes to the first store: one that is in use, or the first in order, once all have said that they are not."""
        begun, known = time.monotonic(), dict[int, ReachedStore]()
        while True:
            places = self._places(self._probes, min(PROBE_SECONDS, max(patience, _REACH_SECONDS)))
            known |= {place.number: place for place in places}
            best = max(known.values(), key=lambda place: place.rank, default=None)
            if best is not None and (best.generation >= 0 or len(known) == len(self.endpoints)):
                try:
                    return self._move(best)
                except RendezvousConnectionError:  # it was there when it was asked
                    known.clear()
                    self._generation = 0  # the next one must not be raised to that store's
            waited, silent = time.monotonic() - begun, self._named(known)
            if waited > patience:
                why = ". The job may be at work there; leave out of --rdzv-endpoint, on all hosts, a store that is gone" if known else ""
                raise RendezvousConnectionError(f"no store can be reached at {silent} within {patience:g} s{why}")
            if waited > _SAID_SECONDS and not self._said:
                self._said = True
                _log.warning("waiting for the store of the rendezvous at %s, for %g s at most (join_timeout)", silent, patience)
            time.sleep(_RETRY_SECONDS)

    # -- torch's RendezvousBackend

    def get_state(self) -> tuple[bytes, Any] | None:
        """The state and a token for it; None: there is none."""
        if len(self.endpoints) > 1 and time.monotonic() - self._looked_at > LOOK_SECONDS:
            if self._last is None or not pickle.loads(self._last).complete:
                self._look()  # the hosts have not met: perhaps they are elsewhere
            elif not self._beside.is_alive():
                self._looked_at = time.monotonic()
                self._beside = threading.Thread(target=self.look_beside, name="gemini-stores", daemon=True)
                self._beside.start()
        return self._ask(lambda backend: backend.get_state())

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Writes the state if it is still that of the token; returns what is there now, and whether it is ours."""
        return self._ask(lambda backend: backend.set_state(state, token))

    def sign_off(self) -> None:
        """Says that this host is at work no longer, unless the store is out of reach: without it others may begin."""
        with contextlib.suppress(RendezvousConnectionError):
            while (found := _within(_PARTING_SECONDS, self._backend.get_state)) is not None and has_left(
                state := pickle.loads(found[0]), lasting_name()
            ):
                said = _within(_PARTING_SECONDS, partial(self._backend.set_state, pickle.dumps(state), found[1]))
                if said is None or said[2]:
                    break

    # -- inside

    @property
    def is_closed(self) -> bool:
        """Whether the job was over when this launcher looked last."""
        return self._last is not None and _progress(self._last)[0]

    @property
    def is_given_up(self) -> bool:
        """Whether no store has been there for so long that a launcher which needs one had better end."""
        return time.monotonic() - self._answered_at > self.patience

    def _ask(self, question: Callable[[C10dRendezvousBackend], S]) -> S:
        try:
            answer = _within(ANSWER_SECONDS, lambda: question(self._backend))
        except RendezvousConnectionError:
            self._take_over()
            answer = _within(ANSWER_SECONDS, lambda: question(self._backend))
        self._answered_at = time.monotonic()
        self._last = answer[0] if answer is not None else self._last
        return answer

    def _take_over(self) -> None:
        """Finds another store, and continues there what is not continued yet."""
        places = self._places(self._probes)
        if not places:
            if not self._said:
                self._said = True
                _log.warning("the store of the rendezvous is lost (%s); the workers go on, and it is looked for", self._named())
            raise RendezvousConnectionError(f"the store of the rendezvous cannot be reached at {self._named()}")
        _log.warning("the store of the rendezvous was lost; it goes on at %s:%d", *self.endpoints[places[0].number])
        self._move(places[0], takes_over=True)

    def _look(self) -> None:
        """Goes to the store at which the job is at work, or else to a better one than the present one, if there is one."""
        self._looked_at = time.monotonic()
        places = self._places(self._probes)
        at_work = [place for place in places if place.number != self._number and self._is_at_work(place)]
        better = [place for place in places[:1] if place.rank > (self._generation, -self._number)]
        for place in (at_work or better)[:1]:
            _log.warning("the others may be at %s:%d; the rendezvous goes on there", *self.endpoints[place.number])
            self._move(place, joins=bool(at_work))

    def _is_at_work(self, place: ReachedStore) -> bool:
        """Whether a world trains by way of another store: its round is complete, and its hosts live."""
        try:
            theirs = self._state_of(place)
        except RendezvousConnectionError:  # it was there just now
            return False
        return theirs is not None and theirs.complete and self._lives(place, theirs, theirs.participants)

    def look_beside(self) -> None:
        """Looks whether another store serves a rendezvous of this run that is complete, alive, and has come further than this one."""
        with contextlib.suppress(RendezvousConnectionError):
            for place in self._places(self._probes_beside):
                theirs = self._state_of(place) if place.number != self._number else None
                if theirs is not None and self._last is not None:
                    self._meet(place, theirs, pickle.loads(self._last))

    def _state_of(self, place: ReachedStore) -> Any:
        """The state of the rendezvous in another store; None: there is none."""
        found = _within(ANSWER_SECONDS, partial(state_at, place.store, self._run))
        return pickle.loads(found) if found is not None else None

    def _meet(self, place: ReachedStore, theirs: Any, ours: Any) -> None:
        if world_of(theirs) == world_of(ours):
            return  # copies of one round, from before hosts lost sight of each other
        is_alive = self._lives(place, theirs, theirs.participants.keys() - ours.participants.keys())
        if theirs.complete and is_alive and (theirs.round, -place.number) > (ours.round, -self._number):
            self.overtaken = (
                f"another part of this job goes on by way of the store at {self.endpoints[place.number][0]}:"
                f"{self.endpoints[place.number][1]}, in round {theirs.round} of the rendezvous; this one, in round {ours.round}, ends"
            )

    def _lives(self, place: ReachedStore, theirs: Any, nodes: Collection[Any]) -> bool:
        """Whether one of these hosts has given a sign of life at another store since it was looked at last."""
        beats = {node: beat for node, beat in theirs.last_heartbeats.items() if node in nodes}
        before, self._beats[place.number] = self._beats.get(place.number, {}), beats
        return any(before.get(node, beat) != beat for node, beat in beats.items())

    def _move(self, place: ReachedStore, takes_over: bool = False, joins: bool = False) -> None:
        """Makes a store the present one; if it is behind what this launcher has seen, lets it catch up, unless it joins a world there.

        A host that has not taken part writes only where nothing is, and makes no store better than it is by that.
        """
        key, is_first = _GENERATION + self._run, self._last is None
        members = members_of(pickle.loads(self._last)) if self._last is not None else frozenset()
        is_member = not members or lasting_name() in members  # of the job, as far as it is known which hosts are
        is_behind = place.generation < self._generation
        if takes_over and place.number != self._number:
            is_behind |= place.generation == self._generation  # hosts that have not taken part have been there before
        if place.generation < 0 or (is_behind and is_member):
            wanted = str(self._generation if is_first or not is_member else self._generation + 1)
            before = "" if place.generation < 0 else str(place.generation)
            self._generation = int(_within(ANSWER_SECONDS, lambda: place.store.compare_set(key, before, wanted)))
        else:
            self._generation = place.generation
        self._backend: Any = _within(ANSWER_SECONDS, lambda: C10dRendezvousBackend(place.store, self._run))
        self.store, self._number, self._said = place.store, place.number, False
        while self._last is not None and not joins:
            there = _within(ANSWER_SECONDS, self._backend.get_state)
            if there is not None and (not is_member or _progress(there[0]) >= _progress(self._last)):
                break
            _within(ANSWER_SECONDS, partial(self._backend.set_state, self._last, there[1] if there is not None else None))
        if not is_first:
            self.moved_at = time.monotonic()

    def _places(self, probes: _Probes, seconds: float = PROBE_SECONDS) -> list[ReachedStore]:
        """The stores that can be reached, the best one first. One found later counts in the next look, which does not ask it anew."""
        for number in range(len(self.endpoints)):
            if number not in probes:
                probes[number] = time.monotonic(), on_thread(partial(self._probe, number), _THREAD)
        for begun, probe in probes.values():
            wait([probe], max(0.0, begun + seconds - time.monotonic()))
        ended = [probes.pop(number)[1] for number, (_, probe) in list(probes.items()) if probe.done()]
        found = [probe.result() for probe in ended if probe.exception() is None]
        return sorted(found, key=lambda place: place.rank, reverse=True)

    def _probe(self, number: int) -> ReachedStore:
        """Finds a store; a name server may keep this waiting, which torch asks for the name of whoever it has connected to as well."""
        host, port = self.endpoints[number]
        socket.create_connection((host, port), _REACH_SECONDS).close()  # torch would try again where the port is closed
        store = _within(_NAMING_SECONDS, partial(TCPStore, host, port, is_master=False, timeout=_REACH))
        store.set_timeout(timedelta(seconds=self._read_seconds))
        said = _within(ANSWER_SECONDS, partial(store.compare_set, _GENERATION + self._run, "?", "?"))
        return ReachedStore(generation=int(said) if said.lstrip(b"-").isdigit() else -1, number=number, store=store)

    def _named(self, without: Collection[int] = ()) -> str:
        return ", ".join(f"{host}:{port}" for number, (host, port) in enumerate(self.endpoints) if number not in without)


def state_at(store: TCPStore, run: str) -> bytes | None:
    found = C10dRendezvousBackend(store, run).get_state()
    return found[0] if found is not None else None


def _progress(state: bytes) -> tuple[bool, int, bool]:
    found = pickle.loads(state)  # torch loads it in the same way
    return found.closed, found.round, found.complete


def _within(seconds: float, call: Callable[[], T]) -> T:
    """The call's result. Raises RendezvousConnectionError: it has failed, or takes longer; its thread is given up."""
    outcome = on_thread(call, _THREAD)
    cause = outcome.exception() if wait([outcome], seconds).done else TimeoutError(f"no answer within {seconds:g} s")
    if cause is not None:
        raise RendezvousConnectionError(f"the connection to the store of the rendezvous has failed: {cause}") from cause
    return outcome.result()


def has_given_up() -> bool:
    """Whether a thread of this process still waits in torch's code, for a store that does not answer."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


def _is_here(host: str) -> bool:
    """Whether a name is this machine's; a name server that does not answer is not waited for."""
    try:
        return _within(PROBE_SECONDS, partial(_matches_machine_hostname, host))
    except RendezvousConnectionError:
        return False


def _served(endpoints: Sequence[tuple[str, int]], is_host: bool | None) -> list[TCPStore]:
    """The stores that this process serves: at the endpoints that name this host, unless the user says whether it is one."""
    found = []
    for host, port in endpoints:
        if is_host if is_host is not None and len(endpoints) == 1 else is_host is not False and _is_here(host):
            try:
                found.append(TCPStore(host, port, is_master=True, multi_tenant=True, wait_for_workers=False))
            except RuntimeError as error:  # another launcher of this host serves it, as torch supposes as well
                if is_host:
                    raise RendezvousConnectionError(f"no store can be served at {host}:{port}: {error}") from error
    return found


@contextmanager
def surviving_stores() -> Iterator[None]:
    """Inside, torch's c10d rendezvous takes several endpoints, separated by commas, and survives the loss of its store."""
    create, handler = c10d_rendezvous_backend.create_backend, DynamicRendezvousHandler
    get_store, waiting = handler._get_store, handler.num_nodes_waiting
    served: list[TCPStore] = []
    backends: list[Standby] = []

    def create_surviving(params: RendezvousParameters) -> tuple[Any, Any]:
        if params.get("store_type", "tcp").strip().lower() != "tcp":
            return create(params)
        endpoints = [parse_rendezvous_endpoint(one, DEFAULT_PORT) for one in params.endpoint.split(",")]
        if len(endpoints) == 1 and endpoints[0][1] == 0:  # a job of one host, with a port that nobody else has to know
            return create(params)
        served.extend(_served(endpoints, params.get_as_bool("is_host")))
        joining = params.get_as_int("join_timeout", 600) or 600
        backend = Standby(params.run_id, endpoints, joining, params.get_as_int("read_timeout", _READ_SECONDS) or _READ_SECONDS)
        backend.patience = params.get_as_int("store_timeout", joining) or joining
        backends.append(backend)
        return backend, backend.store

    def present_store(self: Any) -> Any:
        if isinstance(backend := self._state_holder._backend, Standby):
            self._store = backend.store
        return get_store(self)

    def waiting_if_known(self: Any) -> int:
        if why := getattr(self._state_holder._backend, "overtaken", ""):
            raise OvertakenError(why)
        try:
            return waiting(self)
        except RendezvousConnectionError:
            return 0  # as long as the workers are well, they need no rendezvous

    try:
        with (
            replaced(c10d_rendezvous_backend, create_backend=create_surviving),
            replaced(handler, _get_store=present_store, num_nodes_waiting=waiting_if_known),
        ):
            yield
    finally:
        for backend in backends:
            if not backend.is_closed:
                backend.sign_off()
        if served:
            time.sleep(_PARTING_SECONDS)
        served.clear()
