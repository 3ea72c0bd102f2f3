"""A leader that is lost, hangs, or comes back, and the hosts that lead after it (docs/design.md, "Commit")."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from crew_kit import Crew, Member, version

from gemini_ft.agent.commit import leader as leader_module
from gemini_ft.agent.commit import member
from gemini_ft.agent.commit.collector import ask
from gemini_ft.core.decisions import Commit, Holders
from gemini_ft.core.effects import Completed
from gemini_ft.wire.peer_messages import AllFinished, DrainHost, ReportFinished


def test_when_the_leader_is_lost_the_next_host_leads_and_what_was_committed_stays() -> None:
    """A host whose agent is dead has nothing committed; everything else goes on, and so does that when it is back."""

    async def work() -> None:
        async with Crew(4) as crew:
            await crew.commit(1)
            crew[0].end()
            await crew.until(lambda: crew.leaders == ["h1"] and all(host.failover.reaches_leader for host in crew.alive))
            assert crew.epochs == {1}
            assert crew[1].failover.leader is not None
            assert crew[1].failover.leader.book.committed == version(1)
            crew.report(2)
            await crew[0].restart()
            await crew.until(lambda: crew[0].failover.reaches_leader)
            crew[0].complete(2)
            await crew.until(lambda: all(host.committed == version(2) for host in crew.alive))
            assert crew.leaders == ["h1"]
            await crew.commit(3)

    asyncio.run(work())


def test_a_leader_that_says_nothing_for_less_than_the_timeout_is_not_taken_for_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with Crew(3, timeout=600) as crew:
            await asyncio.sleep(0.3)  # thirty looks
            assert not [line for line in crew.lines if "silent" in line]

    monkeypatch.setattr(member, "LOOK", 0.01)
    asyncio.run(work())


def test_the_leader_names_the_hosts_of_which_it_hears_nothing() -> None:
    """Two kinds of host: one whose open connection is silent, as after a power cut, and one whose connection is closed."""

    async def work() -> None:
        async with Crew(4) as crew:
            leader = crew[0].failover.leader
            assert leader is not None
            assert leader.unheard(time.monotonic()) == []
            assert leader.unheard(time.monotonic() + 60.0) == ["h1", "h2", "h3"]  # if they say nothing until then
            crew[3].end()
            await crew.until(lambda: leader.unheard(time.monotonic()) == ["h3"])

    asyncio.run(work())


def test_a_host_whose_connection_closes_is_heard_of_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may live: its agent is started anew, or another session begins there."""
    ahead = [0.0]
    monkeypatch.setattr(leader_module, "SILENCE", 1000.0)
    monkeypatch.setattr(leader_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0]))

    async def work() -> None:
        async with Crew(4) as crew:
            leader = crew[0].failover.leader
            assert leader is not None
            ahead[0] = 800.0
            await crew.commit(1)  # all have spoken since
            crew[3].end()
            await crew.until(lambda: not leader.is_obeyed)
            assert leader.unheard(time.monotonic() + ahead[0]) == []
            assert leader.unheard(time.monotonic() + ahead[0] + 600.0) == ["h1", "h2", "h3"]

    asyncio.run(work())


def test_leaders_are_lost_one_after_the_other() -> None:
    async def work() -> None:
        async with Crew(5) as crew:
            for lost in range(3):
                await crew.commit(lost + 1)
                crew[lost].end()
                await crew.until(lambda lost=lost: crew.leaders == [f"h{lost + 1}"])  # type: ignore[misc]
                await crew[lost].restart()
                await crew.until(lambda: all(host.failover.reaches_leader for host in crew.alive))
            await crew.commit(4)
            assert crew.epochs == {3}

    asyncio.run(work())


def test_a_leader_that_only_one_host_does_not_reach_stays() -> None:
    async def work() -> None:
        async with Crew(4) as crew:
            crew.cut_off("h0", "h2")
            await crew.until(lambda: crew[2].succession.suspects(time.monotonic()))
            crew.report(1)
            for _ in range(3):
                asked = len(crew[1].incoming)
                await crew.until(lambda asked=asked: len(crew[1].incoming) > asked)  # type: ignore[misc]
            assert crew.leaders == ["h0"]
            crew.cut.clear()
            await crew.until(lambda: all(host.committed == version(1) for host in crew.alive))
            assert crew.epochs == {0}

    asyncio.run(work())


@pytest.mark.parametrize("size", [2, 4])
def test_a_leader_that_nobody_reaches_but_that_reaches_the_others_steps_down(size: int) -> None:
    """The way to its port is cut, and nothing else is: its copies are there, and are committed by the next leader."""

    async def work() -> None:
        async with Crew(size) as crew:
            await crew.commit(1)
            crew.cut_off("h0")
            await crew.until(lambda: crew.leaders == ["h1"])
            await crew.commit(2)
            assert crew.epochs == {1}

    asyncio.run(work())


def test_hosts_below_collectors_follow_with_their_collector() -> None:
    async def work() -> None:
        async with Crew(7, fan_in=2) as crew:
            await crew.commit(1)
            below = crew[2].failover.member
            assert below is not None
            connection = below.connection
            crew[0].end()
            await crew.until(lambda: len(crew.leaders) == 1 and all(host.failover.reaches_leader for host in crew.alive))
            assert crew.leaders == ["h2"]  # the first that is no collector
            kept = crew[3].failover.member
            assert kept is not None
            assert kept.connection is not connection
            crew.report(2)
            await crew[0].restart()
            await crew.until(lambda: crew[0].failover.reaches_leader)
            crew[0].complete(2)
            await crew.until(lambda: all(host.committed == version(2) for host in crew.alive))
            assert all(isinstance(host.heard[-1], Commit) for host in crew.alive)
            await crew.commit(3)

    asyncio.run(work())


@pytest.mark.parametrize("size", [2, 3])
def test_where_no_other_host_may_lead_the_first_one_does_again_when_its_agent_is_back(size: int) -> None:
    async def work() -> None:
        async with Crew(size, timeout=0.0) as crew:
            await crew.commit(1)
            crew[0].end()
            await crew[0].restart()
            await crew.until(lambda: all(host.failover.reaches_leader for host in crew.alive))
            await crew.commit(2)

    asyncio.run(work())


@pytest.mark.parametrize(("size", "fan_in"), [(2, 64), (4, 64), (7, 2)])
def test_a_leader_is_found_when_no_agent_knows_of_any(size: int, fan_in: int) -> None:
    async def work() -> None:
        async with Crew(size, fan_in=fan_in) as crew:
            await crew.commit(1)
            for host in crew.alive:
                host.end()
            for host in crew.hosts.values():
                await host.restart()
            await crew.commit(2)

    asyncio.run(work())


def test_a_host_that_has_heard_that_all_have_finished_tells_the_next_leader() -> None:
    """The agents of the others may have left by then, and with them the words of their ranks."""

    async def work() -> None:
        async with Crew(4) as crew:
            for message in (ReportFinished(rank=2), DrainHost(host="h3")):  # the second one shows that the first has been heard
                crew[2].failover.take(message)
            await crew.until(lambda: DrainHost(host="h3") in crew[0].heard)
            crew.cut_off("h0", "h2")
            for rank in (0, 1, 3):
                crew[rank].failover.take(ReportFinished(rank=rank))
            await crew.until(lambda: AllFinished() in crew[1].heard)
            crew[0].end()
            crew[3].end()
            await crew.until(lambda: AllFinished() in crew[2].heard)
            assert crew.leaders == ["h1"]

    asyncio.run(work())


def test_a_member_that_claims_the_last_epoch_there_can_be_stops_no_leader_from_following() -> None:
    """After that number none could be sent any more, so that the next loss of a leader would end the commits for good."""

    async def work() -> None:
        async with Crew(4) as crew:
            liar = crew[3]
            for epoch in (2**64 - 1, 2**63 - 1, 2**62):
                liar.succession.epoch = epoch
                await ask(liar, "h1", epoch)
                liar.succession.epoch = 0
            crew[0].end()
            await crew.until(lambda: crew.leaders == ["h1"])
            await crew[0].restart()
            await crew.commit(1)
            assert crew.epochs == {1}

    asyncio.run(work())


def test_a_leader_is_obeyed_as_long_as_all_others_report_to_it() -> None:
    async def work() -> None:
        async with Crew(7, fan_in=2) as crew:
            leader = crew[0].failover.leader
            assert leader is not None
            assert leader.is_obeyed
            crew.cut_off("h0", "h1")
            await crew.until(lambda: not leader.is_obeyed)

    asyncio.run(work())


def test_a_drain_that_the_lost_leader_has_not_heard_is_told_to_the_next_one() -> None:
    async def work() -> None:
        async with Crew(4) as crew:
            crew[2].failover.take(DrainHost(host="h3"))
            crew[0].end()
            await crew.until(lambda: DrainHost(host="h3") in crew[3].heard)

    asyncio.run(work())


def test_holders_that_were_left_out_under_the_lost_leader_count_under_the_next_one_and_all_hear_that() -> None:
    async def work() -> None:
        async with Crew(3, patience=0.0) as crew:
            late, *others = crew[2], crew[0], crew[1]
            crew.report(1, others)
            late.failover.take(Completed(owner=2, host="h2", version=version(1), layout="l", digest="d", root="root 2"))
            await crew.until(lambda: any(isinstance(message, Holders) and message.excluded for message in crew[1].heard))
            crew[0].end()
            await crew.until(lambda: crew.leaders == ["h1"] and crew[2].failover.reaches_leader)
            for host in (crew[1], crew[2]):
                await crew.until(lambda host=host: Holders(epoch=0, excluded=frozenset(), newly=frozenset()) in host.heard)  # type: ignore[misc]

    asyncio.run(work())


def test_a_failover_that_is_closed_hears_of_no_leader() -> None:
    async def work() -> None:
        async with Crew(3) as crew:
            crew[1].failover.close()
            crew[1].failover.hear(2)
            assert crew[1].succession.epoch == 0


def test_hosts_return_to_their_own_collector_when_it_is_there_again_and_no_commit_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all hosts would report to one collector in the end, after each other one was away for a moment."""
    monkeypatch.setattr(member, "RETURN", 0.05)
    monkeypatch.setattr(member, "TRIES", 1)

    def reporting_to(collector: Member) -> set[str]:
        return {name for name, connection in collector.incoming if not connection.closed.is_set()}

    async def work() -> None:
        async with Crew(7, fan_in=2) as crew:
            own, other = crew[1], crew[4]
            assert (reporting_to(own), reporting_to(other)) == ({"h2", "h3"}, {"h5", "h6"})
            await crew.commit(1)
            own.end()
            await crew.until(lambda: reporting_to(other) == {"h2", "h3", "h5", "h6"})
            await own.restart()
            iteration = 1
            async with asyncio.timeout(30):
                while reporting_to(other) != {"h5", "h6"}:
                    iteration += 1
                    await crew.commit(iteration)
            await crew.commit(iteration + 1)
            assert reporting_to(own) == {"h2", "h3"}
            committed = [message.version.iteration for message in crew[2].heard if isinstance(message, Commit)]
            assert set(committed) >= set(range(1, iteration + 2))

    asyncio.run(work())
