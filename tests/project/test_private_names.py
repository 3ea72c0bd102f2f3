"""Names: tests use public ones, and a class name means one thing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
VENDORS = {
    "_parameters",
    "_rendezvous",
    "_sampler",
    "_settings",
    "_store",
    "_timeout",
}  # private names of torch and Lightning that the package has, too


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names() -> set[str]:
    """The private names that the package gives to functions, classes, attributes and module variables."""
    found: set[str] = set()
    for folder in ("gemini_ft", "sync", "compression"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                        found.add(name)
                    case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                        found.add(name)
    return {name for name in found if is_private(name) and not hasattr(torch.Tensor, name)} - VENDORS


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that are reached into: as attributes, by imports, and in the strings that patch them."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.ImportFrom(names=names):
                yield from ((node.lineno, each.name) for each in names)
            case ast.Call(func=ast.Attribute(attr="setattr" | "object") | ast.Name(id="setattr" | "getattr"), args=arguments):
                texts = [each.value for each in arguments if isinstance(each, ast.Constant) and isinstance(each.value, str)]
                yield from ((node.lineno, text.rpartition(".")[2]) for text in texts)


def test_no_test_reaches_into_what_is_private() -> None:
    private = private_names()
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path.parent.name != "simulation"  # whose doubles stand below the package, where nothing is public
        for line, name in uses(ast.parse(path.read_text()))
        if name in private
    ]
    assert not found, "use a public name, or make this one public"


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, set[str]] = {}
    for folder in ("gemini_ft", "sync", "compression"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, set()).add(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
