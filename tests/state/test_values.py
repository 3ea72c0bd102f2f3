"""Values that are compared bit for bit, and looks at objects that do not like to be looked at."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gemini_ft.state.fields import fields_of
from gemini_ft.state.modes import Modes
from gemini_ft.state.remembered import Attributes
from gemini_ft.state.values import Identity, Opaque, copy_of, digest, is_same, is_shared, snapshot

NAN = float("nan")


@pytest.mark.parametrize(
    "value", [NAN, torch.full((3,), NAN), {"a": NAN}, [1.0, NAN], complex(NAN, 1), np.float32("nan"), np.array([NAN]), torch.tensor([1j])]
)
def test_what_is_no_number_is_the_same_as_itself(value: Any) -> None:
    assert is_same(copy_of(value), value)


@pytest.mark.parametrize("of", [float, torch.tensor, np.float32, lambda zero: [complex(1, zero)]])
def test_the_sign_of_a_zero_counts(of: Any) -> None:
    assert is_same(of(0.0), of(0.0))
    assert not is_same(of(0.0), of(-0.0))


@pytest.mark.parametrize("kind", [list, tuple, lambda parts: {"inner": parts[0]}], ids=["list", "tuple", "dict"])
def test_what_is_deep_or_contains_itself_is_not_plain(kind: Any) -> None:
    deep: Any = 1
    for _ in range(3000):
        deep = kind([deep])
    around: list[Any] = []
    around.append(kind([around]))
    for value in (deep, around):
        mark = snapshot(value)
        assert type(mark) is Opaque
        assert mark.is_now(value)


def test_a_write_to_a_mapped_file_shows(tmp_path: Path) -> None:
    written = np.memmap(tmp_path / "file", np.int64, "w+", shape=40_000)
    read = np.memmap(tmp_path / "file", np.int64, "r", shape=40_000)
    marks = Opaque(written, closely=True), Opaque(read, closely=True)
    written[:] = 1
    assert not marks[0].is_now(written)
    assert marks[1].is_now(read)  # nobody looks into it


def test_values_that_two_processes_have_made_alike_have_one_digest() -> None:
    def made(last: Any = 3.0) -> list[Any]:
        parts = [torch.arange(9), np.arange(9), {"a": (1, "\ud800")}, last]
        return [parts * 99, deque(parts * 99, 300), tuple(parts), np.array(parts, object), {5: parts}, {1, 2}, object()]

    assert list(map(digest, made())) == list(map(digest, made()))
    others = [digest(one) != digest(other) for one, other in zip(made(), made(last=torch.ones(2)), strict=True)]
    assert others == [True, True, True, False, True, False, False]


@pytest.mark.parametrize("size", [12, 1000])
@pytest.mark.parametrize("kind", [list, deque, tuple, lambda parts: dict(enumerate(parts))], ids=["list", "deque", "tuple", "dict"])
def test_a_digest_looks_at_so_much_and_no_more(kind: Any, size: int) -> None:
    """It is made before every snapshot."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"
        assert calls < 40_000

    def nested(last: int, depth: int) -> Any:
        value: Any = last
        for _ in range(depth):
            value = kind([value] * size)
        return value

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        digest(nested(0, depth=4))
    finally:
        sys.setprofile(before)
    assert digest(nested(0, depth=2)) != digest(nested(1, depth=2))


def test_a_digest_of_what_contains_itself_ends() -> None:
    held: list[Any] = []
    held.append({"a": held})
    assert digest(held) == digest(held)


class Odd(nn.Module):
    """Attributes of which each raised at a look."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.names = {tensor: name for name, tensor in self.net.named_parameters()}
        self.held = [nn.LazyLinear(3)]
        self.nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        self.count = 0


def test_attributes_that_cannot_be_looked_at_stop_nothing() -> None:
    odd = Odd()
    modes = Modes(dict(odd.named_modules()))
    odd.count = 3
    assert modes.collect(dict(odd.named_modules()))["attributes"] == {"": {"count": 3}}


def test_a_class_that_was_made_in_a_function_is_not_kept_alive_by_a_look() -> None:
    def look() -> weakref.ref[nn.Module]:
        model = nn.Linear(2, 2)

        class Meter:
            __slots__ = ("total",)

            def __init__(self) -> None:
                self.total = 0.0

            def add(self) -> None:
                self.total += float(model.weight.sum())

        meter = Meter()
        assert dict(fields_of(meter)) == {"total": 0.0}
        Attributes({"meter": meter}).changes()
        return weakref.ref(model)

    model = look()
    gc.collect()
    assert model() is None


def test_a_loader_that_comes_after_an_attribute_of_another_was_deleted_is_made() -> None:
    data, other = SimpleNamespace(first=1, second=2), SimpleNamespace(first=1)
    before = Attributes({"dataset": data})
    del data.second
    Attributes({"dataset": other}).count_from(before)


def test_another_tensor_with_the_id_of_one_that_is_gone_is_not_that_one() -> None:
    first = torch.zeros(2)
    number, mark = id(first), Identity(first)
    assert mark.is_of(first)
    del first
    assert not any(mark.is_of(other) for _ in range(1000) if id(other := torch.zeros(2)) == number)


def test_changes_are_listed_by_the_paths_of_attributes_alone() -> None:
    data = SimpleNamespace(held=[0], gone=1)
    attributes = Attributes({"dataset": data})
    data.held.append(1)
    del data.gone
    assert attributes.changes().each() == {"dataset.held": [0, 1], "(gone).dataset": ["gone"]}


def test_a_sparse_tensor_lies_in_no_memory_that_processes_share() -> None:
    assert not is_shared(torch.eye(2).to_sparse())


def test_a_namespace_is_given_back_without_its_classs_own_methods() -> None:
    class Strict(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            raise TypeError("read only")

        def pop(self, *_: Any) -> Any:
            raise TypeError("read only")

    holder = nn.Module()
    holder.config = Strict(rate=1.0)
    modes = Modes({"": holder})
    dict.__setitem__(holder.config, "rate", 2.0)
    saved = modes.collect({"": holder})
    assert not math.isclose(1.0, saved["attributes"][".config"]["rate"])
    dict.__setitem__(holder.config, "rate", 1.0)
    modes.restore(saved, {"": holder})
    assert holder.config == {"rate": 2.0}
