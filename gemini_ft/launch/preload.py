"""Reads a program before it starts: which modules the fork server imports for it, and which variables it sets before that.

Some libraries read their variables only while they are imported (OMP_NUM_THREADS, TORCH_LOGS, HF_HOME). A fork server has imported them
long before the script runs. Where the script gives a constant, the server can set it first; where the value is known only when the
script runs, workers must be started cold.

The constructs of training scripts are followed: statements in order, ``try`` and ``if __name__ == "__main__"``, functions that they
call, and modules beside the script. Pure but for reading these files.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gemini_ft.launch.forkserver import OPTIONAL
from gemini_ft.launch.script import import_root

# Variables that are read when they are used, not when something is imported.
_LATE = ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_ORDER", "CUBLAS_WORKSPACE_CONFIG", "TOKENIZERS_PARALLELISM")
_LATE_PREFIXES = ("MASTER_", "NCCL_", "GLOO_", "WANDB_", "MLFLOW_")
_OF_TORCH = ("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "TORCH", "PYTORCH_")  # these are read while torch is imported, or later
_READERS = ("load_dotenv", "read_env", "putenv")  # functions that set variables whose names are not in the script
MOST_FILES = 100  # that are read of one program
UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)  # what ast.parse raises


@dataclass
class Early:
    """The variables that a program sets before it imports any of the heavy modules."""

    constants: dict[str, str | None] = field(default_factory=dict)  # None: removed
    unknown: str | None = None  # where a variable gets a value that is known only when the program runs


def read_early(files: Sequence[Path], folder: Path, heavy: Collection[str], environ: Collection[str]) -> Early:
    """Reads what a program does before its heavy imports.

    Args:
        files: sources that run one after the other: the packages of a module that is run, then the program.
        folder: first on ``sys.path``: modules found there are read too.
        heavy: top-level names of the modules that the program imports and that are imported ahead for it, torch among them. It is
            read as far as the last of them: HF_HOME may be set between the imports of torch and transformers.
        environ: names of variables that are set already, which ``setdefault`` leaves alone.
    """
    reader = _Reader(folder, set(heavy), set(environ))
    for path in files:
        if reader.file(path):
            break
    return reader.early


def is_file(path: Path) -> bool:
    """Whether there is such a file, as far as this user may know."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # in a folder that cannot be looked into; a name that is none
        return False


class _Unknown(Exception):
    pass


class _Reader:
    """Follows a program; its methods return True once all heavy imports are reached."""

    def __init__(self, folder: Path, heavy: set[str], environ: set[str]) -> None:
        self.early = Early()
        self._folder, self._heavy, self._environ = folder, heavy, environ
        self._functions: dict[str, list[ast.stmt]] = {}
        self._files: set[Path] = set()
        self._name = ""

    def file(self, path: Path) -> bool:
        if path in self._files or len(self._files) >= MOST_FILES or not is_file(path):  # a pipe can be read only once
            return False
        self._files.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, *UNPARSABLE):
            return False
        before, self._name = self._name, path.name
        try:
            return self._block(tree.body)
        finally:
            self._name = before

    def _block(self, statements: Iterable[ast.stmt]) -> bool:
        return any(self._statement(statement) for statement in statements)

    def _statement(self, node: ast.stmt) -> bool:
        match node:
            case ast.Import():
                return any(self._module(alias.name) for alias in node.names)
            case ast.ImportFrom():
                name = node.module or ""
                return node.level == 0 and (self._module(name) or any(self._local(f"{name}.{alias.name}") for alias in node.names))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._functions[node.name] = node.body
            case ast.ClassDef():
                return self._block(node.body)
            case ast.Try():
                return self._block([*node.body, *node.orelse, *node.finalbody])
            case ast.With():
                return self._block(node.body)
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                return self._block(node.body)
            case ast.If(test=ast.Compare(left=ast.Constant(value=str(name)), ops=[ast.NotIn()]), orelse=[]) if name in self._environ:
                return False  # set already, so the script leaves it
            case ast.If(test=ast.Compare(left=ast.Constant(value=str()), ops=[ast.NotIn()]), orelse=[]):
                return self._block(node.body)
            case _:
                return self._other(node)
        return False

    def _other(self, node: ast.stmt) -> bool:
        try:
            known = {name: value for name, value in _settings(node) if not (_is_late(name) or self._is_too_late(name))}
        except _Unknown as unknown:
            if self._is_too_late(str(unknown)):
                return False
            self.early.unknown = self.early.unknown or f"{self._name} sets {unknown} in line {node.lineno}, before its imports"
            return False
        if isinstance(node, ast.If | ast.For | ast.While | ast.Match) and known:
            self.early.unknown = self.early.unknown or f"{self._name} may set {next(iter(known))} in line {node.lineno}, before its imports"
        elif _is_default(node) and not known.keys().isdisjoint(self._environ):
            return False
        self.early.constants.update(known)
        self._environ |= known.keys()
        called = [name for name in _called(node) if name in self._functions]
        if any(self._block(self._functions.pop(name, ())) for name in called):
            return True
        inner = [item for item in ast.walk(node) if isinstance(item, ast.Import | ast.ImportFrom)]
        return any(self._statement(item) for item in inner)

    def _is_too_late(self, name: str) -> bool:
        return "torch" not in self._heavy and name.startswith(_OF_TORCH)

    def _module(self, name: str) -> bool:
        if (package := name.partition(".")[0]) in self._heavy:
            self._heavy -= {package, "torch"}  # which all the others import
            return not self._heavy
        return self._local(name)

    def _local(self, name: str) -> bool:
        return any(map(self.file, _local(self._folder, name)))


def _settings(node: ast.AST) -> Iterator[tuple[str, str | None]]:
    """The variables that a statement sets, wherever in it; `_Unknown` if a name or a value is not a constant."""
    for item in ast.walk(node):
        match item:
            case ast.Assign(targets=targets, value=value):
                yield from (
                    _pair(target.slice, value) for target in targets if isinstance(target, ast.Subscript) and _is_environ(target.value)
                )
            case ast.Delete(targets=targets):
                yield from (
                    (_constant(each.slice), None) for each in targets if isinstance(each, ast.Subscript) and _is_environ(each.value)
                )
            case ast.AugAssign(target=target, value=value) if _is_environ(target):
                yield from _mapping(value)
            case ast.Call(func=ast.Attribute(value=owner, attr="setdefault"), args=[key, value]) if _is_environ(owner):
                yield _pair(key, value)
            case ast.Call(func=ast.Attribute(value=owner, attr="pop"), args=[key, *_]) if _is_environ(owner):
                yield _constant(key), None
            case ast.Call(func=ast.Attribute(value=owner, attr="update"), args=args, keywords=keywords) if _is_environ(owner):
                for mapping in args:
                    yield from _mapping(mapping)
                yield from (_pair(ast.Constant(word.arg), word.value) for word in keywords)
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in _READERS:
                raise _Unknown("variables")


def _mapping(node: ast.expr) -> Iterator[tuple[str, str | None]]:
    if not isinstance(node, ast.Dict):
        raise _Unknown("variables")
    yield from (_pair(key, value) for key, value in zip(node.keys, node.values, strict=True))


def _pair(key: ast.expr | None, value: ast.expr) -> tuple[str, str | None]:
    name = _constant(key)
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return name, value.value
    if _is_late(name):
        return name, None  # its value does not matter
    raise _Unknown(name)


def _constant(key: ast.expr | None) -> str:
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        return key.value
    raise _Unknown("variables")


def _is_late(name: str) -> bool:
    return name in _LATE or name.startswith(_LATE_PREFIXES)


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (isinstance(node, ast.Name) and node.id == "environ")


def _is_default(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and getattr(node.value.func, "attr", "") == "setdefault"


def _called(node: ast.AST) -> list[str]:
    calls = [item.func for item in ast.walk(node) if isinstance(item, ast.Call)]
    return [call.attr if isinstance(call, ast.Attribute) else call.id for call in calls if isinstance(call, ast.Attribute | ast.Name)]


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
        found = [name for vendor, names in VENDORS.items() if vendor in beside for name in names]
        vendors += [name.removesuffix(OPTIONAL) + OPTIONAL for name in found]
    known = dict.fromkeys([*ALWAYS, *vendors, *extra])
    return [name for name in known if name.removesuffix(OPTIONAL) == name or name.removesuffix(OPTIONAL) not in known]


def early_environment(program: Sequence[str], modules: Sequence[str], copy: Path | None = None, *, follow: bool = True) -> Early:
    """The variables that ``program`` sets before it imports what the fork server has imported; arguments as above."""
    imported = _imported(program, copy, follow)
    ahead = {name.removesuffix(OPTIONAL).partition(".")[0] for name in modules}
    heavy = {"torch", *(ahead & imported)} - {"gemini_ft"}  # which reads variables when it is used
    return read_early(_sources(program, copy), Path(import_root(program)), heavy, os.environ)


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
    """The modules that a source imports (``nested``: in functions too, and for a type checker), and how many packages up each begins.

    None if it cannot be parsed.
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
