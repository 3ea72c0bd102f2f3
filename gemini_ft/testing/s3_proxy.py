"""A proxy in front of an S3 server that misbehaves on command, for tests and drills: `gemini_ft.testing.S3Proxy`.

with S3Proxy("http://127.0.0.1:9000") as proxy:
    storage = open_storage("s3://bucket/run", proxy.endpoint)
    proxy.fail("flip", "GetObject")                  # one bit of every object that is read, from now on
    proxy.fail("503 SlowDown", "PutObject", count=5)
    ...
    proxy.release()                                  # all is well again
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import random
import re
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

from gemini_ft.errors import ConfigError
from gemini_ft.storage.s3parts import RateLimit

FAULTS: Final = {
    "reset": "half of the request's body passes, then the connection is reset",
    "lost": "the request is carried out, and the connection is reset in place of an answer",
    "torn": "half of the request's body is stored, and the answer says that all is well",
    "hold": "nothing happens until `S3Proxy.release`",
    "delay SECONDS": "the request is carried out after this time",
    "cut [BYTES]": "the answer's body breaks after as many bytes; without a number, after half of it",
    "hang": "the answer's headers come, its body does not until `S3Proxy.release`",
    "flip": "one bit of the answer's body is wrong",
    "half": "half of the answer's body comes, with a Content-Length that fits",
    "whole": "Range is ignored: 200 and as many bytes as the object has; those that were not asked for are zeros",
    "empty": "200 and an empty body",
    "html": "200 and a page of HTML",
    "nothing": "200 and a listing without any object in it",
    "stale": "a listing as the one before was, if there was one",
    "but STATUS CODE": "the request is carried out, and the answer is this HTTP status and this error code",
    "STATUS CODE": "this HTTP status and this error code of S3, such as ``403 AccessDenied``",
}
_PIECE = 64 * 1024
_DRAIN = 5.0  # seconds
_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>injected</Message></Error>'
_NOTHING = (
    '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{bucket}</Name>'
    "<Prefix>{prefix}</Prefix><KeyCount>0</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated></ListBucketResult>"
)
_HTML = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Please sign in to the network.</body></html>"
_FORMS = re.compile(r"reset|lost|torn|hold|delay [\d.]+|cut( \d+)?|hang|flip|half|whole|empty|html|nothing|stale|(but )?[2-5]\d\d \w+")


@dataclass(frozen=True, kw_only=True)
class S3Request:
    """A request that came in."""

    method: str  # of HTTP
    path: str  # with its query
    nbytes: int  # of its body

    @property
    def key(self) -> str:
        """The object's key; empty where the request is about the bucket."""
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]

    @property
    def prefix(self) -> str:
        """The prefix of a listing."""
        return "".join(parse_qs(urlsplit(self.path).query).get("prefix", []))

    @property
    def operation(self) -> str:
        """The name that S3 has for it: GetObject, HeadObject, PutObject, DeleteObject, ListObjects, UploadPart, ..."""
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        if not self.key:
            return (
                "ListMultipartUploads" if "uploads" in query else "ListObjects" if self.method == "GET" else f"{self.method.title()}Bucket"
            )
        if self.method == "POST":
            return "CreateMultipartUpload" if "uploads" in query else "CompleteMultipartUpload"
        if "uploadId" in query:
            return {"PUT": "UploadPart", "DELETE": "AbortMultipartUpload"}.get(self.method, "ListParts")
        return f"{self.method.title()}Object"


@dataclass
class S3Fault:
    """A fault for the next ``count`` requests for which ``when`` holds."""

    kind: str  # one of `FAULTS`
    count: int | None = 1  # how many requests it meets; None: all, until it is taken away
    when: Callable[[S3Request], bool] = lambda request: True  # which requests; all by default
    chance: float = 1.0  # that a request for which ``when`` holds is met

    def __post_init__(self) -> None:
        if not _FORMS.fullmatch(self.kind):
            raise ConfigError(f"kind={self.kind!r}: must be one of {', '.join(map(repr, FAULTS))}")


class S3Proxy(ThreadingHTTPServer):
    """Listens on loopback in front of an S3 server on plain HTTP. A context manager; the attributes may be changed at any time.

    It knows no credentials: requests pass as they were signed.

    Args:
        upstream: URL of the server, or its port on loopback.
        rate: bytes per second of all bodies together, both ways; None: no limit.
        seed: of the random choices.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: str | int, rate: float | None = None, seed: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _ProxyHandler)
        self.upstream = f"127.0.0.1:{upstream}" if isinstance(upstream, int) else urlsplit(upstream).netloc
        self._limit = RateLimit(rate)
        self.faults: list[S3Fault] = []  # to inject; the first that fits a request is taken, one that is used up is removed
        self.requests: list[S3Request] = []  # everything that has come in so far
        self.met: list[str] = []  # the kind of each fault that has met a request, in their order
        self.moved = 0  # bytes of bodies so far
        self.listings: dict[str, bytes] = {}  # path -> the last answer
        self._random = random.Random(seed)
        self.released = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> S3Proxy:
        self._thread.start()
        return self

    @property
    def rate(self) -> float | None:
        """Bytes per second of all bodies together, both ways; None: no limit. It may be set at any time."""
        return self._limit.limit

    @rate.setter
    def rate(self, rate: float | None) -> None:
        self._limit.limit = rate

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
        self.shutdown()
        self.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        """URL for ``storage.endpoint_url``."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fail(self, kind: str, *operations: str, key: str = "", count: int | None = None, chance: float = 1.0) -> S3Fault:
        """Makes requests fail from now on.

        Args:
            kind: one of `FAULTS`.
            operations: which requests, by `S3Request.operation`; none: all.
            key: regular expression that is searched for in the key; for listings in their prefix.
            count: how many requests; None: until ``faults`` is cleared.
            chance: that such a request is met.

        Raises:
            ConfigError: there is no such fault.
        """

        def when(request: S3Request) -> bool:
            return (not operations or request.operation in operations) and re.search(key, request.key or request.prefix) is not None

        fault = S3Fault(kind, count, when, chance)
        self.faults.append(fault)
        return fault

    def release(self) -> None:
        """Releases requests that are held or hang, and clears all faults."""
        self.faults.clear()
        released, self.released = self.released, threading.Event()
        released.set()

    def take_fault(self, request: S3Request) -> str | None:
        """Returns the kind of fault that this request meets, and counts it."""
        with self._lock:
            self.requests.append(request)
            for fault in [*self.faults]:
                if fault.when(request) and (fault.chance >= 1 or self._random.random() < fault.chance):
                    if fault.count is not None:
                        fault.count -= 1
                        if not fault.count:
                            self.faults.remove(fault)
                    self.met.append(fault.kind)
                    return fault.kind
        return None

    def pace(self, nbytes: int) -> None:
        """Waits until as many bytes may pass."""
        with self._lock:
            self.moved += nbytes
        self._limit.take(nbytes)

    def flip(self, piece: bytes) -> bytes:
        """Returns the bytes with one bit wrong."""
        with self._lock:
            place = self._random.randrange(8 * len(piece))
        return piece[: place // 8] + bytes([piece[place // 8] ^ 1 << place % 8]) + piece[place // 8 + 1 :]

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores the error: a client may hang up at any time."""


class _ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: S3Proxy
    timeout = 60

    def log_message(self, *_: object) -> None:
        return

    def _serve(self) -> None:
        nbytes = int(self.headers.get("Content-Length", 0))
        request = S3Request(method=self.command, path=self.path, nbytes=nbytes)
        self._released = self.server.released  # before the fault is known: a release in between is not missed
        kind, _, argument = (self.server.take_fault(request) or "").partition(" ")
        if kind == "hold":
            self._released.wait()
        elif kind == "delay":
            time.sleep(float(argument))
        if kind == "reset":
            self._discard(nbytes // 2)
            self._reset()
        elif kind.isdecimal():
            self._say(nbytes, int(kind), _ERROR.format(code=argument).encode())
        elif kind in ("empty", "nothing"):
            bucket = unquote(urlsplit(self.path).path).strip("/")
            self._say(nbytes, 200, _NOTHING.format(bucket=bucket, prefix=request.prefix).encode() if kind == "nothing" else b"")
        elif kind == "html":
            self._say(nbytes, 200, _HTML, "text/html")
        elif kind == "stale" and self.path in self.server.listings:
            self._say(nbytes, 200, self.server.listings[self.path])
        else:
            self._forward(request, kind, argument)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

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

    def _say(self, nbytes: int, status: int, body: bytes, content_type: str = "application/xml") -> None:
        """Answers instead of the server."""
        self._discard(nbytes)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _forward(self, request: S3Request, kind: str, argument: str) -> None:
        kept = request.nbytes // 2 if kind == "torn" else request.nbytes
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=60)
        with contextlib.closing(upstream):
            try:
                upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() not in ("connection", "expect", "content-length", "content-md5" if kind == "torn" else "connection"):
                        upstream.putheader(name, value)
                if "Content-Length" in self.headers:
                    upstream.putheader("Content-Length", str(kept))
                upstream.endheaders()
                for piece in self._read(kept):
                    upstream.send(piece)
                self._discard(request.nbytes - kept)
                answer = upstream.getresponse()
            except (ConnectionRefusedError, ConnectionResetError, http.client.RemoteDisconnected):
                self._reset()  # as if the client had spoken to the server itself
                return
            if kind == "lost":
                answer.read()
                self._reset()
            elif kind == "but":
                answer.read()
                status, _, code = argument.partition(" ")
                self._say(0, int(status), _ERROR.format(code=code).encode())
            else:
                self._answer(answer, request, kind, argument)

    def _answer(self, answer: http.client.HTTPResponse, request: S3Request, kind: str, argument: str) -> None:
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in ("connection", "transfer-encoding")}
        body: Iterable[bytes] = iter(lambda: answer.read(_PIECE), b"")
        length, status = answer.length, answer.status
        if kind in ("flip", "half", "whole") or request.operation == "ListObjects":
            status, content = self._changed(kind, status, headers, b"".join(body))
            if request.operation == "ListObjects" and status == 200:
                self.server.listings[self.path] = content
            body, length = (content[at : at + _PIECE] for at in range(0, len(content), _PIECE)), len(content)
            if self.command != "HEAD":
                headers = {name: value for name, value in headers.items() if name.lower() != "content-length"} | {
                    "Content-Length": str(length)
                }
        self._pass_on(status, answer.reason, headers, body, length, kind=kind, argument=argument)

    def _changed(self, kind: str, status: int, headers: dict[str, str], content: bytes) -> tuple[int, bytes]:
        """The answer's status and body as this fault leaves them; ``headers`` are changed where they stand."""
        if kind == "flip" and content:
            return status, self.server.flip(content)
        if kind == "half":
            return status, content[: len(content) // 2]
        place = "".join(headers.pop(name) for name in [*headers] if name.lower() == "content-range") if kind == "whole" else ""
        if found := re.search(r"(\d+)-(\d+)/(\d+)", place):
            first, last, whole = map(int, found.groups())
            return 200, bytes(first) + content + bytes(whole - last - 1)
        return status, content

    def _pass_on(
        self, status: int, reason: str, headers: dict[str, str], body: Iterable[bytes], length: int | None, *, kind: str, argument: str
    ) -> None:
        self.send_response_only(status, reason)
        for name, value in headers.items():
            self.send_header(name, value)
        if length is None and self.command != "HEAD" and status not in (204, 304):
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        if kind == "hang":
            self.wfile.flush()
            self._released.wait()
        left = (int(argument) if argument else length // 2 if length else None) if kind == "cut" else None
        for piece in body:
            self.server.pace(len(piece))
            self.wfile.write(piece if left is None else piece[:left])
            left = None if left is None else left - len(piece)
            if left is not None and left <= 0:
                self._reset()
                return

    def _reset(self) -> None:
        self.wfile.flush()
        until = time.monotonic() + _DRAIN
        while struct.unpack("i", fcntl.ioctl(self.connection, termios.TIOCOUTQ, bytes(4)))[0] and time.monotonic() < until:
            time.sleep(0.001)  # a reset would take back bytes that have not arrived yet
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
