"""Warnings of other packages are no errors while these are imported, whatever else is installed; all others are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    # Torch imports it where it is there, with all that this brings about.
    "pynvml": """
        import warnings
        warnings.warn("The pynvml package is deprecated. Please install nvidia-ml-py instead.", FutureWarning, stacklevel=2)
    """,
    # As torch.compile does: what it imports at its first call uses what has been deprecated since.
    "lazy_compiler": """
        def compiled():
            import lazy_parts
    """,
    "lazy_parts": """
        import warnings
        def script_method():
            warnings.warn("`torch.jit.script_method` is deprecated.", DeprecationWarning)
        script_method()
    """,
}
TESTS = """
import warnings
import lazy_compiler
import pytest
import torch

def test_a_call_may_import():
    lazy_compiler.compiled()
    assert torch.cuda._HAS_PYNVML

def test_afterwards_a_warning_is_an_error_again():
    import lazy_parts
    with pytest.raises(DeprecationWarning, match="script_method"):
        lazy_parts.script_method()

def test_a_warning_of_this_module_is_an_error():
    with pytest.raises(UserWarning, match="ours"):
        warnings.warn("ours")
"""


def test_a_package_that_warns_while_it_is_imported_breaks_no_test(tmp_path: Path) -> None:
    others = tmp_path / "site-packages"
    others.mkdir()
    for name, text in PACKAGES.items():
        lines = text.splitlines()
        (others / f"{name}.py").write_text("\n".join(line[8:] for line in lines))
    (tmp_path / "test_it.py").write_text(TESTS)
    paths = [str(others), str(ROOT / "tests"), str(ROOT / "tests" / "kit")]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "conftest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([*command, str(tmp_path / "test_it.py")], env=environ, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert "3 passed" in done.stdout, done.stdout + done.stderr
