"""A worker's connection to a switch, or to several that have a part of the slots each. Sockets and clock of one rank."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from . import switch_packets as packet
from .switch_worker import TensorStream, Worker

MOST_ROUNDS = 2**31  # of a job's slot: a packet has 32 bits for their number, and a nonce must never come again
_ASK_AGAIN = 0.1  # seconds between control messages that are not answered
_TICK = 0.005  # seconds between looks at the timers
_FRESH = 30.0  # seconds for which a switch's answer is believed; its cookie is good for longer


class SwitchSilentError(Exception):
    """A switch does not answer; the text says which, and what is known."""


class SwitchRefusedError(Exception):
    """A switch does not take the job; the text says why."""


@dataclass(frozen=True, kw_only=True)
class SwitchTerms:
    """The demands of a job on a switch; the same on all ranks."""

    adder: str
    largest: bool  # whether the side word of a sum is the largest of those given, else the smallest
    slots: int  # of all parts together
    nbytes: int  # of a packet's values
    patience: float  # seconds without any progress after which the switch counts as silent


class _SwitchShare:
    """One of the switches."""

    def __init__(self, place: str, envelope: packet.Envelope) -> None:
        self.place = place
        host, _, port = place.rpartition(":")
        try:
            [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        except (OSError, ValueError) as error:
            raise SwitchSilentError(f"switch {place!r}: {error}; give host:port") from None
        with contextlib.ExitStack() as undo:
            try:
                plain = undo.enter_context(socket.socket(family, kind, protocol))
                plain.connect(address)
            except OSError as error:
                raise SwitchSilentError(f"switch {place}: {error}") from None
            undo.pop_all()
        self.socket = packet.Datagrams(plain)
        self._welcome: tuple[float, packet.SwitchWelcome] | None = None
        self.key: AESGCM | None = None
        self._envelope = envelope

    @property
    def welcome(self) -> packet.SwitchWelcome | None:
        """The switch's answer to a hello, if it is recent."""
        return self._welcome[1] if self._welcome is not None and time.monotonic() - self._welcome[0] < _FRESH else None

    def say(self, message: packet.Message) -> None:
        with contextlib.suppress(OSError):  # told at the next one
            self.socket.socket.send(self._envelope.seal(message))

    def answers(self) -> Iterable[packet.Message]:
        """Control messages that have come, but for a welcome, which is kept; all else is dropped."""
        while True:
            try:
                received = self.socket.receive()
            except OSError:  # nobody listens, or there is no way
                continue
            if not received:
                return
            for array, _ in received:
                for datagram in array:
                    message = self._envelope.open(bytes(datagram))
                    if isinstance(message, packet.SwitchWelcome):
                        self._welcome = time.monotonic(), message
                    elif message is not None:
                        yield message


class Client:
    """One rank's side of one job.

    ``places``: host:port of each switch, in the order of their parts.

    Raises SwitchSilentError: a name cannot be resolved, there is no way there, or this process can have no socket.
    """

    def __init__(self, places: Sequence[str], key: bytes, rank: int, world: int, terms: SwitchTerms) -> None:
        self._rank, self._world, self._terms, self._key = rank, world, terms, key
        self.parts: list[_SwitchShare] = []
        self._job: str | None = None
        self._slots_each = -(-terms.slots // len(places))
        self.slots = self._slots_each * len(places)
        self._worker = Worker(self.slots, terms.nbytes, len(places))
        envelope = packet.Envelope(key)
        try:
            for place in places:
                self.parts.append(_SwitchShare(place, envelope))
        except SwitchSilentError:
            self.close()
            raise

    @property
    def sent_again(self) -> int:
        """Packets that were sent more than once."""
        return self._worker.sent_again

    @property
    def spent(self) -> bool:
        """Whether the job has had so many rounds that it should end; the same on all ranks between two tensors."""
        return self._worker.rounds >= MOST_ROUNDS

    def reaches(self, seconds: float) -> str | None:
        """Says hello to all switches and waits for their answers at most so long; returns which does not answer, or None.

        With 0 seconds the answers are those to an earlier hello.
        """
        return self._silent(self._until(seconds, lambda part: packet.SwitchHello() if part.welcome is None else None))

    def join(self, job: str, seconds: float) -> None:
        """Joins a job, after `reaches`.

        Raises SwitchSilentError: a switch did not answer in time. SwitchRefusedError: a switch cannot take the job.
        """
        refused: list[str] = []
        welcomes = {part: part.welcome for part in self.parts}

        def ask(part: _SwitchShare) -> packet.Message | None:
            if part.key is not None or refused:
                return None
            if (welcome := welcomes[part]) is None:
                return packet.SwitchHello()
            terms = self._terms
            return packet.Join(
                cookie=welcome.cookie,
                job=job,
                rank=self._rank,
                world=self._world,
                adder=terms.adder,
                largest=terms.largest,
                slots=self._slots_each,
                nbytes=terms.nbytes,
            )

        def hear(part: _SwitchShare, message: packet.Message) -> None:
            if isinstance(message, packet.SwitchRefused) and message.job == job:
                refused.append(f"switch {part.place}: {message.reason}")
            elif isinstance(message, packet.Joined) and (message.job, message.rank) == (job, self._rank) and (welcome := welcomes[part]):
                part.key = packet.job_key(self._key, welcome.boot, job)

        for number, (part, welcome) in enumerate(welcomes.items()):
            if welcome is not None and (welcome.part, welcome.parts) != (number, len(self.parts)):
                has = f"{welcome.part + 1}/{welcome.parts}"
                raise SwitchRefusedError(f"switch {part.place} has part {has}, and is given as {number + 1}/{len(self.parts)}: see --part")
        self._job = job
        left = self._until(seconds, ask, hear)
        if refused:
            raise SwitchRefusedError(refused[0])
        if (silent := self._silent(left)) is not None:
            raise SwitchSilentError(silent)

    def run(self, stream: TensorStream) -> None:
        """Takes one tensor through the switch; all ranks of the job must.

        Raises SwitchSilentError: nothing came for ``patience`` seconds. The job is over: what was given cannot be taken back.
        """
        now = heard = looked = time.monotonic()
        try:
            self._send(self._worker.start(stream, now))
            while not self._worker.done:
                progress = self._receive()
                now = time.monotonic()
                if progress:
                    heard = now
                if now - looked >= _TICK:
                    looked = now
                    self._send(self._worker.tick(now))
                if now - heard > self._terms.patience:
                    raise SwitchSilentError(f"no sums came for {self._terms.patience:g} s from switch {self._named()}")
                if not progress:
                    packet.await_any([part.socket for part in self.parts], _TICK)
        except OSError as error:
            raise SwitchSilentError(f"switch {self._named()}: {error.strerror}") from None

    def close(self) -> None:
        for part in self.parts:
            if self._job is not None:
                part.say(packet.SwitchLeave(job=self._job))
            part.socket.close()

    def _receive(self) -> bool:
        """Takes what has come; returns whether any of it was new."""
        before, given = self._worker.completed, list[packet.Packets]()
        for number, part in enumerate(self.parts):
            assert part.key is not None
            for array, _ in part.socket.receive():
                sums, _ = packet.decode(array, packet.SUMMED, packet.SWITCH, number, part.key)
                if sums.values is None or sums.values.shape[1] == self._terms.nbytes:
                    whole = packet.Packets(
                        slots=sums.slots * len(self.parts) + number, rounds=sums.rounds, sides=sums.sides, values=sums.values
                    )
                    given += self._worker.take(whole, time.monotonic())
        self._send(packet.Packets.join(given))
        return self._worker.completed > before

    def _send(self, given: Iterable[packet.Packets]) -> None:
        for each in given:
            for number, part in enumerate(self.parts):
                assert part.key is not None
                own = each if len(self.parts) == 1 else each.pick(each.slots % len(self.parts) == number)
                if len(own):
                    local = packet.Packets(slots=own.slots // len(self.parts), rounds=own.rounds, sides=own.sides, values=own.values)
                    part.socket.send(packet.encode(local, packet.GIVEN, self._rank, number, part.key))

    def _until(
        self,
        seconds: float,
        ask: Callable[[_SwitchShare], packet.Message | None],
        hear: Callable[[_SwitchShare, packet.Message], None] = lambda part, message: None,
    ) -> list[_SwitchShare]:
        """Asks all parts again and again until there is nothing to ask (None), or for so long; returns those with an answer to come."""
        end = time.monotonic() + seconds
        while True:
            for part in self.parts:
                for message in part.answers():
                    hear(part, message)
            left = [(part, question) for part in self.parts if (question := ask(part)) is not None]
            for part, question in left:
                part.say(question)
            wait = min(_ASK_AGAIN, end - time.monotonic())
            if not left or wait <= 0:
                return [part for part, _ in left]
            packet.await_any([part.socket for part, _ in left], wait)

    @staticmethod
    def _silent(left: Sequence[_SwitchShare]) -> str | None:
        places = ", ".join(part.place for part in left)
        return f"switch {places} does not answer (is it running, and has it the same secret?)" if left else None

    def _named(self) -> str:
        return ", ".join(part.place for part in self.parts)
