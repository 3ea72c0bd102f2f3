"""Where an export goes: the old one stays whole until the new one is, wherever it is stopped; nothing is left lying about."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3_server

from gemini_ft.errors import ConfigError, StorageError
from gemini_ft.export import target as staging
from gemini_ft.export.target import DCP, DEEPSPEED, Target, staged
from gemini_ft.storage import local
from gemini_ft.storage.base import Storage
from gemini_ft.storage.opening import open_storage
from gemini_ft.storage.s3 import S3Storage
from gemini_ft.testing import S3Proxy

WAIT = 60  # seconds


def write_dcp(to: Path | str, content: str, overwrite: bool = False, endpoint: str | None = None) -> None:
    """An export of two files, the one that names the other last; as those of torch.distributed.checkpoint it has names of its own."""
    with staged(str(to), DCP, overwrite, endpoint) as folder:
        (folder / f"__0_{content}_0.distcp").write_text(content)
        (folder / ".metadata").write_text(f"__0_{content}_0.distcp")


def write_deepspeed(to: Path | str, content: str, overwrite: bool = False, endpoint: str | None = None) -> None:
    with staged(str(to), DEEPSPEED, overwrite, endpoint) as folder:
        (folder / "global_step7").mkdir()
        (folder / "global_step7" / "states.pt").write_text(content)
        (folder / "latest").write_text("global_step7")


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def dcp_of(content: str) -> dict[str, str]:
    return {f"__0_{content}_0.distcp": content, ".metadata": f"__0_{content}_0.distcp"}


def killed(code: str, *arguments: Path) -> None:
    """Run code until it kills itself."""
    said = subprocess.run([sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], capture_output=True, timeout=WAIT)
    assert said.returncode == -signal.SIGKILL, said.stderr.decode()


IN_THE_MIDDLE = """
    import os, signal, sys, tempfile
    from gemini_ft.export.target import DCP, Target, staged

    with staged(sys.argv[1], Target(name="model.safetensors") if len(sys.argv) > 2 else DCP, overwrite=True) as folder:
        (folder / "__0_0.distcp").write_text("torn")
        os.kill(os.getpid(), signal.SIGKILL)
"""


class TestLocal:
    @pytest.fixture(params=["in one go", "in two steps"])
    def changed_over(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """As file systems do it that can exchange two folders, and as those that cannot (NFS)."""
        if request.param == "in two steps":
            monkeypatch.setattr(staging, "exchange", lambda one, other: False)

    @pytest.mark.usefixtures("changed_over")
    def test_the_new_one_takes_the_place_of_the_old_one(self, tmp_path: Path) -> None:
        write_dcp(tmp_path / "out", "old")
        write_dcp(tmp_path / "out", "new", overwrite=True)
        assert files(tmp_path) == {f"out/{name}": content for name, content in dcp_of("new").items()}

    @pytest.mark.usefixtures("changed_over")
    def test_what_came_in_between_is_kept(self, tmp_path: Path) -> None:
        write_dcp(tmp_path / "out", "old")
        with staged(str(tmp_path / "out"), DCP, True) as folder:
            (folder / ".metadata").write_text("new")
            (tmp_path / "out" / "notes.txt").write_text("precious")
        assert files(tmp_path) == {"out/.metadata": "new", "out/notes.txt": "precious"}

    def test_the_old_one_stays_whole_while_the_new_one_is_put_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As somebody sees it who looks at any moment: every call that changes a folder is one."""
        write_dcp(tmp_path / "out", "old")
        seen = []

        def watched(call: Callable[..., object]) -> Callable[..., object]:
            def watching(*arguments: object, **options: object) -> object:
                seen.append(files(tmp_path / "out"))
                return call(*arguments, **options)

            return watching

        for place, name in ((os, "unlink"), (os, "rmdir"), (os, "rename"), (os, "replace"), (staging, "exchange")):
            monkeypatch.setattr(place, name, watched(getattr(place, name)))
        write_dcp(tmp_path / "out", "new", overwrite=True)
        assert seen
        assert all(one in (dcp_of("old"), dcp_of("new")) for one in seen)

    def test_a_killed_export_changes_nothing_and_the_next_one_clears_up(self, tmp_path: Path) -> None:
        write_dcp(tmp_path / "out", "old")
        killed(IN_THE_MIDDLE, tmp_path / "out")
        assert files(tmp_path / "out") == dcp_of("old")
        write_dcp(tmp_path / "another", "new")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "out"]

    def test_a_killed_export_of_one_file_is_cleared_up_too(self, tmp_path: Path) -> None:
        killed(IN_THE_MIDDLE, tmp_path, Path("file"))
        assert len(list(tmp_path.iterdir())) == 2
        with staged(str(tmp_path), Target(name="model.safetensors")) as folder:
            (folder / "model.safetensors").write_text("new")
        assert files(tmp_path) == {"model.safetensors": "new"}

    def test_one_killed_between_two_steps_has_lost_nothing(self, tmp_path: Path) -> None:
        write_dcp(tmp_path / "out", "old")
        killed(
            """
            import os, signal, sys
            from pathlib import Path
            from gemini_ft.export import target as stage
            from gemini_ft.export.target import DCP, staged

            def rename(path, target, rename=Path.rename):
                rename(path, target)
                os.kill(os.getpid(), signal.SIGKILL)

            stage.exchange = lambda one, other: False
            with staged(sys.argv[1], DCP, overwrite=True) as folder:
                (folder / ".metadata").write_text("new")
                Path.rename = rename
            """,
            tmp_path / "out",
        )
        assert not (tmp_path / "out").exists()
        with pytest.raises(ConfigError, match="exists already"):
            write_dcp(tmp_path / "out", "new")
        assert files(tmp_path) == {f"out/{name}": content for name, content in dcp_of("old").items()}

    def test_one_that_is_running_is_left_alone(self, tmp_path: Path) -> None:
        with staged(str(tmp_path / "one"), DCP) as folder:
            write_dcp(tmp_path / "other", "new")
            (folder / ".metadata").write_text("still here")
        assert files(tmp_path / "one") == {".metadata": "still here"}

    def test_one_of_another_host_is_left_alone_while_it_writes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local, "boot_id", lambda: "feed0001")
        lock, fd = local.create(tmp_path, staging.PREFIX)
        os.close(fd)  # no lock of it can be seen here
        monkeypatch.undo()
        new, _ = staging.folders_of(lock)
        new.mkdir()
        (new / "shard").write_text("half")
        long_ago = time.time() - 2 * local.ABANDONED
        os.utime(lock, (long_ago, long_ago))
        write_dcp(tmp_path / "out", "new")
        assert (new / "shard").exists()
        for path in (new / "shard", new):
            os.utime(path, (long_ago, long_ago))
        write_dcp(tmp_path / "other", "new")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


class TestS3:
    @pytest.fixture
    def proxy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
        for name, value in s3_server.CREDENTIALS.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "tmp").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
        with s3_server.serve(tmp_path / "s3", "bucket") as server, S3Proxy(server.port) as running:
            yield running
        assert list((tmp_path / "tmp").iterdir()) == []

    @pytest.fixture
    def storage(self, proxy: S3Proxy) -> Storage:
        return open_storage("s3://bucket/out", proxy.endpoint)

    @staticmethod
    def content(storage: Storage) -> dict[str, str]:
        return {key: storage.get(key).decode() for key in storage.list()}

    def test_the_old_one_is_whole_until_the_new_one_is(self, storage: Storage, proxy: S3Proxy) -> None:
        write_dcp(storage.url, "old", endpoint=proxy.endpoint)
        proxy.fail("403 AccessDenied", "PutObject", key="metadata")
        with pytest.raises(StorageError, match="AccessDenied"):
            write_dcp(storage.url, "new", True, proxy.endpoint)
        assert dcp_of("old").items() <= self.content(storage).items()
        proxy.faults.clear()
        write_dcp(storage.url, "newer", True, proxy.endpoint)
        assert self.content(storage) == dcp_of("newer")

    def test_the_old_one_of_the_same_step_too(self, storage: Storage, proxy: S3Proxy) -> None:
        write_deepspeed(storage.url, "old", endpoint=proxy.endpoint)
        proxy.fail("403 AccessDenied", "PutObject", key="latest")
        with pytest.raises(StorageError, match="AccessDenied"):
            write_deepspeed(storage.url, "new", True, proxy.endpoint)
        assert {"latest": "global_step7", "global_step7/states.pt": "old"}.items() <= self.content(storage).items()
        proxy.faults.clear()
        write_deepspeed(storage.url, "newer", True, proxy.endpoint)
        found = self.content(storage)
        assert found == {"latest": found["latest"], f"{found['latest']}/states.pt": "newer"}

    def test_what_a_killed_one_left_is_named_and_replaced(self, storage: Storage, proxy: S3Proxy) -> None:
        storage.put("__0_torn_0.distcp", [b"torn"])
        with pytest.raises(ConfigError, match=r"exists already \(without .metadata, as an export leaves it that was killed\)"):
            write_dcp(storage.url, "new", endpoint=proxy.endpoint)
        write_dcp(storage.url, "new", True, proxy.endpoint)
        assert self.content(storage) == dcp_of("new")

    def test_two_at_once_are_not_both_called_well(self, storage: Storage, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
        def put(self: S3Storage, key: str, *more: Any, put: Callable[..., None] = S3Storage.put) -> None:
            put(self, key, *more)
            if key == ".metadata":
                storage.delete("__0_new_0.distcp")  # as the other one does once it is there

        monkeypatch.setattr(S3Storage, "put", put)
        with pytest.raises(StorageError, match="is gone again; was something else exported there at the same time"):
            write_dcp(storage.url, "new", True, proxy.endpoint)

    def test_the_temporary_folder_is_cleared_of_what_was_killed(self, tmp_path: Path, storage: Storage, proxy: S3Proxy) -> None:
        left, fd = local.create(tmp_path / "tmp", staging.PREFIX)
        os.close(fd)
        staging.folders_of(left)[0].mkdir()
        write_dcp(storage.url, "new", endpoint=proxy.endpoint)  # the fixture looks at what is left
