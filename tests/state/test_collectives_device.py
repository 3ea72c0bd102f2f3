"""Collectives of a device: each form of a backend's answer is followed to its end or left alone; an observer that fails stops.

NCCL is stood for by what it returns, and the device by its double.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agent_kit import eventually
from fake_accelerator import FakeAccelerator, installed
from torch._C._distributed_c10d import Work

from gemini_ft.worker import collectives
from gemini_ft.worker.collectives import CollectiveTraffic, Observer

KEYS = torch._C._dispatch_keyset_full()


class _Answer(Work):
    """A work object: its future is done when its kernel is queued, and it is completed when the device says so."""

    def __init__(self, is_completed: Callable[[], bool], has_future: bool = True) -> None:
        super().__init__()
        self._is_completed, self._has_future = is_completed, has_future

    def is_completed(self) -> bool:
        return self._is_completed()

    def get_future(self) -> Any:
        if not self._has_future:
            raise RuntimeError("no future")
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future


class Backend:
    """Answers to one collective after the other, called as torch's dispatcher calls them."""

    def __init__(self, traffic: CollectiveTraffic, fake: FakeAccelerator) -> None:
        self.traffic, self.fake, self.answer = traffic, fake, lambda: None
        self._works: list[tuple[Any, Work | None]] = []  # beside their handles
        operator = SimpleNamespace(name=lambda: "c10d::allreduce_", redispatch=lambda *_: self.answer())
        self._kernel = traffic.kernel(operator)

    def __call__(self, answer: Callable[[], Any], *more: Any) -> Any:
        self.answer = answer
        return self._kernel(KEYS, [self.fake.tensor(torch.ones(4))], *more)

    def boxed(self, work: Work | None) -> Any:
        """The handle of a work object; None: what NCCL returns without async_op, a script object that unboxes to None."""
        self._works.append(((work or Work()).boxed(), work))
        return self._works[-1][0]

    def unboxed(self, handle: Any) -> Any:
        return next(work for each, work in self._works if each is handle)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    monkeypatch.setattr(CollectiveTraffic, "listen", lambda _: SimpleNamespace(_destroy=lambda: None))
    with installed(0) as fake:
        traffic = CollectiveTraffic()
        made = Backend(traffic, fake)
        monkeypatch.setattr(collectives, "Work", SimpleNamespace(unbox=made.unboxed))
        yield made
        traffic.close()


@pytest.fixture
def observer(backend: Backend) -> Observer:
    return backend.traffic.add()


def in_flight(observer: Observer) -> int:
    return observer.page.read().in_flight


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "without async_op": lambda backend, _: backend.boxed(None),
    "async_op": lambda backend, event: backend.boxed(_Answer(event.query)),
    "without a future": lambda backend, event: backend.boxed(_Answer(event.query, has_future=False)),
    "beside tensors": lambda backend, event: ([torch.ones(4)], backend.boxed(_Answer(event.query))),
    "no handle at all": lambda *_: None,
    "tensors alone": lambda *_: torch.ones(4),
}


@pytest.mark.parametrize("form", FORMS)
def test_it_is_in_flight_until_the_device_has_carried_it_out(backend: Backend, observer: Observer, form: str) -> None:
    queued = backend.fake.current_stream().record_event()
    answer = FORMS[form](backend, queued)
    assert backend(lambda: answer) is answer
    assert in_flight(observer) == 1
    backend.fake.synchronize()
    eventually(lambda: in_flight(observer) == 0)
    (seen,) = observer.step_over().collectives
    assert (seen.name, seen.nbytes) == ("allreduce_", 16)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_captured_into_a_graph_is_left_alone(backend: Backend, observer: Observer, form: str) -> None:
    never = SimpleNamespace(query=lambda: pytest.fail("events of a capture can never be asked"))
    backend.fake.is_current_stream_capturing = lambda: True  # type: ignore[attr-defined]
    answer, queued = FORMS[form](backend, never), len(backend.fake.current_stream().queue)
    assert backend(lambda: answer) is answer
    assert in_flight(observer) == 0
    assert len(backend.fake.current_stream().queue) == queued
    assert observer.polled == 0


def test_those_of_a_group_are_asked_in_order_on_their_device(backend: Backend, observer: Observer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that runs ahead has hundreds under way: each question takes the interpreter lock from the training."""
    entered, asked, is_free, groups = list[str](), list[int](), threading.Event(), [Work().boxed() for _ in range(2)]
    monkeypatch.setattr(backend.fake, "set_device", lambda _: entered.append(threading.current_thread().name))
    unbox = {id(group): SimpleNamespace(size=lambda: 2, group_name=f"group {number}") for number, group in enumerate(groups)}
    monkeypatch.setattr(collectives, "ProcessGroup", SimpleNamespace(unbox=lambda group: unbox[id(group)]))

    def ask(number: int) -> bool:
        asked.append(number)
        return is_free.is_set()

    for number in range(100):
        backend(lambda number=number: backend.boxed(_Answer(partial(ask, number))), groups[number % 2])
    eventually(lambda: len(asked) >= 20)
    assert {*asked} == {0, 1}
    is_free.set()
    eventually(lambda: in_flight(observer) == 0)
    assert {*asked} == {*range(100)}
    assert entered == ["gemini-collectives"]


def test_one_that_fails_on_the_device_is_over(backend: Backend, observer: Observer) -> None:
    def failing() -> bool:
        raise RuntimeError("NCCL error")

    backend(lambda: backend.boxed(_Answer(failing)))
    eventually(lambda: in_flight(observer) == 0)


@pytest.mark.parametrize("what", ["begin", "follow"])
def test_an_observer_that_fails_says_so_once_and_stops(
    backend: Backend, observer: Observer, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend(lambda: backend.boxed(_Answer(lambda: False)))
    assert in_flight(observer) == 1
    calls: list[int] = []

    def fails(*_: Any) -> Any:
        calls.append(1)
        raise AttributeError("of another torch")

    monkeypatch.setattr(CollectiveTraffic, what, fails)
    with caplog.at_level(logging.WARNING, "gemini_ft"):
        for number in range(3):
            assert backend(lambda number=number: number) == number
    assert len(calls) == 1
    assert len([record for record in caplog.records if "cannot be observed" in record.message]) == 1
    assert in_flight(observer) == 0
    with pytest.raises(ValueError, match="the training's own"):
        backend(lambda: (_ for _ in ()).throw(ValueError("the training's own")))


@pytest.mark.parametrize("what", [collectives.Profiler, collectives.WorkWindow])
def test_a_profile_that_fails_ends_observing_and_not_the_training(
    what: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CollectiveTraffic, "listen", lambda _: SimpleNamespace(_destroy=lambda: None))
    observation = collectives.Observation(lambda *_: None, 4, True)
    monkeypatch.setattr(what, "add", lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING, "gemini_ft"):
        for iteration in (1, 2):
            observation.step_over(iteration)
    observation.close()
    assert len([record for record in caplog.records if "cannot be observed" in record.message]) == 1


def test_a_page_that_cannot_be_written_ends_observing_and_no_wait_of_the_training(
    backend: Backend, observer: Observer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(collectives.ControlPage, "write", lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING, "gemini_ft"), observer.waiting(), observer.waiting():
        assert backend(lambda: 7) == 7
    assert len([record for record in caplog.records if "cannot be observed" in record.message]) == 1


@pytest.mark.parametrize("is_timed", [False, True])
def test_nobody_is_told_of_times_that_nobody_compares(is_timed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `straggler_factor=0`."""
    monkeypatch.setattr(CollectiveTraffic, "listen", lambda _: SimpleNamespace(_destroy=lambda: None))
    told: list[Any] = []
    observation = collectives.Observation(lambda message, _: told.append(message), 4, False, is_timed=is_timed)
    for iteration in range(20):
        observation.step_over(iteration)
    observation.close()
    assert len(told) == (2 if is_timed else 0)
