"""The web page of an agent: three static files, and one document with the accounts of all hosts, which needs the token.

A browser sends the token in a header, and gets none in return: it is in no address, cookie or cache.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import math
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import gemini_ft
from gemini_ft.config import GeminiConfig
from gemini_ft.errors import ConfigError
from gemini_ft.wire.trust import private_file

DATA = "/status.json"
_LEAST = 16  # characters of a token
_HOSTS_PER_SECOND = 100  # whose accounts may be gathered: a large job's are gathered less often
_DEEPEST = 64  # containers in one another in an account: readers' parsers have a limit, too
_KINDS = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}


@dataclass(frozen=True, kw_only=True)
class PageAnswer:
    """An answer to a request; ``headers`` come beside those that all answers have."""

    status: HTTPStatus = HTTPStatus.OK
    kind: str = "text/plain; charset=utf-8"
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()

    def encoded(self, has_body: bool = True) -> bytes:
        """The answer as it travels."""
        headers = {"Content-Type": self.kind, "Content-Length": str(len(self.body)), **_HEADERS, **dict(self.headers)}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n{head}\r\n".encode() + (self.body if has_body else b"")


def read_token(config: GeminiConfig) -> str | None:
    """The token of the web page; None: no page is asked for.

    Raises ConfigError: there is no address to serve it at, or the token is none. SecretError: its file is missing, or readable by others.
    """
    if (path := config.page_token_file) is None:
        return None
    way = "make one with `umask 077; openssl rand -hex 32 > FILE`"
    token = private_file("page_token_file", path, f"give the path of a file; {way}").decode("latin-1")
    if config.metrics is None:
        raise ConfigError(f"page_token_file={path} is given, and metrics is not: give its address, such as GEMINI_METRICS=9464, as well")
    if len(token) < _LEAST or not all("!" <= letter <= "~" for letter in token):
        raise ConfigError(f"page_token_file={path} must hold one word of at least {_LEAST} ASCII characters; {way}")
    return token


class WebPage:
    """The page of one agent.

    Args:
        token: to be shown by whoever asks for figures.
        name: the host's name or address in the option ``metrics``.
        job: gives the accounts of all hosts (`Requests.job`), and asks them for new ones.
    """

    def __init__(self, token: str, name: str, job: Callable[[], dict[str, Any]]) -> None:
        self._token, self._names, self._job = token, {name.lower(), "localhost", socket.gethostname().lower()}, job
        paths = [path for path in Path(__file__).with_name("web").iterdir() if path.suffix in _KINDS]
        files = {path.name: PageAnswer(kind=_KINDS[path.suffix], body=path.read_bytes()) for path in paths}
        self._files = {"/": files.pop("index.html")} | {f"/{name}": file for name, file in files.items()}
        self._document: asyncio.Task[bytes] | None = None  # the newest, or the one that is being written
        self._begun, self._lasts = 0.0, 0.0

    async def answer(self, path: str, headers: Mapping[str, str], now: float) -> PageAnswer | None:
        """Answers a request for a path; None: it is none of the page's. ``now``: seconds of the monotonic clock.

        However many ask, one document is written at a time, by another thread: those of large jobs would hold up the agent's loop.
        """
        if path != DATA and path not in self._files:
            return None
        if not self._is_meant(headers.get("host", "")):
            text = "this page has another name here: ask by address, or by the host's name in the option `metrics` of its agent\n"
            return PageAnswer(status=HTTPStatus.MISDIRECTED_REQUEST, body=text.encode())
        if path != DATA:
            return self._files[path]
        shown = headers.get("authorization", "").partition(" ")[2].strip()
        if not hmac.compare_digest(shown.encode("latin-1"), self._token.encode()):
            text = "the token is missing or wrong: send `Authorization: Bearer TOKEN`, with the word in the page_token_file of this host\n"
            challenge = ("WWW-Authenticate", 'Bearer realm="gemini-ft"')
            return PageAnswer(status=HTTPStatus.UNAUTHORIZED, body=text.encode(), headers=(challenge,))
        newest = self._document
        if newest is None or (newest.done() and (now - self._begun > self._lasts or newest.cancelled() or newest.exception() is not None)):
            job = self._job()
            self._begun, self._lasts = now, max(1.0, len(job["hosts"]) / _HOSTS_PER_SECOND)
            newest = self._document = asyncio.create_task(asyncio.to_thread(_written, job))
        return PageAnswer(kind="application/json", body=await asyncio.shield(newest))

    def _is_meant(self, host: str) -> bool:
        """Whether a Host header names this server, and not a name that a stranger has pointed at its address."""
        name = (host.partition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]).lower()
        try:
            return name in self._names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def _written(job: dict[str, Any]) -> bytes:
    """The document: all accounts are read and written one by one, as one call for all of them would keep other threads from running."""
    rest = {name: value for name, value in job.items() if name != "hosts"}
    hosts = (
        f'{json.dumps(host)}: {{"heard": {json.dumps(of["heard"], allow_nan=False)}, "account": {_checked(of["account"])}}}'
        for host, of in job["hosts"].items()
    )
    head = json.dumps({**rest, "version": gemini_ft.__version__}, allow_nan=False)
    return f'{head[:-1]}, "hosts": {{{", ".join(hosts)}}}}}'.encode()


def _checked(account: str) -> str:
    """A host's account, without the numbers that Python writes and no browser reads; ``null``: it is none, or no reader may bear it."""
    try:
        found = json.loads(account, parse_constant=lambda _: None, parse_float=_finite)
        return json.dumps(found, allow_nan=False) if _is_flat(found) else "null"
    except (ValueError, RecursionError):
        return "null"


def _is_flat(found: Any) -> bool:
    level: list[Any] = [[found]]
    for _ in range(_DEEPEST):
        groups = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for group in groups for each in group if isinstance(each, dict | list)]
        if not level:
            return True
    return False


def _finite(text: str) -> float | None:
    return value if abs(value := float(text)) < math.inf else None
