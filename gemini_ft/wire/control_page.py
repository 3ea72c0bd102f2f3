"""A page of memory in which a worker shows its host's agent its present use of the network, and the collectives that it has entered.

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
from typing import Any

from gemini_ft.core.autopsy import ENTRIES, GROUPS, TEXT, Entered, GroupTrail
from gemini_ft.core.traffic import Moment
from gemini_ft.errors import AgentError

_SIZE = 16384
_MOMENT = struct.Struct("=qqqd?")
_CHECK = struct.Struct("=I")  # crc32 of the bytes before it: a read in the middle of a write is noticed on every kind of processor
_LISTENS = 2048  # the only byte that the agent writes
_OBSERVED = 2049  # whether the collectives of this process are observed
_TRAILS = 4096  # where the groups begin, GROUPS of them
_GROUP = struct.Struct(f"=i{TEXT}s")  # size, name; its _CHECK and ENTRIES collectives follow
_ENTERED = struct.Struct(f"=qI{TEXT}s")  # number, mark, text; its _CHECK follows, and a byte: whether it is over
_ENTRY = _ENTERED.size + _CHECK.size + 1
_TRAIL = _GROUP.size + _CHECK.size + ENTRIES * _ENTRY
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

        Raises AgentError: they are no page and bell; a page that can be truncated would kill every process that maps it.
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

    def observe(self, is_observed: bool) -> None:
        """Publishes whether the worker's collectives are observed."""
        self._memory[_OBSERVED] = is_observed

    def write_group(self, place: int, size: int, name: bytes) -> None:
        """Begins the trail of a group at one of the places from 0 to GROUPS - 1, over another one's."""
        record = _GROUP.pack(size, name)
        self._memory[(at := _TRAILS + place * _TRAIL) : at + _TRAIL] = (record + _CHECK.pack(zlib.crc32(record))).ljust(_TRAIL, b"\0")

    def write_entered(self, place: int, number: int, mark: int, text: bytes) -> None:
        """Adds a collective to the trail of a group, over its oldest one."""
        record = _ENTERED.pack(number, mark, text)
        at = _entry(place, number)
        self._memory[at : at + _ENTRY] = record + _CHECK.pack(zlib.crc32(record)) + b"\0"

    def write_over(self, place: int, number: int) -> None:
        """Publishes that a collective is over, which must be in the trail still."""
        self._memory[_entry(place, number) + _ENTRY - 1] = 1

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

    def trails(self) -> tuple[GroupTrail, ...] | None:
        """The collectives that the worker has entered, by group, as far as they are whole; None: they are not observed."""
        groups = [trail for place in range(GROUPS) if (trail := self._trail(place)) is not None]
        return tuple(groups) if self._memory[_OBSERVED] else None

    def _trail(self, place: int) -> GroupTrail | None:
        at = _TRAILS + place * _TRAIL
        if (head := self._checked(_GROUP, at)) is None:
            return None
        entries = []
        for at in range(_entry(place, 0), _entry(place, ENTRIES - 1) + 1, _ENTRY):
            if (fields := self._checked(_ENTERED, at)) is not None:
                is_over = bool(self._memory[at + _ENTRY - 1])
                entries.append(Entered(number=fields[0], is_over=is_over, mark=fields[1], text=_text(fields[2])))
        entries.sort(key=lambda each: each.number)
        return GroupTrail(group=_text(head[1]), size=head[0], entered=tuple(entries)) if entries else None

    def _checked(self, shape: struct.Struct, at: int) -> tuple[Any, ...] | None:
        record, check = self._memory[at : (end := at + shape.size)], self._memory[end : end + _CHECK.size]
        is_whole = any(check) and _CHECK.unpack(check) == (zlib.crc32(record),)
        return shape.unpack(record) if is_whole else None

    def listen(self, wanted: bool) -> None:
        self._memory[_LISTENS] = wanted

    def answer(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)


def _entry(place: int, number: int) -> int:
    return _TRAILS + place * _TRAIL + _GROUP.size + _CHECK.size + number % ENTRIES * _ENTRY


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
