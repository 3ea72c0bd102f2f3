"""A proxy in front of an S3 server that misbehaves when it is told to: slow, silent, full of errors, cut in the middle."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_PIECE = 64 * 1024
_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>of the test</Message></Error>'


@dataclass
class Request:
    """What came in."""

    method: str
    path: str
    nbytes: int  # of its body


@dataclass
class Fault:
    """What happens to the next ``count`` requests for which ``when`` holds.

    ``kind``: ``reset`` (half of the body passes, then the connection is reset), ``cut`` (half of the answer does), ``hold``
    (nothing happens until ``release``), or an HTTP status and an S3 error code, such as ``503 SlowDown``.
    """

    kind: str
    count: int = 1
    when: Callable[[Request], bool] = lambda request: True


class Proxy(ThreadingHTTPServer):
    """Listens on loopback in front of ``port``. The attributes may be changed at any time.

    Attributes:
        rate: bytes per second of all bodies together, both ways; None: no limit.
        faults: what is to go wrong; a fault that is used up is removed.
        requests: what has come in so far.
    """

    daemon_threads = True

    def __init__(self, port: int, rate: float | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = port
        self.rate = rate
        self.faults: list[Fault] = []
        self._released = threading.Event()
        self.requests: list[Request] = []
        self.moved = 0  # bytes of bodies so far
        self._lock = threading.Lock()
        self._free_at = 0.0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def release(self) -> None:
        """Requests that are held go on, and nothing goes wrong any more."""
        self.faults.clear()
        self._released.set()

    def wait_for_release(self) -> None:
        self._released.wait()

    def take_fault(self, request: Request) -> str | None:
        """What happens to this request."""
        with self._lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.when(request):
                    fault.count -= 1
                    if not fault.count:
                        self.faults.remove(fault)
                    return fault.kind
        return None

    def pace(self, nbytes: int) -> None:
        """Wait until so many bytes may pass."""
        with self._lock:
            self.moved += nbytes
            if self.rate is None:
                return
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + nbytes / self.rate
            wait = self._free_at - now
        time.sleep(wait)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is none of our business."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy
    timeout = 60

    def log_message(self, *_: object) -> None:
        return

    def _pass_on(self) -> None:
        nbytes = int(self.headers.get("Content-Length", 0))
        fault = self.server.take_fault(Request(self.command, self.path, nbytes))
        if fault == "hold":
            self.server.wait_for_release()
            fault = None
        if fault == "reset":
            self._discard(nbytes // 2)
            self._reset()
        elif fault is not None and fault != "cut":
            self._fail(nbytes, *fault.split())
        else:
            self._forward(nbytes, cut=fault == "cut")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    def _read(self, nbytes: int) -> Iterator[bytes]:
        while nbytes:
            piece = self.rfile.read(min(nbytes, _PIECE))
            if not piece:
                raise ConnectionError("the client hung up")
            self.server.pace(len(piece))
            nbytes -= len(piece)
            yield piece

    def _discard(self, nbytes: int) -> None:
        for _ in self._read(nbytes):
            pass

    def _fail(self, nbytes: int, status: str, code: str) -> None:
        self._discard(nbytes)
        body = _ERROR.format(code=code).encode()
        self.send_response(int(status))
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _forward(self, nbytes: int, cut: bool) -> None:
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=60)
        with contextlib.closing(upstream):
            try:
                upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() not in ("connection", "expect"):
                        upstream.putheader(name, value)
                upstream.endheaders()
                for piece in self._read(nbytes):
                    upstream.send(piece)
                answer = upstream.getresponse()
            except (ConnectionRefusedError, ConnectionResetError, http.client.RemoteDisconnected):
                self._reset()  # as if the client had spoken to the server itself
                return
            self._answer(answer, cut)

    def _answer(self, answer: http.client.HTTPResponse, cut: bool) -> None:
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        left = answer.length
        if left is None and self.command != "HEAD" and answer.status not in (204, 304):
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        limit = left // 2 if cut and left else None
        while piece := answer.read(_PIECE if limit is None else min(_PIECE, limit)):
            self.server.pace(len(piece))
            self.wfile.write(piece)
            limit = None if limit is None else limit - len(piece)
            if limit == 0:
                self._reset()
                return

    def _reset(self) -> None:
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


@contextmanager
def proxy(port: int, rate: float | None = None) -> Iterator[Proxy]:
    """A proxy in front of the server at ``port``; ended whatever happens."""
    server = Proxy(port, rate)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.release()
        server.shutdown()
        server.server_close()
        thread.join()
