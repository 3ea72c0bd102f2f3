"""The page that a worker and its agent share: what is read was written, whole; and the bell rings when somebody listens."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from multiprocessing.reduction import DupFd
from typing import Any

import pytest
from agent_kit import WAIT, context, open_fds
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.core.autopsy import ENTRIES, GROUPS, TEXT
from gemini_ft.core.traffic import Moment
from gemini_ft.errors import AgentError
from gemini_ft.wire.control_page import ControlPage


@pytest.fixture
def page() -> Iterator[ControlPage]:
    page = ControlPage.create()
    yield page
    page.close()


@pytest.fixture
def agent(page: ControlPage) -> Iterator[ControlPage]:
    """The agent's end."""
    taken = ControlPage.take(os.dup(page.page), os.dup(page.bell))
    yield taken
    taken.close()


def rung(page: ControlPage) -> bool:
    try:
        return os.eventfd_read(page.bell) > 0
    except BlockingIOError:
        return False


counts = st.integers(0, 2**63 - 1)


@given(st.builds(Moment, in_flight=counts, begun=counts, step=counts, since=st.floats(allow_nan=False), waiting=st.booleans()))
def test_what_is_written_is_read(moment: Moment) -> None:
    page = ControlPage.create()
    agent = ControlPage.take(os.dup(page.page), os.dup(page.bell))
    try:
        assert agent.read() == Moment()
        page.write(moment)
        assert agent.read() == moment
    finally:
        page.close()
        agent.close()


def _write(*fds: Any) -> None:
    """Moments whose fields all say the same, until somebody is busy on the other page."""
    page, stop = (ControlPage.take(first.detach(), second.detach()) for first, second in (fds[:2], fds[2:]))
    number = 0
    while not stop.read().in_flight:
        number += 1
        page.write(Moment(in_flight=number, begun=number, step=number, since=float(number)))


def test_a_reader_never_sees_half_a_write(page: ControlPage, agent: ControlPage) -> None:
    stop = ControlPage.create()
    writer = context.Process(target=_write, args=[DupFd(fd) for each in (page, stop) for fd in (each.page, each.bell)])
    writer.start()  # another process: threads would take turns
    newest, end = 0, time.monotonic() + WAIT
    try:
        while newest < 50_000:
            assert time.monotonic() < end, newest
            moment = agent.read()
            if moment == Moment(in_flight=1):  # it could not be read whole
                continue
            assert moment == Moment(in_flight=moment.begun, begun=moment.begun, step=moment.begun, since=float(moment.begun))
            assert moment.begun >= newest
            newest = moment.begun
    finally:
        stop.write(Moment(in_flight=1))
        writer.join(WAIT)
        stop.close()
    assert writer.exitcode == 0


def test_one_that_was_stopped_in_the_middle_of_writing_counts_as_busy(page: ControlPage, agent: ControlPage) -> None:
    page.write(Moment())
    struct.pack_into("=q", mmap.mmap(page.page, 0), 0, 3)  # as after the first of the three steps of a write
    assert agent.read().in_flight == 1
    page.write(Moment(begun=5))
    assert agent.read() == Moment(begun=5)


GROUP = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.text(max_size=TEXT // 4), st.booleans()), min_size=1, max_size=3 * ENTRIES)


class TestTrails:
    @given(st.dictionaries(st.integers(0, GROUPS - 1), GROUP))
    def test_of_each_group_the_newest_collectives_are_read(self, groups: dict[int, list[tuple[int, str, bool]]]) -> None:
        page = ControlPage.create()
        try:
            page.observe(True)
            for place, entered in groups.items():
                page.write_group(place, place, b"former")
                page.write_entered(place, 999, 1, b"former")
                page.write_group(place, place, f"group {place}".encode())
                for number, (mark, text, is_over) in enumerate(entered, start=1):
                    page.write_entered(place, number, mark, text.encode())
                    if is_over:
                        page.write_over(place, number)
            read = {trail.group: trail for trail in page.trails() or ()}
            assert read.keys() == {f"group {place}" for place in groups}
            for place, entered in groups.items():
                trail = read[f"group {place}"]
                kept = [*enumerate(entered, start=1)][-ENTRIES:]
                assert trail.size == place
                assert [(each.number, each.mark, each.text, each.is_over) for each in trail.entered] == [
                    (number, mark, text.rstrip("\0"), is_over) for number, (mark, text, is_over) in kept
                ]
        finally:
            page.close()

    def test_one_that_was_stopped_in_the_middle_of_writing_has_not_entered(self, page: ControlPage, agent: ControlPage) -> None:
        page.observe(True)
        page.write_group(0, 2, b"0")
        page.write_entered(0, 1, 5, b"barrier")
        before = bytes(mmap.mmap(page.page, 0))
        page.write_entered(0, 2, 5, b"barrier")
        (trail,) = agent.trails() or ()
        assert [each.number for each in trail.entered] == [1, 2]
        after = bytes(mmap.mmap(page.page, 0))
        half = [at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new][::2]
        for at in half:
            mmap.mmap(page.page, 0)[at] = before[at]
        (trail,) = agent.trails() or ()
        assert [each.number for each in trail.entered] == [1]

    def test_are_none_where_nothing_is_observed_any_more(self, page: ControlPage, agent: ControlPage) -> None:
        assert agent.trails() is None
        page.observe(True)
        assert agent.trails() == ()
        page.observe(False)
        assert agent.trails() is None


class TestBell:
    def test_is_silent_while_nobody_listens(self, page: ControlPage, agent: ControlPage) -> None:
        page.write(Moment())
        assert not rung(agent)

    def test_rings_when_the_network_falls_idle_and_somebody_listens(self, page: ControlPage, agent: ControlPage) -> None:
        agent.listen(True)
        page.write(Moment(in_flight=1))
        assert not rung(agent)
        page.write(Moment())
        assert rung(agent)
        agent.listen(False)
        page.write(Moment())
        assert not rung(agent)

    def test_is_heard_once_however_often_it_rang(self, page: ControlPage, agent: ControlPage) -> None:
        agent.listen(True)
        for _ in range(3):
            page.write(Moment())
        agent.answer()
        assert not rung(agent)
        agent.answer()  # for nothing: does not wait

    def test_that_is_never_heard_does_not_hold_the_worker_up(self, page: ControlPage, agent: ControlPage) -> None:
        agent.listen(True)
        os.eventfd_write(page.bell, 2**64 - 2)  # as often as it can
        page.write(Moment(begun=1))
        assert agent.read().begun == 1


def sealed(nbytes: int, seals: int) -> int:
    page = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(page, nbytes)
    fcntl.fcntl(page, fcntl.F_ADD_SEALS, seals)
    return page


ALL = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class TestWhatIsNoPage:
    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(lambda: os.memfd_create("test"), id="empty"),
            pytest.param(lambda: sealed(16384, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL), id="can be truncated"),
            pytest.param(lambda: sealed(16384, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW), id="can be sealed further"),
            pytest.param(lambda: sealed(100, ALL), id="too small"),
            pytest.param(lambda: sealed(2**20, ALL), id="too large"),
            pytest.param(lambda: sealed(16384, ALL | fcntl.F_SEAL_WRITE), id="cannot be written"),
            pytest.param(lambda: os.open("/dev/null", os.O_RDWR), id="no memfd"),
            pytest.param(lambda: os.pipe2(0)[0], id="pipe"),
        ],
    )
    def test_is_refused_and_nothing_stays_open(self, make: Callable[[], int]) -> None:
        page, bell = make(), os.eventfd(0)
        before = open_fds(os.getpid())
        with pytest.raises(AgentError, match="a control page must be a sealed memfd of 16384 bytes, with an eventfd beside it"):
            ControlPage.take(page, bell)
        assert open_fds(os.getpid()) == before - 2

    @pytest.mark.parametrize("make", [lambda: os.open("/dev/null", os.O_RDWR), lambda: os.memfd_create("bell")], ids=["null", "memfd"])
    def test_nor_a_bell(self, make: Callable[[], int], page: ControlPage) -> None:
        """The loop of the agent cannot wait for every descriptor."""
        bell = make()
        copy = os.dup(page.page)
        before = open_fds(os.getpid())
        with pytest.raises(AgentError, match="with an eventfd beside it"):
            ControlPage.take(copy, bell)
        assert open_fds(os.getpid()) == before - 2


def test_closing_leaves_nothing_open() -> None:
    before = open_fds(os.getpid())
    page = ControlPage.create()
    agent = ControlPage.take(os.dup(page.page), os.dup(page.bell))
    page.close()
    agent.close()
    assert open_fds(os.getpid()) == before
