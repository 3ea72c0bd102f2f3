"""`scripts/gemini-evidence`: a bundle says what was run and what came out, and one that was changed is refused."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "gemini-evidence"))
check: Callable[..., list[str]] = SCRIPT["check"]
TINY = ["benchmarks/simulate.py", "--no-report", "--first", "3", "--seeds", "1", "--hours", "0.001"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = tmp_path_factory.mktemp("evidence") / "bundle"
    SCRIPT["CAMPAIGNS"]["simulate"] = TINY
    with pytest.raises(SystemExit) as end:
        SCRIPT["main"](["run", "--only", "simulate", str(bundle)])
    assert end.value.code == 0
    path = bundle / "bundle.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"changed": []}))  # the tests may run in a checkout with changes
    return bundle


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "bundle")
    return tmp_path / "bundle"


def _change(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((bundle / "bundle.json").read_text())
    change(index)
    (bundle / "bundle.json").write_text(json.dumps(index))


def test_a_bundle_says_what_was_run_and_is_found_as_it_was_written(bundle: Path) -> None:
    index = json.loads((bundle / "bundle.json").read_text())
    (campaign,) = index["campaigns"]
    assert campaign["command"] == ["python", *TINY]
    assert campaign["seeds"] == [3]
    assert campaign["results"]["commits_heard"]
    assert index["versions"].keys() >= {"python", "torch"}
    assert index["machine"]["cores"]
    assert index["files"].keys() == {"simulate.out", "simulate.log"}
    assert check(bundle, SCRIPT["sha256"](bundle / "bundle.json")) == []


def test_a_bundle_is_verified_in_another_clone_by_python_alone(bundle: Path, tmp_path: Path) -> None:
    def verified(clone: Path) -> str:
        command = [sys.executable, "-I", "-S", "-B", str(clone / "scripts" / "gemini-evidence"), "verify", str(bundle)]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return run.stdout + run.stderr

    clone, empty = tmp_path / "clone", tmp_path / "empty"
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(clone)], check=True)
    assert verified(clone).endswith(": every file is as it was written, and every campaign has passed\n")
    for folder in ("scripts", "benchmarks"):
        shutil.copytree(clone / folder, empty / folder)
    subprocess.run(["git", "init", "--quiet", str(empty)], check=True)
    assert " is not in this clone" in verified(empty)


def test_a_bundle_in_which_anything_was_changed_is_refused(bundle: Path) -> None:
    def refused(text: str, **options: Any) -> None:
        assert any(text in problem for problem in check(bundle, **options))

    (bundle / "more").write_text("")
    refused("more was added")
    (bundle / "more").unlink()
    output = (bundle / "simulate.out").read_text()
    (bundle / "simulate.out").write_text(output.replace('"commits_heard": ', '"commits_heard": 1'))
    refused("simulate.out is not as it was written")
    refused("are not those in its output")
    _change(bundle, lambda index: index["files"].update({"simulate.out": SCRIPT["sha256"](bundle / "simulate.out")}))
    refused("are not those in its output")
    refused("has the SHA-256", digest="0" * 64)
    (bundle / "simulate.out").write_text(output)
    _change(bundle, lambda index: index.update(commit="0" * 40))
    refused("is not in this clone")
    _change(bundle, lambda index: index["campaigns"][0].update(status=1))
    refused("simulate has failed")
    (bundle / "simulate.log").unlink()
    refused("simulate.log is missing")
    (bundle / "bundle.json").write_text("{")
    refused("cannot be read")


def test_a_history_that_its_seed_does_not_bring_about_is_refused(bundle: Path) -> None:
    results = json.loads((bundle / "simulate.out").read_text().splitlines()[-1])
    results["results"]["digests"] = {"3": "0" * 64}
    (bundle / "simulate.out").write_text(json.dumps(results) + "\n")
    _change(bundle, lambda index: index["campaigns"][0].update(results=results["results"]))
    _change(bundle, lambda index: index["files"].update({"simulate.out": SCRIPT["sha256"](bundle / "simulate.out")}))
    assert check(bundle) == []  # nothing but the run itself can tell
    assert check(bundle, again=True) == ["simulate has other histories when it is repeated"]
