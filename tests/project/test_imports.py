"""What importing costs, and what the package shows; true for a checkout and for an installed wheel."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import gemini_ft
from gemini_ft import errors

HEAVY = {"accelerate", "deepspeed", "lightning", "lightning_fabric", "numpy", "pytorch_lightning", "torch", "transformers"}
PURE = (
    "config",
    "errors",
    "core.faults",
    "core.layout",
    "core.ledger",
    "wire.messages",
    "wire.peer_messages",
    "wire.worker_messages",
    "core.placement",
    "core.protocol",
    "launch.launched",
    "core.traffic",
    "core.slots",
    "core.versions",
    "launch.autoprotect",
    "testing.network",
    "trackers",
)


def _run(code: str, cwd: Path | None = None) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _loaded_by(*modules: str) -> set[str]:
    """Top-level names in ``sys.modules`` of a new interpreter after importing ``modules``."""
    imports = "".join(f"import {module}\n" for module in modules)
    return {name.partition(".")[0] for name in json.loads(_run(f"import json, sys\n{imports}print(json.dumps(list(sys.modules)))"))}


def _modules_of(package: str) -> list[str]:
    found = importlib.import_module(package)
    return [package, *(module.name for module in pkgutil.walk_packages(found.__path__, f"{package}."))]


def test_the_measure_sees_torch() -> None:
    assert "torch" in _loaded_by("torch")


def test_importing_the_package_is_light() -> None:
    assert not _loaded_by("gemini_ft") & (HEAVY | {"pydantic"})


@pytest.mark.parametrize("package", ["agent", "core", "storage", "wire"])
def test_the_agent_process_never_loads_torch(package: str) -> None:
    modules = set(_modules_of(f"gemini_ft.{package}"))
    assert len(modules) > 1
    assert not _loaded_by(*modules) & HEAVY


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_load_nothing_heavy(module: str) -> None:
    assert not _loaded_by(f"gemini_ft.{module}") & HEAVY


def test_sync_and_compression_are_found_and_hide_nothing(tmp_path: Path) -> None:
    code = "import gzip, gemini_ft.compression.base, gemini_ft.sync.base; print(gzip.decompress(gzip.compress(b'same')))"
    for folder in (tmp_path, Path(gemini_ft.__file__).parent.parent):  # the second: a checkout's root, first on sys.path
        assert _run(code, cwd=folder) == "b'same'\n"


def test_lightnings_private_names_are_used_in_few_modules() -> None:
    """Methods that our strategies and loaders override are another matter: they are called by ``super()``."""
    files = [file for folder in ("lightning", "loaders") for file in Path(gemini_ft.__file__).with_name(folder).glob("*.py")]
    nodes = [(file.stem, node) for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
    used = {(name, node.attr) for name, node in nodes if ast.unparse(node.value) not in ("self", "cls", "super()")}
    private = {use for use in used if use[1].startswith("_") and not use[1].startswith(("__", "_gemini"))}
    elsewhere = {use for use in private if use[0] != "compat" and not use[0].startswith("trainer_")}
    of_torch = {"between": {"_iterator"}, "bookmark": {"_iterator"}, "workers": {"_get_data", "_task_info", "_workers_status"}}
    of_others = {"ahead": {"_update_state_dict"}}  # accelerate's
    assert elsewhere == {(name, attribute) for name, attributes in (of_torch | of_others).items() for attribute in attributes}


def test_types_are_shipped() -> None:
    assert Path(gemini_ft.__file__).with_name("py.typed").is_file()


@pytest.mark.parametrize("name", gemini_ft.__all__)
def test_exported_members_exist(name: str) -> None:
    if name == "huggingface":
        pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    assert getattr(gemini_ft, name) is not None
    assert name in dir(gemini_ft)


def test_exported_members_are_sorted_and_unique() -> None:
    assert gemini_ft.__all__ == sorted(set(gemini_ft.__all__))


def test_unknown_members_are_refused_by_name() -> None:
    with pytest.raises(AttributeError, match="'gemini_ft' has no attribute 'Checkpoint'"):
        _ = gemini_ft.Checkpoint


def test_the_tree_of_errors_is_drawn_in_full() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert errors.__doc__ is not None
    drawn = {word for line in errors.__doc__.splitlines() for word in line.split() if word.endswith("Error")}
    assert drawn == classes


@pytest.mark.parametrize("package", ["gemini_ft.sync", "gemini_ft.compression"])
def test_packages_without_an_init_show_their_names(package: str) -> None:
    """In every way of importing; type checkers read the same file."""
    found = importlib.import_module(package)
    assert set(found.__all__) <= set(dir(found))
    for name in found.__all__:
        assert not name.startswith("_")
        assert getattr(found, name) is vars(found)[name]
    with pytest.raises(AttributeError, match=r"has no attribute 'Zem'; it has .*, and its modules"):
        found.Zem  # noqa: B018
    star: dict[str, object] = {}
    exec(f"from {package} import *", star)
    assert set(found.__all__) <= star.keys()


def test_every_scheme_and_method_has_a_name_in_its_package() -> None:
    _run(
        "from gemini_ft import compression, sync\n"
        "from gemini_ft.compression import base, methods\n"
        "from gemini_ft.sync.schemes import LOSSY_SCHEMES, SCHEMES, SWITCH_SCHEMES\n"
        "for found in {**SCHEMES, **LOSSY_SCHEMES, **SWITCH_SCHEMES}.values():\n"
        "    assert getattr(sync, found.__name__) is found\n"
        "classes = [each for each in vars(methods).values() if isinstance(each, type)]\n"
        "classes = [each for each in classes if issubclass(each, (base.Compressor, base.Reducer))]\n"
        "assert len(classes) > 20\n"
        "for found in classes:\n"
        "    assert getattr(compression, found.__name__) is found"
    )


def test_names_of_the_packages_beside_load_what_they_need_and_no_more() -> None:
    assert not HEAVY & _loaded_by("gemini_ft.sync", "gemini_ft.compression")
    _run(
        "import sys; from gemini_ft.sync import Zen; assert 'torch' in sys.modules and 'gemini_ft.sync.sparcml' not in sys.modules\n"
        "from gemini_ft.compression import TopK, sparse; assert sparse.TopK is TopK"
    )
