"""Ends collectives in flight once the launcher has said that the attempt is over: a rank for which they wait may be stopped or cut off.

Neither ``abort`` nor ``shutdown`` of a gloo group closes a connection (torch 2.13), so its sockets are found and shut down here. Python's
calls of collectives then raise the error that they raise for a rank that is lost.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import stat
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

_GRACE = 0.2  # seconds in which the training may hear of the end, or of a new attempt, by itself
_POLLED = re.compile(r"^tfd:\s+(\d+) events:\s+\w+ data:\s+(\w+) +pos:\w+ ino:(\w+)", re.MULTILINE)  # proc(5), of a descriptor of epoll


class ConnectionAbort:
    """Watches a worker's channel to its launcher beside the training."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._before = end, {number for _, number in _sockets()}
        self._is_training = self._is_closed = False
        self._thread = threading.Thread(target=self._watch, name="gemini-abort", daemon=True)
        self._thread.start()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Inside, collectives may be ended."""
        self._is_training = True
        try:
            yield
        finally:
            self._is_training = False

    def close(self) -> None:
        """Ends the watch, and the channel with it."""
        self._is_closed = True
        self._end.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _watch(self) -> None:
        news = select.poll()
        news.register(self._end, select.POLLIN)
        while news.poll() and not self._is_closed:
            time.sleep(_GRACE)
            if self._is_training and news.poll(0):
                shut_down(self._before)


def shut_down(before: Collection[int]) -> None:
    """Shuts down the connections of gloo, and those to torch's key-value store, without those that were there ``before``."""
    native = _polled_by_native_code()
    for fd, number in _sockets():
        if number in before:
            continue
        with contextlib.suppress(OSError, ValueError), _opened(fd, number) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            port = one.getpeername()[1]  # an error where it listens: gloo ends the process when it can accept no more
            if number in native or port == int(os.environ.get("MASTER_PORT", 0)):
                one.shutdown(socket.SHUT_RDWR)


@contextmanager
def _opened(fd: int, number: int) -> Iterator[socket.socket]:
    """The socket of this number in the kernel. Raises OSError: the descriptor is another file's by now."""
    copy = os.dup(fd)
    try:
        if os.fstat(copy).st_ino != number:
            raise OSError("another file")
        # Without SOCK_NONBLOCK Python sets that, for all who have the file, where the script has called socket.setdefaulttimeout.
        one = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=copy)
    except BaseException:
        os.close(copy)
        raise
    with one:
        yield one


def _sockets() -> Iterator[tuple[int, int]]:
    """Each socket of this process, and its number in the kernel."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            found = os.fstat(fd)
            if stat.S_ISSOCK(found.st_mode):
                yield fd, found.st_ino


def _polled_by_native_code() -> set[int]:
    """The numbers of files that are polled in gloo's manner: the kernel keeps a pointer, where libuv and Python have the descriptor.

    Python sets only the lower 32 bits of what is kept. Other native libraries may keep pointers, too. None: the kernel does not say it.
    """
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventpoll]":
                with open(f"/proc/self/fdinfo/{fd}") as file:
                    polled = _POLLED.findall(file.read())
                found |= {int(number, 16) for one, kept, number in polled if int(kept, 16) & 0xFFFFFFFF != int(one)}
    return found
