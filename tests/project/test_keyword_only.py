"""Small value types are made by keyword wherever two values in a row could change places without a type checker's noticing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
# One family: a value of one is taken where another is declared, if what is inside of them fits too.
FAMILIES = (
    {"bool", "int", "float"},
    {"list", "tuple", "Sequence", "Iterable", "Collection", "deque"},
    {"dict", "Mapping", "MutableMapping"},
    {"set", "frozenset"},
    {"bytes", "bytearray", "memoryview"},
)
# Tuples with names that stay tuples.
POSITIONAL = {
    "Command": "a table with a line for each command",
    "Fragment": "is stored, and read again, as a tuple",
    "Candidate": "is stored, and read again, as a list",
    "Stamped": "torch's loaders hand tuples through, and pin what is in them",
    "Figure": "a table with a line for each figure",
    "_Leaf": "made for each value that is looked at",
}


def trees() -> Iterator[ast.Module]:
    for folder in ("gemini_ft", "sync", "compression"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield ast.parse(path.read_text())


class Types:
    """The types that the package's annotations mean: its classes with their bases, and its names for other types."""

    def __init__(self, modules: list[ast.Module]) -> None:
        nodes = [node for module in modules for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
        self.bases = {node.name: [ast.unparse(base).split("[")[0] for base in node.bases] for node in nodes}
        self.aliases = {
            node.targets[0].id: node.value
            for module in modules
            for node in module.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.lstrip("_")[:1].isupper()
            if isinstance(node.value, ast.Subscript | ast.BinOp | ast.Name)
        }

    def options(self, annotation: ast.expr) -> list[ast.expr]:
        """The members of a union, without None."""
        match annotation:
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self.options(left) + self.options(right)
            case ast.Constant(value=None):
                return []
            case ast.Constant(value=str(text)):
                return self.options(ast.parse(text, mode="eval").body)
            case ast.Name(id=name) if name in self.aliases:
                return self.options(self.aliases[name])
        return [annotation]

    def fit(self, one: ast.expr, other: ast.expr) -> bool:
        """Whether a value of one type may stand where the other is declared, or the other way round."""
        return any(self._fit(a, b) for a in self.options(one) for b in self.options(other))

    def _fit(self, one: ast.expr, other: ast.expr) -> bool:
        names = [ast.unparse(each.value if isinstance(each, ast.Subscript) else each).rpartition(".")[2] for each in (one, other)]
        if {"Any", "object"} & {*names}:
            return True
        if names[0] == names[1] == "Callable":
            return ast.unparse(one) == ast.unparse(other)
        if not any({*names} <= family for family in FAMILIES) and not self._derives(*names) and not self._derives(*reversed(names)):
            return False
        inside = [self._inside(each) for each in (one, other)]
        return all(self.fit(a, b) for a, b in zip(*inside, strict=False))

    def _derives(self, name: str, base: str) -> bool:
        return name == base or any(self._derives(each, base) for each in self.bases.get(name, []))

    @staticmethod
    def _inside(annotation: ast.expr) -> list[ast.expr]:
        if not isinstance(annotation, ast.Subscript):
            return []
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        return [each for each in inner if not (isinstance(each, ast.Constant) and each.value is ...)]


def is_positional(node: ast.ClassDef) -> bool:
    """Whether a class is a value type whose values may be given by position."""
    if any(ast.unparse(base) == "NamedTuple" for base in node.bases):
        return True
    made = [ast.unparse(each) for each in node.decorator_list]
    return any(each.startswith("dataclass") and "kw_only=True" not in each for each in made)


def fields(node: ast.ClassDef) -> Iterator[ast.AnnAssign]:
    """Yields the fields that may be given by position."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and not ast.unparse(each.annotation).startswith("ClassVar"):
            if ast.unparse(each.annotation) == "KW_ONLY":
                return
            if each.value is None or not {"init=False", "kw_only=True"} & {
                *ast.unparse(each.value).rstrip(")").partition("(")[2].split(", ")
            }:
                yield each


def exchangeable(modules: list[ast.Module]) -> dict[str, list[str]]:
    """Class -> pairs of neighbours that could change places."""
    types = Types(modules)
    found: dict[str, list[str]] = {}
    for node in [node for module in modules for node in ast.walk(module) if isinstance(node, ast.ClassDef) and is_positional(node)]:
        listed = [*fields(node)]
        pairs = [(a, b) for a, b in pairwise(listed) if types.fit(a.annotation, b.annotation)]
        if pairs:
            found[node.name] = [f"{ast.unparse(a.target)}, {ast.unparse(b.target)}" for a, b in pairs]
    return found


def test_values_that_could_change_places_are_given_by_keyword() -> None:
    found = exchangeable([*trees()])
    assert {name: pairs for name, pairs in found.items() if name not in POSITIONAL} == {}, "add kw_only=True"
    assert found.keys() >= POSITIONAL.keys(), "these need no exception"


def test_what_counts_as_exchangeable() -> None:
    source = """
Marks = tuple[list[int], list[int]]
class Base: ...
class Derived(Base): ...
@dataclass
class Apart:
    a: int
    b: str
    c: bytes | None = None
    d: list[str] | None = None
    e: list[int] = field(default_factory=list)
    f: dict[str, int]
    g: dict[str, str]
@dataclass(frozen=True)
class Numbers:
    a: int
    b: str
    c: float
    d: bool
@dataclass(frozen=True, kw_only=True)
class Keyword:
    a: int
    b: int
class Pair(NamedTuple):
    a: Base
    b: Derived | None
@dataclass
class Named:
    a: Marks
    b: tuple[Sequence[int], list[int]]
@dataclass
class Unknown:
    a: Callable[[], str]
    b: Any
"""
    found = exchangeable([ast.parse(source)])
    assert found == {"Numbers": ["c, d"], "Pair": ["a, b"], "Named": ["a, b"], "Unknown": ["a, b"]}
