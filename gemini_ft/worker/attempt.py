"""A worker's attempt inside `gemini_ft.run`: hears from the launcher that it is over, and knows what it has made.

The main thread looks for the launcher's word wherever it is in this package's hands: at each step and each collective, and while it waits
for the processes of a DataLoader. It is interrupted nowhere else: an exception in the middle of other code could leave its objects half
changed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gemini_ft import accelerator
from gemini_ft.launch.failures import may_go_away, text_of
from gemini_ft.launch.in_place import ARRIVED, NEVER
from gemini_ft.state.copy_plan import end_rest
from gemini_ft.wire import channel


class OverError(BaseException):
    """Ends an attempt of which another worker has failed. No Exception, which loops may take for an error of their own."""


class OwnAttempt:
    """The end of this worker's channel to the launcher.

    Attributes:
        is_over: whether the launcher has said that the attempt is.
        watched: references to what the attempt has given to be captured; it must be gone before the next attempt begins.
        held: those of its objects that take no weak references. One is gone if nothing else refers to it.
        changing: finalizers of loaders; each watches the datasets, samplers and functions that have changed during the attempt.
        closing: objects that it has made and that are closed at its end -> arguments of their ``close``.
        defaults: default process groups that it has made.
        groups: process groups that it has made, kept until its end, although the script may destroy them before.
        is_sharded: whether some of it is sharded over a mesh.
        is_of_others: whether it has ended by an error that follows from what another rank has met.
        refusal: the reason why this process cannot stay after it; empty: none is known.
        has_arrived: whether it has made a step.
    """

    def __init__(self, end: socket.socket, at_refusal: Callable[[], object] = lambda: None) -> None:
        """Takes the worker's end; ``at_refusal`` is called once it is known that the process cannot stay."""
        self._end, self._thread, self._at_refusal = end, threading.get_ident(), at_refusal
        end.setblocking(False)
        self.is_over = False
        self._order: tuple[dict[str, str], list[int]] | None = None
        self.watched: list[weakref.ref[Any]] = []
        self.held: list[Any] = []
        self.changing: list[weakref.finalize[..., Any]] = []
        self.closing: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self.defaults: list[Any] = []
        self.groups: list[Any] = []
        self.is_sharded = False
        self.is_of_others = self.has_arrived = False
        self.refusal = ""
        with torch.enable_grad():
            self._oldest = torch.ones((), requires_grad=True, device="cpu") * 1  # of all graphs of this attempt

    def await_order(self) -> tuple[dict[str, str], list[int]]:
        """The next attempt's environment and standard streams, once the launcher has sent them.

        Raises ConnectionError: the launcher is gone.
        """
        waiting = select.poll()
        waiting.register(self._end, select.POLLIN)
        while self._order is None:
            waiting.poll()
            self.look()
        return self._order

    def look(self) -> None:
        """Hears what the launcher has said. Raises ConnectionError: the launcher is gone."""
        try:
            received = channel.receive(self._end)
        except BlockingIOError:
            return
        if received is None:
            raise ConnectionError("the launcher has ended")
        message, descriptors = received
        self.is_over = True
        if "environ" in message:
            self._order = message["environ"], descriptors

    def blame(self, error: BaseException | None) -> None:
        """Notes whether the error that ends the attempt is this rank's own."""
        if error is not None:
            self.is_of_others = may_go_away([kind.__name__ for kind in type(error).__mro__], text_of(error))

    def leave_if_over(self) -> None:
        """Raises OverError in the thread of the training."""
        if threading.get_ident() == self._thread:
            self.look()
            if self.is_over:
                raise OverError
            if accelerator.in_use() is not None:
                self.refuse("it uses a device, and groups of devices are not yet made anew in place")

    def refuse(self, why: str) -> None:
        """Says to the launcher, once, that this process cannot stay."""
        if not self.refusal:
            self.refusal = why
            self.say(NEVER, why=why)
            self._at_refusal()

    def close(self) -> None:
        """Closes what the attempt has made, the last first."""
        for each, options in reversed(list(self.closing.items())):
            each.close(**options)
        kept.clear()

    def keep_groups(self) -> None:
        if dist.is_initialized():
            self.defaults.append(dist.group.WORLD)
            self.groups += dist.distributed_c10d._world.pg_map

    def left_behind(self) -> list[Any]:
        """The objects that should be gone, and are still referenced from elsewhere."""
        while self.changing:
            self.changing.pop()()
        # A backward pass that an exception has ended leaves nodes, and with them parameters, in this thread's queue. Newer ones come first
        # in it, and are dropped.
        torch.autograd.backward([self._oldest], retain_graph=True)
        gc.collect()
        self.held.append(object())  # has as many references as one that is gone
        references = [sys.getrefcount(each) for each in self.held]
        held = [each for each, count in zip(self.held, references, strict=True) if count > references[-1]]
        return [*held, *(each for ref in self.watched if (each := ref()) is not None)]

    def say(self, word: str, **more: str) -> None:
        channel.send(self._end, {"word": word, **more})


present: OwnAttempt | None = None
kept: list[Any] = []  # until the script has ended well, or the attempt is over: what follows a training may fail
named: Counter[str] = Counter()  # kind -> streams of snapshots of this kind that this attempt, or what came before it, has named
# (run, stream) of what has finished in this attempt -> references to the models that it trained
finished: dict[tuple[str, str], list[weakref.ref[Any]]] = {}


def next_name(kind: str) -> str:
    """The name of a further stream of snapshots: a script may train several times, and comes to the same names when it begins anew."""
    named[kind] += 1
    return f"{kind}-{named[kind] - 1}"


def leave_if_over() -> None:
    """Ends the attempt, if another worker has failed meanwhile. Raises OverError: another worker has failed."""
    if present is not None:
        present.leave_if_over()


def arrived() -> None:
    """Tells the launcher of the attempt's first step: the agent watches this worker from then on."""
    if present is not None:
        if not present.has_arrived:
            present.has_arrived = True
            present.say(ARRIVED)
        end_rest()  # at each step: a training that fails may be followed by another one in the same attempt


def is_in_place() -> bool:
    """Whether another attempt may follow in this process."""
    return present is not None and not present.refusal


def has_failed() -> bool | None:
    """Whether the attempt that ends has failed here, and not elsewhere; None: the process ends with it."""
    if present is None:
        return None
    with contextlib.suppress(ConnectionError):  # the launcher is gone, which ends this process as well
        present.look()
    present.blame(sys.exception())
    return not present.is_over and not present.is_of_others


def keep_groups() -> None:
    """Keeps the process groups that there are until the attempt is over: objects of theirs may live longer than they do."""
    if present is not None:
        present.keep_groups()


def watch(captured: Iterable[Any]) -> None:
    """Watches objects that are captured: this process stays only if they are gone after the attempt."""
    if present is not None:
        for each in captured:
            present.is_sharded |= isinstance(each, DeviceMesh)
            try:
                present.watched.append(weakref.ref(each))
            except TypeError:
                if not any(each is other for other in present.held):
                    present.held.append(each)


def watch_changed(owner: Any, changed: Callable[[], Iterable[Any]]) -> None:
    """Watches what has changed once the attempt ends, or ``owner`` is gone, as a script may make a loader for each epoch."""
    if present is not None:
        last = weakref.finalize(owner, lambda: watch(changed()))
        last.atexit = False
        present.changing.append(last)


def close_with(owner: Any, **options: Any) -> None:
    """Has an object closed, with ``options``, when the attempt is over."""
    if present is not None:
        present.closing[owner] = options


def never_stay(why: str) -> None:
    """Has this process replaced after a failure, for a reason."""
    if present is not None:
        present.refuse(why)


def _forget() -> None:
    """A forked child has no attempt of its own."""
    global present
    present = None


os.register_at_fork(after_in_child=_forget)
