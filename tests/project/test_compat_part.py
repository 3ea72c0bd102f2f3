"""The compatibility part of `make compat` names tests that there are."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _part() -> list[str]:
    loader = SourceFileLoader("compat_script", str(ROOT / "scripts" / "compat"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    script = module_from_spec(spec)
    loader.exec_module(script)
    found: list[str] = script.PART
    return found


@pytest.mark.parametrize("entry", _part())
def test_every_entry_is_a_test(entry: str) -> None:
    """Its parameters are pytest's to check: `make compat` ends where one is missing."""
    file, *names = entry.partition("[")[0].split("::")
    body = ast.parse((ROOT / file).read_text()).body
    for name in names:
        found = next((node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name), None)
        assert found is not None, f"{file} has no {name}"
        body = found.body


def test_a_folder_that_is_no_environment_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    command = [sys.executable, str(ROOT / "scripts" / "compat"), "--again", "--environment", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (tmp_path / "mine").exists()
    assert "is no virtual environment, and would be removed" in done.stderr
