"""The look at the storage before the first step, with real ranks and folders: each host is asked once, and all of them are compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rank_kit import World

from gemini_ft.config import GeminiConfig
from gemini_ft.errors import ConfigError
from gemini_ft.storage.base import ignore
from gemini_ft.storage.local import LocalStorage
from gemini_ft.worker.rendezvous import init_process_group
from gemini_ft.worker.storage_check import check_storage

HOSTS = ["a", "a", "b", "b", "c", "c"]


class CountedFolder(LocalStorage):
    """A folder that notes who writes to it."""

    def __init__(self, root: Path, notes: Path) -> None:
        super().__init__(root)
        self._notes = notes

    def put(self, key: str, parts: Iterable[memoryview | bytes], sent: Callable[[int], None] = ignore) -> None:
        with open(self._notes, "a") as notes:
            print(os.environ["RANK"], file=notes)
        super().put(key, parts, sent)


def look(folders: Sequence[Path], notes: Path) -> None:
    init_process_group("gloo")
    rank = int(os.environ["RANK"])
    config = GeminiConfig(run_id="r", storage={"url": "file:///shared", "every_steps": 1})
    choice: Any = SimpleNamespace(plan=SimpleNamespace(kind="fresh"))
    hello: Any = SimpleNamespace(rank=rank, run="r", stream="main")
    check_storage(config, lambda: CountedFolder(folders[rank], notes), choice, hello, HOSTS)


def test_each_host_writes_twice_whatever_the_number_of_its_ranks(tmp_path: Path) -> None:
    """Once to prove that it can write, and once for the next host to read."""
    with World(tmp_path, hosts=HOSTS) as world:
        assert world.outcome(look, [tmp_path / "store"] * 6, tmp_path / "notes") == [None] * 6
    assert sorted((tmp_path / "notes").read_text().split()) == ["0", "0", "2", "2", "4", "4"]
    assert LocalStorage(tmp_path / "store").list() == []


def test_a_host_with_a_folder_of_its_own_is_named(tmp_path: Path) -> None:
    """Its ranks see each other's files: only another host's show that the folder is not shared."""
    folders = [tmp_path / ("own" if host == "b" else "store") for host in HOSTS]
    with World(tmp_path, hosts=HOSTS) as world:
        outcome = world.outcome(look, folders, tmp_path / "notes")
    assert all(isinstance(error, ConfigError) for error in outcome)
    assert "host b does not see what host a has just written there" in str(outcome[0])
