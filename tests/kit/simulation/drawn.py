"""Small faults of a programmer, drawn by a seed from the package's own code: what the simulation sees of those that nobody thought of."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from random import Random
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

PARTS = {
    "core": ("gathering", "ledger", "protocol", "rounds", "slots", "succession", "tree"),
    "agent": (
        "commit.collector", "commit.failover", "commit.leader", "commit.member", "memory.slot_memory", "memory.slot_store",
        "own_shards",
        "replication.rebuild", "replication.receive", "replication.send", "replication.serve", "session", "storing", "stream", "uploads",
    ),
    "storage": ("checkpoints", "decisions", "lookout", "marks", "retention", "shard"),
    "recovery": ("agent_memory", "plan", "readers"),
}  # fmt: skip
_OPPOSITES = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
RAN: list[int] = []  # grows whenever the changed place is reached


class Mutant(NamedTuple):
    """One changed place. ``module``, ``owner`` (a class, or nothing) and ``name`` say in which function; ``place`` which one of it."""

    module: str
    owner: str
    name: str
    place: int
    change: str

    def __str__(self) -> str:
        return f"{self.module}:{self.owner + '.' if self.owner else ''}{self.name}: {self.change}"

    def apply(self) -> None:
        """Breaks the package, in this process."""
        module = importlib.import_module(self.module)
        holder = getattr(module, self.owner) if self.owner else module
        before, tree = getattr(holder, self.name), _tree(getattr(holder, self.name))
        list(_places(tree))[self.place][1]()
        future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
        scope: dict[str, Any] = {}
        vars(module)["_reached"] = lambda: RAN.append(1)
        exec(compile(ast.fix_missing_locations(ast.Module([future, tree], [])), str(self), "exec"), vars(module), scope)
        setattr(holder, self.name, scope[self.name])
        for other in [] if self.owner else [*sys.modules.values()]:  # which have imported it by its name
            if vars(other).get(self.name) is before:
                setattr(other, self.name, scope[self.name])


def draw(count: int, seed: int) -> list[Mutant]:
    """Draws places, each function at most once, as many from each part of the package."""
    rng, found = Random(seed), list[Mutant]()
    pools = [rng.sample(all_, len(all_)) for all_ in (sorted(_functions(part)) for part in PARTS)]
    while len(found) < count:
        module, owner, name = pools[len(found) % len(pools)].pop()
        holder = importlib.import_module(module)
        function = getattr(getattr(holder, owner) if owner else holder, name)
        if places := list(_places(_tree(function))):
            index = rng.randrange(len(places))
            found.append(Mutant(module, owner, name, index, places[index][0]))
    return found


def _functions(part: str) -> Iterator[tuple[str, str, str]]:
    """Plain functions and methods of a part; those with decorators, or that speak of the class around them, are left out."""
    for name in PARTS[part]:
        module = importlib.import_module(f"gemini_ft.{part}.{name}")
        yield from ((module.__name__, "", each) for each in _plain(vars(module), module))
        for owner, each in vars(module).items():
            if isinstance(each, type) and each.__module__ == module.__name__:
                yield from ((module.__name__, owner, method) for method in _plain(vars(each), module))


def _plain(names: Any, module: ModuleType) -> list[str]:
    found = [(name, each) for name, each in names.items() if isinstance(each, FunctionType) and each.__module__ == module.__name__]
    return [name for name, each in found if not each.__code__.co_freevars and name == each.__name__ and _is_plain(each)]


def _is_plain(function: FunctionType) -> bool:
    try:
        return not _tree(function).decorator_list
    except (OSError, TypeError, SyntaxError, AttributeError):  # made by a dataclass, for example
        return False


def _tree(function: FunctionType) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]


def _places(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields each possible change: in words, and as a function that makes it."""
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            for at, each in enumerate(value) if isinstance(value, list) else ():
                if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call | ast.Await) and "log" not in ast.unparse(each).lower():
                    yield f"without `{_short(each)}`", lambda value=value, at=at: value.__setitem__(at, ast.Expr(_call()))
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.NamedExpr):
            test = ast.unparse(node.test)
            yield (f"`{test}` the other way round", lambda node=node: setattr(node, "test", _or_reached(ast.UnaryOp(ast.Not(), node.test))))
        if isinstance(node, ast.BoolOp):
            for at, value in enumerate(node.values):
                if not isinstance(value, ast.NamedExpr):
                    yield f"`{ast.unparse(node)}` without its part {at + 1}", lambda node=node, at=at: _leave_out(node, at)
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPPOSITES and len(node.ops) == 1:
            yield f"`{ast.unparse(node)}` with another comparison", lambda node=node: _turn(node)


def _short(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0][:90]


def _call() -> ast.Call:
    return ast.Call(ast.Name("_reached", ast.Load()), [], [])


def _or_reached(test: ast.expr) -> ast.expr:
    return ast.BoolOp(ast.Or(), [_call(), test])


def _leave_out(node: ast.BoolOp, at: int) -> None:
    neutral = ast.Compare(_call(), [ast.Is() if isinstance(node.op, ast.And) else ast.IsNot()], [ast.Constant(None)])
    node.values[at] = neutral


def _turn(node: ast.Compare) -> None:
    node.ops[0] = _OPPOSITES[type(node.ops[0])]()
    node.left = _or_reached(node.left)
