"""Where replicas wait for idle network: what opens the gate, for how much, and what goes past it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from agent_kit import WAIT, open_fds

from gemini_ft.agent.replication import gate as module
from gemini_ft.agent.replication.gate import Gate, Pass
from gemini_ft.config import TrafficConfig
from gemini_ft.core.traffic import LinkCost, Moment, Profile
from gemini_ft.wire.control_page import ControlPage

LINK = LinkCost(alpha=0.0, bandwidth=1e6)  # 4 ms of it are 4,000 bytes: less than the least slice
FAST = LinkCost(alpha=0.0, bandwidth=100e6)  # 4 ms of it are 400,000 bytes


class Sender:
    """What it has under way."""

    def __init__(self, unacknowledged: int = 0, lanes: int = 1) -> None:
        self.unacknowledged, self.lanes = unacknowledged, lanes


def traffic(**options: Any) -> TrafficConfig:
    return TrafficConfig.model_validate(options)


def profile(*gaps: float, seconds: float = 100.0) -> Profile:
    return Profile(gaps=gaps, begins=gaps, spread=gaps, seconds=seconds, steps=20)


def now(**fields: Any) -> Moment:
    """A moment that has just begun."""
    return Moment(since=time.monotonic(), **fields)


def never() -> float:
    """When it is late."""
    return time.monotonic() + 1000.0


class Host:
    """A gate, and the workers it watches."""

    def __init__(self, **options: Any) -> None:
        self.gate = Gate(traffic(**options))
        self.workers: dict[int, ControlPage] = {}
        self.looks = 0  # how often the gate has asked when it is late, which it does whenever it looks

    def worker(self, rank: int = 0, moment: Moment | None = None) -> ControlPage:
        page = self.workers[rank] = ControlPage.create()
        page.write(moment or now())
        self.gate.watch(rank, ControlPage.take(os.dup(page.page), os.dup(page.bell)))
        return page

    async def leave(self, nbytes: int = 10**9, late_at: Callable[[], float] = never) -> Pass:
        def look() -> float:
            self.looks += 1
            return late_at()

        async with asyncio.timeout(WAIT):
            return await self.gate.leave(nbytes, look)

    async def still_waits(self, task: asyncio.Task[Any]) -> bool:
        """Whether the gate has looked again, and lets nothing go."""
        looks = self.looks
        self.gate.poke()
        while self.looks == looks and not task.done():
            await asyncio.sleep(0)
        return not task.done()


@asynccontextmanager
async def host(**options: Any) -> AsyncIterator[Host]:
    made = Host(**options)
    try:
        yield made
    finally:
        made.gate.close()
        for page in made.workers.values():
            page.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 2 * WAIT))


class TestFastLink:
    @pytest.mark.parametrize("rate", [25e9, 50e9])
    def test_is_kept_full_by_several_lanes(self, rate: float) -> None:
        """More is under way than arrives until the gate looks again, and it looks as soon as some has left."""

        async def work() -> None:
            async with host() as here:
                here.worker()
                here.gate.link = LinkCost(alpha=1e-5, bandwidth=rate)
                here.gate.register("lanes", sender := Sender(lanes=8))  # type: ignore[arg-type]

                async def lane() -> None:
                    while True:
                        leave = await here.leave(8 * 2**20)
                        sender.unacknowledged += leave.nbytes

                async with asyncio.TaskGroup() as group:
                    lanes = [group.create_task(lane()) for _ in range(8)]
                    for _ in range(2):
                        while sender.unacknowledged < 0.0075 * rate:
                            await asyncio.sleep(0)
                        for _ in range(100):
                            await asyncio.sleep(0)
                        assert sender.unacknowledged <= 0.008 * rate
                        sender.unacknowledged //= 2
                        here.gate.poke()
                    for each in lanes:
                        each.cancel()

        run(work())

    def test_is_shared_by_the_lanes(self) -> None:
        """Each has something to send at any time, although a chunk is as large as all that may travel."""

        async def work() -> None:
            async with host() as here:
                here.worker()
                here.gate.link = LinkCost(alpha=0.0, bandwidth=1e9)
                here.gate.register("lanes", sender := Sender(lanes=8))  # type: ignore[arg-type]
                given = [0] * 8

                async def lane(number: int) -> None:
                    while True:
                        leave = await here.leave(8 * 2**20)
                        sender.unacknowledged += leave.nbytes
                        given[number] += leave.nbytes
                        await asyncio.sleep(0)

                tasks = [asyncio.create_task(lane(number)) for number in range(8)]
                while sum(given) < 8_000_000:
                    await asyncio.sleep(0)
                assert await here.still_waits(tasks[0])
                assert given == [1_000_000] * 8
                for each in tasks:
                    each.cancel()

        run(work())


class TestOpen:
    def test_where_nobody_is_watched(self) -> None:
        async def work() -> None:
            async with host() as here:
                assert await here.leave(10**9) == Pass(10**9)

        run(work())

    def test_where_the_user_does_not_want_to_wait(self) -> None:
        async def work() -> None:
            async with host(when="ready") as here:
                here.worker(moment=now(in_flight=1))
                assert await here.leave(10**9) == Pass(10**9)

        run(work())

    def test_for_a_slice_while_nothing_is_known(self) -> None:
        async def work() -> None:
            async with host() as here:
                here.worker(moment=now(begun=3, step=7))
                assert await here.leave() == Pass(module.SLICE, span=(7, 3))
                assert await here.leave(100) == Pass(100, span=(7, 3))

        run(work())

    @pytest.mark.parametrize(
        ("link", "transport", "expected"),
        [
            (FAST, "tcp", 400_000),
            (FAST, "collective", 2_000_000),
            (LinkCost(alpha=0.0, bandwidth=50e9), "tcp", 200_000_000),
            (LINK, "tcp", module.SLICE),
        ],
    )
    def test_for_as_much_as_a_collective_may_wait_for(self, link: LinkCost, transport: str, expected: int) -> None:
        async def work() -> None:
            async with host(transport=transport) as here:
                here.worker()
                here.gate.link = link
                assert (await here.leave()).nbytes == expected

        run(work())

    def test_for_what_fits_into_the_span(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 1000.0))

        async def work() -> None:
            async with host(gamma=0.5) as here:
                here.worker(moment=Moment(begun=1, since=999.999))
                here.gate.link, here.gate.profiles[0] = LinkCost(alpha=0.0, bandwidth=1e9), profile(0.0, 0.004)
                assert (await here.leave()).nbytes == pytest.approx(1_000_000, abs=1)  # 2 ms are used; of these, 1 ms is over

        run(work())


class TestClosed:
    def test_while_anybody_communicates_and_open_when_the_bell_rings(self) -> None:
        async def work() -> None:
            async with host() as here:
                here.worker(0)
                other = here.worker(1, now(in_flight=2))
                task = asyncio.create_task(here.leave())
                assert await here.still_waits(task)
                other.write(now(in_flight=1))
                assert await here.still_waits(task)
                other.write(now())
                assert (await task).span == (0, 0)

        run(work())

    def test_when_the_span_is_used_and_open_when_the_next_begins(self) -> None:
        async def work() -> None:
            async with host() as here:
                page = here.worker()
                page.write(Moment(since=time.monotonic() - 50.0))  # of 40 seconds that may be used
                here.gate.link, here.gate.profiles[0] = FAST, profile(50.0, 50.0)
                task = asyncio.create_task(here.leave())
                assert await here.still_waits(task)
                page.write(now(begun=1, in_flight=1))
                page.write(now(begun=1))
                assert (await task).span == (0, 1)

        run(work())

    def test_until_what_is_under_way_has_arrived(self) -> None:
        """Nobody rings then."""

        async def work() -> None:
            async with host() as here:
                here.worker()
                here.gate.link, here.gate.profiles[0] = FAST, profile(50.0)
                sender = Sender(50 * 10**8)
                here.gate.register(sender, sender)  # type: ignore[arg-type]
                task = asyncio.create_task(here.leave())
                assert await here.still_waits(task)
                sender.unacknowledged = 0
                assert (await task).nbytes == 400_000

        run(work())

    def test_not_for_what_a_sender_has_under_way_that_is_gone(self) -> None:
        async def work() -> None:
            async with host() as here:
                here.worker()
                here.gate.link, here.gate.profiles[0] = FAST, profile(50.0)
                sender = Sender(50 * 10**8)
                here.gate.register(sender, sender)  # type: ignore[arg-type]
                here.gate.release(sender)
                assert (await here.leave()).nbytes == 400_000

        run(work())

    def test_not_for_a_few_bytes_that_a_span_has_left(self) -> None:
        """Unless there are as few to send."""

        async def work() -> None:
            async with host(gamma=1.0) as here:
                page = here.worker()
                here.gate.link, here.gate.profiles[0] = LinkCost(alpha=0.0, bandwidth=1.0), profile(1000.0)  # a thousand bytes
                task = asyncio.create_task(here.leave())
                assert await here.still_waits(task)
                page.write(now())
                assert (await here.leave(100)).nbytes == 100
                task.cancel()

        run(work())


class TestLate:
    def test_goes_outside_of_any_span_a_slice_at_a_time(self) -> None:
        async def work() -> None:
            async with host() as here:
                here.worker(moment=now(in_flight=1))
                late_at = time.monotonic() + 0.05
                assert await here.leave(late_at=lambda: late_at) == Pass(module.SLICE, outside=True)
                assert time.monotonic() >= late_at

        run(work())

    def test_goes_at_once_when_it_was_given_up(self) -> None:
        async def work() -> None:
            async with host() as here:
                here.worker(moment=now(in_flight=1))
                at = [never()]
                task = asyncio.create_task(here.leave(late_at=lambda: at[0]))
                assert await here.still_waits(task)
                at[0] = 0.0
                here.gate.poke()
                assert (await task).outside

        run(work())

    def test_is_what_waited_for_longer_than_until_the_next_snapshot(self) -> None:
        gate = Gate(traffic())
        assert gate.patience == module.PATIENCE
        gate.profiles = {0: profile(1.0, seconds=0.5), 1: profile(1.0, seconds=0.25)}
        assert gate.patience == 0.5
        gate.interval = 3
        assert gate.patience == 1.5

    def test_is_nothing_that_waits_for_a_collective_which_does_not_come(self) -> None:
        """An evaluation, say: nothing rings, and the network is idle for longer than it ever was."""

        async def work() -> None:
            async with host() as here:
                page = here.worker()
                page.write(Moment(since=time.monotonic() - 0.005))
                here.gate.link, here.gate.profiles[0] = FAST, profile(0.001)
                late_at = time.monotonic() + WAIT / 2
                assert not (await here.leave(late_at=lambda: late_at)).outside

        run(work())


class TestWorkers:
    def test_one_that_is_gone_is_not_waited_for(self) -> None:
        async def work() -> None:
            async with host() as here:
                here.worker(0)
                here.worker(1, now(in_flight=1))
                here.gate.profiles[1] = profile(1.0)
                task = asyncio.create_task(here.leave())
                assert await here.still_waits(task)
                here.gate.forget(1)
                assert (await task).nbytes == module.SLICE
                assert 1 not in here.gate.profiles
                here.gate.forget(0)
                assert await here.leave() == Pass(10**9)
                here.gate.forget(5)  # was never there

        run(work())

    def test_all_gone_while_something_waits(self) -> None:
        async def work() -> None:
            async with host() as here:
                here.worker(0, now(in_flight=1))
                task = asyncio.create_task(here.leave())
                assert await here.still_waits(task)
                here.gate.close()
                assert await task == Pass(10**9)

        run(work())

    def test_one_that_comes_again_brings_another_page(self) -> None:
        async def work() -> None:
            before = open_fds(os.getpid())
            async with host() as here:
                first = here.worker(0, now(in_flight=1))
                task = asyncio.create_task(here.leave())
                assert await here.still_waits(task)
                again = here.worker(0, now(in_flight=1))
                assert await here.still_waits(task)
                again.write(now())  # rings: the new page says too that somebody listens
                assert (await task).nbytes == module.SLICE
                first.close()
            assert open_fds(os.getpid()) == before

        run(work())

    def test_ring_only_while_something_waits(self) -> None:
        async def work() -> None:
            async with host() as here:
                page = here.worker(0, now(in_flight=1))
                tasks = [asyncio.create_task(here.leave()) for _ in range(2)]
                await asyncio.sleep(0)
                assert page.rings
                tasks[0].cancel()
                with pytest.raises(asyncio.CancelledError):
                    await tasks[0]
                assert page.rings
                page.write(now())
                await tasks[1]
                assert not page.rings

        run(work())


def test_senders_share_what_may_be_under_way() -> None:
    """What one was let out, the other finds under way."""

    async def work() -> None:
        async with host(gamma=1.0) as here:
            here.worker()
            here.gate.link, here.gate.profiles[0] = FAST, profile(100.0)
            senders = [Sender(), Sender()]
            for sender in senders:
                here.gate.register(sender, sender)  # type: ignore[arg-type]
            gone = [0, 0]

            async def send(index: int) -> None:
                while True:
                    passed = await here.leave(100_000)
                    gone[index] += passed.nbytes
                    senders[index].unacknowledged += passed.nbytes  # nothing ever arrives
                    await asyncio.sleep(0)

            tasks = [asyncio.create_task(send(index)) for index in range(2)]
            async with asyncio.timeout(WAIT):
                while sum(gone) < 800_000:
                    await asyncio.sleep(0.001)
            for _ in range(4):
                assert await here.still_waits(tasks[0])
            assert sum(gone) == 800_000  # twice 4 ms of the link
            assert min(gone) > 0
            for task in tasks:
                task.cancel()

    run(work())
