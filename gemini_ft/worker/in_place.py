"""`gemini_ft.run`: calls a training function again in the same process when another worker, or this one, has failed.

All that an attempt has made must be gone before the next one begins; otherwise the process is replaced. Random numbers begin anew, as in a
new process.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from multiprocessing import active_children
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from gemini_ft import accelerator
from gemini_ft.launch import notes, reserve
from gemini_ft.launch.failures import raise_own, record, refusal_behind
from gemini_ft.launch.in_place import BEGUN, FAILED, IN_PLACE, LEAVES, PARKED
from gemini_ft.launch.replaced import replaced, take_rank
from gemini_ft.state.left_out import instances
from gemini_ft.state.rng import rng_state, set_rng_state
from gemini_ft.torch_versions import forget_defaults, forget_meshes, number_groups_anew
from gemini_ft.worker import attempt, rendezvous
from gemini_ft.worker.abort import ConnectionAbort
from gemini_ft.worker.attempt import OverError, OwnAttempt, leave_if_over

T = TypeVar("T")

_log = logging.getLogger("gemini_ft")
_GLANCE = 0.2  # seconds between looks for the launcher's word, while processes of a DataLoader make a batch
_ENDING_SECONDS = 1.0  # for threads and processes of an attempt to end
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # of glibc's mallopt
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # with which launchers end workers


def _handlers() -> dict[signal.Signals, Any]:
    return {each: handler for each in _SIGNALS if (handler := signal.getsignal(each)) is not None}  # None: it is not Python's


def _set_handlers(handlers: dict[signal.Signals, Any]) -> None:
    for each, handler in handlers.items():
        signal.signal(each, handler)


# Settings of the process, each as the functions that read it and put it back: every attempt finds them as the first one did.
_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (os.getcwd, os.chdir),
    (rng_state, set_rng_state),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (_handlers, _set_handlers),
]
has_begun = False  # whether a script has called `run`: only its first call is repeated, as a worker started anew begins with it


def run(train: Callable[[], T]) -> T:
    """Calls ``train``, and again after a failure, if ``gemini run --restart in_place`` has started this worker.

    A worker that lives when another one fails, or that has raised an exception itself, keeps its process and its imports. ``train`` makes
    all the rest: the process group, models, optimizers, loaders, the Checkpointer and the loop. It is called again with the environment
    of the new attempt; random numbers, the working directory and some settings of torch (docs/launcher.md) are as at the first call.
    Elsewhere, and where that is not possible (on a device, for example), ``train`` is called once, and a worker is started anew after a
    failure.

    Args:
        train: the training from the beginning.

    Returns:
        The result of ``train``.
    """
    global has_begun
    is_parked = reserve.end()
    is_first, has_begun = not has_begun, True
    launcher, _, address = os.environ.get(IN_PLACE, "").partition(":")
    if not address:
        return train()
    why = "" if is_first else "it is not the first of this script"
    if dist.is_initialized():
        why = why or "the process group was made before it"
    if launcher != str(os.getppid()):
        why = why or "another program is between it and the launcher"
    if why and is_parked:
        _log.warning("gemini_ft.run: this worker in reserve ends, and another one is started when it is needed, as %s", why)
        raise SystemExit(1)
    if why:
        _log.warning("gemini_ft.run: after a failure this worker is started anew, as %s", why)
        return train()
    give_back = give_back_memory if keep_freed_memory() else lambda: None
    fetch = heeding(_MultiProcessingDataLoaderIter._try_get_data)
    with replaced(_MultiProcessingDataLoaderIter, _try_get_data=fetch), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.connect(f"\0{address}")
        abort = ConnectionAbort(end)
        known = [*threading.enumerate(), *active_children(), *instances(_MultiProcessingDataLoaderIter), *_hooks_of_all()]
        named, variables, settings = attempt.named.copy(), dict(os.environ), list(_settings())
        try:
            while True:
                attempt.present = present = OwnAttempt(end, give_back)
                if not is_parked:
                    with abort.training():
                        done = once(train, present)
                    if done:
                        return done[0]
                is_parked = False
                variables |= park(present, known)
                for name in os.environ.keys() - variables.keys():
                    del os.environ[name]
                os.environ.update(variables)
                take_rank(os.environ)
                attempt.named, attempt.finished = named.copy(), {}
                for put, value in settings:
                    with contextlib.suppress(Exception):
                        put(value)
        finally:
            attempt.present = None
            abort.close()  # processes of a DataLoader may have the descriptor, too


def heeding(fetch: Callable[..., tuple[bool, Any]]) -> Callable[..., tuple[bool, Any]]:
    """A DataLoader's wait for its processes that an attempt's end ends."""

    def try_get_data(iterator: Any, timeout: float = MP_STATUS_CHECK_INTERVAL) -> tuple[bool, Any]:
        end = time.monotonic() + timeout
        while True:
            leave_if_over()
            left = end - time.monotonic()
            found = fetch(iterator, max(0.0, min(_GLANCE, left)))
            if found[0] or left <= _GLANCE:
                return found

    return try_get_data


def keep_freed_memory() -> bool:
    """Has this process keep the pages that it frees, where glibc allocates them and the user has set nothing else; returns whether it does.

    The next attempt makes the same model and gradients. In fresh pages, which the kernel clears, its first step takes twice as long.
    """
    if any(name.startswith("MALLOC_") or "glibc.malloc" in value for name, value in os.environ.items()):
        return False
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1))
    return False


def give_back_memory() -> None:
    """Undoes `keep_freed_memory`, and gives back what is free now. The thresholds are those at which glibc arrives by itself."""
    libc = ctypes.CDLL(None)
    for option, value in ((_M_MMAP_MAX, 65536), (_M_MMAP_THRESHOLD, 32 * 2**20), (_M_TRIM_THRESHOLD, 64 * 2**20)):
        libc.mallopt(option, value)
    libc.malloc_trim(0)


def _settings() -> Iterator[tuple[Callable[[Any], object], Any]]:
    """The settings that can be read now: torch refuses some that a script has set by a newer function of torch."""
    for read, put in _SETTINGS:
        with contextlib.suppress(Exception):
            yield put, read()


def once(train: Callable[[], T], present: OwnAttempt) -> list[T]:
    """Calls ``train`` and returns its result in a list; the list is empty if the attempt is over, and an exception is dropped then."""
    try:
        try:
            result = train()
        except BaseException as error:
            raise_own(error)
            raise
        present.look()
        return [] if present.is_over else [result]
    except OverError:
        pass
    except Exception as error:
        if getattr(error, "exit_status", 1) != 1 or refusal_behind(error) is not None:  # the launcher must see its status
            raise
        present.look()
        present.blame(error)
        if not present.is_over:
            record(error)
            traceback.print_exception(error)
            present.say(FAILED)
    return []


def park(present: OwnAttempt, known: Collection[object]) -> dict[str, str]:
    """Waits for the launcher's order to begin the next attempt, and takes over its streams; returns what is new in its environment.

    Raises SystemExit: this process cannot stay, or the launcher wants no further attempt.
    """
    with contextlib.suppress(ValueError):  # in a thread
        _set_handlers(dict.fromkeys(_handlers(), signal.SIG_DFL))  # a handler of the script may not end the process
    try:
        why = leftovers(present, known)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    try:
        if why:
            present.say(LEAVES, why=why)
            raise SystemExit(1)
        present.say(PARKED)
        environ, streams = present.await_order()
        present.say(BEGUN)
    except ConnectionError:
        raise SystemExit(1) from None
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    return environ


def leftovers(present: OwnAttempt, known: Collection[object]) -> str:
    """Releases all that the attempt has made, so that its connections close. Returns why this process cannot stay; empty: it can."""
    if accelerator.in_use() is not None:
        return "it uses a device, and groups of devices are not yet made anew in place"
    if present.refusal:
        return present.refusal
    for iterator in list(instances(_MultiProcessingDataLoaderIter)):
        if iterator not in known:  # when collected, it would close the queues that tell its processes to end first, and wait without end
            iterator._shutdown_workers()
    present.close()
    # DDP's Reducer holds the interpreter's lock when it is freed. Were its reference to the group the last one, it would wait for the
    # group's threads with that lock held, and one of them may be about to call Python: neither would ever go on.
    # The script may have destroyed it by itself, and so they are also kept when its Checkpointer joins.
    present.keep_groups()
    while present.defaults:
        group = present.defaults.pop()
        if group not in present.defaults:
            forget_defaults(group)
    group = None
    if dist.is_initialized():
        dist.destroy_process_group()
    number_groups_anew()
    if (accelerate := sys.modules.get("accelerate.state")) is not None:  # it keeps devices and process group for the whole process
        for each in (accelerate.AcceleratorState, accelerate.PartialState, accelerate.GradientState):
            each._shared_state.clear()
    if "torch._dynamo" in sys.modules:  # which takes long to import
        torch.compiler.reset()  # else the compiled code counts against the next attempt's limit, and its shapes are known there
    rendezvous.forget_group()
    notes.step = None
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if present.is_sharded:
        forget_meshes()
    # The first look frees garbage of torch's graphs; objects that only this garbage has held are gone at the second one.
    alive = Counter(type(each).__qualname__ for each in present.left_behind() and present.left_behind())
    present.groups.clear()  # which closes their connections, for which other ranks may wait
    if alive:
        return f"what train() has trained is still referenced from outside of it: {', '.join(sorted(alive))}"
    if hooks := [getattr(hook, "__qualname__", repr(hook)) for hook in _hooks_of_all() if hook not in known]:
        return f"train() has registered hooks of all modules or optimizers: {', '.join(hooks)}"
    end = time.monotonic() + _ENDING_SECONDS
    started: list[Any] = [each for each in (*threading.enumerate(), *active_children()) if each not in known]
    for each in started:
        each.join(max(0.0, end - time.monotonic()))
    names = [each.name for each in started if each.is_alive()]
    return f"threads or processes that train() has started still run: {', '.join(names)}" if names else ""


def _hooks_of_all() -> Iterator[Any]:
    """The hooks that torch calls for every module or optimizer, without this package's own."""
    for module in (torch.nn.modules.module, sys.modules["torch.optim.optimizer"]):
        for name, hooks in vars(module).items():
            if name.startswith("_global_") and name.endswith("_hooks"):
                yield from (hook for hook in hooks.values() if not (getattr(hook, "__module__", None) or "").startswith("gemini_ft."))
