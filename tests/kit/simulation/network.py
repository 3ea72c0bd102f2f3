"""Connections between hosts in memory: links with latency that are cut in one direction or both, stall and reset.

`handshake.dial`, `Connection` and everything above are the package's own. In place of TLS the two ends compare secrets; in place of a
lane's thread and socket its orders are carried out on the loop as their bytes come.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from gemini_ft.agent import streams
from gemini_ft.recovery import readers
from gemini_ft.wire import handshake
from gemini_ft.wire.handshake import Accept, Encrypt, Listener
from gemini_ft.wire.lane import ID_BYTES
from gemini_ft.wire.lane_thread import LaneThread
from gemini_ft.wire.tcp import Address, Connection
from simulation.lanes import FakeSocket, SimulatedLane
from simulation.loop import PROCESS, Handle, Process, SimulatedLoop
from simulation.wire import SimulatedWire

SILENCE = 60.0  # simulated seconds after which the kernel gives a peer up: TCP_USER_TIMEOUT and keep-alives
_RST = b""


class Network:
    """All links; the time that a frame takes is drawn for each, and the order of frames on one connection stays."""

    def __init__(self, loop: SimulatedLoop, rng: Random, latency: float) -> None:
        self.loop, self.rng, self.latency = loop, rng, latency
        self.listeners: dict[Address, SimulatedListener] = {}
        self.cut: dict[tuple[str, str], int] = {}  # (from, to) -> how many faults cut it
        self.cut_at: dict[tuple[str, str], float] = {}  # (from, to) -> when the present cut began
        self.held: dict[tuple[str, str], list[End]] = {}  # ends whose bytes wait until a link lets them through
        self.dark: set[str] = set()  # hosts without power
        self.slow: dict[str, float] = {}  # host -> factor of all latencies
        self.garbling = 0  # payloads of which a bit flips on their way
        self.descheduling = rng.choice([0.0, 0.02, 0.1])  # probability that a lane's thread does not run
        self.ends: dict[int, End] = {}
        self.numbers = itertools.count(1)
        self.ports = itertools.count(20_000)

    def delay(self, near: str, far: str) -> float:
        factor = max(self.slow.get(near, 1.0), self.slow.get(far, 1.0))
        return factor * self.latency * (0.5 + self.rng.expovariate(2.0))

    @property
    def is_sound(self) -> bool:
        """Whether nothing is cut."""
        return not any(self.cut.values())

    def is_cut(self, near: str, far: str) -> bool:
        return bool(self.cut.get((near, far)))

    def reaches(self, near: str, far: str) -> bool:
        """Whether there is a way there and back."""
        return not self.is_cut(near, far) and not self.is_cut(far, near)

    def block(self, near: str, far: str, seconds: float) -> None:
        """Lets nothing through in one direction for so long."""
        if not self.is_cut(near, far):
            self.cut_at[near, far] = self.loop.time()
        self.cut[near, far] = self.cut.get((near, far), 0) + 1
        at = self.loop.time() + seconds
        self.loop.outside(at, self._heal, near, far)
        if seconds > SILENCE:
            crossing = [end for end in self.ends.values() if {end.host, end.far.host} == {near, far}]
            self.loop.outside(self.loop.time() + SILENCE, self._give_up, crossing)

    def _heal(self, near: str, far: str) -> None:
        self.cut[near, far] -= 1
        if not self.is_cut(near, far):
            for end in self.held.pop((near, far), []):  # sent again within a while
                self.loop.outside(self.loop.time() + self.rng.uniform(0.0, 1.5), end.flow)

    def _give_up(self, crossing: list[End]) -> None:
        for end in crossing:
            if not self.reaches(end.host, end.far.host):
                end.lose(TimeoutError("Connection timed out"))

    def lose_host(self, host: str) -> None:
        """The host is without power: nobody is told."""
        for end in [end for end in self.ends.values() if end.host == host]:
            end.vanish()
            self.loop.outside(self.loop.time() + SILENCE, end.far.lose, TimeoutError("Connection timed out"))
        self._forget(lambda listener: listener.process.host == host)

    def lose_process(self, process: Process) -> None:
        """The kernel closes what a process had open."""
        for end in [end for end in self.ends.values() if end.process is process]:
            end.vanish()
            end.send(_RST)
        self._forget(lambda listener: listener.process is process)

    def _forget(self, which: Callable[[SimulatedListener], bool]) -> None:
        self.listeners = {address: each for address, each in self.listeners.items() if not which(each)}

    def reset(self, rng: Random) -> None:
        """One connection breaks."""
        live = [end for end in self.ends.values() if end.is_open]
        if live:
            end = rng.choice(live)
            end.lose(ConnectionResetError("Connection reset by peer"))
            end.far.lose(ConnectionResetError("Connection reset by peer"))

    def descheduled(self) -> float:
        """Seconds for which a lane's thread does not run although it has something to send: mostly none."""
        return self.rng.expovariate(1.0) if self.rng.random() < self.descheduling else 0.0

    def garbled(self, data: bytes) -> bytes:
        """A payload as it arrives."""
        if not (self.garbling and data):
            return data
        self.garbling -= 1
        at = self.rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << self.rng.randrange(8)]) + data[at + 1 :]

    # -- dialling

    async def connect(self, host: str, address: Address, secret: bytes, near_end: Callable[[End], None]) -> None:
        """Brings a connection about, as TCP and TLS do; ``near_end`` takes this side's end.

        Raises:
            OSError: nobody listens there, or the secrets differ.
        """
        loop, process = self.loop, PROCESS.get()
        assert process is not None
        far = address[0]
        while not self.reaches(host, far):  # packets are lost, and sent again
            await asyncio.sleep(1.0)
        await asyncio.sleep(self.delay(host, far))
        listener = self.listeners.get(address)
        if listener is None:
            if far in self.dark:
                await asyncio.sleep(SILENCE)
                raise TimeoutError("Connection timed out")
            raise ConnectionRefusedError("Connection refused")
        done: asyncio.Future[None] = loop.create_future()

        def accepted() -> None:  # as the listening process, which may have been stopped meanwhile
            error = None if listener.secret() == secret else ssl.SSLCertVerificationError("certificate verify failed")
            if error is None and not done.cancelled():
                one, other = End(self, process, host), End(self, listener.process, far)
                one.far, other.far = other, one
                listener.greet(other)
                process.at(loop.time() + self.delay(far, host), finished, one)
            else:
                process.at(loop.time() + self.delay(far, host), refused, error)

        def refused(error: OSError | None) -> None:
            if not done.done():
                done.set_exception(error or OSError("gone"))

        def finished(one: End) -> None:
            if done.done():
                one.close()
                one.far.lose(None)
            else:
                near_end(one)
                done.set_result(None)

        listener.process.soon(accepted)
        await done


class End:
    """One end of a way for bytes between two processes; it is also the transport of a `Connection`."""

    far: End

    def __init__(self, network: Network, process: Process, host: str) -> None:
        self.network, self.process, self.host = network, process, host
        self.number = next(network.numbers)
        network.ends[self.number] = self
        self.socket = FakeSocket()
        self.is_open = True
        self.queue: deque[tuple[float, bytes]] = deque()  # on its way to the far end
        self.timer: Handle | None = None
        self._last = 0.0
        self._early: list[bytes] = []  # came before anybody listened
        self._heard: Callable[[bytes], None] | None = None
        self._lost: Callable[[Exception | None], None] = lambda error: None

    def listen(self, heard: Callable[[bytes], None], lost: Callable[[Exception | None], None]) -> None:
        self._heard, self._lost = heard, lost
        early, self._early = self._early, []
        for data in early:
            heard(data)

    def send(self, data: bytes) -> None:
        loop = self.network.loop
        at = max(self._last + 1e-9, loop.time() + self.network.delay(self.host, self.far.host))
        self._last = at
        self.queue.append((at, data))
        self._schedule()

    def _schedule(self) -> None:
        if self.queue and self.timer is None:
            self.timer = self.network.loop.outside(max(self.queue[0][0], self.network.loop.time()), self.flow)

    def flow(self) -> None:
        """Delivers what is due, unless the link is cut: then it is sent again when that is over."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        now = self.network.loop.time()
        if self.network.is_cut(self.host, self.far.host):
            self.network.held.setdefault((self.host, self.far.host), []).append(self)
            return
        while self.queue and self.queue[0][0] <= now:
            _, data = self.queue.popleft()
            self.socket.acked += len(data)
            self.far.process.soon(self.far.arrive, data)
        self._schedule()

    def arrive(self, data: bytes) -> None:
        if not self.is_open:
            return
        if data == _RST:
            self.lose(ConnectionResetError("Connection reset by peer"))
        elif self._heard is None:
            self._early.append(data)
        else:
            self._heard(data)

    def lose(self, error: Exception | None) -> None:
        """This end hears that the connection is gone."""
        if self.is_open:
            self.close()
            self.process.soon(self._lost, error)

    def close(self) -> None:
        self.is_open = False
        self.network.ends.pop(self.number, None)

    def vanish(self) -> None:
        self.close()
        self.queue.clear()

    def hang_up(self) -> None:
        """Closes, and tells the other end."""
        if self.is_open:
            self.close()
            self.queue.clear()
            self.send(_RST)


class SimulatedTransport(asyncio.Transport):
    """The transport of one `Connection`."""

    def __init__(self, end: End, protocol: Connection) -> None:
        super().__init__()
        self._end, self._protocol = end, protocol
        self._unread = bytearray()
        self._reading = True
        end.listen(self._heard, protocol.connection_lost)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": (self._end.far.host, self._end.far.number), "socket": self._end.socket}.get(name, default)

    def write(self, data: Any) -> None:
        if self._end.is_open and len(data):
            self._end.send(bytes(data))

    def get_write_buffer_size(self) -> int:
        return sum(len(data) for _, data in self._end.queue)

    def is_reading(self) -> bool:
        return self._reading

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._end.network.loop.call_soon(self._feed)

    def _heard(self, data: bytes) -> None:
        self._unread += data
        self._feed()

    def _feed(self) -> None:
        while self._unread and self._reading and self._end.is_open:
            buffer = self._protocol.get_buffer(-1)
            count = min(len(buffer), len(self._unread))
            buffer[:count] = self._unread[:count]
            del self._unread[:count]
            self._protocol.buffer_updated(count)

    def abort(self) -> None:
        if self._end.is_open:
            self._end.hang_up()
            self._end.network.loop.call_soon(self._protocol.connection_lost, None)

    close = abort


class SimulatedListener(Listener):
    """A `Listener` without a socket."""

    def __init__(
        self, network: Network, address: Address, secret: Callable[[], bytes], accept: Accept, log: Callable[[str], None], encrypt: Encrypt
    ) -> None:
        process = PROCESS.get()
        assert process is not None
        self.network, self.process, self.address, self.secret = network, process, address, secret
        self._accept, self._log, self._encrypt = accept, log, encrypt
        self._loop, self._lanes, self.sockets = network.loop, {}, []
        network.listeners[address] = self

    def close(self) -> None:
        if self.network.listeners.get(self.address) is self:
            del self.network.listeners[self.address]

    def greet(self, end: End) -> None:
        greeting = handshake._Greeting(self._admit)
        greeting.connection.connection_made(SimulatedTransport(end, greeting.connection))

        def look() -> None:
            if not greeting.over.done():
                greeting.connection.abort("no handshake in time")

        self._loop.call_later(handshake.TIMEOUT, look)

    def lane(self, opens: bytes, end: End) -> None:
        """A lane comes to the connection that waits for it."""
        expected = self._lanes.pop(opens[:ID_BYTES], None)
        if expected is None:
            end.hang_up()
        else:
            expected.connection.attach(expected.number, SimulatedLane(end))


async def open_lane(network: Network, address: Address, opens: bytes, *, encrypt: bool, peer: str) -> LaneThread:
    """In place of `handshake.open_lane`."""
    process = PROCESS.get()
    assert process is not None
    host, far = process.host, address[0]
    await asyncio.sleep(network.delay(host, far))
    listener = network.listeners.get(address)
    if listener is None or not network.reaches(host, far):
        raise ConnectionRefusedError("Connection refused")
    one, other = End(network, process, host), End(network, listener.process, far)
    one.far, other.far = other, one
    listener.process.at(network.loop.time() + network.delay(host, far), listener.lane, opens, other)
    return SimulatedLane(one)


async def listen(
    network: Network,
    bind: str,
    ports: tuple[int, int] | None,
    secret: Callable[[], bytes],
    accept: Accept,
    log: Callable[[str], None],
    encrypt: Encrypt,
    *,
    preferred: int = 0,
    further: Sequence[str] = (),
) -> Listener:
    """In place of `handshake.listen`."""
    process = PROCESS.get()
    assert process is not None
    wanted = (process.host, preferred)
    port = preferred if preferred and wanted not in network.listeners else next(network.ports)
    return SimulatedListener(network, (process.host, port), secret, accept, log, encrypt)


async def create_connection(network: Network, factory: Callable[[], Connection], host: str, port: int, secret: bytes) -> None:
    """In place of the loop's, for `handshake.dial`."""
    process = PROCESS.get()
    assert process is not None

    def connected(end: End) -> None:
        protocol = factory()
        protocol.connection_made(SimulatedTransport(end, protocol))

    await network.connect(process.host, (host, port), secret, connected)


def seams(network: Network) -> list[tuple[Any, str, Any]]:
    """(module, name, double) of all that this module stands in for."""
    return [
        (handshake, "tls_context", lambda secret, server: secret),
        (handshake, "open_lane", partial(open_lane, network)),
        (streams, "listen", partial(listen, network)),
        (readers, "BlockingWire", SimulatedWire),
        (readers, "threads_of_a_reader", lambda: 1),
    ]
