"""Who is to blame when a collective of a gradient pipeline breaks, as far as a rank can know it."""

from __future__ import annotations

from typing import Any

import pytest

from gemini_ft.pipeline import failures

BROKEN = RuntimeError("connection closed by peer")


class Store:
    """A process group's store, whose host may be lost."""

    def __init__(self) -> None:
        self.is_lost = False
        self._values: dict[str, Any] = {}

    def set(self, key: str, value: str) -> None:
        self._ask()
        self._values[key] = value

    def get(self, key: str) -> Any:
        self._ask()
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        self._ask()
        return all(key in self._values for key in keys)

    def _ask(self) -> None:
        if self.is_lost:
            raise RuntimeError("broken pipe")


class Ranks:
    """Four ranks, which can be sent to while they live. Both of their process groups."""

    def __init__(self) -> None:
        self.store, self.gone, self.own = Store(), set[int](), 0

    def rank(self) -> int:
        return self.own

    def get_group_store(self) -> Store:
        return self.store

    def size(self) -> int:
        return 4

    def send(self, tensors: Any, rank: int, tag: int) -> None:
        if rank in self.gone:
            raise RuntimeError("connection reset by peer")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.setattr(failures, "PATIENCE", 0.0)
    return Ranks()


def said(ranks: Ranks, rank: int, error: BaseException = BROKEN, is_computing: bool = False) -> str:
    ranks.own = rank
    return str(failures.Failures(ranks, ranks).resolved(error, 7, is_computing))


def test_ranks_that_left_after_the_first_are_not_blamed(ranks: Ranks) -> None:
    ranks.gone = {3}
    named = "rank 3 has failed, and averages no gradients any more: its process has ended without a word, as one does that is killed"
    assert said(ranks, 1) == named
    ranks.gone = {1, 3}
    assert said(ranks, 2) == named


def test_without_the_store_all_that_have_ended_are_named_and_none_is_first(ranks: Ranks) -> None:
    ranks.gone, ranks.store.is_lost = {1, 3}, True
    assert said(ranks, 2) == (
        "gradients are averaged no more: the processes of these ranks have ended, one of them first: 1, 3; the process group's store, "
        "which may know more, does not answer, as when it has gone with the host that was lost"
    )


def test_who_only_notices_a_failure_is_not_blamed_for_it(ranks: Ranks) -> None:
    assert said(ranks, 1) == str(BROKEN)
    assert said(ranks, 2) == (
        "gradients are averaged no more: a collective failed on rank 1, and no rank is known to have failed; a host may be lost, or the "
        "network between two: RuntimeError: connection closed by peer"
    )


def test_an_error_of_computing_is_told_without_looking_for_another_cause(ranks: Ranks) -> None:
    ranks.gone = {3}
    assert said(ranks, 1, RuntimeError("out of memory"), is_computing=True) == "out of memory"
    assert said(ranks, 2) == "rank 1 has failed, and averages no gradients any more: RuntimeError: out of memory"
