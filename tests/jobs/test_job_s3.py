"""S3 as the slow tier of real jobs: a lost group, a store that fails in every way, and what training notices of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3_server
from agent_kit import end_agent, eventually
from disks import small_disk
from rank_kit import World
from session_case import loop, wait_for_upload

from gemini_ft.agent import lifecycle
from gemini_ft.errors import StorageError, StorageUnclearError
from gemini_ft.storage.checkpoints import list_checkpoints
from gemini_ft.storage.opening import open_storage
from gemini_ft.testing.s3_proxy import S3Fault, S3Proxy, S3Request

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[s3_server.Server]:
    with s3_server.serve(tmp_path / "s3", "bucket") as running:
        yield running


@pytest.fixture
def proxy(server: s3_server.Server) -> Iterator[S3Proxy]:
    with S3Proxy(server.port) as running:
        yield running


@pytest.fixture
def one(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path, 1, **s3_server.CREDENTIALS) as world:
        yield world


@pytest.fixture
def two(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path, 2, **s3_server.CREDENTIALS) as world:
        yield world


def run(endpoint: str, steps: int, storage: dict[str, Any] | None = None, **options: Any) -> Any:
    """Uploads of every second step, each over before the next step begins."""
    settings = {"url": "s3://bucket/team", "endpoint_url": endpoint, "every_steps": 2, **(storage or {})}
    return (_loop, steps, {"storage": settings, "during": wait_for_upload, **options})


def _loop(steps: int, options: dict[str, Any]) -> Any:
    return loop(steps, **options)


def iterations(server: s3_server.Server, run_id: str) -> list[int]:
    """Of the checkpoints that lie on the server's disk."""
    folder = server.root / "bucket/team"
    return [info.iteration for info in list_checkpoints(open_storage(folder.as_uri()), run_id)] if folder.exists() else []


def lose_all(world: World) -> None:
    for host in world.hosts:
        end_agent(world.run, host)


def upload(world: World, host: str = "host0") -> Any:
    """What the host's agent says of storage."""
    status = lifecycle.status(world.run, host)
    return json.loads(status)["streams"].get("main", {}).get("storage") if status is not None else None


def committed_of(world: World) -> int:
    status = lifecycle.status(world.run, "host0")
    assert status is not None
    return int(json.loads(status)["streams"]["main"]["committed"])


def told(result: Any, text: str) -> bool:
    return any(text in said for said in result["told"])


def is_shard(request: S3Request) -> bool:
    return request.method == "PUT" and "/shard-" in request.path


def is_last_part(request: S3Request) -> bool:
    return "partNumber=2" in request.path


class TestResume:
    def test_when_all_memory_is_lost(self, two: World, server: s3_server.Server) -> None:
        two.outcome(*run(server.endpoint, 7))
        lose_all(two)
        results = two.outcome(*run(server.endpoint, 1))
        assert [(result["start"], max(result["restored"])) for result in results] == [(6, "storage")] * 2
        measures = json.loads(lifecycle.status(two.run, "host0") or "")["streams"]["main"]["measures"]
        assert measures["run"]["seconds"]["training"] > measures["seconds"]["training"]  # the time before is in it

    def test_each_shard_is_read_once(self, two: World, proxy: S3Proxy) -> None:
        two.outcome(*run(proxy.endpoint, 2, width=400_000))
        lose_all(two)
        proxy.requests.clear()
        proxy.moved = 0
        results = two.outcome(*run(proxy.endpoint, 1, {"every_steps": 100}, width=400_000))
        assert [result["start"] for result in results] == [2, 2]
        state = 3 * 4 * (4 + 1 + 1) * 400_000
        assert state <= proxy.moved < 1.05 * state

    @pytest.mark.soak
    def test_after_a_group_was_lost_in_the_middle_of_an_upload(self, two: World, server: s3_server.Server, proxy: S3Proxy) -> None:
        wide = {"width": 1_200_000, "timeout": 30.0}  # two parts per shard
        two.outcome(*run(proxy.endpoint, 2, **wide))
        attempt = two.start(*run(proxy.endpoint, 50, during=None, pause=0.05, **wide))
        eventually(lambda: "incarnation 2-" in two.log("host0"), "the second attempt")
        begun = len(proxy.requests)
        proxy.faults.append(S3Fault("hold", 10_000, is_last_part))
        eventually(lambda: any("partNumber=1" in request.path for request in proxy.requests[begun:]), "the first part of an upload")
        (newest, *_) = iterations(server, two.run)
        attempt.kill()
        lose_all(two)
        proxy.release()
        assert [result["start"] for result in two.outcome(*run(proxy.endpoint, 2, **wide))] == [newest, newest]

    def test_when_storage_fails_is_no_reason_to_go_back(self, two: World, server: s3_server.Server, proxy: S3Proxy) -> None:
        two.outcome(*run(proxy.endpoint, 4))
        lose_all(two)
        before = iterations(server, two.run)
        proxy.faults.append(S3Fault("403 AccessDenied", 10_000, lambda request: request.method == "GET" and "/shard-" in request.path))
        results = two.outcome(*run(proxy.endpoint, 4, {"patience": 1.0}))
        assert [type(result) for result in results] == [StorageUnclearError, StorageUnclearError]
        assert "let these credentials list, read" in str(results[0])
        proxy.faults.clear()
        assert iterations(server, two.run) == before
        assert [result["start"] for result in two.outcome(*run(proxy.endpoint, 1))] == [4, 4]

    def test_when_nothing_can_be_listed_and_storage_is_not_required(self, one: World, server: s3_server.Server, proxy: S3Proxy) -> None:
        """Training goes on; nothing older, nor nothing at all, is begun from while it cannot be told what there is."""
        work = run(proxy.endpoint, 3, {"required": False, "patience": 0.0}, during=None)
        denied = proxy.fail("403 AccessDenied", "ListObjects")
        (error,) = one.outcome(*work)
        assert type(error) is StorageUnclearError
        proxy.faults.remove(denied)
        assert one.outcome(*run(proxy.endpoint, 4))[0]["start"] == 0
        proxy.faults.append(denied)
        (result,) = one.outcome(*work)
        assert (result["start"], result["committed"]) == (4, 7)
        assert told(result, "storage cannot say which checkpoints it has")
        lose_all(one)
        (error,) = one.outcome(*work)
        assert type(error) is StorageUnclearError
        assert "let these credentials list, read, write and delete under the prefix (denied: ListObjectsV2)" in str(error)
        assert iterations(server, one.run) == [4, 2]
        proxy.faults.remove(denied)
        proxy.fail("flip", "GetObject", key="/shard-", count=1)  # once is no damage
        proxy.fail("403 AccessDenied", "PutObject")
        (result,) = one.outcome(*work)
        assert (result["start"], result["committed"]) == (4, 7)
        assert told(result, "storage cannot be used now, and it is not required")
        assert "flip" in proxy.met
        assert any("/main.reading-" in request.key for request in proxy.requests)  # no other job deletes it meanwhile

    @pytest.mark.soak  # in short: test_job_storage.py
    def test_from_the_one_before_when_an_object_is_damaged(self, two: World, server: s3_server.Server) -> None:
        two.outcome(*run(server.endpoint, 6))
        lose_all(two)
        (path,) = server.root.glob("bucket/team/*/*/step-00000006-*/shard-00001.safetensors")
        content = bytearray(path.read_bytes())
        content[-8] ^= 1
        path.write_bytes(content)
        results = two.outcome(*run(server.endpoint, 1))
        assert [result["start"] for result in results] == [4, 4]
        assert told(results[0], "in storage is damaged or gone; trying an older one")
        assert told(results[1], "is damaged (XXH3")


class TestTwoJobs:
    @pytest.mark.soak
    def test_with_the_same_prefix_are_kept_apart(self, tmp_path: Path, server: s3_server.Server) -> None:
        for name, steps in (("a", 2), ("b", 4)):
            (tmp_path / name).mkdir()
            with World(tmp_path / name, 1, **s3_server.CREDENTIALS) as world:
                assert world.outcome(*run(server.endpoint, steps))[0]["start"] == 0
                lose_all(world)
                assert world.outcome(*run(server.endpoint, 1))[0]["start"] == steps

    def test_with_the_same_run_id_the_older_one_is_refused(self, tmp_path: Path, server: s3_server.Server) -> None:
        for name in "ab":
            (tmp_path / name).mkdir()
        with (
            World(tmp_path / "a", 1, **s3_server.CREDENTIALS) as first,
            World(tmp_path / "b", 1, ["elsewhere"], **s3_server.CREDENTIALS) as second,
        ):
            attempt = first.start(*run(server.endpoint, 1000, during=None, pause=0.2))
            eventually(lambda: iterations(server, first.run), "a checkpoint of the first job")
            second.environ["GEMINI_RUN_ID"] = second.run = first.run
            (result,) = second.outcome(*run(server.endpoint, 4))
            assert result["start"] > 0  # it cannot be told from a restart of the first on another machine
            text = "another job has taken"
            eventually(lambda: text in first.log("host0"), "the refusal")
            attempt.kill()
            lose_all(second)
            (again,) = second.outcome(*run(server.endpoint, 1))
            assert again["start"] == (result["start"] + 4) // 2 * 2  # nothing of the first job's later steps

    def test_with_the_same_run_id_that_store_at_the_same_moment_lose_nothing_and_are_both_told(
        self, tmp_path: Path, server: s3_server.Server, proxy: S3Proxy
    ) -> None:
        """The same command twice, on two clusters: each looks before the other has written, and the store denies what it has done."""
        for name in "ab":
            (tmp_path / name).mkdir()
        proxy.fail("hold", "PutObject", key="shard-", count=2)
        with (
            World(tmp_path / "a", 1, **s3_server.CREDENTIALS) as first,
            World(tmp_path / "b", 1, ["elsewhere"], **s3_server.CREDENTIALS) as second,
        ):
            second.environ["GEMINI_RUN_ID"] = second.run = first.run
            attempts = [world.start(*run(proxy.endpoint, 1000, during=None, pause=0.1)) for world in (first, second)]
            eventually(lambda: proxy.met.count("hold") == 2, "the first shard of each, which has looked before")
            proxy.release()
            proxy.fail("hold", "PutObject", key="manifest.json", count=2)
            eventually(lambda: proxy.met.count("hold") == 4, "both manifests")
            proxy.release()
            proxy.fail("but 409 ConditionalRequestConflict", "PutObject", key="manifest.json|stored.json", count=3)
            text = "another job has taken run id"
            eventually(lambda: text in first.log("host0") and text in second.log("elsewhere"), "the refusal of both")
            for attempt in attempts:
                attempt.kill()
            kept = iterations(server, first.run)
            assert len(kept) == 2, kept
            lose_all(first)
            lose_all(second)
            (error,) = first.outcome(*run(server.endpoint, 1, {"patience": 0.1}))
            assert isinstance(error, StorageUnclearError)
            assert "storage.history" in str(error)
            assert iterations(server, first.run) == kept


class TestTrouble:
    """Training never stops for it, the status says what is wrong, and the next upload succeeds when it is over.

    The jobs would train for minutes; the end of the test ends them.
    """

    def failed_for_a_while(self, world: World, server: s3_server.Server, end: Callable[[], None]) -> Any:
        """Training goes on meanwhile, and the next upload succeeds afterwards. Returns what the status said."""
        state = eventually(lambda: (state := upload(world)) and state["failing_since"] and state, "the failure in the status")
        committed, before = committed_of(world), iterations(server, world.run)[0]
        eventually(lambda: committed_of(world) > committed + 10, "further steps")
        assert upload(world)["failing_since"] == state["failing_since"]
        end()
        eventually(lambda: max(iterations(server, world.run), default=0) > before, "an upload after the trouble")
        return state

    # The others are tried again by the client first, after pauses that it draws: up to 15 s.
    @pytest.mark.parametrize(
        "kind", ["403 AccessDenied", *(pytest.param(each, marks=pytest.mark.soak) for each in ("reset", "503 SlowDown"))]
    )
    def test_with_every_upload_for_a_while(self, two: World, server: s3_server.Server, proxy: S3Proxy, kind: str) -> None:
        two.start(*run(proxy.endpoint, 10_000, during=None, pause=0.03))
        eventually(lambda: iterations(server, two.run), "the first checkpoint")
        proxy.faults.append(S3Fault(kind, 10_000, is_shard))
        state = self.failed_for_a_while(two, server, proxy.faults.clear)
        assert kind == "reset" or kind.split()[1] in state["error"]
        eventually(lambda: "works again after" in two.log("host0") + two.log("host1"), "the line in the log")

    def test_server_that_is_killed_and_comes_back(self, two: World, server: s3_server.Server) -> None:
        two.start(*run(server.endpoint, 10_000, during=None, pause=0.03))
        eventually(lambda: iterations(server, two.run), "the first checkpoint")
        server.stop()
        self.failed_for_a_while(two, server, server.start)

    @pytest.mark.soak
    def test_bucket_that_is_read_only_for_a_while(self, two: World, server: s3_server.Server) -> None:
        two.start(*run(server.endpoint, 10_000, during=None, pause=0.03))
        eventually(lambda: iterations(server, two.run), "the first checkpoint")
        server.stop()
        server.start("--read-only")
        self.failed_for_a_while(two, server, lambda: (server.stop(), server.start()))

    def test_disk_of_the_server_that_is_full_for_a_while(self, two: World, small: s3_server.Server) -> None:
        two.start(*run(small.endpoint, 10_000, during=None, pause=0.03))
        eventually(lambda: iterations(small, two.run), "the first checkpoint")
        filler = small.root / "filler"
        with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        self.failed_for_a_while(two, small, filler.unlink)

    def test_store_that_lets_nothing_be_deleted(self, one: World, server: s3_server.Server, proxy: S3Proxy) -> None:
        """By default that is an error, which says what else to set: the store would fill up."""
        proxy.fail("403 AccessDenied", "DeleteObject")
        (error,) = one.outcome(*run(proxy.endpoint, 2))
        assert type(error) is StorageError
        assert "set storage.keep_last=all (GEMINI_STORAGE__KEEP_LAST=all)" in str(error)
        asked, keep_all = len(proxy.requests), {"keep_last": "all"}
        one.outcome(*run(proxy.endpoint, 8, keep_all))
        assert iterations(server, one.run) == [8, 6, 4, 2]
        lose_all(one)
        assert one.outcome(*run(proxy.endpoint, 1, keep_all))[0]["start"] == 8
        assert "DeleteObject" not in {request.operation for request in proxy.requests[asked:]}

    def test_store_that_does_not_answer(self, two: World, server: s3_server.Server, proxy: S3Proxy) -> None:
        """The third slot holds what is uploaded. Nothing fails for a minute; snapshots and training do not wait for it."""
        two.start(*run(proxy.endpoint, 10_000, during=None, pause=0.03))
        eventually(lambda: iterations(server, two.run), "the first checkpoint")
        proxy.faults.append(S3Fault("hold", 10_000, is_shard))
        committed = committed_of(two)
        eventually(lambda: committed_of(two) > committed + 20, "further steps")
        assert upload(two)["uploading"]
        newest = iterations(server, two.run)[0]
        proxy.release()
        eventually(lambda: iterations(server, two.run)[0] > newest, "the upload that hung, or the next")

    def test_slot_that_a_hanging_upload_reads_is_kept_after_a_failure(self, two: World, proxy: S3Proxy) -> None:
        attempt = two.start(*run(proxy.endpoint, 10_000, during=None, pause=0.03))
        proxy.fail("hold", "PutObject", key="shard-00000")
        read = eventually(lambda: "hold" in proxy.met and (state := upload(two)) and state["uploading"], "an upload that hangs").split()[1]
        eventually(lambda: committed_of(two) > int(read), "further steps")
        attempt.kill()
        two.start(*run(proxy.endpoint, 10_000, during=None, pause=0.03))
        eventually(lambda: "incarnation 2-" in two.log("host0"), "the second attempt")
        committed = committed_of(two)
        eventually(lambda: committed_of(two) > committed + 20, "further steps")
        status = lifecycle.status(two.run, "host0")
        assert status is not None
        assert f"complete:{read}" in json.loads(status)["streams"]["main"]["shards"]["0"]
        proxy.release()

    @pytest.fixture
    def small(self, tmp_path: Path) -> Iterator[s3_server.Server]:
        """A server on a file system of 16 MiB, mounted for this test."""
        with small_disk(tmp_path / "disk", "16m") as disk, s3_server.serve(disk, "bucket") as running:
            yield running

    def test_upload_that_is_slow_says_how_far_it_is(self, two: World, server: s3_server.Server, proxy: S3Proxy) -> None:
        proxy.rate = 4e6
        two.start(*run(proxy.endpoint, 10_000, {"every_steps": 3}, width=600_000, during=None, pause=0.3))
        begun = eventually(lambda: (state := upload(two)) and state["uploading"], "an upload")
        committed = committed_of(two)
        eventually(lambda: committed_of(two) > committed + 3, "further steps")
        assert upload(two)["uploading"] == begun
        state = eventually(lambda: (s := upload(two)) and s["uploading"] and 0 < s["done_bytes"] < s["total_bytes"] and s, "progress")
        assert state["seconds_left"] > 0
        proxy.rate = None
        eventually(lambda: iterations(server, two.run), "the checkpoint")

    def test_at_the_start_is_a_clear_error(self, two: World, server: s3_server.Server) -> None:
        results = two.outcome(*run(server.endpoint, 2, {"url": "s3://nowhere/x"}))
        assert [type(result) for result in results] == [StorageError, StorageError]
        assert "NoSuchBucket; create the bucket, or correct storage.url" in str(results[0])

    def test_at_the_start_is_a_warning_where_storage_is_not_required(self, two: World, server: s3_server.Server) -> None:
        results = two.outcome(*run(server.endpoint, 2, {"url": "s3://nowhere/x", "required": False}, during=None))
        assert [result["committed"] for result in results] == [2, 2]
        assert told(results[0], "storage cannot be used now, and it is not required")


def test_credentials_are_written_down_nowhere(two: World, server: s3_server.Server, proxy: S3Proxy) -> None:
    proxy.faults.append(S3Fault("403 AccessDenied", 3, is_shard))
    results = two.outcome(*run(proxy.endpoint, 4))
    said = [text for result in results for text in result["told"]] + [two.log(host) for host in two.hosts]
    stored = [path.read_bytes() for path in server.root.rglob("*") if path.is_file()]
    assert stored
    for credential in (s3_server.KEY, s3_server.SECRET):
        assert not any(credential in text for text in said)
        assert not any(credential.encode() in content for content in stored)
