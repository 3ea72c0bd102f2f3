"""Every way in which a job must be refused or go on in a defined way: real ranks, real agents, the very words."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_kit import end_agent
from rank_kit import World
from session_case import grow_small_state, loop, overheard, wait_for_upload

from gemini_ft.agent.memory.slot_files import folder_of
from gemini_ft.agent.memory.slot_memory import EXTRAS_ROOM, SlotMemory
from gemini_ft.errors import (
    ConfigError,
    GeminiError,
    LayoutMismatchError,
    MemoryBudgetError,
    PeerError,
    RecoveryError,
    SecretError,
    StateError,
    WorldSizeError,
)
from gemini_ft.hosts import machine_id
from gemini_ft.launch.notes import LACKS
from gemini_ft.wire.messages import PROTOCOL_VERSION
from gemini_ft.worker import resume_choice, session


def run(steps: int = 3, **options: Any) -> Any:
    return (_loop, steps, options)


def _loop(steps: int, options: dict[str, Any]) -> Any:
    return loop(steps, **options)


def same_error(results: list[Any], kind: type[GeminiError]) -> str:
    """All ranks raised the same; its text."""
    assert [type(result) for result in results] == [kind] * len(results), results
    assert len({str(result) for result in results}) == 1, results
    return str(results[0])


def _of_its_own_version() -> Any:
    session.PROTOCOL_VERSION += int(os.environ.get("NEWER", "0"))
    return loop(3)


def _booted_later(up: float) -> Any:
    resume_choice.uptime = lambda: up
    return loop(1, replicas=1)


class TestVersions:
    def test_hosts_of_two_versions_are_told_so(self, two: World) -> None:
        attempt = two.start(_of_its_own_version, per_rank=[{}, {"NEWER": "1"}])
        text = same_error(attempt.results(), ConfigError)
        assert text == (
            f"ranks speak different protocols (rank 0: {PROTOCOL_VERSION}, rank 1: {PROTOCOL_VERSION + 1}): "
            "their versions of gemini-ft differ; install the same on all hosts"
        )


class TestOptions:
    def test_an_unknown_one_is_named_with_those_there_are(self, one: World) -> None:
        text = same_error(one.outcome(*run(replica=3)), ConfigError)
        known = "agent_cpus, agent_timeout, chunk_bytes, compare_every, copy_when, domain, drain_seconds, drain_signal, elastic, encrypt"
        assert text.startswith(f"gemini options: unknown option 'replica'; allowed: {known}")

    def test_that_differ_between_ranks_are_refused(self, two: World) -> None:
        """By their names: an address of storage may have a password in it."""
        storage = {"GEMINI_STORAGE__URL": "s3://bucket", "GEMINI_STORAGE__EVERY_STEPS": "9"}
        other = {"GEMINI_ENCRYPT": "1", "GEMINI_STORAGE__ENDPOINT_URL": "https://bob:hunter2@host"}
        attempt = two.start(*run(), per_rank=[storage, storage | other])
        text = 'than rank 0: encrypt is true and not false; storage.endpoint_url is "https://...@host" and not null'
        assert text in same_error(attempt.results(), ConfigError)

    def test_an_interface_that_is_not_there_is_refused_with_those_that_are(self, two: World) -> None:
        text = same_error(two.outcome(*run(interface="ib7")), ConfigError)
        assert "interface='ib7': no such interface, and not a CIDR; this host has " in text
        assert "lo (127.0.0.1" in text

    def test_an_interface_that_one_host_lacks_is_named_to_all_ranks(self, two: World) -> None:
        attempt = two.start(*run(), per_rank=[{}, {"GEMINI_INTERFACE": "ib7"}])
        assert same_error(attempt.results(), ConfigError).startswith("rank 1: interface='ib7': no such interface")

    def test_what_agents_must_hear_of_is_no_argument(self, one: World) -> None:
        text = same_error(one.outcome(*run(agent_cpus="0")), ConfigError)
        assert "it elsewhere: give it as GEMINI_AGENT_CPUS, or in the file that GEMINI_CONFIG names" in text

    def test_processors_for_agents_may_differ_between_hosts(self, two: World) -> None:
        attempt = two.start(*run(), per_rank=[{"GEMINI_AGENT_CPUS": "0"}, {}])
        assert [result["start"] for result in attempt.results()] == [0, 0]

    def test_processors_that_are_not_there_are_refused(self, one: World) -> None:
        attempt = one.start(*run(), per_rank=[{"GEMINI_AGENT_CPUS": "0,1020"}])
        assert "agent_cpus=0,1020: this host, or this process's control group, lacks" in same_error(attempt.results(), ConfigError)

    def test_domains_of_some_hosts_only_are_refused(self, two: World) -> None:
        attempt = two.start(*run(), per_rank=[{"GEMINI_DOMAIN": "rack1"}, {}])
        assert "hosts ['host1'] have no failure domain, others have one" in same_error(attempt.results(), ConfigError)


class TestSecrets:
    def test_a_file_that_others_may_read_is_refused(self, two: World, tmp_path: Path) -> None:
        path = tmp_path / "secret"
        path.write_text("secret\n")
        path.chmod(0o640)
        text = same_error(two.outcome(*run(), GEMINI_SECRET_FILE=str(path)), SecretError)
        assert text == f"ranks 0, 1: secret_file={path} has mode 0640 and may be read by others; `chmod 600 {path}`"

    def test_a_file_that_is_missing_on_one_host_is_named(self, two: World, tmp_path: Path) -> None:
        path = tmp_path / "secret"
        path.write_text("secret\n")
        path.chmod(0o600)
        attempt = two.start(*run(), per_rank=[{"GEMINI_SECRET_FILE": str(p)} for p in (path, tmp_path / "none")])
        assert "rank 1: secret_file=" in same_error(attempt.results(), SecretError)

    @pytest.mark.parametrize("first", [{"GEMINI_SECRET": "one"}, {}], ids=["another one", "none"])
    def test_that_differ_are_refused_without_being_shown(self, two: World, first: dict[str, str]) -> None:
        attempt = two.start(*run(), per_rank=[first, {"GEMINI_SECRET": "other"}])
        text = same_error(attempt.results(), SecretError)
        assert "the ranks were given different run secrets (fingerprints: rank 1 has " in text
        assert "other" not in text

    def test_that_are_given_are_used_and_nothing_is_warned_of(self, two: World) -> None:
        results = two.outcome(*run(), GEMINI_SECRET="secret")
        assert [result["committed"] for result in results] == [3, 3]
        assert not any("no run secret" in text for text in results[0]["told"])

    @pytest.mark.parametrize("given", [{}, {"GEMINI_SECRET": "a secret of the user's"}], ids=["made up", "given"])
    def test_that_all_ranks_have_were_never_said_openly(self, two: World, given: dict[str, str]) -> None:
        results = two.outcome(overheard, **given)
        assert [(result["said"] > 3, result["length"] >= 16, result["overheard"]) for result in results] == [(True, True, False)] * 2
        assert results[0]["secret"] == results[1]["secret"]


class TestMemory:
    def test_too_little_is_refused_at_the_first_step_on_all_ranks(self, two: World) -> None:
        text = same_error(two.outcome(*run(memory_limit="12MiB", width=2**18)), MemoryBudgetError)
        assert "bytes of snapshots; its agent may hold 12,582,912. Raise memory_limit (GEMINI_MEMORY_LIMIT), lower replicas (now 2)" in text

    def test_small_state_that_outgrows_its_room_gets_more(self, one: World) -> None:
        (grown,) = one.outcome(*run(4, during=grow_small_state))
        assert grown["committed"] == 4
        (resumed,) = one.outcome(*run(1))
        assert resumed["start"] == 4
        assert resumed["scalars"]["grown"] == "g" * 2 * EXTRAS_ROOM

    def test_too_little_on_one_host_is_refused_on_all_ranks(self, two: World) -> None:
        attempt = two.start(*run(width=2**18), per_rank=[{}, {"GEMINI_MEMORY_LIMIT": "12MiB"}])
        assert "host host1 must hold " in same_error(attempt.results(), MemoryBudgetError)


class TestOtherJob:
    """The run id is that of a job that was another."""

    def test_of_another_size_is_refused_with_both_sizes_and_the_way_out(self, two: World) -> None:
        two.outcome(*run())
        two.hosts = ["host0", "host1", "host2"]
        text = same_error(two.outcome(*run()), WorldSizeError)
        assert text.startswith(
            "the snapshot in memory was made by 2 ranks, this job has 3. Start 2 ranks to resume it, or set resume='never'"
        )
        assert two.outcome(*run(resume="never"))[0]["start"] == 0

    def test_with_another_model_is_refused_by_name(self, two: World) -> None:
        two.outcome(*run())
        text = same_error(two.outcome(*run(width=9)), LayoutMismatchError)
        assert "the snapshot belongs to another model or optimizer, " in text
        assert "model.0.weight has shape (9, 4) now and (8, 4) in the snapshot" in text

    def test_that_does_not_fit_is_kept_however_often_it_is_tried(self, two: World) -> None:
        two.outcome(*run())
        for _ in range(3):
            same_error(two.outcome(*run(width=9, max_retries=1)), LayoutMismatchError)
        assert [result["start"] for result in two.outcome(*run(max_retries=1))] == [3, 3]

    def test_with_other_state_is_refused_by_name(self, one: World) -> None:
        one.outcome(*run(state=("scheduler", "scaler")))
        text = same_error(one.outcome(*run(state=("scheduler",))), StateError)
        assert text == "the snapshot has state of ['scaler', 'scheduler'], this job has ['scheduler']; give the same `state` as before"


@pytest.fixture
def slots_folder() -> Iterator[Path]:
    """A folder for slots, which outlive their agents there."""
    root = Path("/dev/shm", f"gemini-test-{secrets.token_hex(6)}")
    root.mkdir(mode=0o700)
    yield root
    shutil.rmtree(root)


def damage_newest(folder: Path, owner: int) -> None:
    """Flips a bit in the newest copy of a shard among the slots of a host."""
    copies = [SlotMemory.adopt(os.open(path, os.O_RDWR)) for path in folder.glob("gemini-slot-*")]
    newest = max((copy for copy in copies if copy.shape.owner == owner and copy.version is not None), key=lambda copy: copy.version)
    newest.data(0, 1)[0] ^= 1
    for copy in copies:
        copy.close()


class TestAbsentHosts:
    def test_that_alone_may_have_what_was_committed_are_waited_for(self, tmp_path: Path) -> None:
        """A host lost earlier, which held only something older, is no absent one, and lets those that held this come first."""
        with World(tmp_path, hosts=["host0", "host1", "host2"]) as world:
            world.outcome(*run(3))
            world.hosts = ["host0", "host4", "host2"]
            assert [result["start"] for result in world.outcome(*run(3))] == [3, 3, 3]
            for host in ("host0", "host4"):
                end_agent(world.run, host)
            world.hosts = ["host1", "host2", "host4"]
            notes = [tmp_path / host for host in world.hosts]
            attempt = world.start(*run(3), per_rank=[{"GEMINI_NOTES_FILE": str(note)} for note in notes])
            text = same_error(attempt.results(), PeerError)
            attempt.kill()
            assert text.startswith("step 6 was committed, and no host here has the shards of ranks [1]; these hosts may: host0. Nothing is")
            assert [LACKS in note.read_text().split() for note in notes] == [True, False, False]
            world.hosts = ["host0", "host2", "host4"]
            assert [result["start"] for result in world.outcome(*run(1))] == [0, 0, 0]

    def test_have_it_still_when_they_come_back_and_need_not_come(self, two: World) -> None:
        two.outcome(*run(replicas=1))
        two.hosts = ["host0", "host7"]
        text = same_error(two.outcome(*run(replicas=1)), PeerError)
        assert "of ranks [1]; these hosts may: host1." in text
        assert "start the command with GEMINI_RESUME=never, or with another --run-id" in text
        two.hosts = ["host0", "host1"]
        assert [result["start"] for result in two.outcome(*run(replicas=1))] == [3, 3]
        two.hosts = ["host0", "host7"]
        assert [result["start"] for result in two.outcome(*run(replicas=1, resume="never"))] == [0, 0]

    def test_that_have_been_booted_since_are_here_and_have_nothing(self, two: World) -> None:
        two.hosts = [f"{name}-{boot}" for name, boot in (("here", "0123abcd"), ("node", "0123abcd"))]
        two.outcome(*run(replicas=1))
        two.hosts = [two.hosts[0], f"node-{machine_id()[:8]}"]  # as if by default
        text = same_error(two.outcome(_booted_later, 1e9), PeerError)
        assert "these hosts may: node-0123abcd. " in text, "this machine was there before, so it is another one of the same name"
        assert "renamed or booted since, counts as absent: GEMINI_HOST_ID gives" in text
        results = two.outcome(_booted_later, 0.0)
        assert [result["start"] for result in results] == [0, 0]
        lost = f"host node-0123abcd is here as {two.hosts[1]}, booted since: its copies of iteration 3 of incarnation"
        assert [sum(lost in text for text in result["told"]) for result in results] == [1, 0]

    def test_are_known_to_an_agent_that_has_been_started_anew(self, two: World, slots_folder: Path) -> None:
        """Its slots are files, and so is the rest that it has to know."""
        options = {"GEMINI_MEMORY__FOLDER": str(slots_folder)}
        two.outcome(*run(replicas=1), **options)
        for host in two.hosts:
            end_agent(two.run, host)
        two.hosts = ["host0", "host7"]
        text = same_error(two.outcome(*run(replicas=1), **options), PeerError)
        assert text.startswith("step 3 was committed, and no host here has the shards of ranks [1]; these hosts may: host1. Nothing is")
        two.hosts = ["host0", "host1"]
        assert [result["start"] for result in two.outcome(*run(replicas=1), **options)] == [3, 3]

    def test_are_known_to_a_launcher_whose_agent_is_lost_with_its_memory(self, two: World, tmp_path: Path) -> None:
        notes = [{"GEMINI_NOTES_FILE": str(tmp_path / f"notes{number}")} for number in range(2)]
        two.start(*run(), per_rank=notes).results()
        end_agent(two.run, "host0")
        two.hosts = ["host0", "host7"]
        text = same_error(two.start(*run(), per_rank=[notes[0], {}]).results(), PeerError)
        assert text.startswith("something was committed, and no host here has any of it; these hosts may: host1. Nothing is begun without")
        two.hosts = ["host0", "host1"]
        assert [result["start"] for result in two.start(*run(), per_rank=notes).results()] == [3, 3]

    def test_have_what_is_newer_than_what_is_whole_here(self, two: World, slots_folder: Path, tmp_path: Path) -> None:
        """One copy of the newest step is damaged here, and its owner's host is cut off: without storage nothing older is resumed."""
        options = {"GEMINI_MEMORY__FOLDER": str(slots_folder)}
        storage = {"url": f"file://{tmp_path}/store", "every_steps": 2}
        two.outcome(*run(during=wait_for_upload, storage=storage), **options)
        damage_newest(folder_of(slots_folder, two.run, "host1"), owner=0)
        two.hosts = ["host1", "host7"]
        text = same_error(two.outcome(*run(), **options), PeerError)
        assert text.startswith("step 3 was committed, and no host here has the shards of ranks [0]; these hosts may: host0. Nothing older")
        assert "GEMINI_RESUME=found goes on from step 2" in text
        assert [result["start"] for result in two.outcome(*run(0, storage=storage), **options)] == [2, 2]

    def test_have_gone_on_as_the_launcher_knows_from_what_is_whole_here(self, two: World, tmp_path: Path) -> None:
        """Another host has taken the place of one that was cut off and comes back; the newer ones are absent, or have lost it."""
        notes = [{"GEMINI_NOTES_FILE": str(tmp_path / f"notes{number}")} for number in range(2)]
        assert [result["start"] for result in two.start(*run(), per_rank=notes).results()] == [0, 0]
        told = (tmp_path / "notes1").read_text().replace("hosts=", "told=").replace("host1", "host7")
        with (tmp_path / "notes1").open("a") as file:
            file.write(told)
        for hosts, absent in ((["host8", "host1"], "host0, host7"), (["host0", "host1"], "host7")):
            two.hosts = hosts
            text = same_error(two.start(*run(), per_rank=notes).results(), PeerError)
            assert text.startswith(
                f"step 3 is whole here, and other hosts have committed since; these hosts may have it: {absent}. Nothing older"
            )
        attempt = two.start(*run(1), per_rank=[each | {"GEMINI_RESUME": "found"} for each in notes])
        assert [result["start"] for result in attempt.results()] == [3, 3]
        assert [result["start"] for result in two.start(*run(1), per_rank=notes).results()] == [4, 4]


class TestResume:
    def test_auto_never_and_require(self, two: World) -> None:
        text = same_error(two.outcome(*run(resume="require")), RecoveryError)
        assert text.startswith("resume='require', but nothing to resume yet: starting from the beginning. Set resume='auto'")
        first = two.outcome(*run())
        assert [result["start"] for result in first] == [0, 0]
        assert any("nothing to resume yet" in text for text in first[0]["told"])
        again = two.outcome(*run(resume="require"))
        assert [(result["start"], result["scalars"]) for result in again] == [(3, {"iteration": 5})] * 2
        assert any("resuming at iteration 3 from memory" in text for text in again[0]["told"])
        assert [result["start"] for result in two.outcome(*run(resume="never"))] == [0, 0]
        assert [result["start"] for result in two.outcome(*run())] == [3, 3]

    def test_never_says_so_of_what_was_there_before_the_launch(self, two: World, tmp_path: Path) -> None:
        """`never` leaves aside what was there before the launch, however early a failure comes; its own steps are resumed."""
        storage = {"url": f"file://{tmp_path}/store", "every_steps": 2}
        assert [result["start"] for result in two.outcome(*run(2, storage=storage))] == [0, 0]
        launch = {"GEMINI_LAUNCH": "again", "GEMINI_LAUNCHER_PID": str(os.getpid())}
        for _ in range(2):  # nothing is committed
            attempt = two.outcome(*run(3, storage=storage, resume="never", crash_at=0), **launch)
            assert all(isinstance(result, RuntimeError) for result in attempt), attempt
        assert [result["start"] for result in two.outcome(*run(3, storage=storage, resume="never"), **launch)] == [0, 0]
        assert [result["start"] for result in two.outcome(*run(4, storage=storage, resume="never"), **launch)] == [3, 3]

    def test_a_version_that_fails_again_and_again_is_given_up_for_an_older_one(self, two: World) -> None:
        two.outcome(*run())
        for _ in range(2):
            assert all(isinstance(result, RuntimeError) for result in two.outcome(*run(crash_at=3, max_retries=2)))
        results = two.outcome(*run(crash_at=3, max_retries=2))
        assert [result["start"] for result in results] == [2, 2]
        assert (
            "iteration 3 of incarnation 1 was resumed 2 times in a row without one step of progress: it is left aside" in results[0]["told"]
        )

    def test_the_last_one_there_is_is_not_given_up(self, two: World) -> None:
        two.outcome(*run(1))
        for _ in range(3):
            assert all(isinstance(result, RuntimeError) for result in two.outcome(*run(crash_at=1, max_retries=1)))
        results = two.outcome(*run(max_retries=1))
        assert [result["start"] for result in results] == [1, 1]
        assert any("without one step of progress: there is no other, so it is tried again" in text for text in results[0]["told"])
