"""``gemini simulate`` and ``gemini plan``: what they print, draw and refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gemini_ft.cli import main as cli

PAPER = [
    "--hosts",
    "16",
    "--state",
    "1.2TB",
    "--step",
    "62s",
    "--bandwidth",
    "340gbit",
    "--storage-bandwidth",
    "20gbit",
    "--restart",
    "7min",
    "--replace",
    "12min",
    "--runs",
    "3",
]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main([*arguments]) == 0
    return capsys.readouterr().out


def test_the_papers_cluster_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "simulate", *PAPER)
    assert "16 hosts, 2 replicas, 8 groups of 2. The loss of any 1 host is survived; 2 hosts at once with 93.3 %" in text
    assert "0.48 failures per day; 3 runs of 30 days." in text
    assert "By formula a failure loses 32.8 s of work." in text
    assert "Memory per host: 375.0 GB; sent and received per host and snapshot: 75.0 GB." in text


def test_for_programs_and_as_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = json.loads(shown(capsys, "simulate", *PAPER, "--json", "--svg", str(tmp_path / "lost.svg")))
    memory, storage = found["ways"]["memory"], found["ways"]["storage_alone"]
    assert memory["effective_training_ratio"] > storage["effective_training_ratio"]
    assert memory["lost_work"]["p50"] < storage["lost_work"]["p50"]
    assert found["replication_seconds"] == pytest.approx(1.76, abs=0.01)
    picture = ElementTree.parse(tmp_path / "lost.svg").getroot()
    assert len(picture.findall("{http://www.w3.org/2000/svg}polyline")) == 2


def test_the_same_seed_is_the_same_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    first, again = (shown(capsys, "simulate", *PAPER, "--seed", "7") for _ in range(2))
    assert first == again
    assert first != shown(capsys, "simulate", *PAPER, "--seed", "8")


def test_a_plan_names_replicas_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "plan", *PAPER, "--memory", "500GB")
    assert "replicas: 2" in text
    assert text.count("does not fit") == 2  # three copies take 525 GB
    assert "2 hosts lost at the same time: survived with 93.33%" in text
    assert json.loads(shown(capsys, "plan", *PAPER, "--memory", "500GB", "--json"))["replicas"] == 2


def test_a_plan_that_is_impossible_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *PAPER, "--memory", "10GB"]) == 1
    assert "Nothing fits into 10.0 GB per host: one copy takes 225.0 GB." in capsys.readouterr().out


def test_without_storage_the_way_back_is_the_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--hosts", "4", "--state", "10GB", "--step", "1s", "--bandwidth", "10gbit", "--runs", "1"]
    text = shown(capsys, "simulate", *arguments)
    assert "falls back to the beginning" in text
    assert "storage alone" not in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--step", "fast"], "'fast' is no time; give a number and a unit, such as 62s, 5min, 3h or 2d"),
        (["--bandwidth", "10 apples"], "'10 apples' is no rate"),
        (["--state", "much"], "'much' is no size"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(change: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["simulate", *PAPER, *change])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--replicas", "17"], "replicas=17 needs as many hosts, got 16"),
        (["--runs", "0"], "--runs 0: must be at least 1"),
        (["--host-failures", "inf"], "host_failures=inf: must not be negative, and less than 1e+30"),
        (["--runs", "1", "--svg", "no/such/folder"], "--svg no/such/folder: cannot be written (No such file or directory)"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(change: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *PAPER, *change]) == 2
    assert words in capsys.readouterr().err


def test_the_page_shows_what_the_commands_print(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    blocks = re.findall(r"^```console\n\$ gemini (.*)\n([^`]*)```", page, re.MULTILINE)
    assert [words.split()[0] for words, _ in blocks] == ["simulate", "plan"]
    for words, printed in blocks:
        assert shown(capsys, *words.split()) == printed
