"""Trouble in the middle of a job, with real ranks and agents: what is said, what is lost, and that training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agent_kit import end_agent, eventually
from rank_kit import World
from session_case import (
    add_buffer,
    add_parameters,
    compare_with_a_gap,
    drift,
    growth,
    kill_the_agent,
    loop,
    stop_the_agent,
    stop_the_next_agent,
    write_data_during_the_copy,
    write_during_the_copy,
    write_unseen,
    write_with_permission,
)

from gemini_ft.errors import ConcurrentWriteError, ReplicaDivergedError, UnsupportedStateError
from gemini_ft.storage.checkpoints import list_checkpoints
from gemini_ft.storage.opening import open_storage


def run(steps: int = 6, **options: Any) -> Any:
    return (_loop, steps, options)


def _loop(steps: int, options: dict[str, Any]) -> Any:
    return loop(steps, **options)


def told(result: Any, text: str) -> bool:
    return any(text in said for said in result["told"])


class TestWrites:
    @pytest.mark.parametrize("during", [write_during_the_copy, write_data_during_the_copy])
    def test_during_the_copy_cost_one_snapshot_and_are_named(self, one: World, during: Any) -> None:
        (result,) = one.outcome(*run(during=during))
        assert told(result, "iteration 3 has no snapshot: model.0.weight written during the copy (write inside `with checkpointer.mutate")
        assert result["committed"] == 6

    def test_that_no_counter_shows_are_found_by_verify(self, one: World) -> None:
        (error,) = one.outcome(*run(during=write_unseen, verify=True))
        assert isinstance(error, ConcurrentWriteError)
        assert str(error).startswith("iteration 3: model.0.weight changed between the snapshot and the next update; write inside")

    def test_inside_mutate_cost_nothing(self, two: World) -> None:
        for verify in (False, True):
            results = two.outcome(*run(during=write_with_permission, verify=verify))
            assert [result["committed"] for result in results] == [6 + results[0]["start"]] * 2
            assert not told(results[0], "has no snapshot")


class TestDrift:
    def test_before_the_first_step_is_refused_on_all_ranks(self, two: World) -> None:
        results = two.outcome(*run(drifted=True))
        assert {type(result) for result in results} == {ReplicaDivergedError}
        assert len({str(result) for result in results}) == 1
        assert str(results[0]).startswith("model.0.weight is ")
        assert "on ranks [1]" in str(results[0])

    def test_is_found_without_storage(self, two: World) -> None:
        results = two.outcome(*run(50, during=drift, compare_every=10))
        assert any(isinstance(result, ReplicaDivergedError) for result in results), results

    def test_is_looked_for_at_the_same_iterations_by_all_ranks(self, two: World) -> None:
        results = two.outcome(*run(22, during=compare_with_a_gap, compare_every=10, on_late="skip", interval=1, pause=0.05))
        assert [result["scalars"]["digested"] for result in results] == [[10, 20], [20]]

    def test_is_found_before_the_next_upload(self, two: World, tmp_path: Path) -> None:
        storage = {"url": f"file://{tmp_path}/store", "every_steps": 2}
        results = two.outcome(*run(50, during=drift, storage=storage))
        diverged = [result for result in results if isinstance(result, ReplicaDivergedError)]
        assert diverged
        assert all("state that must be the same on all ranks differs: ranks [" in str(error) for error in diverged)
        # Agents tell their own ranks: one may be gone before the other has finished its step, and takes the connection along.
        assert all("127.0.0.1" in str(result) for result in results if result not in diverged), results
        eventually(
            lambda: [info.iteration for info in list_checkpoints(open_storage(storage["url"]))] == [2], "the upload that was under way"
        )


class TestLayout:
    def test_a_change_in_the_middle_is_followed(self, two: World) -> None:
        results = two.outcome(*run(during=add_buffer))
        assert [result["committed"] for result in results] == [6, 6]
        assert not told(results[0], "has no snapshot")
        assert [result["memfds"] for result in results] == [4, 4]  # slots of its own and two replicas: none of the first layout

    def test_parameters_of_no_model_are_refused_by_name(self, two: World) -> None:
        for error in two.outcome(*run(during=add_parameters)):
            assert isinstance(error, UnsupportedStateError)
            assert "the layout has changed while training: " in str(error)
            assert "has got a parameter of no model: a fresh process cannot build it from a snapshot" in str(error)


class TestAgent:
    @pytest.mark.parametrize("victim", [0, 1], ids=["leader", "member"])
    def test_that_dies_is_replaced_and_has_everything_again(self, two: World, victim: int) -> None:
        results = two.outcome(*run(8, during=kill_the_agent), VICTIM=str(victim))
        assert [result["committed"] for result in results] == [8, 8], results
        assert told(results[victim], "this host's agent has ended; starting another and giving it the memory back")
        again = two.outcome(*run(1))
        assert [(result["start"], set(result["restored"])) for result in again] == [(8, {"own memory"})] * 2

    def test_that_dies_is_replaced_for_all_the_ranks_of_its_host(self, two: World) -> None:
        two.hosts = ["host0", "host0", "host1"]
        results = two.outcome(*run(8, during=kill_the_agent), VICTIM="1")
        assert [result["committed"] for result in results] == [8, 8, 8], results
        again = two.outcome(*run(1))
        assert [(result["start"], set(result["restored"])) for result in again] == [(8, {"own memory"})] * 3

    @pytest.mark.parametrize("victim", [0, 1], ids=["leader", "member"])
    def test_that_hangs_costs_snapshots_and_no_step(self, two: World, victim: int) -> None:
        results = two.outcome(*run(40, during=stop_the_agent, on_late="skip", pause=0.01), VICTIM=str(victim))
        assert told(results[0], "has no snapshot: the previous snapshot was still uncommitted at the next update")
        assert all(result["committed"] > 23 for result in results), results

    def test_whose_successor_is_slow_to_begin_holds_up_no_step(self, one: World) -> None:
        (result,) = one.outcome(*run(120, during=stop_the_next_agent, on_late="skip", pause=0.05, timeout=60.0))
        assert result["longest"] < 3.0
        assert result["committed"] > 60, result


class TestAllocations:
    def test_of_the_size_of_the_state_end_with_the_first_steps(self, two: World) -> None:
        for grown in two.outcome(growth, 20_000_000, 3):
            assert grown["shard"] == 160_000_000
            assert max(grown["worker"], grown["agent"]) < grown["shard"] // 4, grown


class TestHosts:
    def test_one_that_lost_everything_reads_from_its_peer(self, two: World) -> None:
        two.outcome(*run())
        end_agent(two.run, "host1")
        results = two.outcome(*run())
        assert [result["start"] for result in results] == [6, 6]
        assert [set(result["restored"]) for result in results] == [{"own memory"}, {"peer host0"}]
        third = two.outcome(*run())
        assert [(result["start"], set(result["restored"])) for result in third] == [(12, {"own memory"})] * 2

    def test_that_changed_their_ranks_keep_their_memory(self, two: World) -> None:
        two.outcome(*run())
        two.hosts = ["host1", "host0"]
        results = two.outcome(*run())
        assert [(result["start"], set(result["restored"])) for result in results] == [(6, {"own memory"})] * 2

    def test_a_new_one_in_place_of_a_lost_one_reads_from_the_peer(self, two: World) -> None:
        two.outcome(*run())
        end_agent(two.run, "host0")
        two.hosts = ["host1", "host7"]
        results = two.outcome(*run())
        assert [result["start"] for result in results] == [6, 6]
        assert [set(result["restored"]) for result in results] == [{"own memory"}, {"peer host1"}]

    def test_that_took_all_copies_of_a_shard_with_them_are_mourned_loudly(self, two: World) -> None:
        two.outcome(*run(replicas=1))
        end_agent(two.run, "host1")
        results = two.outcome(*run(replicas=1))
        assert [result["start"] for result in results] == [0, 0]
        text = "copies of iteration 6 exist, but none of the shards of ranks [1], and no checkpoint in storage: starting from the beginning"
        assert told(results[0], text)
