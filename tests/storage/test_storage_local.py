"""The local folder as storage: real files, real processes that die, real disks that are full."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import small_disk
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.errors import ConfigError, CorruptDataError, StorageError
from gemini_ft.storage.base import check_key, find_sign
from gemini_ft.storage.local import LocalStorage
from gemini_ft.storage.opening import open_storage

WAIT = 60  # seconds until a process that must answer is given up


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store")


def partial_files(storage: LocalStorage) -> list[str]:
    folder = storage.root / ".partial"
    return os.listdir(folder) if folder.exists() else []


# -- objects --------------------------------------------------------------------------------------


def test_parts_come_back_end_to_end(storage: LocalStorage) -> None:
    storage.put("run/a.bin", [b"one", memoryview(bytearray(b"two")), b""])
    assert storage.get("run/a.bin") == b"onetwo"
    out = memoryview(bytearray(3))
    storage.get_range("run/a.bin", 2, out)
    assert bytes(out) == b"etw"


def test_parts_of_wider_items_are_written_whole(storage: LocalStorage) -> None:
    storage.put("a", [memoryview(b"\x01\0\0\0\x02\0\0\0").cast("i")])
    assert storage.get("a") == b"\x01\0\0\0\x02\0\0\0"


def test_a_second_put_replaces_the_first(storage: LocalStorage) -> None:
    storage.put("a", [b"long before"])
    storage.put("a", [b"after"])
    assert storage.get("a") == b"after"
    assert storage.list() == ["a"]


def test_list_takes_any_prefix(storage: LocalStorage) -> None:
    for key in ("run/x/2", "run/x/1", "run-2/x/1", "top"):
        storage.put(key, [b""])
    assert storage.list() == ["run-2/x/1", "run/x/1", "run/x/2", "top"]
    assert storage.list("run/") == ["run/x/1", "run/x/2"]
    assert storage.list("run") == ["run-2/x/1", "run/x/1", "run/x/2"]
    assert storage.list("run/x/2") == ["run/x/2"]
    assert storage.list("nothing/here") == []


def test_delete_takes_emptied_folders_along_and_may_be_repeated(storage: LocalStorage) -> None:
    storage.put("run/x/1", [b""])
    storage.put("run/y", [b""])
    storage.delete("run/x/1")
    storage.delete("run/x/1")
    assert storage.list() == ["run/y"]
    assert sorted(path.name for path in (storage.root / "run").iterdir()) == ["y"]


def test_reading_beyond_the_end_is_damage_and_a_missing_object_is_not(storage: LocalStorage) -> None:
    storage.put("a", [b"1234"])
    with pytest.raises(CorruptDataError, match="a ends at byte 4, it should have 2 more"):
        storage.get_range("a", 2, memoryview(bytearray(4)))
    with pytest.raises(StorageError, match="cannot read b: No such file or directory"):
        storage.get("b")


words = st.text("abz09._-", min_size=1, max_size=4)


@given(st.lists(words, min_size=1, max_size=4))
def test_keys_cannot_lead_out_of_the_folder(path: list[str]) -> None:
    key = "/".join(path)
    if any(word.startswith(".") for word in path):
        with pytest.raises(StorageError, match="none beginning with a dot"):
            check_key(key)
    else:
        assert check_key(key) == key


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/..", "a b", "a\n", "ä", ".partial/x"])
def test_odd_keys_are_refused_everywhere(storage: LocalStorage, key: str) -> None:
    for use in (lambda: storage.put(key, [b""]), lambda: storage.get(key), lambda: storage.delete(key)):
        with pytest.raises(StorageError, match="key"):
            use()
    assert not storage.root.exists()


# -- URLs -----------------------------------------------------------------------------------------


def test_open_storage_by_url(tmp_path: Path) -> None:
    storage = open_storage(f"file://{tmp_path}/with%20space")
    storage.put("a", [b"1"])
    assert (tmp_path / "with space" / "a").read_bytes() == b"1"
    assert storage.url == f"file://{tmp_path}/with%20space"


@pytest.mark.parametrize("url", ["file://host/folder", "file:relative", "/tmp/folder", "s3:///prefix", ""])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="file:///folder"):
        open_storage(url)


# -- writers that fail ----------------------------------------------------------------------------


def failing() -> Iterator[bytes]:
    yield b"x" * 1000
    raise RuntimeError("the source broke")


def test_a_source_that_fails_leaves_nothing(storage: LocalStorage) -> None:
    storage.put("a", [b"before"])
    with pytest.raises(RuntimeError, match="the source broke"):
        storage.put("a", failing())
    assert storage.get("a") == b"before"
    assert partial_files(storage) == []


DYING_WRITER = """
import sys, time
from gemini_ft.storage.local import LocalStorage

def parts():
    yield b"x" * 5_000_000
    print("half", flush=True)
    time.sleep(600)
    yield b"y"

LocalStorage(sys.argv[1]).put("run/a", parts())
"""


def test_a_writer_killed_in_the_middle_leaves_nothing_visible(storage: LocalStorage) -> None:
    with subprocess.Popen([sys.executable, "-c", DYING_WRITER, str(storage.root)], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"half\n"
            assert len(partial_files(storage)) == 1
            storage.check()
            assert len(partial_files(storage)) == 1  # the writer lives: its file stays
        finally:
            writer.kill()
            assert writer.wait(WAIT) == -signal.SIGKILL
    assert storage.list() == []
    storage.check()  # what the next agent does first
    assert partial_files(storage) == []


def test_writers_and_deleters_of_one_folder_do_not_disturb_each_other(storage: LocalStorage) -> None:
    """A delete takes the emptied folder away while others are about to write into it."""
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for _ in range(100):
                storage.put(f"run/{name}", [name.encode()])
                assert storage.get(f"run/{name}") == name.encode()
                storage.delete(f"run/{name}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert failures == []
    assert storage.list() == []
    assert partial_files(storage) == []


def test_a_folder_that_another_made_and_took_away_is_made_again(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """What threads alone show once in many runs: mkdir says that the folder exists, and it is gone before one can look."""
    make, there = os.mkdir, iter([True])

    def mkdir(path: str | Path, mode: int = 0o777) -> None:
        if Path(path).name == "run" and next(there, False):
            raise FileExistsError(errno.EEXIST, "File exists", path)
        make(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    storage.put("run/a", [b"a"])
    assert storage.get("run/a") == b"a"
    assert next(there, None) is None


def test_a_dangling_link_in_place_of_a_folder_is_named(storage: LocalStorage) -> None:
    storage.put("run/a", [b"a"])
    (storage.root / "other").symlink_to(storage.root / "nowhere")
    with pytest.raises(StorageError, match="is a link"):
        storage.put("other/a", [b"a"])


# -- disks that do not take it --------------------------------------------------------------------


def test_check_proves_that_the_folder_can_be_used(storage: LocalStorage) -> None:
    storage.check()
    assert storage.list() == []


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    storage = LocalStorage(tmp_path / "file" / "store")
    with pytest.raises(StorageError, match=rf"file://{tmp_path}/file/store: cannot write .*Not a directory; choose a path"):
        storage.check()
    with pytest.raises(StorageError, match="Not a directory"):
        storage.list()


@pytest.fixture
def locked_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that this process may not write to; root may write everywhere, so it becomes somebody else for a while."""
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        os.seteuid(user)


def test_a_folder_without_write_permission_is_named(locked_folder: Path) -> None:
    with pytest.raises(StorageError, match="Permission denied; give this user the right to write there"):
        LocalStorage(locked_folder / "store").check()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, mounted for this test."""
    with small_disk(tmp_path / "disk", "256k") as disk:
        yield disk


def test_a_full_disk_is_named_and_given_back(tiny_disk: Path) -> None:
    storage = LocalStorage(tiny_disk / "store")
    storage.put("a", [b"before"])
    with pytest.raises(StorageError, match=r"No space left on device \(.* MB free\); free some space or lower storage.keep_last"):
        storage.put("a", [bytes(100_000)] * 4)
    assert storage.get("a") == b"before"
    assert partial_files(storage) == []
    storage.put("b", [bytes(100_000)])  # the room of the failed one is free again


def test_a_read_only_disk_is_named(tiny_disk: Path) -> None:
    storage = LocalStorage(tiny_disk / "store")
    storage.put("a", [b"before"])
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True, timeout=WAIT)
    with pytest.raises(StorageError, match="Read-only file system; mount it writable"):
        storage.check()
    with pytest.raises(StorageError, match="cannot delete a: Read-only file system"):
        storage.delete("a")
    assert storage.get("a") == b"before"


def test_a_write_that_ends_short_is_an_error_and_not_a_torn_object(storage: LocalStorage) -> None:
    """A limit on file sizes stops a write in its middle, on any disk and for any user."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
    try:
        with pytest.raises(StorageError, match="cannot write a: File too large; raise the limit"):
            storage.put("a", [bytes(100_000)] * 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert storage.list() == []
    assert partial_files(storage) == []


def test_what_another_host_has_written_is_looked_for_more_than_once(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may remember for a moment that it was missing."""
    monkeypatch.setattr(time, "sleep", lambda seconds: storage.put("sign", [b"sign"]))
    find_sign(storage, "sign", "a", "b")
    with pytest.raises(ConfigError):
        find_sign(storage, "another", "a", "b")


LEASES = """
import fcntl, os, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("leased", flush=True)
signal.sigwait([signal.SIGIO])
time.sleep(0.2)
"""


def test_a_file_with_a_lease_is_read_when_its_holder_has_let_go(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("run/object", [b"bytes"])
    command = [sys.executable, "-c", LEASES, str(tmp_path / "run" / "object")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        if not holder.stdout.readline():
            pytest.skip("needs leases on files: a TMPDIR on a local file system")
        assert storage.get("run/object") == b"bytes"
