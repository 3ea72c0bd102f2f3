"""No signal of the package goes to a number that may have come to mean another process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import gemini_ft

# By bare number are signalled: this process itself; and children that have not been reaped, so that nothing else can have their numbers.
CHILDREN = {
    "cli/watch.py:tell",
    "launch/forkserver.py:_trial",
    "launch/forkserver.py:_kill_session",
    "launch/grace.py:_end_leftovers",
    "launch/grace.py:_send",
    "launch/health.py:end",
}
BY_NUMBER = {"os.kill", "os.killpg"}
BY_NAME = {"kill", "pkill", "killall", "fuser"}


def signals(tree: ast.AST, function: str = "") -> Iterator[tuple[str, str]]:
    """(function, call) of each signal by a number, and of each program that sends one."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(node, ast.Call) and (call := ast.unparse(node.func)) in BY_NUMBER and ast.unparse(node.args[0]) != "os.getpid()":
            yield inside, call
        if isinstance(node, ast.List) and node.elts and getattr(node.elts[0], "value", None) in BY_NAME:
            yield inside, ast.unparse(node)
        yield from signals(node, inside)


def test_none_goes_to_a_number_that_may_mean_another_process() -> None:
    root = Path(gemini_ft.__file__).parent
    found = {f"{path.relative_to(root)}:{name}" for path in root.rglob("*.py") for name, _ in signals(ast.parse(path.read_text()))}
    assert found == CHILDREN, "use a pidfd, and look at the process once it is open (`gemini_ft.hosts.kill`)"


def test_the_search_finds_what_it_is_for() -> None:
    text = "def f(p):\n os.kill(os.getpid(), 9)\n os.kill(p.pid, 9)\n subprocess.run(['pkill', '-f', 'agent'])\n p.kill()\n"
    assert list(signals(ast.parse(text))) == [("f", "os.kill"), ("f", "['pkill', '-f', 'agent']")]
