"""Which connections a worker ends whose attempt is over."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import platform
import select
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemini_ft.worker.abort import shut_down

_LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def before() -> set[int]:
    """The sockets of this process that are no test's."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(fd))
            found |= {status.st_ino} if stat.S_ISSOCK(status.st_mode) else set()
    return found


def polled(sock: socket.socket, data: int) -> select.epoll:
    """Registers the socket as native code does, with ``data`` to be returned with its events."""
    epoll = select.epoll()
    event = struct.pack("=IQ" if platform.machine() == "x86_64" else "=I4xQ", select.EPOLLIN, data)  # the kernel's epoll_event
    if _LIBC.epoll_ctl(epoll.fileno(), 1, sock.fileno(), event):
        raise OSError(ctypes.get_errno(), "epoll_ctl")
    return epoll


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as dialled,
        server.accept()[0] as accepted,
    ):
        yield dialled, accepted


def carries(one: socket.socket, other: socket.socket) -> bool:
    try:
        one.sendall(b"x")
        return other.recv(1) == b"x"
    except OSError:
        return False


def test_those_that_are_polled_by_a_pointer_and_those_to_the_store_are_shut_down(before: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with connected() as gloos, connected() as stores, connected() as others, polled(gloos[0], 0x7F0012345678) as epoll:
        if " ino:" not in Path(f"/proc/self/fdinfo/{epoll.fileno()}").read_text():
            pytest.skip("needs a kernel that tells what epoll polls: Linux 4.13 or later, and not gVisor")
        monkeypatch.setenv("MASTER_PORT", str(stores[0].getpeername()[1]))
        shut_down(before)
        assert [carries(*pair) for pair in (gloos, stores, others)] == [False, False, True]


def test_those_that_were_there_before_are_not() -> None:
    with connected() as pair, polled(pair[0], 0x7F0012345678):
        shut_down({os.fstat(each.fileno()).st_ino for each in pair})
        assert carries(*pair)


def test_those_that_python_polls_are_not(before: set[int]) -> None:
    """It says which descriptor it is in the lower half of what the kernel keeps, and leaves the upper half as it was."""
    with connected() as pair, polled(pair[0], 0xDEAD << 32 | pair[0].fileno()):
        shut_down(before)
        assert carries(*pair)
    with connected() as pair, select.epoll() as own:
        for each in pair:
            own.register(each)
        shut_down(before)
        assert carries(*pair)
    ours, theirs = socket.socketpair()
    with ours, theirs, polled(ours, 0x7F0012345678):
        shut_down(before)
        assert carries(ours, theirs), "between processes of one host"


def test_those_of_asyncio_are_not(before: set[int]) -> None:
    async def heard(pair: tuple[socket.socket, socket.socket]) -> bytes:
        reader, reading = await asyncio.open_connection(sock=pair[0])
        _, writer = await asyncio.open_connection(sock=pair[1])
        await asyncio.sleep(0)
        shut_down(before)
        writer.write(b"x")
        found = await reader.read(1)
        for each in (reading, writer):
            each.close()
            with contextlib.suppress(OSError):
                await each.wait_closed()
        return found

    with connected() as pair:
        assert asyncio.run(heard(pair)) == b"x"


@pytest.mark.parametrize("is_blocking", [True, False])
def test_nothing_else_changes_for_the_others(is_blocking: bool, before: set[int]) -> None:
    """Whatever the script has set for the sockets that Python makes."""
    with connected() as pair:
        for each in pair:
            each.setblocking(is_blocking)
        open_before = os.listdir("/proc/self/fd")
        socket.setdefaulttimeout(30.0)
        try:
            shut_down(before)
        finally:
            socket.setdefaulttimeout(None)
        assert [os.get_blocking(each.fileno()) for each in pair] == [is_blocking] * 2
        assert os.listdir("/proc/self/fd") == open_before
