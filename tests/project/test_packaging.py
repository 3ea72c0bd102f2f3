"""The checkout: what pyproject.toml says about the folders is what the folders are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import gemini_ft.sync
from gemini_ft.public_names import show_names

ROOT = Path(__file__).parents[2]
BESIDE = ("compression", "sync")  # packages of gemini_ft that lie beside its folder


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _python_folders(top: Path) -> set[Path]:
    return {file.parent.relative_to(ROOT) for file in top.rglob("*.py")}


def test_packages_are_the_folders(pyproject: dict[str, Any]) -> None:
    """Those without a Python file too, whose data is shipped: setuptools warns of a folder that is in a wheel and is not listed."""
    setuptools = pyproject["tool"]["setuptools"]
    top = ROOT / "gemini_ft"
    files = [file.relative_to(ROOT) for file in top.rglob("*") if file.is_file() and file.suffix != ".pyc"]
    folders = {".".join(file.parent.parts) for file in files}
    assert setuptools["packages"] == sorted(folders | {f"gemini_ft.{name}" for name in BESIDE})
    python = {".".join(folder.parts) for folder in _python_folders(top)}
    assert folders - python == {"gemini_ft.agent.web"} <= setuptools["package-data"].keys()


def test_package_dir_maps_what_lies_beside(pyproject: dict[str, Any]) -> None:
    mapping = {"gemini_ft": "gemini_ft"} | {f"gemini_ft.{name}": name for name in BESIDE}
    assert pyproject["tool"]["setuptools"]["package-dir"] == mapping


def test_names_that_packages_show_are_shipped(pyproject: dict[str, Any]) -> None:
    data = pyproject["tool"]["setuptools"]["package-data"]
    stubs = [file.parent.relative_to(ROOT) for top in ("gemini_ft", *BESIDE) for file in (ROOT / top).rglob("__init__.pyi")]
    shown = {f"gemini_ft.{stub}" if str(stub) in BESIDE else ".".join(stub.parts) for stub in stubs}
    assert shown == {package for package, files in data.items() if "*.pyi" in files}


@pytest.mark.parametrize("folder", sorted(_python_folders(ROOT / "gemini_ft")), ids=str)
def test_folders_of_gemini_ft_are_packages(folder: Path) -> None:
    assert (ROOT / folder / "__init__.py").is_file()


@pytest.mark.parametrize("name", BESIDE)
def test_folders_beside_are_not(name: str) -> None:
    """With an ``__init__.py``, ``compression/`` would hide the standard library's from Python 3.14 on."""
    assert _python_folders(ROOT / name) == {Path(name)}, "subfolders are not in the packages list"
    assert not (ROOT / name / "__init__.py").exists()
    assert not (ROOT / "tests" / name).exists(), "pytest would put tests/ on sys.path and the bare name would resolve"


@pytest.mark.parametrize("name", BESIDE)
def test_siblings_are_imported_relatively(name: str) -> None:
    for file in (ROOT / name).glob("*.py"):
        assert not re.search(rf"^\s*(from|import) (gemini_ft\.)?{name}\b", file.read_text(), re.MULTILINE), file


def test_version_is_said_alike(pyproject: dict[str, Any]) -> None:
    """In the package, in what is installed, for citations, and as the newest section of the changelog."""
    released = re.findall(r"^## \[(\d.*?)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert pyproject["project"]["version"] == gemini_ft.__version__ == metadata.version("gemini-ft") == released[0] == cited[0]


def test_badges_are_true(pyproject: dict[str, Any]) -> None:
    """Those of Python and torch say what is allowed, and whose runs are in docs/versions.md."""
    badges = re.findall(r"^\[!\[(.*?)\]\(https://img\.shields\.io/badge/(.*?)-blue\)\]", (ROOT / "README.md").read_text(), re.MULTILINE)
    project, runs = pyproject["project"], re.findall(r"^\| 2\d{3}-.*", (ROOT / "docs" / "versions.md").read_text(), re.MULTILINE)
    cells = [run.split(" | ") for run in runs]

    def span(column: int) -> str:
        minors = sorted({tuple(int(part) for part in row[column].split(".")[:2]) for row in cells})
        return " to ".join(".".join(map(str, minors[end])) for end in (0, -1))

    assert [text for text, _ in badges] == [f"Python {span(1)}", f"torch {span(2)}", f"License: {project['license']}"]
    assert [shown.replace("--", "\0").replace("-", " ").replace("_", " ").replace("\0", "-") for _, shown in badges] == [
        f"python {span(1)}",
        f"torch {span(2)}",
        f"license {project['license']}",
    ]
    low, high = span(2).split(" to ")
    assert f"torch>={low},<2.{int(high.split('.')[1]) + 1}" in project["dependencies"]
    assert project["requires-python"] == f">={span(1).split(' ')[0]}"


def test_constraints_pin_every_dependency(pyproject: dict[str, Any]) -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all("==" in line for line in lines)
    pinned = {_normal(line.split("==")[0]): line.split("==")[1] for line in lines}
    optional = pyproject["project"]["optional-dependencies"]
    for text in [*pyproject["project"]["dependencies"], *optional["lightning"], *optional["s3"], *optional["dev"], *optional["docs"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[_normal(requirement.name)]), text


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_map_of_modules_is_the_tree() -> None:
    """A folder, and below it the names of its modules, each said once."""
    page = (ROOT / "docs" / "modules.md").read_text()
    lines = page.split("```\ngemini_ft/\n")[1].split("sync/ compression/")[0].splitlines()
    told: dict[str, list[str]] = {"": []}
    for line in lines:
        if not line.startswith(" " * 24):
            name = line.split()[0]
            told |= {name: []} if name.endswith("/") else {"": [*told[""], name.removesuffix(".py")]}
        else:
            told[list(told)[-1]] += line.split()
    root = ROOT / "gemini_ft"
    tree = {"": root} | {f"{folder.relative_to(root)}/": folder for folder in root.rglob("*") if folder.is_dir()}
    there = {name: sorted(file.stem for file in folder.glob("*.py") if file.stem != "__init__") for name, folder in tree.items()}
    assert {name: sorted(modules) for name, modules in told.items()} == {name: modules for name, modules in there.items() if modules}


@pytest.mark.parametrize("folders", [True, False])
def test_names_that_packages_show_are_found_in_a_zip_archive(tmp_path: Path, folders: bool) -> None:
    """As a cluster's tools ship Python packages to their workers; with an entry for each folder, or as a wheel, which has none."""
    places = {"gemini_ft": "gemini_ft"} | {name: f"gemini_ft/{name}" for name in BESIDE}
    for folder, place in places.items():
        shutil.copytree(ROOT / folder, tmp_path / "tree" / place, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    archive = shutil.make_archive(str(tmp_path / "shipped"), "zip", tmp_path / "tree")
    if not folders:
        archive = str(tmp_path / "shipped.whl")
        with zipfile.ZipFile(archive, "w") as wheel:
            for file in filter(Path.is_file, (tmp_path / "tree").rglob("*")):
                wheel.write(file, file.relative_to(tmp_path / "tree"))
    code = "import gemini_ft as gf, gemini_ft.sync as sync; print(gf.__file__); print(sync.__all__); print(gf.run.__name__, sync.Zen)"
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env={**os.environ, "PYTHONPATH": archive}, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert said.stdout.splitlines() == [f"{archive}/gemini_ft/__init__.py", str(gemini_ft.sync.__all__), f"run {gemini_ft.sync.Zen}"]


def test_a_package_that_lacks_a_module_is_no_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "outer" / "__init__.py").touch()
    (tmp_path / "outer" / "inner" / "__init__.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        show_names("outer.inner")
    assert "outer.inner" not in sys.modules
