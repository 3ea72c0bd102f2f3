"""asyncio on simulated time, and processes on it that can be stopped, slowed down and killed at any moment.

Every callback runs in the context of its process. One whose process is dead is dropped; one whose process is stopped waits until that
goes on. Blocking code runs on stacks of its own, one at a time, so that a run can be repeated exactly: greenlets where they are
installed, and threads elsewhere.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import importlib
import itertools
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from random import Random
from typing import Any, ClassVar, TypeVar

from gemini_ft.errors import StorageError

try:
    greenlet: Any = importlib.import_module("greenlet")
except ImportError:
    greenlet = None  # threads do the same, slower

T = TypeVar("T")
_LEAST = 1e-9  # seconds; without it, a wait for what is left of a second may take no time, again and again
_STACK = 512 * 1024  # bytes, of a fiber's thread
_BEGAN = 1_000_000.0  # seconds of the simulated clock at its beginning


class Killed(BaseException):
    """Ends the threads of a process that was killed."""


class Handle:
    """A callback that is due, as asyncio's handles are, but small: there are hundreds of them in each simulated second."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "process", "when")

    def __init__(
        self, process: Process | None, callback: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context, when: float = 0.0
    ) -> None:
        self.process, self.callback, self.args, self.context, self.when, self.is_cancelled = process, callback, args, context, when, False

    def cancel(self) -> None:
        self.is_cancelled = True


class Process:
    """A process of a host: what it has begun does nothing any more once it is dead."""

    def __init__(self, loop: SimulatedLoop, name: str, host: str) -> None:
        self.loop, self.name, self.host = loop, name, host
        self.alive = True
        self.stopped_at = self.stopped_until = 0.0  # simulated seconds
        self.parked: deque[Handle] = deque()
        self.fibers: set[Fiber] = set()
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)
        loop.processes.append(self)

    def run(self, work: Callable[..., T], *args: Any) -> T:
        """Calls ``work`` as this process."""
        return self.context.copy().run(work, *args)

    def soon(self, work: Callable[..., Any], *args: Any) -> None:
        """Has this process do something."""
        self.loop.call_soon(work, *args, context=self.context.copy())

    def at(self, when: float, work: Callable[..., Any], *args: Any) -> Handle:
        return self.loop.call_at(when, work, *args, context=self.context.copy())

    @property
    def is_stopped(self) -> bool:
        return self.stopped_until > self.loop.time()

    def stop(self, seconds: float) -> None:
        """Lets it do nothing for so long."""
        self.stopped_at = self.stopped_at if self.is_stopped else self.loop.time()
        self.stopped_until = max(self.stopped_until, self.loop.time() + seconds)
        self.loop.outside(self.stopped_until, self._go_on)

    def _go_on(self) -> None:
        while self.parked and self.alive and not self.is_stopped:
            self.loop.call_back(self.parked.popleft())

    def kill(self) -> None:
        """Ends it; nothing of it runs any more, not even what would clean up."""
        self.alive = False
        self.parked.clear()
        self.loop.processes.remove(self)
        for fiber in sorted(self.fibers, key=lambda each: each.number):
            fiber.end()


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class _Task(asyncio.Task[Any]):
    """A task whose hash is the same in every run."""

    _made = itertools.count()

    def __hash__(self) -> int:
        if not hasattr(self, "number"):
            self.number = next(self._made)
        return self.number


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when nothing is left to do.

    Args:
        rng: draws how long blocking calls take to begin.
    """

    def __init__(self, rng: Random) -> None:
        self.now = _BEGAN
        self.rng = rng
        self._handles: deque[Handle] = deque()  # due now
        self._timers: list[tuple[float, int, Handle]] = []  # a heap; the numbers keep the order of those that are due at the same time
        self._numbers = itertools.count()
        self.processes: list[Process] = []
        self.errors: list[str] = []
        self.fibers_begun = 0
        self.dial: Callable[..., Any]
        super().__init__()
        self.set_exception_handler(self._on_error)
        self._kept = set[asyncio.Task[Any]]()  # tasks that have not ended, even of dead processes: what is collected would clean up
        self.set_task_factory(self._new_task)

    def _new_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = _Task(coro, loop=self, **options)
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)
        return task

    def time(self) -> float:
        return self.now

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, message = context.get("exception"), str(context.get("message"))
        if "was destroyed but it is pending" in message or ("never retrieved" in message and error is None):
            return
        self.errors.append(f"{message}: {error!r}")
        if error is not None:
            self.errors[-1] += "\n" + "".join(traceback.format_exception(error))

    # -- callbacks of processes

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Handle:  # type: ignore[override]
        context = context or contextvars.copy_context()
        handle = Handle(context.get(PROCESS), callback, args, context)
        self._handles.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        context = context or contextvars.copy_context()
        return self._add(Handle(context.get(PROCESS), callback, args, context, when))

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def outside(self, when: float, callback: Callable[..., Any], *args: Any) -> Handle:
        """Calls at a simulated time what no process does; 0: at once."""
        return self._add(Handle(None, callback, args, contextvars.copy_context(), max(when, self.now)))

    def _add(self, handle: Handle) -> Handle:
        heapq.heappush(self._timers, (handle.when, next(self._numbers), handle))
        return handle

    def carry_out(self, handle: Handle) -> None:
        """Calls back, unless the process is dead, or stopped: then it waits until that goes on."""
        process = handle.process
        if process is None or (process.alive and not process.parked and process.stopped_until <= self.now):
            self.call_back(handle)
        elif process.alive:
            process.parked.append(handle)

    def call_back(self, handle: Handle) -> None:
        if handle.is_cancelled:
            return
        try:
            handle.context.run(handle.callback, *handle.args)
        except Killed:
            return
        except Exception as error:
            name = handle.process.name if handle.process is not None else "the world"
            self.call_exception_handler({"message": f"in {name}", "exception": error})

    def _run_once(self) -> None:
        """Carries out what is due; where nothing is, time passes until something is."""
        handles, timers = self._handles, self._timers
        if not handles and not self._stopping:  # type: ignore[attr-defined]
            while timers[0][2].is_cancelled:
                heapq.heappop(timers)
            if timers[0][0] > self.now:
                self.now = max(self.now + _LEAST, timers[0][0])
        while timers and timers[0][0] <= self.now:
            handles.append(heapq.heappop(timers)[2])
        for _ in range(len(handles)):
            self.carry_out(handles.popleft())

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:  # type: ignore[override]
        """Does nothing: of all signals only those that end a process are simulated."""

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        """Dials by way of the simulated network."""
        return await self.dial(protocol_factory, host, port, options["ssl"])

    # -- blocking calls

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Calls ``func`` beside the loop, as on a thread."""
        done: asyncio.Future[T] = self.create_future()
        process = PROCESS.get()
        assert process is not None

        def over(value: T | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(value)  # type: ignore[arg-type]

        fiber = Fiber(process, lambda: func(*args), over)
        process.at(self.time() + self.rng.expovariate(1 / 0.0005), fiber.go_on)
        return done


class _Thread:
    """A thread for fibers, one after the other: to start one takes longer than most of them live. One thread at a time is awake."""

    idle: ClassVar[list[_Thread]] = []

    def __init__(self) -> None:
        self._mine, self._loops = threading.Lock(), threading.Lock()
        self._mine.acquire()
        self._loops.acquire()
        self._fiber: Fiber | None = None
        threading.Thread(target=self._work, daemon=True).start()

    @classmethod
    def take(cls, fiber: Fiber) -> _Thread:
        """An idle thread, or a new one."""
        thread = cls.idle.pop() if cls.idle else cls()
        thread._fiber = fiber
        return thread

    def resume(self) -> None:
        self._mine.release()
        self._loops.acquire()

    def pause(self) -> None:
        self._loops.release()
        self._mine.acquire()

    def _work(self) -> None:
        self._mine.acquire()
        while True:
            fiber, self._fiber = self._fiber, None
            assert fiber is not None
            fiber.main()
            del fiber
            self.idle.append(self)
            self.pause()


class _Greenlet:
    """A stack of its own for a fiber, on the loop's thread: to change over needs no other thread, for which a busy machine lets it wait."""

    def __init__(self, fiber: Fiber) -> None:
        self._greenlet = greenlet.greenlet(fiber.main)

    def resume(self) -> None:
        self._greenlet.parent = greenlet.getcurrent()
        self._greenlet.switch()

    def pause(self) -> None:
        self._greenlet.parent.switch()


class Fiber:
    """Blocking code of a process on a stack of its own, which goes on only while the loop waits for it.

    Args:
        process: whose.
        work: the code.
        over: called on the loop with its result, or its error.
    """

    running: ClassVar[Fiber | None] = None

    def __init__(self, process: Process, work: Callable[[], Any], over: Callable[[Any, BaseException | None], None]) -> None:
        self.process, self._work, self._over = process, work, over
        self.loop = process.loop
        self.loop.fibers_begun += 1
        self.number = self.loop.fibers_begun
        self._dead = False
        self.turn = 0  # counts its waits, so that a wake-up for an earlier one counts for nothing
        process.fibers.add(self)
        self._context = contextvars.copy_context()
        self._stack: _Thread | _Greenlet | None = None

    @staticmethod
    def here() -> Fiber | None:
        return Fiber.running

    # -- on the loop

    def go_on(self) -> None:
        """Lets it run until it waits again, or ends."""
        if self._stack is None:
            self._stack = _Greenlet(self) if greenlet is not None else _Thread.take(self)
        before, Fiber.running = Fiber.running, self
        self._stack.resume()
        Fiber.running = before

    def wake(self, turn: int) -> None:
        if turn == self.turn and self in self.process.fibers:
            self.go_on()

    def end(self) -> None:
        """Ends it, as its process is dead."""
        self._dead = True
        if self._stack is not None and Fiber.running is not self:
            self.go_on()
        else:
            self.process.fibers.discard(self)

    # -- on its own stack

    def main(self) -> None:
        value, error = None, None
        try:
            value = self._context.run(self._work)
        except Killed:
            self._dead = True
        except BaseException as caught:
            error = caught.with_traceback(caught.__traceback__)
        self.process.fibers.discard(self)
        if not self._dead:
            self.loop.call_soon(self._over, value, error, context=self.process.context.copy())

    def check(self) -> None:
        if self._dead or not self.process.alive:
            raise Killed

    def _wait(self) -> None:
        assert self._stack is not None
        self._stack.pause()
        self.turn += 1
        self.check()

    def sleep(self, seconds: float) -> None:
        self.check()
        self.process.at(self.loop.time() + max(0.0, seconds), self.wake, self.turn)
        self._wait()

    def on_loop(self, work: Callable[[], T]) -> T:
        """Calls ``work`` on the loop."""
        self.check()
        done: asyncio.Future[T] = self.loop.create_future()

        def call() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        self.process.soon(call)
        self.wait_for(done, 1e9)
        return done.result()

    def wait_for(self, future: asyncio.Future[Any], seconds: float) -> bool:
        """Whether it is done within that time."""
        self.check()
        if future.done():
            return True
        turn = self.turn
        timer = self.process.at(self.loop.time() + seconds, self.wake, turn)
        future.add_done_callback(lambda _: self.wake(turn), context=self.process.context.copy())
        self._wait()
        timer.cancel()
        return future.done()


def sleep(seconds: float) -> None:
    """In place of `time.sleep`."""
    fiber = Fiber.here()
    assert fiber is not None, "only blocking code may sleep"
    fiber.sleep(seconds)


class Lock:
    """In place of `threading.Lock`, where one is held while storage is used. The loop must never wait for one."""

    def __init__(self) -> None:
        self._is_held = False

    def __enter__(self) -> None:
        fiber = Fiber.here()
        assert fiber is not None, "the agent's loop would wait for a thread that uses storage, wherever one does"
        while self._is_held:
            fiber.sleep(0.01)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False


def within(seconds: float, what: str, work: Callable[[], T]) -> T:
    """In place of `gemini_ft.storage.lookout.within`: the same, with a fiber in place of a thread."""
    here = Fiber.here()
    assert here is not None
    done: asyncio.Future[tuple[T | None, BaseException | None]] = here.loop.create_future()
    inner = Fiber(here.process, work, lambda value, error: done.set_result((value, error)))
    here.process.at(here.loop.time() + 1e-5, inner.go_on)
    if not here.wait_for(done, seconds):
        raise StorageError(f"{what}: storage did not answer within {seconds:g} s; does it hang?")
    value, error = done.result()
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
