"""Which of several processes that call themselves by one host's name is the host (docs/security.md)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_ft.agent.callers import Callers
from gemini_ft.errors import AgentError, PeerError


class Caller(SimpleNamespace):
    """A connection of a process with a certificate."""

    def __init__(self, certificate: bytes) -> None:
        super().__init__(certificate=certificate, closed=asyncio.Event())

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
        callers = Callers(certificate_of, lines.append)
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
