"""Nothing is decided by the clock on the wall, which differs between hosts and is set while a job runs, but what is named here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import gemini_ft

# Ages and moments that are shown, or written down for people and for the functions below.
SHOWN = {
    "agent/figures.py:_committed_at",
    "agent/figures.py:kept",
    "agent/figures.py:opened",
    "agent/figures.py:lost",
    "agent/requests.py:__init__",
    "agent/requests.py:job",
    "agent/uploads.py:_insist",
    "agent/uploads.py:_outage",
    "agent/uploads.py:_stake",
    "agent/uploads.py:over",
    "agent/uploads.py:tidy",
    "agent/uploads.py:write_manifest",
    "cli/commands.py:_describe_storage",
    "cli/commands.py:_in_storage",
    "cli/top.py:command",
    "events.py:write",
    "launch/build_locks.py:_took_away",
    "launch/failures.py:record",
    "launch/trainjob.py:_status",
    "state/carried.py:",
    "storage/checkpoints.py:",
    "storage/local.py:create",
    "storage/s3errors.py:_skew",
    "worker/resume_choice.py:_stage_all",
}
# Function -> why a clock that is wrong does little harm there.
JUDGES = {
    "agent/memory/slot_memory.py:age": "by it a host that is here under its default name was booted since, or not (failure_model.md)",
    "agent/memory/slot_memory.py:finish": "by it a host that is here under its default name was booted since, or not (failure_model.md)",
    "agent/lifecycle.py:_remove_old_logs": "of more than a hundred logs old ones are removed, by the clock of one host",
    "agent/session.py:_book": "the next upload is due at any time between at once and every_seconds later",
    "cli/watch.py:_changes": "as in Prometheus: rules compare the times that agents tell with the clock of the one who asks",
    "cli/watch.py:command": "the times of alerts that begin and end, as a hook is told them",
    "launch/spares.py:_due": "a host compares what it has written itself, in both directions",
    "launch/spares.py:_sanitize": "what torch is told is made of times on the monotonic clock",
    "launch/spares.py:mark_dirty": "what torch is told is made of times on the monotonic clock",
    "storage/local.py:last_byte": "leftovers are as old as they are by the clock of their file system, which has written both times",
    "storage/local.py:put": "leftovers are as old as they are by the clock of their file system, which has written both times",
    "wire/private.py:newest_first": "orders logs",
}
READINGS = {"time.time", "datetime.now", "st_mtime", "st_ctime"}


def readings(tree: ast.AST, function: str = "") -> Iterator[str]:
    """The functions that read the wall clock, or a time that some machine's wall clock has written."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(node, ast.Attribute) and READINGS & {ast.unparse(node), node.attr}:
            yield inside
        yield from readings(node, inside)


def test_no_other_decision_is_left_to_the_wall_clock() -> None:
    root = Path(gemini_ft.__file__).parent
    found = {f"{path.relative_to(root)}:{name}" for path in root.rglob("*.py") for name in readings(ast.parse(path.read_text()))}
    assert found == SHOWN | JUDGES.keys(), "use time.monotonic()"
