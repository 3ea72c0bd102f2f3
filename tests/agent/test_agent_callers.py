"""Which of several processes that call themselves by one host's name is the host (docs/security.md)."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_ft.agent import session as module
from gemini_ft.agent.session import Callers, silence_of
from gemini_ft.errors import AgentError, PeerError


class Caller(SimpleNamespace):
    """A connection of a process with a certificate."""

    def __init__(self, certificate: bytes, silence: float = 0.0) -> None:
        super().__init__(certificate=certificate, closed=asyncio.Event(), silence=silence)

    def abort(self, reason: str) -> None:
        self.closed.set()


def test_whoever_answers_at_the_hosts_address_is_the_host_whatever_comes_meanwhile() -> None:
    async def work() -> None:
        answer = asyncio.Event()
        there: list[bytes | None] = [b"host"]

        async def certificate_of(host: str) -> bytes:
            await answer.wait()
            if there[0] is None:
                raise PeerError("nobody answers")
            return there[0]

        async def call_back() -> None:
            answer.set()
            for _ in range(3):
                await asyncio.sleep(0)
            answer.clear()

        lines: list[str] = []
        callers = Callers(SimpleNamespace(certificate_of=certificate_of, log=lines.append, disown=lambda host: None))  # type: ignore[arg-type]
        first, second = Caller(b"liar"), Caller(b"host")
        let_in: Any = callers.let_in
        let_in(first, "c")
        with pytest.raises(AgentError, match="another process is known here as host 'c'"):
            let_in(second, "c")
        await call_back()
        assert first.closed.is_set()
        assert len(lines) == 1
        let_in(second, "c")
        second.abort("lost")
        for _ in range(2):  # while the host is called back once more, too
            with pytest.raises(AgentError):
                let_in(Caller(b"liar"), "c")
            await asyncio.sleep(0)
        await call_back()
        let_in(Caller(b"host"), "c")
        there[0] = b"its next agent"
        with pytest.raises(AgentError):
            let_in(Caller(there[0]), "c")
        await call_back()
        let_in(Caller(there[0]), "c")
        callers.close()

    asyncio.run(work())


@pytest.mark.parametrize("error", [PeerError("nobody answers"), KeyError("c")], ids=["nobody answers", "a defect"])
def test_a_silent_process_whose_host_cannot_be_called_back_makes_way(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be stopped, with its sockets open, or its host gone; while any of its connections says something, it stays."""
    monkeypatch.setattr(module, "silence_of", lambda connection: connection.silence)

    async def work() -> None:
        asked: list[str] = []

        async def certificate_of(host: str) -> bytes:
            asked.append(host)
            raise error

        lines: list[str] = []
        callers = Callers(SimpleNamespace(certificate_of=certificate_of, log=lines.append, disown=lambda host: None))  # type: ignore[arg-type]
        let_in: Any = callers.let_in
        sends, reports = Caller(b"old", silence=100.0), Caller(b"old", silence=1.0)
        let_in(sends, "c")
        let_in(reports, "c")
        for times in (1, 2):  # it is called back each time
            with pytest.raises(AgentError, match="dial again"):
                let_in(Caller(b"new"), "c")
            await asyncio.sleep(0)
            assert asked == ["c"] * times
        assert not (sends.closed.is_set())
        assert not (reports.closed.is_set())
        assert not lines
        reports.silence = 6.0
        with pytest.raises(AgentError):
            let_in(Caller(b"new"), "c")
        await asyncio.sleep(0)
        assert sends.closed.is_set()
        assert reports.closed.is_set()
        assert lines == ["host 'c' is not at its address, and has been silent for more than 5 s: its connections are closed"]
        let_in(Caller(b"new"), "c")
        callers.close()

    asyncio.run(work())


def test_silence_ends_with_what_comes_on_any_socket_of_a_connection() -> None:
    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            dialled = [socket.create_connection(server.getsockname()) for _ in range(2)]
            messages, lane = (server.accept()[0] for _ in range(2))
            connection: Any = SimpleNamespace(
                transport=SimpleNamespace(get_extra_info=lambda name: messages if name == "socket" else None), payload_sockets=[lane]
            )
            for sender in reversed(dialled):
                await asyncio.sleep(0.3)
                assert 0.25 < silence_of(connection) < 30
                sender.send(b"x")
                await asyncio.sleep(0.05)
                assert silence_of(connection) < 0.25
            for sock in (*dialled, messages, lane):
                sock.close()
            assert silence_of(connection) == float("inf")
            connection.transport = None
            assert silence_of(connection) == float("inf")

    asyncio.run(work())
