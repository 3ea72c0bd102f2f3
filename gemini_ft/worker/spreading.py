"""Fills the live state of all ranks from a snapshot. Collective, before the first step.

What every rank needs is read by one rank each and goes round in all-gathers of the default process group, so that a host sends and
receives the state about once, for any number of ranks; the rest, and what arrived damaged, each rank reads by itself. Process
groups protect nothing, so every part is sealed under a key that follows from the run secret, as payloads between agents are.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gemini_ft import accelerator
from gemini_ft.errors import CorruptDataError, PeerError
from gemini_ft.recovery.readers import ShardReaders
from gemini_ft.recovery.restore import StateRestore
from gemini_ft.recovery.spread import Landing, Outflow, SharedShard, owners_to_spread
from gemini_ft.state.base import TrainingState
from gemini_ft.torch_versions import all_gather_single
from gemini_ft.wire.lane import SLICE, TAG_BYTES, Seal, Unseal
from gemini_ft.wire.peer_messages import Description
from gemini_ft.wire.trust import derive
from gemini_ft.worker.rendezvous import exchange_or_raise, on_all_ranks
from gemini_ft.worker.session import WorkerSession

_READING_SECONDS = 600.0  # that reading the state may take beside the wait for a silent host
ROUND = 64 * 2**20  # bytes that an all-gather is to bring, of all ranks together
LEAST, MOST = 16 * 2**10, 8 * 2**20  # bytes of one rank in it
TRAILER = 64  # bytes behind each rank's part: whether it goes on, and the seal; as many as let no part begin in the middle of an element
_SALT_BYTES = 16


def fill(session: WorkerSession, state: TrainingState, extras: Mapping[int, Any]) -> tuple[dict[str, int], Any]:
    """Reads everything this rank needs into the tensors of ``state``. `TrainingState.apply_extras` is due when all ranks have done so.

    ``extras``: rank of the job that made the snapshot -> what it gave as extras; at least those this rank needs.

    Returns bytes read from each place (`StateRestore.restored`), and what to give to ``apply_extras``.

    Raises:
        LayoutMismatchError: the snapshot is of another model; the first differences are named.
        RecoveryError: a shard could not be read from anywhere.
        PeerError: a rank was lost, or did not go on in time.
    """
    limit = session.config.timeout + _READING_SECONDS
    with contextlib.closing(session.sources) as sources:
        accounts = _accounts(session, sources, limit)
        shards = {shard.owner: shard for account in accounts.values() if (shard := _shared(session, account.about)) is not None}
        layouts = {owner: shard.layout for owner, shard in shards.items()}

        def prepare() -> StateRestore:
            filling = StateRestore(sources, state, extras, session.rank, session.world_size, layouts)
            if not accounts:
                filling.read()
            return filling

        filling = on_all_ranks(prepare, limit)
        if accounts:
            spread = _Spread(session, sources, filling, shards, {rank: account.salt for rank, account in accounts.items()})
            with _allowing(limit):
                spread.carry_out(limit)
            on_all_ranks(spread.complete, limit)
            if spread.stopped:
                raise PeerError("a rank could not go on giving the others the state, and no rank says why; see the ranks' logs")
    return filling.restored, filling.own


@dataclass(frozen=True)
class _Account:
    """A rank's account of its shard, where that is spread, and the salt of the key for its seals: no two restores may have the same."""

    about: Description | None
    salt: bytes


def _accounts(session: WorkerSession, sources: ShardReaders, limit: float) -> dict[int, _Account]:
    """All ranks' accounts, if shards are spread; none where each rank reads for itself.

    The ranks' collectives do not encrypt: with ``encrypt`` state goes from agent to agent only.
    """
    plan, rank, world_size = session.plan, session.rank, session.world_size
    if session.config.encrypt or plan.world_size != world_size:
        return {}
    owners = owners_to_spread(plan, session.spec.hosts)
    if not owners:
        return {}

    def describe() -> _Account:
        everyone, about = tuple(range(world_size)), None
        if rank in owners:
            about = sources.read(rank, rank, lambda shard: shard.about if everyone in shard.layout.groups else None, keep=True)
        return _Account(about, secrets.token_bytes(_SALT_BYTES))

    accounts = exchange_or_raise(describe, limit)
    return dict(enumerate(accounts)) if any(account.about is not None for account in accounts) else {}


def _shared(session: WorkerSession, about: Description | None) -> SharedShard | None:
    """The shard by its owner's account; None, the same on all ranks: there is none, or a wrong one. Every rank reads it by itself."""
    if about is None:
        return None
    try:
        return SharedShard(about, session.plan.roots.get(about.owner), session.world_size)
    except CorruptDataError:
        return None


class _Spread:
    """The collectives of one restore, as one rank takes part in them.

    Every rank takes part until the last round, or the one in which some rank says that it cannot go on: all see that in the same round.
    That word is sealed as the blocks are: a forged one has no effect, and where a true one is suppressed, others wait as for a lost one.
    """

    def __init__(
        self,
        session: WorkerSession,
        sources: ShardReaders,
        filling: StateRestore,
        shards: Mapping[int, SharedShard],
        salts: Mapping[int, bytes],
    ) -> None:
        self._rank, self._sources, self._filling, self._shards = session.rank, sources, filling, shards
        longest = max((shard.nbytes for shard in shards.values()), default=0)
        self._block = -(-min(longest, MOST, max(LEAST, ROUND // session.world_size)) // 64) * 64
        self._rounds = -(-longest // self._block) if longest else 0
        self._rings = [_Ring(session.world_size, self._block) for _ in range(min(2, self._rounds))]
        others = {owner: shard for owner, shard in shards.items() if owner != self._rank and shard.covers(filling.reads.get(owner, ()))}
        self._landings = {owner: Landing(shard, filling.reads.get(owner, ()), filling.tensors) for owner, shard in others.items()}
        keys = {rank: derive(session.secret, b"spread %d " % rank + salt) for rank, salt in salts.items()}
        self._seal = Seal(keys.pop(self._rank))
        self._unseals = {rank: Unseal(key) for rank, key in keys.items()}
        self._outflow: Outflow | None = None
        self._failure: Exception | None = None
        self.stopped = False  # whether some rank could not go on

    def carry_out(self, limit: float) -> None:
        """Sends this rank's shard round and takes those of the others.

        Raises PeerError: a rank was lost, or did not go on within ``limit`` seconds.
        """
        if self._rank in self._shards and self._rings:
            blocks = [memoryview(bytearray(self._block)) for _ in range(2)]
            reads = self._filling.reads.get(self._rank, [])
            self._outflow = Outflow(self._sources, self._shards[self._rank], reads, self._filling.tensors, blocks)
        try:
            under_way: _Ring | None = None
            for number in range(self._rounds):
                ring = self._rings[number % 2]
                ring.send(self._next)
                if under_way is not None:
                    self._arrived(under_way, limit)
                under_way = ring
                if self.stopped:
                    break
            if under_way is not None:
                self._arrived(under_way, limit)
        finally:
            if self._outflow is not None:
                self._outflow.close()

    def complete(self) -> None:
        """Reads by itself what was not spread, or came damaged; says what had gone wrong, if anything had.

        Raises RecoveryError: this rank could not read its own shard.
        """
        outflow, done = self._outflow, set()
        if self._failure is not None:
            raise self._failure
        if outflow is not None and outflow.failure is not None:
            raise outflow.failure
        if self.stopped:
            return  # the rank that could not go on says why
        if outflow is not None and outflow.read is not None:
            self._filling.note(*outflow.read)
            done.add(self._rank)
        for owner, landing in self._landings.items():
            if landing.is_complete:
                self._filling.note("other ranks", landing.nbytes)
                done.add(owner)
        self._filling.read(without=done)

    def _next(self, part: _Part) -> None:
        """Fills this rank's part with its next block, if there is one."""
        goes_on = self._failure is None
        if goes_on and self._outflow is not None:
            block = self._outflow.next_block()
            if block is not None:
                part.block[:] = block
                self._outflow.give_back(block)
            goes_on = self._outflow.failure is None
        part.finish(goes_on, self._seal)

    def _arrived(self, ring: _Ring, limit: float) -> None:
        """Takes what a round has brought."""
        parts = ring.receive(limit)
        self.stopped = self.stopped or not ring.own.goes_on
        for rank, unseal in self._unseals.items():
            try:
                parts[rank].check(unseal, f"rank {rank}")
                self.stopped = self.stopped or not parts[rank].goes_on
                if rank in self._landings:
                    self._landings[rank].take(parts[rank].block)
            except (CorruptDataError, PeerError):
                self._landings.pop(rank, None)  # it is read from its holders
            except Exception as error:  # must not keep this rank from the rounds that the others are waiting in
                self._failure = error


class _Part:
    """One rank's part of a round: a block, whether the rank goes on, and the seal of both."""

    def __init__(self, memory: memoryview) -> None:
        self.block = memory[:-TRAILER]
        self._sealed, self._tag = memory[: 1 - TRAILER], memory[1 - TRAILER :][:TAG_BYTES]

    @property
    def goes_on(self) -> bool:
        """Whether the rank has more rounds in it."""
        return self._sealed[-1] == 0

    def finish(self, goes_on: bool, seal: Seal) -> None:
        """Makes it ready to go."""
        self._sealed[-1] = not goes_on
        self._show(seal)
        self._tag[:] = seal.close()

    def check(self, unseal: Unseal, peer: str) -> None:
        """Raises PeerError: it was changed on its way."""
        self._show(unseal)
        unseal.check(bytes(self._tag), peer)

    def _show(self, seal: Seal | Unseal) -> None:
        for at in range(0, len(self._sealed), SLICE):
            seal.add(self._sealed[at : at + SLICE])


class _Ring:
    """The memory of one all-gather, which the next but one finds free again."""

    def __init__(self, world_size: int, block: int) -> None:
        stride = block + TRAILER
        self._device = _device()
        cpu = self._device.type == "cpu"
        memory = bytearray(stride * (world_size + 1))  # what comes, and behind it what goes
        parts = [_Part(memoryview(memory)[at : at + stride]) for at in range(0, len(memory), stride)]
        self._parts, self.own = parts[:-1], parts[-1]
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        self._incoming, self._outgoing = everything[:-stride], everything[-stride:]
        self._there = self._incoming if cpu else torch.empty_like(self._incoming, device=self._device)
        self._sent = self._outgoing  # kept until the next round: the backend reads it
        self._work: Any = None

    def send(self, fill: Callable[[_Part], None]) -> None:
        """Lets ``fill`` write this rank's part, and sends it round."""
        fill(self.own)
        try:
            self._sent = self._outgoing.to(self._device)
            self._work = all_gather_single(self._there, self._sent, async_op=True)
        except RuntimeError as error:
            raise _lost(error) from error

    def receive(self, limit: float) -> list[_Part]:
        """Waits for the round to end; returns the parts by rank.

        Raises PeerError: a rank was lost, or took longer than ``limit`` seconds.
        """
        try:
            self._work.wait(timedelta(seconds=limit))
        except RuntimeError as error:
            raise _lost(error) from error
        if self._there is not self._incoming:
            self._incoming.copy_(self._there)
        return self._parts


def _device() -> torch.device:
    """The device whose backend carries the rounds."""
    return torch.device("cpu") if "cpu:" in dist.get_backend_config() else accelerator.current_device()


@contextlib.contextmanager
def _allowing(seconds: float) -> Iterator[None]:
    """Lets the default group's collectives wait this long for a rank that reads: the limit that the user has set is meant for steps."""
    group: Any = dist.group.WORLD
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(AttributeError, RuntimeError):  # a backend whose limit is not known
            backend = group._get_backend(_device())
            before: timedelta = backend.options._timeout
            backend._set_default_timeout(max(before, timedelta(seconds=seconds)))
            stack.callback(backend._set_default_timeout, before)
        yield


def _lost(error: RuntimeError) -> PeerError:
    return PeerError(f"another rank was lost, or did not go on, while the ranks gave each other the state; see the others' logs ({error})")
