"""Which modules the fork server imports for a program, found by reading it: its script, and the modules beside it that it imports."""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Sequence
from pathlib import Path

from gemini_ft.launch.early import MOST_FILES, UNPARSABLE, Early, is_file, read_early
from gemini_ft.launch.forkserver import OPTIONAL
from gemini_ft.launch.script import import_root

# Torch imports torch._dynamo (a second) when a script creates its first optimizer.
ALWAYS = ("torch", "torch._dynamo", "gemini_ft", "gemini_ft.worker.rendezvous", "gemini_ft.checkpointer")
_HOOKS = f"torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook{OPTIONAL}"
_STRATEGIES = ("gemini_ft.lightning.naming", "gemini_ft.lightning.fabric")
# Package that a script imports -> modules that are imported ahead for it: with what it imports itself only when it is used.
VENDORS = {
    "lightning": ("lightning", *_STRATEGIES, _HOOKS),
    "pytorch_lightning": ("pytorch_lightning", "gemini_ft.pytorch_lightning", *_STRATEGIES, _HOOKS),
    "lightning_fabric": ("lightning_fabric", "gemini_ft.lightning.fabric"),
    # The first engine imports the last ones, and with one of them torch._inductor: most of the time of a restart.
    "deepspeed": (
        "deepspeed",
        "gemini_ft.deepspeed.engine",
        f"deepspeed.runtime.zero.muon.original_muon{OPTIONAL}",
        f"deepspeed.module_inject.auto_ep_layer{OPTIONAL}",
        f"deepspeed.ops.op_builder.all_ops{OPTIONAL}",
        f"torch.utils.cpp_extension{OPTIONAL}",  # it needs setuptools
    ),
    "accelerate": ("accelerate",),
    "transformers": ("transformers.trainer", "accelerate", f"gemini_ft.huggingface{OPTIONAL}", _HOOKS),  # of some versions only
}
_NOT_FOLLOWED = "deepspeed"  # it asks for devices, compilers and MPI: a module that may never be used is no reason for that
_MOST_BYTES = 2**20  # of a file that is read


def modules_to_preload(program: Sequence[str], extra: Sequence[str] = (), copy: Path | None = None, *, follow: bool = True) -> list[str]:
    """Lists the modules that the fork server imports for ``program``: torch, this package, and those that the script imports.

    Args:
        program: script and arguments, or ``-m``, module name and arguments.
        extra: names of further modules.
        copy: of the script, which has come through a pipe.
        follow: read the modules beside the script that it imports as well.

    Returns:
        Names; one that ends with "?" may be missing.
    """
    text = "".join(map(_text, _sources(program, copy)[-1:]))
    imported = _packages(text)
    if imported & {"accelerate", "transformers"} and ("deepspeed" in text or any("deepspeed" in argument for argument in program)):
        imported.add("deepspeed")  # by them, later
    vendors = [name for vendor, names in VENDORS.items() if vendor in imported for name in names]
    if follow:
        beside = _imported(program, copy, follow=True) - imported - {_NOT_FOLLOWED}
        vendors += [_optional(name) for vendor, names in VENDORS.items() if vendor in beside for name in names]
    known = dict.fromkeys([*ALWAYS, *vendors, *extra])
    return [name for name in known if name.removesuffix(OPTIONAL) == name or name.removesuffix(OPTIONAL) not in known]


def early_environment(program: Sequence[str], modules: Sequence[str], copy: Path | None = None, *, follow: bool = True) -> Early:
    """The variables that ``program`` sets before it imports what the fork server has imported; arguments as above."""
    imported = _imported(program, copy, follow)
    ahead = {name.removesuffix(OPTIONAL).partition(".")[0] for name in modules}
    heavy = {"torch", *(ahead & imported)} - {"gemini_ft"}  # which reads variables when it is used
    return read_early(_sources(program, copy), Path(import_root(program)), heavy, os.environ)


def _optional(name: str) -> str:
    return name.removesuffix(OPTIONAL) + OPTIONAL


def _imported(program: Sequence[str], copy: Path | None, follow: bool) -> set[str]:
    """The packages that a script imports anywhere; with ``follow`` also those that are imported with it, by the modules beside it."""
    root, sources, local = Path(import_root(program)), _sources(program, copy), functools.cache(_local)
    waiting, read, found = sources[:] if follow else sources[-1:], set[Path](), set[str]()
    while waiting and len(read) < MOST_FILES:
        path = waiting.pop(0)
        if path in read:
            continue
        read.add(path)
        text = _text(path)
        found |= _packages(text, nested=path == sources[-1])
        for name, level in dict.fromkeys(_imports(text, nested=path in sources)) if follow else ():
            folder = path.parents[level - 1] if 0 < level <= len(path.parents) else root
            if level == 0 or folder.is_relative_to(root):  # above it no relative import leads
                waiting += local(folder, name)
    return found


def _sources(program: Sequence[str], copy: Path | None) -> list[Path]:
    """The files that Python runs for this program, the last one as ``__main__``."""
    if copy:
        return [copy]
    if program[0] != "-m":
        return [Path(program[0])]
    root, name = Path(import_root(program)), program[1]
    return list(dict.fromkeys([*_local(root, name), *_local(root, f"{name}.__main__")]))


def _local(folder: Path, name: str) -> list[Path]:
    """The files that ``import name`` runs, of those in this folder: packages on the way to it, and the module."""
    found, base = list[Path](), folder
    for part in name.split("."):
        base = base / part
        found += [path for path in (base / "__init__.py", base.parent / f"{part}.py") if is_file(path)][:1]
    return found


def _packages(text: str, nested: bool = True) -> set[str]:
    return {name.partition(".")[0] for name, level in _imports(text, nested) if not level}


@functools.cache
def _imports(text: str, nested: bool) -> list[tuple[str, int]]:
    """The modules that a source imports, and how many packages up a relative one begins; none if it cannot be parsed.

    Args:
        text: the source.
        nested: in functions too, and for a type checker.
    """
    try:
        waiting: list[ast.AST] = [ast.parse(text)]
    except UNPARSABLE:
        return []
    found = list[tuple[str, int]]()
    while waiting:
        match waiting.pop(0):
            case ast.Import(names):
                found += [(alias.name, 0) for alias in names]
            case ast.ImportFrom(module, names, level):
                found += [(".".join([*([module] if module else []), alias.name]), level) for alias in names]
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not nested:
                pass
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=other) if not nested:
                waiting += other
            case ast.expr():
                pass
            case node:
                waiting += ast.iter_child_nodes(node)
    return found


def _text(source: Path) -> str:
    """The text of the file, or an empty string if it cannot be read."""
    try:
        return source.read_text(errors="replace") if is_file(source) and source.stat().st_size <= _MOST_BYTES else ""
    except OSError:
        return ""
