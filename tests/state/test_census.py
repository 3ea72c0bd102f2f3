"""The census: four fates and no fifth, taken again when something has changed, and the page has the code's own table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemini_ft.checkpointer import Checkpointer
from gemini_ft.core import census
from gemini_ft.core.census import Census, Fate, declare, table
from gemini_ft.errors import UnsupportedStateError
from gemini_ft.state.base import PlainState

TABLE = Path(__file__).parents[1] / "kit" / "census_table.py"
_KEPT = census.StateKind("things that a test keeps", Fate.CAPTURED, "by the test")
_REFUSED = census.StateKind("things that a test refuses", Fate.REFUSED, "do without")


def test_what_is_refused_is_named_with_the_way_out_and_all_of_it_at_once() -> None:
    parts = Census()
    parts.register("a", lambda: [_KEPT.found("a.kept"), _REFUSED.found("a.odd", note="a socket")])
    parts.register("b", lambda: [_REFUSED.found("b.odd")])
    with pytest.raises(UnsupportedStateError, match=r"a\.odd \(a socket\): do without; b\.odd: do without.*option `ignore`"):
        parts.take()


def test_what_the_user_sees_to_is_his() -> None:
    parts = Census(ignore=["*.odd"])
    parts.register("a", lambda: [_KEPT.found("a.kept", 8), _REFUSED.found("a.odd")])
    assert [(item.where, item.rule.fate) for item in parts.take()] == [("a.kept", Fate.CAPTURED), ("a.odd", Fate.USERS)]


def test_it_is_due_at_first_and_after_a_change() -> None:
    parts, fingerprint = Census(), [1]
    parts.register("a", list, lambda: tuple(fingerprint))
    assert [parts.is_due(), parts.is_due()] == [True, False]
    fingerprint[0] = 2
    assert [parts.is_due(), parts.is_due()] == [True, False]
    parts.register("b", list)
    assert parts.is_due()


def test_the_table_has_a_line_for_each_thing() -> None:
    lines = table([_KEPT.found("a.kept", 1234), _REFUSED.found("a.odd", note="a socket")]).splitlines()
    assert [line.split()[0] for line in lines] == ["what", "things", "things"]
    assert "1,234" in lines[1]
    assert lines[2].endswith("a socket")


def test_the_page_has_the_table_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "failure_model.md").read_text()
    begin, end = "<!-- python tests/kit/census_table.py -->\n", "<!-- end -->"
    assert begin in page
    # In a process of its own: what other tests have imported may declare more.
    said = subprocess.run([sys.executable, "-X", "warm", TABLE], capture_output=True, text=True, check=True).stdout
    assert page.split(begin)[1].split(end)[0].strip() == said.strip(), f"run python {TABLE}, and put its output there"


class Odd(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = torch.optim.Adam(params)
        self.stream = iter([1])
        self.count = 3


def test_models_and_optimizers_are_in_it() -> None:
    model = nn.Linear(2, 2)
    state = PlainState.of(model, Odd(list(model.parameters())), None)
    found = {item.where: (item.rule.fate, item.nbytes) for item in state.findings()}
    assert found == {
        "model": (Fate.CAPTURED, 24),
        "optim0": (Fate.CAPTURED, 0),
        "optim0.inner": (Fate.CAPTURED, 0),
        "optim0.stream": (Fate.REFUSED, 0),
        "optim0.count": (Fate.CAPTURED, 0),
        "flags": (Fate.CAPTURED, 0),
    }


def test_what_is_ignored_is_not_walked() -> None:
    model = nn.Linear(2, 2)
    optimizer = Odd(list(model.parameters()))
    checkpointer = Checkpointer(model, optimizer)
    with pytest.raises(UnsupportedStateError, match=r"optim0\.stream .*list_iterator.*option `ignore`"):
        checkpointer.census.take()
    checkpointer = Checkpointer(model, optimizer, ignore="optim0.stream, model.*")
    assert "the user's" in checkpointer.explain()
    fates = {item.where: item.rule.fate for item in checkpointer.census.take()}
    assert (fates["optim0.stream"], fates["optim0.count"]) == (Fate.USERS, Fate.CAPTURED)


def test_rules_are_declared_once() -> None:
    before = census.rules()
    assert declare(before[0].what, before[0].fate, before[0].how) == before[0]
    assert census.rules() == before
