"""Launches of a run: which are alive, what is said to a second one, and what has changed between two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_ft.agent.departure import Launches, began
from gemini_ft.errors import ConfigError, RunAliveError
from gemini_ft.launch.launched import changes, launch_id, relevant, this_launch, without_secrets
from gemini_ft.launch.whole_rounds import LaunchName
from gemini_ft.wire.messages import Channel, Failed, pack
from gemini_ft.wire.worker_messages import GetInventory, Launch


def launch(name: str, pid: int = 0, ticks: int = 0, **facts: Any) -> Launch:
    known: dict[str, Any] = {"started": 1e9, "command": ["train.py", "1"], "folder": "/job", "script": "a", "environ": {}}
    return Launch(id=name, pid=pid, ticks=ticks, **{**known, **facts})


class TestAlive:
    def test_a_launch_lives_as_long_as_who_started_its_workers(self) -> None:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            launches, first = Launches(), launch("first", process.pid, began(process.pid) or 0)
            launches.note(first)
            launches.refuse_second("run", "here", launch("first", 1), [])  # another host's launcher, of the same launch
            with pytest.raises(RunAliveError, match=rf"run run is alive on host here: process {process.pid} has .*kill {process.pid}$"):
                launches.refuse_second("run", "here", launch("second"), [])
            launches.refuse_second("run", "here", launch("rank 0 has moved", first.pid, first.ticks), [])
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # nobody has collected it yet
            launches.refuse_second("run", "here", launch("second"), [])

    def test_a_later_process_of_the_same_number_is_another(self) -> None:
        launches = Launches()
        launches.note(launch("first", os.getpid(), (began(os.getpid()) or 0) - 1))
        launches.refuse_second("run", "here", launch("second"), [])

    def test_a_worker_that_its_launcher_has_left_behind_counts(self) -> None:
        with pytest.raises(RunAliveError):
            Launches().refuse_second("run", "here", launch("second", 1), [(os.getpid(), launch("first", 2))])


@pytest.mark.parametrize("given", ["abc", "-1", "", "9" * 30, "1\n"])
def test_a_number_of_a_launcher_that_is_none_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_LAUNCHER_PID", given)
    with pytest.raises(ConfigError, match=r"^GEMINI_LAUNCHER_PID=.*: must be the number of a process") as caught:
        this_launch("run")
    assert str(caught.value).isprintable()


def test_a_name_that_is_none_of_the_locales_encoding_travels_and_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a folder in Latin 1, or of any with an umlaut where the locale is ASCII."""
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    os.mkdir(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["caf\udce9.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    here, failed = this_launch("a"), Failed(error="OSError", text=f"{folder} is full")
    channel: Channel[Any] = Channel(GetInventory | Failed | Launch)
    there = channel.unpack(pack(here)[4:])
    assert changes(there, here) == []
    assert (there.command, there.folder) == (["caf\\udce9.py"], f"{tmp_path}/caf\\udce9")
    assert channel.unpack(pack(failed)[4:]).text == f"{tmp_path}/caf\\udce9 is full"


class TestChanges:
    def test_are_named_one_by_one(self) -> None:
        then = launch("a", environ={"LR": "'0.1'", "SEED": "'1'"})
        now = launch("b", command=["train.py", "2"], folder="/other", script="b", environ={"LR": "'0.5'", "WD": "'0'"})
        assert changes(then, now) == [
            "the command was `train.py 1` and is `train.py 2`",
            "the folder was /job and is /other",
            "train.py is another than it was",
            "LR was '0.1' and is '0.5'",
            "SEED was '1' and is not set",
            "WD was not set and is '0'",
        ]

    def test_are_told_without_a_value_that_could_be_a_secret(self) -> None:
        urls = [f"postgres://bob:{word}@host/db" for word in ("hunter2", "correcthorse")]
        then, now = (
            relevant({"DATABASE_URL": url, "WORD": word, "API_PIN": pin, "LR": rate, "SSH_TTY": "/dev/pts/1", "GEMINI_RESUME": "never"})
            for url, word, pin, rate in zip(urls, ("hunter2", "hunter3"), ("1234", "2345"), ("0.1", "5e-4"), strict=True)
        )
        words = ["API_PIN is another than it was", "DATABASE_URL is another than it was", "LR was '0.1' and is '5e-4'"]
        words += ["WORD is another than it was"]
        assert changes(launch("a", environ=then), launch("b", environ=now)) == words
        assert changes(launch("a", environ={}), launch("b", environ=relevant({"WORD": "hunter2"}))) == ["WORD is set"]

    @pytest.mark.parametrize(
        ("command", "shown"),
        [
            ("train.py --db postgres://bob:hunter2@host/db", "train.py --db postgres://...@host/db"),
            ("train.py --db postgres://bob:hun/t@er2@host/db", "train.py --db postgres://...@host/db"),
            ("train.py --db bob:hunter2@host:5432 --range 1:8", "train.py --db ...@host:5432 --range 1:8"),
            ("train.py --api-key hunter2 --lr 0.1", "train.py --api-key ... --lr 0.1"),
            ("train.py auth.token=hunter2 lr=0.1", "train.py auth.token=... lr=0.1"),
            ("train.py --tokens 4096 --max-tokens=8192 --password --fast", "train.py --tokens 4096 --max-tokens=8192 --password --fast"),
            ("train.py hf_abcdefghijklmnop", "train.py ..."),
            (f"train.py {'0123456789abcdef' * 4}", "train.py ..."),
            ("/home/bob/experiments/a_long_name_of_a_folder_that_is_no_secret/train.py", None),
        ],
    )
    def test_a_command_is_told_without_its_secrets(self, command: str, shown: str | None) -> None:
        assert " ".join(without_secrets(command.split())) == (shown or command)

    def test_a_process_finds_none_in_itself(self) -> None:
        assert changes(this_launch("a"), this_launch("b")) == []

    def test_the_folder_of_a_worker_of_ray_is_none_as_every_cluster_has_others(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        context = SimpleNamespace(get_experiment_name=lambda: "name")
        monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=lambda: context))
        before = this_launch("a")
        monkeypatch.chdir(tmp_path)
        assert changes(before, this_launch("b")) == []


def test_hosts_that_come_later_take_over_the_name_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for name in ("one", "two", "three"):
        monkeypatch.setenv("GEMINI_LAUNCH", name)
        names.append(LaunchName())
    one, two, three = names
    for host in (one, two):
        host.agree(["own one", "own two"])
    assert [one.word, two.word] == ["agreed one", "agreed one"]
    three.agree([three.word, two.word])  # in the first place, and new
    assert os.environ["GEMINI_LAUNCH"] == "one"


def test_torchrun_and_a_notebook_do_not_ask_how_the_last_upload_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GEMINI_LAUNCH", "GEMINI_LAUNCHER_PID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "theirs")
    assert not this_launch(launch_id()).is_of_run
