"""``/metrics`` of an agent: its figures as Prometheus reads them, and its web page, served from the agent's own event loop.

No reader holds up the agent: the figures are taken at most once a second, and a connection whose answer is not fetched within seconds
is cut off.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from gemini_ft.agent.context import RunContext
from gemini_ft.agent.figures import families
from gemini_ft.agent.tasks import Tasks
from gemini_ft.agent.web_page import PageAnswer, WebPage, read_token
from gemini_ft.config import GeminiConfig, load_config
from gemini_ft.errors import ConfigError, SecretError
from gemini_ft.wire.network import FairShare, bound

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_AGE = 1.0  # seconds for which a page is served again as it is
RETRY_SECONDS = 2.0  # seconds until a port that was taken is tried again
_SECONDS = 5.0  # for a request and its answer
_READERS = 256  # at a time
_UNSENT = 16  # of them, for one that has not fetched its answer after a while: answers of large jobs take megabytes
FETCH_SECONDS = 0.2  # that while
_REQUEST_BYTES = 8192
_TEXTS = 20  # about figures that could not be read; each is logged once
_PATH = "/metrics"
_PARTS = ("core", "exposition", "openmetrics.exposition")  # of prometheus-client
_OPEN_METRICS = "application/openmetrics-text; version=1.0.0"  # whatever version a reader asks for: there are two pages only


def check_metrics(config: GeminiConfig) -> None:
    """Refuses the option ``metrics`` where prometheus-client is not installed, and a token of the web page that is none.

    Raises ConfigError: metrics are asked for, and the library is missing; or see `read_token`. SecretError: see `read_token`.
    """
    read_token(config)
    if config.metrics is not None and importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(
            f"metrics={config.metrics!r} needs prometheus-client, which is not installed for {os.path.realpath('/proc/self/exe')}: "
            "pip install 'gemini-ft[metrics]', or leave the option out"
        )


class MetricsPage:
    """The page of one agent. `RunContext.metrics` has its address as soon as it is served.

    Args:
        account: gives the agent's account of itself, as ``gemini status --json`` prints it.
        job: gives the accounts of all hosts, for the web page.
    """

    def __init__(self, run: RunContext, account: Callable[[], dict[str, Any]], job: Callable[[], dict[str, Any]] = dict) -> None:
        self._run, self._account, self._job = run, account, job
        self._web: WebPage | None = None
        self._said = set[str]()  # about figures that could not be read
        self._pages: dict[str, tuple[float, bytes]] = {}  # content type -> when it was written, and the page
        self._readers = FairShare[asyncio.StreamWriter](_READERS, _cut_off)  # that are being answered
        self._tasks = Tasks()
        self._server: asyncio.Server | None = None
        self._tasks.spawn(self._listen())

    def close(self) -> None:
        self._tasks.cancel()
        if self._server is not None:
            self._server.close()

    async def _listen(self) -> None:
        """Listens as soon as the port is free: the agent of another run may have it, as agents outlive their jobs."""
        try:
            check_metrics(config := load_config())
        except (ConfigError, SecretError) as error:  # the option may have been set after a worker had checked it
            self._run.log(str(error))
            return
        try:  # of which a reader should not be the first: it takes longer than the agent's loop may wait
            for part in _PARTS:
                await asyncio.to_thread(importlib.import_module, f"prometheus_client.{part}")
        except Exception as error:  # of any kind: the library is not ours
            self._run.log(f"metrics are not served, as prometheus-client cannot be imported: {type(error).__name__}: {error}")
            return
        host, _, port = (config.metrics or "").rpartition(":")
        is_told = False
        while True:
            try:
                # Not on this thread: a name server that is down would stop the agent.
                listener = await asyncio.to_thread(bound, host.strip("[]"), int(port), socket.SOCK_STREAM)
                break
            except (ConfigError, UnicodeError) as error:  # such a name cannot be asked for
                if not is_told:
                    is_told = True
                    self._run.log(f"metrics are not served while this lasts, and all else goes on: {error}")
            await asyncio.sleep(RETRY_SECONDS)
        if (token := await asyncio.to_thread(read_token, config)) is not None:
            self._web = await asyncio.to_thread(WebPage, token, host.strip("[]"), self._job)
        self._server = await asyncio.start_server(self._answer, sock=listener, limit=_REQUEST_BYTES)
        self._run.has_page = self._web is not None
        self._run.metrics = f"{host}:{listener.getsockname()[1]}"
        self._run.log(f"metrics are served at http://{self._run.metrics}{_PATH}")
        if self._run.has_page:
            self._run.log(f"a web page is served at http://{self._run.metrics}/; {config.page_token_file} has its token")

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = "{}:{}".format(*writer.get_extra_info("peername") or ("", 0))  # no name: it has hung up
        self._readers.take(writer, peer)
        try:
            async with asyncio.timeout(_SECONDS):
                writer.write(await self._response(await reader.readuntil(b"\r\n\r\n")))
                asyncio.get_running_loop().call_later(FETCH_SECONDS, self._count, writer, peer)
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the reader is slow, has gone, or does not speak HTTP
        finally:
            self._readers.give_back(writer)
            _cut_off(writer)

    def _count(self, writer: asyncio.StreamWriter, peer: str) -> None:
        """Counts an answer that still takes memory here; none of one that is over does."""
        if writer.transport.get_write_buffer_size():
            self._readers.take(writer, peer, _UNSENT)

    async def _response(self, request: bytes) -> bytes:
        first, *rest = request.decode("latin-1").split("\r\n")
        method, target, *_ = [*first.split(" "), "", ""]
        if method not in ("GET", "HEAD"):
            return PageAnswer(status=HTTPStatus.METHOD_NOT_ALLOWED, body=b"only GET and HEAD\n").encoded()
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
        try:
            answer = await self._answer_to(target.partition("?")[0], headers)
        except Exception as error:  # of any kind: a figure must not leave the reader without an answer
            text = f"the figures cannot be read: {type(error).__name__}: {error}"
            if text not in self._said and len(self._said) < _TEXTS:
                self._said.add(text)
                self._run.log(text)
            answer = PageAnswer(status=HTTPStatus.INTERNAL_SERVER_ERROR, body=b"the figures cannot be read; see the agent's log\n")
        return answer.encoded(has_body=method == "GET")

    async def _answer_to(self, path: str, headers: Mapping[str, str]) -> PageAnswer:
        if path == _PATH:
            kind, page = self._page(headers.get("accept", ""))
            return PageAnswer(kind=kind, body=page)
        of_page = await self._web.answer(path, headers, time.monotonic()) if self._web is not None else None
        return of_page or PageAnswer(status=HTTPStatus.NOT_FOUND, body=f"figures are at {_PATH}\n".encode())

    def _page(self, accepted: str) -> tuple[str, bytes]:
        from prometheus_client.exposition import choose_encoder

        encode, kind = choose_encoder(_OPEN_METRICS if _OPEN_METRICS.partition(";")[0] in accepted else "text/plain")
        written, page = self._pages.get(kind, (0.0, b""))
        now = time.monotonic()
        if not page or now - written > _AGE:
            page = encode(self)
            self._pages[kind] = now, page
        return kind, page

    def collect(self) -> Iterator[Metric]:
        """Yields the figures. It is the only method of a registry that the writers of prometheus-client call."""
        return families(self._account())


def _cut_off(writer: asyncio.StreamWriter) -> None:
    """Ends a connection now; one that is closed when all has been sent ends by itself, and asyncio fails to abort it."""
    if not writer.transport.is_closing() or writer.transport.get_write_buffer_size():
        writer.transport.abort()
