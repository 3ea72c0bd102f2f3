"""An attacker between two hosts, or in front of one, who does not know the run secret: he sees and rewrites every byte."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from agent_kit import WAIT

from gemini_ft.wire.lane import MARK

Alter = Callable[[bytearray], None]


class Relay:
    """Passes bytes on between whoever connects to ``address`` and ``target``, and keeps and changes what it wants.

    Attributes:
        address: where it listens.
        control, lanes: what was seen of each connection on the way there, TLS and payloads.
        on_control, on_lane: called with each piece on the way there (and, for lanes, back), which they may change.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address: tuple[str, int] = self._listener.getsockname()
        self.control: list[bytearray] = []
        self.lanes: list[bytearray] = []
        self.on_control: Alter = lambda piece: None
        self.on_lane: Alter = lambda piece: None
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(WAIT)

    def cut(self) -> None:
        """Closes every connection, wherever its bytes are."""
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                self._threads.append(threading.Thread(target=self._serve, args=(near, far)))
                self._threads[-1].start()

    def _serve(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            first = near.recv(len(MARK), socket.MSG_PEEK)
            is_lane = first[:1] == MARK[:1]
            seen = bytearray()
            (self.lanes if is_lane else self.control).append(seen)
            back = threading.Thread(target=self._pass_on, args=(far, near, bytearray(), self.on_lane if is_lane else None))
            self._threads.append(back)
            back.start()
            self._pass_on(near, far, seen, self.on_lane if is_lane else self.on_control)

    def _pass_on(self, source: socket.socket, sink: socket.socket, seen: bytearray, alter: Alter | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                piece = bytearray(data)
                seen += piece
                if alter is not None:
                    alter(piece)
                sink.sendall(piece)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
