"""Switches in processes of their own, for tests."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

from agent_kit import WAIT, context, forked

from gemini_ft.sync.switch_server import Limits, SwitchServer

KEY = b"of the tests' switches, 32 bytes"
PATIENCE = 20.0  # seconds; where a dead switch is no part of the test


class Switch:
    """A switch on loopback. ``port`` 0: any free one."""

    def __init__(self, port: int = 0, part: int = 0, parts: int = 1, key: bytes = KEY, limits: Limits | None = None) -> None:
        self._pipe, theirs = context.Pipe()
        self.process = forked(_serve, theirs, port, part, parts, key, limits)
        self.process.start()
        theirs.close()
        assert self._pipe.poll(WAIT)
        self.port: int = self._pipe.recv()
        self.place = f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT)

    def stop(self) -> dict[str, int]:
        """Ends it; its report."""
        self._pipe.send(None)
        assert self._pipe.poll(WAIT)
        report: dict[str, int] = self._pipe.recv()
        self.process.join(WAIT)
        return report


@contextlib.contextmanager
def switches(count: int = 1, **options: Any) -> Iterator[list[Switch]]:
    """Switches with a part of the slots each."""
    made: list[Switch] = []
    try:
        for part in range(count):
            made.append(Switch(part=part, parts=count, **options))
        yield made
    finally:
        for switch in made:
            switch.kill()


def places(made: list[Switch]) -> str:
    """The switches as a scheme takes them."""
    return ",".join(switch.place for switch in made)


def _serve(pipe: Any, port: int, part: int, parts: int, key: bytes, limits: Limits | None) -> None:
    listening = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listening.bind(("127.0.0.1", port))
    server = SwitchServer(listening, key, limits or Limits(jobs=1000), part, parts)  # ranks of tests end without a word
    stop, stopped = socket.socketpair()

    def wait() -> None:
        with contextlib.suppress(EOFError):
            pipe.recv()
        stopped.close()

    threading.Thread(target=wait, daemon=True).start()
    pipe.send(listening.getsockname()[1])
    server.serve(stop)
    pipe.send(server.report())
