"""A page of memory in which a worker shows its host's agent its present use of the network.

The worker writes, the agent reads; neither waits for the other. An agent that waits for the network to fall idle says so in
the page, and only then does the worker ring its bell (an eventfd).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import zlib

from gemini_ft.core.traffic import Moment
from gemini_ft.errors import AgentError

_SIZE = 4096
_MOMENT = struct.Struct("=qqqd?")
_CHECK = struct.Struct("=I")  # crc32 of the bytes before it: a read in the middle of a write is noticed on every kind of processor
_LISTENS = 2048  # the only byte that the agent writes
_TRIES = 100
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class ControlPage:
    """The page and bell of one worker; either side makes one of the descriptors that it is given, and owns these."""

    def __init__(self, page: int, bell: int) -> None:
        self.page, self.bell = page, bell
        self._memory = mmap.mmap(page, _SIZE)

    @classmethod
    def create(cls) -> ControlPage:
        page = os.memfd_create("gemini-control", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(page, _SIZE)
        fcntl.fcntl(page, fcntl.F_ADD_SEALS, _SEALS)
        made = cls(page, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        made.write(Moment())
        return made

    @classmethod
    def take(cls, page: int, bell: int) -> ControlPage:
        """The agent's side; owns the descriptors from here on, whatever they are.

        Raises:
            AgentError: they are no page and bell; a page that can be truncated would kill every process that maps it.
        """
        try:
            is_page = fcntl.fcntl(page, fcntl.F_GET_SEALS) & _SEALS == _SEALS and os.fstat(page).st_size == _SIZE
            if is_page and os.readlink(f"/proc/self/fd/{bell}") == "anon_inode:[eventfd]":
                os.set_blocking(bell, False)
                return cls(page, bell)
        except OSError:
            pass
        os.close(page)
        os.close(bell)
        raise AgentError(f"a control page must be a sealed memfd of {_SIZE} bytes, with an eventfd beside it")

    def close(self) -> None:
        self._memory.close()
        os.close(self.page)
        os.close(self.bell)

    # -- the worker

    def write(self, moment: Moment) -> None:
        """Publishes the worker's use of the network; by one thread at a time. Rings if the network is idle and the agent waits for that."""
        record = _MOMENT.pack(moment.in_flight, moment.begun, moment.step, moment.since, moment.waiting)
        self._memory[: _MOMENT.size + _CHECK.size] = record + _CHECK.pack(zlib.crc32(record))
        if moment.in_flight == 0 and self.rings:
            with contextlib.suppress(BlockingIOError):  # it has been rung often and not been heard: once is enough
                os.eventfd_write(self.bell, 1)

    @property
    def rings(self) -> bool:
        """Whether the agent wants the bell to be rung."""
        return bool(self._memory[_LISTENS])

    # -- the agent

    def read(self) -> Moment:
        """The newest entry that is whole; one that claims to be busy if the worker was stopped in the middle of writing."""
        for _ in range(_TRIES):
            record, check = self._memory[: _MOMENT.size], self._memory[_MOMENT.size : _MOMENT.size + _CHECK.size]
            if _CHECK.unpack(check) == (zlib.crc32(record),):
                in_flight, begun, step, since, waiting = _MOMENT.unpack(record)
                return Moment(in_flight=in_flight, begun=begun, step=step, since=since, waiting=waiting)
        return Moment(in_flight=1)

    def listen(self, wanted: bool) -> None:
        """Sets whether the bell is to be rung."""
        self._memory[_LISTENS] = wanted

    def answer(self) -> None:
        """Records that the bell was heard."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)
