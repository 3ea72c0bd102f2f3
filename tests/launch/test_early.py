"""Variables that a script sets before its heavy imports are found by reading it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gemini_ft.launch.preload import Early, read_early


def early(folder: Path, source: str, *environ: str) -> Early:
    (folder / "train.py").write_text(source)
    heavy = ["torch", *(["transformers"] if "transformers" in source else [])]
    return read_early([folder / "train.py"], folder, heavy, environ)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import os\nos.environ['A'] = '1'\nimport torch\nos.environ['B'] = '2'", {"A": "1"}),
        ("from os import environ\nenviron['A'] = '1'\nfrom torch import nn", {"A": "1"}),
        ("import os\nos.environ.setdefault('A', '1')\nos.environ.setdefault('SET', '1')\nimport torch", {"A": "1"}),
        ("import os\nos.environ.update({'A': '1'}, B='2')\nos.environ |= {'C': '3'}\nimport torch", {"A": "1", "B": "2", "C": "3"}),
        ("import os\ndel os.environ['SET']\nos.environ.pop('A', None)\nimport torch", {"SET": None, "A": None}),
        (
            "import os\nif 'A' not in os.environ:\n    os.environ['A'] = '1'\nif 'SET' not in os.environ:\n    os.environ['SET'] = '1'",
            {"A": "1"},
        ),
        ("import os\ntry:\n    import uvloop\nexcept ImportError:\n    pass\nos.environ['A'] = '1'", {"A": "1"}),
        ("import os\ndef main():\n    os.environ['A'] = '1'\n    import torch\nif __name__ == '__main__':\n    main()", {"A": "1"}),
        ("import os\ndef main():\n    os.environ['A'] = '1'\nimport torch\nmain()", {}),
        ("import os\ndef f():\n    os.environ['A'] = '1'\nboth = f(), f()\nimport torch", {"A": "1"}),
        ("import os\nprint(os.environ['A'], os.environ.get('B'))\nimport torch", {}),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = os.environ['LOCAL_RANK']\nimport torch", {}),
        ("import os\nif x:\n    os.environ['NCCL_DEBUG'] = 'INFO'\nimport torch", {}),
        ("import settings\nimport torch", {"A": "from a module"}),
        ("from deep.inner import setup\nsetup()\nimport torch", {"A": "from a function"}),
        ("import os, torch\nos.environ['HF_HOME'] = os.environ['OMP_NUM_THREADS'] = '1'\nimport transformers", {"HF_HOME": "1"}),
        ("import os, transformers\nos.environ['HF_HOME'] = '1'\nimport torch", {}),
        ("from . import torch", {}),
        ("this is not Python", {}),
    ],
)
def test_constants_are_for_the_fork_server_too(source: str, expected: dict[str, str | None], tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text("import os\nos.environ['A'] = 'from a module'\nimport torch\nos.environ['B'] = '2'")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "inner.py").write_text("import os\ndef setup():\n    os.environ['A'] = 'from a function'")
    assert early(tmp_path, source, "SET") == Early(expected)


@pytest.mark.parametrize(
    ("source", "unknown"),
    [
        (
            "import os\nos.environ['HF_HOME'] = f'/scratch/{os.getuid()}'\nimport torch",
            "train.py sets HF_HOME in line 2, before its imports",
        ),
        ("import os\nif os.cpu_count() > 8:\n    os.environ['A'] = '1'\nimport torch", "train.py may set A in line 2, before its imports"),
        ("import os\nfor n in 'AB':\n    os.environ[n] = '1'\nimport torch", "train.py sets variables in line 2, before its imports"),
        ("import os\nos.environ.update(read())\nimport torch", "train.py sets variables in line 2, before its imports"),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport torch", "train.py sets variables in line 2, before its imports"),
        ("import settings\nimport torch", "settings.py sets A in line 2, before its imports"),
    ],
)
def test_what_is_known_only_when_the_script_runs_is_said(source: str, unknown: str, tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text("import os\nos.environ['A'] = os.getcwd()")
    assert early(tmp_path, source).unknown == unknown


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_early([tmp_path / "pipe"], tmp_path, ["torch"], []) == Early()
