"""Observes the training's collectives without changing them: the number in flight, and those of each step.

Every collective of torch, from Python or from DDP's and FSDP's own code, passes torch's dispatcher. There we listen, one layer
above the real kernel, which is then called with the same arguments: no tensor is touched, no hook is installed (a DDP
communication hook would change the bits), and DeepSpeed and Lightning need nothing of their own. `Observation` shows the agent what is
seen, so that replicas keep out of the training's way.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

# torch.distributed exports this too, but not so that type checkers see it.
from torch._C._distributed_c10d import ProcessGroup, Work

from gemini_ft import accelerator
from gemini_ft.agent.lifecycle import yield_to_training
from gemini_ft.core.autopsy import ENTRIES, GROUPS
from gemini_ft.core.stragglers import WorkWindow
from gemini_ft.core.traffic import Collective, Moment, ObservedStep, Profiler
from gemini_ft.wire.control_page import ControlPage
from gemini_ft.wire.private import open_log
from gemini_ft.wire.worker_messages import Observed, ToAgent, Watch, Worked
from gemini_ft.worker.attempt import leave_if_over

_log = logging.getLogger("gemini_ft")
_Seen = TypeVar("_Seen")
UNSEEN = "this process's collectives cannot be observed; replicas travel, and hangs are judged, without regard to them from now on"
_POLL = 0.001  # seconds between looks at collectives that do not say when they are over
_HERE = "BackendSelect"  # of all dispatch keys the one that every call passes, whatever its device, and with autograd off too
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_TRANSFERS = {"send": " to ", "recv_": " from ", "recv_any_source_": " with tag "}  # between two ranks; each rank has its own count
_UNLIKE = {"gather_", "scatter_", "alltoall_", "alltoall_base_", "reduce_scatter_"}  # the shapes of ranks may differ
_private = threading.local()


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Hides, inside, this thread's collectives from the observers: they are not the training's."""
    before, _private.on = getattr(_private, "on", False), True
    try:
        yield
    finally:
        _private.on = before


@dataclass(kw_only=True)
class _NumberedGroup:
    """A process group whose collectives are counted."""

    head: tuple[int, bytes]  # its size, 0 for transfers between two of its ranks, and its name
    place: int = -1  # in the control page; -1: it has none
    number: int = 0  # collectives that have begun, by which all of its ranks number them alike
    used: float = 0.0  # when the last one began, in seconds of the monotonic clock


class Flight:
    """One collective under way."""

    def __init__(self, name: str, arguments: tuple[Any, ...], begin: float) -> None:
        tensors = _tensors(arguments[0])
        self.name, self.begin = name, begin
        self.group: _NumberedGroup | None = None
        self.number = 0  # in its group
        self.nbytes = sum(_nbytes(tensor) for tensor in tensors)
        self.device = next((tensor.device for tensor in tensors if accelerator.holds(tensor)), None)
        self.end: float | None = None
        first = tensors[0] if tensors else None
        text = name if first is None else f"{name} {str(first.dtype)[6:]}{list(first.shape)}"
        text += f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        self.text = f"{text}{_TRANSFERS[name]}{arguments[2]}" if name in _TRANSFERS else text
        is_sparse = any(tensor.is_sparse for tensor in tensors)  # then each rank has as many bytes as its gradient has rows
        self.mark = zlib.crc32((name if name in _UNLIKE else text if is_sparse else f"{text} {self.nbytes}").encode())


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes that travel: of a sparse gradient its indices and values."""
    return tensor._indices().nbytes + tensor._values().nbytes if tensor.is_sparse else tensor.nbytes


class Observer:
    """One user's view of this process's collectives, with its own steps; made by `observe`."""

    def __init__(self, traffic: CollectiveTraffic) -> None:
        self.page = ControlPage.create()  # shows what is in flight
        self.newest: ObservedStep | None = None  # the last step that is over
        self._traffic = traffic
        self._step: list[Flight] = []  # begun since the step did
        self._began = self._idle_since = time.monotonic()
        self._carried = 0.0  # until when collectives of the step before were in flight
        self._steps = 0
        self._waiting = self._closed = False

    def step_over(self) -> ObservedStep:
        """Ends a step and begins the next one; returns the step's collectives."""
        self._traffic.forget(self._began)
        with self._traffic.lock:
            now = time.monotonic()
            done = tuple(
                Collective(name=f.name, nbytes=f.nbytes, begin=f.begin - self._began, end=(now if f.end is None else f.end) - self._began)
                for f in self._step
            )
            self.newest = ObservedStep(
                collectives=done, seconds=now - self._began, carried=max(0.0, self._carried - self._began), began=self._began
            )
            self._began, self._carried, self._step = now, 0.0, []
            self._steps += 1
            if not self._traffic.in_flight:
                self._idle_since = now
            self._publish()
        return self.newest

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Shows meanwhile that the training stands still until a snapshot has travelled."""
        self._traffic.observed(lambda: self._set_waiting(True))
        try:
            yield
        finally:
            self._traffic.observed(lambda: self._set_waiting(False))

    def _set_waiting(self, value: bool) -> None:
        with self._traffic.lock:
            self._waiting = value
            self._publish()

    @property
    def polled(self) -> int:
        """How many collectives of this process are being polled, since they do not tell when they are over."""
        return self._traffic.polled

    def look(self, look: Callable[[], _Seen]) -> _Seen | None:
        return self._traffic.observed(look)

    # -- told by the traffic, which holds its lock

    def begun(self, flight: Flight) -> None:
        self._step.append(flight)
        self._publish()
        if (group := flight.group) is not None:
            self.page.write_entered(group.place, flight.number, flight.mark, flight.text.encode())

    def over(self, flight: Flight, now: float) -> None:
        if (group := flight.group) is not None and group.place >= 0 and group.number - flight.number < ENTRIES:
            self.page.write_over(group.place, flight.number)
        if flight.begin < self._began:
            self._carried = now
        if not self._traffic.in_flight:
            self._idle_since = now
            self._publish()

    def close(self) -> None:
        self._closed = True
        self.page.close()

    def _publish(self) -> None:
        if not self._closed:
            self.page.write(
                Moment(
                    in_flight=len(self._traffic.in_flight),
                    begun=len(self._step),
                    step=self._steps,
                    since=self._idle_since,
                    waiting=self._waiting,
                )
            )


class CollectiveTraffic:
    """All collectives of this process, from where torch dispatches them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.in_flight: list[Flight] = []
        self.observers: list[Observer] = []
        self._groups: dict[tuple[int, bytes], _NumberedGroup] = {}
        self._broken = False  # a look has failed; there is none any more
        self._poller = _Poller(self._over)
        self._library = self.listen()

    def add(self) -> Observer:
        observer = Observer(self)
        with self.lock:
            self.observers.append(observer)
            observer._publish()
            for group in self._groups.values():
                if group.place >= 0:
                    observer.page.write_group(group.place, *group.head)
            observer.page.observe(not self._broken)
        return observer

    def remove(self, observer: Observer) -> None:
        with self.lock:
            self.observers.remove(observer)
            observer.close()

    def forget(self, before: float) -> None:
        """Forgets collectives that began before that time and are not over: they are not waited for any more."""
        for flight in [each for each in self.in_flight if each.begin < before]:
            self._over(flight)

    def close(self) -> None:
        """Stops listening; collectives in flight end as usual."""
        self._library._destroy()
        self._poller.close()

    @property
    def polled(self) -> int:
        return len(self._poller.works)

    # -- inside

    def listen(self) -> Any:
        names = [name.removeprefix("c10d::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")]
        kernels = {name: self.kernel(getattr(torch.ops.c10d, name).default) for name in names}
        library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for name, kernel in kernels.items():
            library.impl(name, kernel, _HERE, with_keyset=True)
        return library

    def kernel(self, operator: Any) -> Callable[..., Any]:
        name = operator.name().removeprefix("c10d::")

        def kernel(keys: Any, *arguments: Any) -> Any:
            leave_if_over()  # a rank that computes hears of it at the next bucket of its gradients, and not after all of them
            flight = None if getattr(_private, "on", False) else self.observed(lambda: self.begin(name, arguments))
            try:
                result = operator.redispatch(keys & _BELOW, *arguments)
            except BaseException:
                if flight is not None:
                    self._over(flight)
                raise
            if flight is None:
                return result
            followed = self.observed(lambda: self.follow(flight, result))
            return result if followed is None else followed

        return kernel

    def observed(self, look: Callable[[], _Seen]) -> _Seen | None:
        """Returns what a look at collectives does; None where it fails, which ends observing: it must never cost the training."""
        if self._broken:
            return None
        try:
            return look()
        except Exception:
            self._broken = True
            for observer in self.observers:
                observer.page.observe(False)
            for flight in list(self.in_flight):
                self._over(flight)
            _log.warning(UNSEEN, exc_info=True)
            return None

    def begin(self, name: str, arguments: tuple[Any, ...]) -> Flight:
        flight = Flight(name, arguments, time.monotonic())
        with self.lock:
            self.in_flight.append(flight)
            self._enter(flight, arguments)
            for observer in self.observers:
                observer.begun(flight)
        return flight

    def _enter(self, flight: Flight, arguments: tuple[Any, ...]) -> None:
        """Gives a collective its number in its group, and the group a place in the pages, if need be that of another one."""
        boxed = next((each for each in arguments[1:3] if isinstance(each, torch.ScriptObject)), None)
        if boxed is None:  # it is no collective, and looks at tensors only
            return
        process_group = ProcessGroup.unbox(boxed)
        is_transfer, name = flight.name in _TRANSFERS, process_group.group_name
        head = (0 if is_transfer else process_group.size(), f"{name}, point to point".encode() if is_transfer else name.encode())
        if (group := self._groups.get(head)) is None:
            group = self._groups[head] = _NumberedGroup(head=head)
        if group.place < 0:
            shown = [each for each in self._groups.values() if each.place >= 0]
            group.place = len(shown)
            if len(shown) == GROUPS:
                oldest = min(shown, key=lambda each: each.used)
                group.place, oldest.place = oldest.place, -1
            for observer in self.observers:
                observer.page.write_group(group.place, *head)
        group.number, group.used = group.number + 1, flight.begin
        flight.group, flight.number = group, group.number

    def follow(self, flight: Flight, result: Any) -> Any:
        """Watches for the end of a collective that has started; returns the caller's result."""
        handle = result[-1] if isinstance(result, tuple) else result
        if flight.device is not None and accelerator.is_capturing(flight.device):  # it will be carried out with the graph, unseen
            self._over(flight)
            return result
        work = Work.unbox(handle) if isinstance(handle, torch.ScriptObject) else None
        if work is None and flight.device is not None:  # NCCL without async_op: it is in the queue of its caller's stream
            event = accelerator.event_on(accelerator.stream_of(flight.device), flight.device)
            self._poller.add(flight, event.query)
            return result
        if work is None:  # nothing to wait for: it is over
            self._over(flight)
            return result
        try:
            future = work.get_future()
        except RuntimeError:  # gloo has none for some
            if "reduce_scatter" in flight.name:  # and these do not even know when they are over, until they are waited for
                told = _Told(work, lambda: self._over(flight))
                return (*result[:-1], told.boxed()) if isinstance(result, tuple) else told.boxed()
            self._poller.add(flight, work.is_completed)
            return result
        if flight.device is not None:  # a future is done when its kernel is queued; the work asks an event
            self._poller.add(flight, work.is_completed)
        else:
            future.add_done_callback(lambda _: self._over(flight))
        return result

    def _over(self, flight: Flight) -> None:
        now = time.monotonic()
        with self.lock:
            if flight not in self.in_flight:
                return
            flight.end = now
            self.in_flight.remove(flight)
            for observer in self.observers:
                with contextlib.suppress(Exception):  # also where a collective itself has failed: that error is the training's
                    observer.over(flight, now)


class _Told(Work):
    """A work object that tells when it has been waited for.

    Until then it is kept alive, also when the observer forgets it: what C++ holds is only the half that is C++, which alone would be
    waited for in vain.
    """

    _unawaited: ClassVar[set[_Told]] = set()

    def __init__(self, inner: Any, over: Callable[[], None]) -> None:
        super().__init__()
        self._inner, self._over = inner, over
        self._unawaited.add(self)

    def wait(self, *timeout: Any) -> bool:
        try:
            return bool(self._inner.wait(*timeout))
        finally:
            self._unawaited.discard(self)
            self._over()


class _Poller:
    """Polls collectives that do not tell when they are over; those of CUDA by their events."""

    def __init__(self, over: Callable[[Flight], None]) -> None:
        self._over = over
        self.works: list[tuple[Flight, Callable[[], bool]]] = []  # and what says that it is over
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stop = False

    def add(self, flight: Flight, is_over: Callable[[], bool]) -> None:
        with self._condition:
            self.works.append((flight, is_over))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="gemini-collectives", daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread can be started: perhaps at the next collective
                    thread.start()
                    self._thread = thread
            self._condition.notify()

    def close(self) -> None:
        with self._condition:
            self._stop = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        yield_to_training()
        has_entered = False
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self.works or self._stop)
                if self._stop:
                    return
                works = list(self.works)
            if not has_entered and (devices := [flight.device for flight, _ in works if flight.device is not None]):
                has_entered = True
                with contextlib.suppress(Exception):  # of a device of another kind
                    accelerator.enter(devices[0])
            done = list(self._over_among(works))
            with self._condition:
                self.works = [each for each in self.works if each not in done]
            for flight, _ in done:
                self._over(flight)
            if len(done) < len(works):
                time.sleep(_POLL)

    def _over_among(self, works: Iterable[tuple[Flight, Callable[[], bool]]]) -> Iterator[tuple[Flight, Callable[[], bool]]]:
        """Finds those that are over, or forgotten. A device carries out a group's in order: none behind one that is not over is asked."""
        waiting = set[int]()
        for flight, ask in works:
            line = id(flight.group) if flight.device is not None and flight.name not in _TRANSFERS else id(flight)
            if flight.end is not None or (line not in waiting and self._is_over(ask)):
                yield flight, ask
            elif flight.group is not None:
                waiting.add(line)

    @staticmethod
    def _is_over(ask: Callable[[], bool]) -> bool:
        try:
            return ask()
        except Exception:  # it failed: its caller is told, and whoever waits for it here waits no longer
            return True


_traffic: CollectiveTraffic | None = None


@contextlib.contextmanager
def observe() -> Iterator[Observer]:
    """Observes this process's collectives. Each observer has its own steps; with the last one, listening ends."""
    global _traffic
    if _traffic is None:
        _traffic = CollectiveTraffic()
    traffic = _traffic
    observer = traffic.add()
    try:
        yield observer
    finally:
        traffic.remove(observer)
        if not traffic.observers:
            traffic.close()
            _traffic = None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []


def write_record(path: str) -> None:
    """Writes what torch's flight recorder has kept, for torch's own tools; nothing where it is off."""
    with contextlib.suppress(Exception):  # of another torch, or a full disk
        record: bytes = torch._C._distributed_c10d._dump_fr_trace()  # type: ignore[attr-defined]
        if b"entries" in record:
            with open(open_log(Path(path)), "wb") as file:
                file.write(record)


class Observation:
    """The observation of this process's traffic, for one session.

    Args:
        tell: sends a message, and descriptors beside it, to the agent; raises AgentError when it is gone.
        window: steps that make a profile.
        is_profiled: whether the agent is told of profiles, for the replicas' sake.
        is_timed: whether it is told of this rank's own time in a step, to find stragglers.
    """

    def __init__(self, tell: Callable[[ToAgent, Sequence[int]], None], window: int, is_profiled: bool, *, is_timed: bool = True) -> None:
        self._tell, self._is_profiled = tell, is_profiled
        self._profiler, self._window = Profiler(window), WorkWindow() if is_timed else None
        self._stack = contextlib.ExitStack()
        self._observer = self._stack.enter_context(observe())

    def introduce(self) -> None:
        """Introduces itself to an agent that knows nothing of this yet."""
        page = self._observer.page
        self._tell(Watch(), (page.page, page.bell))
        self._report()

    def step_over(self, iteration: int) -> None:
        step = self._observer.look(self._observer.step_over)
        if step is None:
            return
        if self._observer.look(lambda: self._profiler.add(step)):
            self._report()
        if (window := self._window) is None:
            return
        times = self._observer.look(lambda: window.add(iteration, step.seconds, sum(seconds for _, seconds in step.idle())))
        if times is not None:
            self._tell(Worked(window=iteration, times=times), ())

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        return self._observer.waiting()

    def close(self) -> None:
        self._stack.close()

    def _report(self) -> None:
        if self._is_profiled:
            self._tell(Observed(profile=self._profiler.profile), ())
