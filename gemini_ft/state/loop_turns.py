"""Reads from a script's source what its loops carry from one turn to the next."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from collections.abc import Iterable, Sequence
from types import CodeType, FrameType
from typing import NamedTuple

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_ADDS = {"add", "append", "clear", "extend", "reset", "update"}  # methods of lists, meters and the like that only write
_TELLS = {"add_scalar", "debug", "info", "log", "print", "set_description", "set_postfix", "warning", "write"}


class LoopTurn(ast.NodeVisitor):
    """The names that one turn of a loop assigns, and those of them that it reads first.

    Each branch of an ``if`` is read as if the other one were not there.

    ``added``: names that a turn adds to (``total += loss``, ``losses.append(loss)``), and reads only to print or log them.
    """

    def __init__(self, loop: ast.AST) -> None:
        self.stored: set[str] = set()  # names that a turn assigns
        self._read: set[str] = set()
        self._adds, self._used = set[str](), set[str]()
        self.iterated: set[str] = set()  # names in the expression that the loop iterates over
        self.target = set[str]()  # names that the loop itself assigns
        self.counter = ""  # the name that counts the turns of a loop over a range, which begins anew with it; empty: it is no such loop
        if isinstance(loop, ast.While):
            self.visit(loop.test)
        elif isinstance(loop, ast.For | ast.AsyncFor):
            self.iterated = {node.id for node in ast.walk(loop.iter) if isinstance(node, ast.Name)}
            self.visit(loop.target)
            self.target = set(self.stored)
            called = getattr(loop.iter, "func", None)
            if isinstance(called, ast.Name) and called.id == "range" and isinstance(loop.target, ast.Name):
                self.counter = loop.target.id
        for statement in getattr(loop, "body", ()):
            self.visit(statement)
        self.uses = self._read  # names that a turn reads before it assigns them, if it does
        self.carried = self.stored & self._read  # those of them that a turn reads before it assigns them
        self.added = self._adds - self._used

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.stored.add(node.id)
        else:
            self._use(node.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._in_order(node.value, *node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._in_order(*([node.value, node.target] if node.value is not None else []))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            (self._add_to if isinstance(node.op, ast.Add) else self._use)(node.target.id)
        self._in_order(node.value, node.target)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        function = call.func if isinstance(call, ast.Call) else None
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if isinstance(call, ast.Call) and name in _ADDS and isinstance(owner := getattr(function, "value", None), ast.Name):
            self._add_to(owner.id)
            self._in_order(*call.args, *call.keywords)
            return
        used = set(self._used)
        self.visit(call)
        if name in _TELLS:
            self._used = used

    def _add_to(self, name: str) -> None:
        self._adds.add(name)
        self._read |= {name} - self.stored

    def _use(self, name: str) -> None:
        self._used.add(name)
        self._read |= {name} - self.stored

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._in_order(node.value, node.target)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._in_order(node.iter, node.target, *node.body, *node.orelse)

    visit_AsyncFor = visit_For

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        before = set(self.stored)
        self._in_order(*node.body)
        after, self.stored = self.stored, before
        self._in_order(*node.orelse)
        self.stored |= after

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.stored.add(node.name)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Leaves a lambda out, as its body runs later."""

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, _COMPREHENSIONS):
            before = set(self.stored)
            self._in_order(*node.generators)
            self._in_order(*([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]))
            self.stored = before
        elif isinstance(node, ast.comprehension):
            self._in_order(node.iter, node.target, *node.ifs)
        else:
            super().generic_visit(node)

    def _in_order(self, *nodes: ast.AST) -> None:
        for node in nodes:
            self.visit(node)


class _Source(NamedTuple):
    """The loops in the source of a code object, each with its first and last line, outer loops first; and the result of `begun_by`."""

    loops: Sequence[tuple[int, int, LoopTurn]]
    begun: frozenset[str]


_UNREADABLE = _Source((), frozenset())


def turns_at(frame: FrameType) -> Sequence[LoopTurn] | None:
    """Returns the loops around the present line of a frame, the innermost last; None: the source cannot be read."""
    source = _source_of(frame.f_code)
    return [turn for first, last, turn in source.loops if first <= frame.f_lineno <= last] if source is not _UNREADABLE else None


def begun_by(code: CodeType) -> frozenset[str]:
    """Returns the variables to which a code object assigns only constants, and adds; they begin with these when it is started again."""
    return _source_of(code).begun


@functools.cache
def _source_of(code: CodeType) -> _Source:
    is_module = code.co_name == "<module>"
    if not (lines := linecache.getlines(code.co_filename)):
        return _UNREADABLE
    first = 0 if is_module else code.co_firstlineno - 1
    source = "".join(lines if is_module else inspect.getblock(lines[first:]))
    try:
        tree = ast.parse(f"if 1:\n{source}" if (is_inside := source[:1].isspace()) else source)
    except SyntaxError:
        return _UNREADABLE
    shift = first - is_inside
    nodes = [*ast.walk(tree)]
    loops = [(node.lineno + shift, (node.end_lineno or node.lineno) + shift, LoopTurn(node)) for node in nodes if isinstance(node, _LOOPS)]
    return _Source(loops, _begun(nodes))


def _begun(nodes: Iterable[ast.AST]) -> frozenset[str]:
    stores = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    constant, added = list[str](), list[str]()
    for node in nodes:
        if isinstance(node, ast.Assign):
            pairs = [pair for target in node.targets for pair in _pairs(target, node.value)]
            constant += [target.id for target, value in pairs if isinstance(target, ast.Name) and isinstance(value, ast.Constant)]
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            added.append(node.target.id)
    return frozenset(name for name in {*constant} & {*added} if stores.count(name) == constant.count(name) + added.count(name))


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
    return [*zip(target.elts, value.elts, strict=False)] if both else [(target, value)]  # type: ignore[attr-defined]
