"""Makes a round of torch's rendezvous count only once all its hosts have been heard in it.

Torch completes a round when enough hosts have come, and each of them then waits for the others' words in the store. Of a host that is lost
between the two, none comes: after the store's 60 s the launchers of all other hosts failed, and the job with them. Here hosts say
in the store that they have seen the round complete, look at the rendezvous while they wait for the others, and come together
anew as soon as one is missing there.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous import api as rendezvous_api
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from gemini_ft.launch.launched import LAUNCH
from gemini_ft.launch.replaced import replaced

logger = logging.getLogger(__name__)

_POLL = 0.02  # seconds
_RETRY = 0.5  # seconds, until a store that is lost is asked for once more
_HERE = "gemini/here"


class _BrokenRoundError(Exception):
    """A host was lost after the round was complete and before all had met in it."""


class LaunchName:
    """The name of the launch: of those that the first hosts have come with, one; hosts that come later take it over."""

    def __init__(self) -> None:
        self._name, self._agreed = os.environ.get(LAUNCH) or uuid.uuid4().hex, False

    @property
    def word(self) -> str:
        """The text put in the rendezvous store for the other hosts: ``own NAME`` or ``agreed NAME``."""
        return f"{'agreed' if self._agreed else 'own'} {self._name}"

    def agree(self, words: Sequence[str]) -> None:
        """``words``: of all hosts in the round, by their places."""
        self._name = min(words, key=lambda word: not word.startswith("agreed")).partition(" ")[2]
        self._agreed = True
        os.environ[LAUNCH] = self._name


@contextmanager
def whole_rounds() -> Iterator[None]:
    """Inside, torch's rendezvous returns from whole rounds only, and all hosts of a job have one name for its launch.

    The port of an attempt's store stays bound until the next attempt has one.
    """
    this, held = LaunchName(), ExitStack()
    handler = DynamicRendezvousHandler
    rendezvous, world, store, assign = handler.next_rendezvous, handler._get_world, handler._get_store, SimpleElasticAgent._rendezvous

    def next_whole(self: Any) -> Any:
        while True:
            try:
                return rendezvous(self)
            except _BrokenRoundError as error:
                logger.warning("the hosts begin a new rendezvous round: %s", error)
            except (RendezvousConnectionError, dist.DistError) as error:  # the store was lost, and may be elsewhere or come back
                if getattr(self._state_holder._backend, "is_given_up", True):
                    raise
                logger.warning("the hosts begin a new rendezvous round: %s", str(error).splitlines()[0])
                time.sleep(_RETRY)

    def whole_world(self: Any) -> tuple[int, int]:
        _places(self)
        found: tuple[int, int] = world(self)
        return found

    def assigned(self: Any, group: Any) -> Any:
        while True:
            try:
                return assign(self, group)
            except dist.DistError as error:  # a host, or the store, was lost right after all had met: its word is missing
                logger.warning("the hosts begin a new rendezvous round: %s", str(error).splitlines()[0])

    def held_port() -> int:
        held.close()
        place = held.enter_context(_bound())
        return int(place.getsockname()[1])

    changes = {"next_rendezvous": next_whole, "_get_world": whole_world, "_get_store": lambda self: _met(self, store(self), this)}
    with (
        held,
        replaced(handler, **changes),
        replaced(SimpleElasticAgent, _rendezvous=assigned),
        replaced(rendezvous_api, get_free_port=held_port),
    ):
        yield


def _bound() -> socket.socket:
    """A socket that keeps others away from a free port, and lets a store listen there, which takes the workers seconds to begin."""
    has_both = socket.has_dualstack_ipv6()
    place = socket.socket(socket.AF_INET6 if has_both else socket.AF_INET)
    if has_both:
        place.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind(("", 0))
    return place


def _places(handler: Any) -> tuple[int, dict[Any, int]]:
    """The round that this host is in, and the place of each host in it."""
    state = handler._state_holder.state
    places: dict[Any, int] = dict(state.participants)
    if not state.complete or handler._this_node not in places:
        raise _BrokenRoundError("this host was not heard for a while, and has lost its place")
    if sorted(places.values()) != list(range(len(places))):
        raise _BrokenRoundError("a host was lost before all had met")
    return state.round, places


def _met(handler: Any, store: Any, this: LaunchName) -> Any:
    """The round's store, once every host of the round has announced itself there, and its launch."""
    begun = _places(handler)
    number, size = begun[1][handler._this_node], len(begun[1])
    store.set(f"{_HERE}/{size}/{number}", this.word)
    until = time.monotonic() + handler._settings.timeout.join.total_seconds()
    while not store.check([f"{_HERE}/{size}/{other}" for other in range(size)]):
        with handler._heartbeat_lock:
            handler._state_holder.sync()
            now = _places(handler)
        if now != begun:
            raise _BrokenRoundError("a host was lost before all had met")
        if time.monotonic() > until:
            raise RendezvousTimeoutError("some hosts have taken a place in the round and never came to it; see their launchers' output")
        time.sleep(_POLL)
    this.agree([store.get(f"{_HERE}/{size}/{other}").decode() for other in range(size)])
    return store
