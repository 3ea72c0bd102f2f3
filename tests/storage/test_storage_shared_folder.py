"""A folder that several hosts and other programs use: locks that end at a host, links, foreign files, disks that fill up."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from disks import small_disk

from gemini_ft.errors import StorageError
from gemini_ft.storage import local
from gemini_ft.storage.local import LocalStorage

WAIT = 60  # seconds


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store")


def partial_files(storage: LocalStorage) -> list[str]:
    folder = storage.root / ".partial"
    return os.listdir(folder) if folder.exists() else []


# -- temporary files ------------------------------------------------------------------------------


class LocalLocks:
    """flock as NFS has it with ``nolock``, and Lustre with ``localflock``: no host sees the locks of another one. A host is a thread."""

    def __init__(self) -> None:
        self._held: set[tuple[str, int]] = set()

    def flock(self, fd: int, how: int) -> None:
        mine = (threading.current_thread().name, os.fstat(fd).st_ino)
        if mine in self._held:
            raise BlockingIOError
        self._held.add(mine)


@pytest.fixture
def local_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", LocalLocks().flock)
    monkeypatch.setattr("gemini_ft.storage.local.boot_id", lambda: threading.current_thread().name.encode().hex())


@pytest.mark.usefixtures("local_locks")
def test_six_hosts_whose_locks_end_at_the_host_write_at_once(storage: LocalStorage) -> None:
    together = threading.Barrier(6, timeout=WAIT)
    failures: list[BaseException] = []

    def parts() -> Iterator[bytes]:
        for _ in range(3):
            together.wait()  # nobody ends before everybody has begun, and swept
            yield b"x" * 1000

    def write(name: str) -> None:
        try:
            storage.put(f"run/{name}", parts())
        except BaseException as error:
            failures.append(error)
            together.abort()

    hosts = [threading.Thread(target=write, args=(f"host{number}",), name=f"host{number}") for number in range(6)]
    for host in hosts:
        host.start()
    for host in hosts:
        host.join(WAIT)
    assert failures == []
    assert storage.list() == [f"run/host{number}" for number in range(6)]
    assert partial_files(storage) == []


def left_behind(storage: LocalStorage, age: float, domain: str = "0123abcd-9") -> Path:
    """A file of a writer of another host, whose last byte came so long ago."""
    storage.put("a", [b"1"])
    path = storage.root / ".partial" / f"host7.{domain}.4711.{int(time.time() - age)}.0123abcd"
    path.write_bytes(b"torn")
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_another_hosts_file_is_removed_when_it_is_old(storage: LocalStorage) -> None:
    young, old = left_behind(storage, 60), left_behind(storage, local.ABANDONED + 60)
    storage.put("b", [b"1"])
    assert young.exists()
    assert not old.exists()


def test_age_is_by_the_clock_of_the_file_system(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    young = left_behind(storage, 60)
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 10 * local.ABANDONED)
    storage.put("b", [b"1"])
    assert young.exists()


def test_an_old_file_whose_writer_holds_its_lock_stays(storage: LocalStorage) -> None:
    path = left_behind(storage, 10 * local.ABANDONED)
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        storage.put("b", [b"1"])
    assert path.exists()


def test_a_temporary_file_says_whose_it_is_and_since_when(storage: LocalStorage) -> None:
    names: list[str] = []
    storage.put("a", [b"1"], SimpleNamespace(add=lambda nbytes: names.extend(partial_files(storage))))
    found = re.fullmatch(r"(?P<host>[^.]+)\.(?P<domain>[0-9a-f]+-[0-9a-f]+)\.(?P<pid>\d+)\.(?P<begun>\d+)\.[0-9a-f]{8}", names[0])
    assert found is not None
    assert int(found["pid"]) == os.getpid()
    assert abs(int(found["begun"]) - time.time()) < WAIT


@pytest.mark.parametrize("name", ["notes.txt", "0123456789abcdef", "host.x.1.2.3"])
def test_other_files_beside_them_stay(storage: LocalStorage, name: str) -> None:
    storage.put("a", [b"1"])
    other = storage.root / ".partial" / name
    other.write_text("of another program")
    os.utime(other, (0, 0))
    storage.put("b", [b"1"])
    assert other.exists()


# -- full disks and file systems that lie ----------------------------------------------------------

DYING_WRITER = """
import sys, time
from gemini_ft.storage.local import LocalStorage

def parts():
    yield bytes(700_000)
    print("torn", flush=True)
    time.sleep(600)

LocalStorage(sys.argv[1]).put("run/a", parts())
"""


def test_a_disk_full_of_what_a_killed_writer_left_recovers_by_itself(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        storage = LocalStorage(disk / "store")
        with subprocess.Popen([sys.executable, "-c", DYING_WRITER, str(storage.root)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"torn\n"
            with pytest.raises(StorageError, match="No space left"):
                storage.put("run/b", [bytes(700_000)])
            assert len(partial_files(storage)) == 1  # that of the one who lives
            writer.kill()
            assert writer.wait(WAIT) == -signal.SIGKILL
        storage.put("run/b", [bytes(700_000)])
        assert storage.list() == ["run/b"]
        assert partial_files(storage) == []


def test_a_file_system_that_keeps_half_is_caught(storage: LocalStorage) -> None:
    def lose(nbytes: int) -> None:
        (path,) = (storage.root / ".partial").iterdir()
        os.truncate(path, 500)

    with pytest.raises(StorageError, match="500 of 1000 bytes were kept without an error"):
        storage.put("a", [bytes(1000)], SimpleNamespace(add=lose))
    assert storage.list() == []


# -- what other programs and people leave there ----------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder outside of the storage, with a file that looks like one of a checkpoint."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "manifest.json").write_text("of another program")
    return folder


def test_a_link_to_a_folder_is_not_followed(storage: LocalStorage, elsewhere: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage.put("run/main/step-1/a", [b"1"])
    (storage.root / "run/main/step-2").symlink_to(elsewhere)
    assert storage.list() == storage.list("run/main/") == ["run/main/step-1/a"]
    assert caplog.text.count("step-2 is a link, which is not followed") == 1


def test_a_link_on_the_way_is_an_error_and_not_nothing(storage: LocalStorage, elsewhere: Path) -> None:
    storage.put("other/a", [b"1"])
    (storage.root / "run").symlink_to(elsewhere)
    for use in (
        lambda: storage.list("run/"),
        lambda: storage.get("run/manifest.json"),
        lambda: storage.get_range("run/manifest.json", 0, memoryview(bytearray(1))),
        lambda: storage.put("run/manifest.json", [b"1"]),
        lambda: storage.delete("run/manifest.json"),
    ):
        with pytest.raises(StorageError, match="run is a link; links are not followed below the storage folder"):
            use()
    assert (elsewhere / "manifest.json").read_text() == "of another program"


def test_a_link_to_a_file_is_neither_listed_nor_read(storage: LocalStorage, elsewhere: Path) -> None:
    storage.put("run/a", [b"1"])
    (storage.root / "run/b").symlink_to(elsewhere / "manifest.json")
    assert storage.list() == ["run/a"]
    with pytest.raises(StorageError, match="links are not followed"):
        storage.get("run/b")


def test_the_folder_itself_may_be_a_link(tmp_path: Path, elsewhere: Path) -> None:
    (tmp_path / "link").symlink_to(elsewhere)
    storage = LocalStorage(tmp_path / "link")
    storage.put("run/a", [b"1"])
    assert storage.get("run/a") == b"1"
    assert storage.list("run/") == ["run/a"]


@contextmanager
def another_user() -> Iterator[None]:
    """Root may read everything, so it becomes another user for a while."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def open_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStorage:
    """A storage that other users reach too, unlike the folder above it."""
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return LocalStorage(Path("store"))


def test_foreign_names_do_not_stop_a_listing(open_to_all: LocalStorage) -> None:
    storage = open_to_all
    storage.put("run/a", [b"1"])
    (storage.root / "lost+found").mkdir(mode=0o700)
    (storage.root / "run" / "a file.txt").write_text("of another program")
    os.mkfifo(storage.root / "run" / "pipe")
    with another_user():
        assert storage.list() == ["run/a"]
        assert storage.list("run/") == ["run/a"]


def test_a_folder_that_may_not_be_read_is_an_error_and_not_nothing(open_to_all: LocalStorage) -> None:
    open_to_all.put("run/a", [b"1"])
    (open_to_all.root / "run").chmod(0o700)
    with another_user(), pytest.raises(StorageError, match="Permission denied"):
        open_to_all.list()


def test_deleting_goes_on_beside_foreign_files(storage: LocalStorage) -> None:
    """As an administrator leaves them in a step's folder."""
    storage.put("run/step-1/a", [b"1"])
    (storage.root / "run/step-1/to delete.txt").write_text("of another program")
    for key in storage.list("run/step-1/"):
        storage.delete(key)
    assert storage.list() == []
    assert (storage.root / "run/step-1/to delete.txt").exists()
