"""Brings ranks together: a process group for every attempt of a job, and the exchanges between its ranks.

torch 2.13 restarts the workers of an elastic job on the key-value store of the attempt before, so that a restarted
gloo group reads the addresses of dead peers and fails or hangs. :func:`init_process_group` gives every attempt a key
prefix of its own. ``TORCHELASTIC_RESTART_COUNT`` cannot be that prefix: it counts per host, and changes of membership
do not count at all. The ranks agree on it in a handshake instead.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import torch.distributed as dist

# torch.distributed exports these too, but not so that type checkers see it.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from gemini_ft import errors
from gemini_ft.errors import ConfigError, GeminiError, PeerError
from gemini_ft.launch.failures import error_at_end
from gemini_ft.worker.attempt import leave_if_over
from gemini_ft.worker.store_listener import await_store

T = TypeVar("T")

# The longest uninterrupted wait inside torch, in seconds: signal handlers run in between.
_SLICE = 1.0


def init_process_group(backend: str | None = None, timeout: timedelta | None = None, **kwargs: Any) -> None:
    """Creates the default process group as ``torch.distributed.init_process_group`` does, on keys of this attempt alone.

    Under torchrun with its shared store (``static``, ``--standalone`` and ``c10d``) the store gets a fresh prefix.
    Everywhere else (plain ``MASTER_ADDR``/``RANK``/``WORLD_SIZE``, or a ``store`` or ``init_method`` of the caller's)
    this is torch's own function. The group is destroyed when the interpreter exits: otherwise a thread of gloo may end
    the finished process with ``terminate called without an active exception``, and torchrun would restart the job.

    Args:
        backend: as torch's.
        timeout: as torch's; also how long to wait for the other ranks (default 30 minutes).
        **kwargs: passed on to torch.

    Raises:
        ConfigError: a process that multiprocessing starts is importing the script.
        PeerError: some ranks did not come; the message names them.
    """
    refuse_import()
    is_told = not {"store", "init_method", "rank", "world_size"}.isdisjoint(kwargs)  # by the caller, not by the environment
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not is_told:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = _fresh_store(rank, world_size, timeout or default_pg_timeout)
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size, **kwargs)
        _use_board(_Board(group=dist.group.WORLD, store=store))
    else:
        if not (is_told or backend == "mpi"):
            await_store(os.environ, (timeout or default_pg_timeout).total_seconds())
        dist.init_process_group(backend, timeout=timeout, **kwargs)
    atexit.register(_leave)


def refuse_import() -> None:
    """Refuses to train while a process that multiprocessing starts is importing the script.

    Such a process has the rank of the one that starts it, which waits for it, as it itself would wait for the other ranks.

    Raises ConfigError: that is so.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # by this multiprocessing refuses to start processes here
        raise ConfigError(
            "the script trains while it is imported by a process that multiprocessing has started, as from Python 3.14 on it does for the "
            'workers of a DataLoader; put the lines that train under `if __name__ == "__main__":`, or give the DataLoader '
            'multiprocessing_context="fork"'
        )


def _leave() -> None:
    if not dist.is_initialized():
        return
    # After an exception the peers may be gone, and NCCL would wait for them: let the process end instead.
    if error_at_end() is not None and "nccl" in dist.get_backend_config():
        return
    dist.destroy_process_group()


def _fresh_store(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Torchrun's store under a prefix that all ranks of this attempt, and no others, agree on.

    Every rank but 0 says hello under a name made up for this attempt. Rank 0 numbers the attempt, answers each name
    with the number, and waits until all ranks have acknowledged it. A hello that a dead predecessor left behind is
    answered too, but never acknowledged.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        shared = TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    except dist.DistNetworkError as error:
        raise PeerError(
            f"rank {rank}: the launcher's store at {address}:{port} did not answer within {timeout.total_seconds():g} s; "
            f"is the launcher on that host alive, and the port reachable? ({error})"
        ) from error
    store = PrefixStore("gemini/rendezvous", shared)
    number = _gather_attempt(store, world_size, timeout) if rank == 0 else _join_attempt(store, rank, timeout)
    return PrefixStore(f"gemini/attempt-{number}", shared)


def _gather_attempt(store: Store, world_size: int, timeout: timedelta) -> str:
    number = str(store.add("attempts", 1))
    pending = set(range(1, world_size))
    answered: dict[int, str] = {}
    end, pause = time.monotonic() + timeout.total_seconds(), 0.001
    while pending:
        leave_if_over()
        for rank in sorted(pending):
            if store.check([f"acknowledged/{number}/{rank}"]):
                pending.discard(rank)
            elif store.check([f"hello/{rank}"]):
                name = store.get(f"hello/{rank}").decode()
                if answered.get(rank) != name:
                    answered[rank] = name
                    store.set(f"answer/{name}", number)
        if pending and time.monotonic() > end:
            raise PeerError(
                f"{_ranks(pending)} of {world_size} did not join the process group within {timeout.total_seconds():g} s; "
                "see the logs of those ranks, or allow more time (timeout)"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return number


def _join_attempt(store: Store, rank: int, timeout: timedelta) -> str:
    name = uuid.uuid4().hex
    store.set(f"hello/{rank}", name)
    if not _await(store, [f"answer/{name}"], timeout.total_seconds()):
        raise PeerError(
            f"rank 0 did not answer rank {rank} within {timeout.total_seconds():g} s, so there is no process group; "
            "see the log of rank 0, or allow more time (timeout)"
        )
    number = store.get(f"answer/{name}").decode()
    store.delete_key(f"answer/{name}")
    store.set(f"acknowledged/{number}/{rank}", "")
    return number


def _await(store: Store, keys: Sequence[str], seconds: float) -> bool:
    """Waits until all ``keys`` are set; False if that takes more than ``seconds``."""
    end = time.monotonic() + seconds
    while not store.check(list(keys)):
        leave_if_over()
        left = end - time.monotonic()
        if left <= 0:
            return False
        try:
            store.wait(list(keys), timedelta(seconds=min(left, _SLICE)))
        except dist.DistStoreError:
            continue  # the slice is over
    return True


def _ranks(ranks: Iterable[int]) -> str:
    names = sorted(ranks)
    return f"rank{'s' * (len(names) > 1)} {', '.join(map(str, names))}"


@dataclass(kw_only=True)
class _Board:
    """The board on which ranks of one process group note that they have arrived, before they enter a collective together.

    The collective itself could only time out, after the group's 30 minutes, and not say who was missing.
    """

    group: object
    store: Store
    meetings: int = field(default=0)

    def meet(self, rank: int, world_size: int, seconds: float) -> None:
        """Returns on every rank once all have come, or raises the same PeerError on every rank that has."""
        meeting = self.meetings
        self.meetings += 1
        here = [f"{meeting}/here/{other}" for other in range(world_size)]
        verdict = f"{meeting}/verdict"
        self.store.set(here[rank], "")
        if rank == 0:
            missing = [] if _await(self.store, here, seconds) else [r for r, key in enumerate(here) if not self.store.check([key])]
            text = f"{_ranks(missing)} of {world_size} did not answer within {seconds:g} s; see the logs of those ranks" if missing else ""
            self.store.set(verdict, text)
        # Ranks that came before rank 0 give it the full time too, counted from their arrival.
        elif not (_await(self.store, [here[0]], seconds) and _await(self.store, [verdict], seconds + _SLICE)):
            raise PeerError(f"rank 0 of {world_size} did not answer within {seconds:g} s; see the log of that rank")
        text = self.store.get(verdict).decode()
        if text:
            raise PeerError(text)


_current: _Board | None = None


def _use_board(board: _Board) -> _Board:
    global _current
    _current = board
    return board


def forget_group() -> None:
    """Lets go of the group, which has been destroyed, and of its store."""
    global _current
    _current = None


def _board() -> _Board:
    group = dist.group.WORLD
    if _current is not None and _current.group is group:
        return _current
    # Another library's group, perhaps on a store with keys of an earlier attempt: agree on a name that was never used.
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0)
    return _use_board(_Board(group=group, store=PrefixStore(f"gemini/{name[0]}", dist.distributed_c10d._get_default_store())))


def exchange(obj: T, timeout: float = 60.0) -> list[T]:
    """Gives ``obj`` to all ranks of the default process group, and takes theirs.

    Collective: all ranks call it, in the same order. Objects are pickled, and under NCCL travel through the current CUDA
    device. Without a group the result is ``[obj]``.

    ``obj``: anything that can be pickled. Where ranks say the same, they get one object for it: it must not be changed.

    Returns the objects of all ranks, in rank order.

    Raises PeerError: some ranks did not come in time, or were lost during the exchange; the message names them if known.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [obj]
    return _loaded(exchange_bytes(pickle.dumps(obj), timeout))


def _loaded(blobs: Sequence[bytes]) -> list[Any]:
    """The objects that ranks have said; those that have said the same share one, as there may be thousands of them."""
    known: dict[bytes, Any] = {}
    for blob in blobs:
        if blob not in known:
            known[blob] = pickle.loads(blob)
    return [known[blob] for blob in blobs]


def exchange_bytes(blob: bytes, timeout: float) -> list[bytes]:
    world_size = dist.get_world_size()
    gathered: list[Any] = [None] * world_size
    try:
        _board().meet(dist.get_rank(), world_size, timeout)
        dist.all_gather_object(gathered, blob)
    except RuntimeError as error:  # torch's errors for a lost connection, and for its own timeout
        raise PeerError(f"another rank was lost while the ranks exchanged what they know; see the logs of the others ({error})") from error
    return gathered


def mark_of(blob: bytes) -> bytes:
    """A mark by which ranks see that they have the same bytes."""
    return blake2b(blob, digest_size=16).digest()


def exchange_alike(blobs: Sequence[bytes], marks: Sequence[Sequence[bytes]], timeout: float = 60.0) -> list[list[bytes]]:
    """Gives all ranks the blobs of all, where those who have the same one say it together: each its part.

    Collective, as :func:`exchange`. Ranks of one host know the same of it, and all ranks have the same options: else the bytes that reach
    every rank would grow with the ranks, and not with what there is to say.

    ``blobs``: of this rank; every rank has as many. ``marks``: rank -> the `mark_of` each of its blobs, as all ranks know them.

    Returns:
        Rank -> its blobs.

    Raises PeerError: as :func:`exchange`; or the parts do not make up what was announced.
    """
    rank = dist.get_rank() if len(marks) > 1 else 0
    alike = _alike(marks)
    parts = [part_of(blob, alike[index, mark], rank) for index, (blob, mark) in enumerate(zip(blobs, marks[rank], strict=True))]
    return _joined(alike, marks, exchange(parts, timeout))


def _alike(marks: Sequence[Sequence[bytes]]) -> dict[tuple[int, bytes], list[int]]:
    """(Which blob, mark) -> ranks that have it."""
    alike: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    for other, own in enumerate(marks):
        for index, mark in enumerate(own):
            alike[index, mark].append(other)
    return alike


def _joined(
    alike: Mapping[tuple[int, bytes], list[int]], marks: Sequence[Sequence[bytes]], said: Sequence[Sequence[bytes]]
) -> list[list[bytes]]:
    """The blobs of each rank, of which ranks have said a part each."""
    whole = {key: b"".join(said[other][key[0]] for other in ranks) for key, ranks in alike.items()}
    for (index, mark), blob in whole.items():
        if mark_of(blob) != mark:
            raise PeerError(f"{_ranks(alike[index, mark])} announced one thing and said another; see the logs of those ranks")
    return [[whole[index, mark] for index, mark in enumerate(own)] for own in marks]


def part_of(blob: bytes, ranks: Sequence[int], rank: int) -> bytes:
    """The part of a blob that one of the ranks that have it says."""
    at, of = ranks.index(rank), len(ranks)
    return blob[len(blob) * at // of : len(blob) * (at + 1) // of]


@dataclass(frozen=True)
class _Result(Generic[T]):
    value: T


@dataclass(frozen=True)
class _Failure:
    classes: tuple[str, ...]  # names of the error's class and its bases, nearest first, as far as they are this package's
    text: str

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        # Only classes that every rank has: all must raise the same.
        classes = tuple(kind.__name__ for kind in type(error).__mro__ if vars(errors).get(kind.__name__) is kind)
        return cls(classes, str(error) if classes else f"{type(error).__name__}: {error}")


def _common_error(failures: dict[int, _Failure]) -> GeminiError:
    said = defaultdict[str, list[int]](list)
    for rank, failure in failures.items():
        said[failure.text].append(rank)
    classes = failures[min(failures)].classes
    kind: type[GeminiError] = getattr(errors, classes[0]) if classes else GeminiError
    return kind("; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in said.items()))


def exchange_or_raise(fn: Callable[[], T], timeout: float = 60.0) -> list[T]:
    """Calls ``fn`` on every rank; returns all results in rank order, or raises the same error on every rank.

    Collective, as :func:`exchange`. In a world of one rank ``fn``'s own exception passes.

    Raises:
        GeminiError: ``fn`` failed somewhere. The class is that of the lowest failed rank (its nearest base among this
            package's errors), the text names the ranks and what each of them said.
        PeerError: as :func:`exchange`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [fn()]
    cause: Exception | None = None
    try:
        blob = pickle.dumps(_Result(fn()))
    except Exception as error:
        cause = error
        blob = pickle.dumps(_Failure.of(error))
    outcomes: list[_Result[T] | _Failure] = _loaded(exchange_bytes(blob, timeout))
    values, failures = _parted(outcomes)
    if failures:
        raise _common_error(failures) from cause
    return values


def _parted(outcomes: Sequence[_Result[T] | _Failure]) -> tuple[list[T], dict[int, _Failure]]:
    """The results, and the failures by rank."""
    failures = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, _Failure)}
    return [outcome.value for outcome in outcomes if isinstance(outcome, _Result)], failures


def on_all_ranks(fn: Callable[[], T], timeout: float = 60.0) -> T:
    """Calls ``fn`` on every rank, raises as :func:`exchange_or_raise` if it fails anywhere, and returns this rank's own result."""
    mine: list[T] = []
    exchange_or_raise(lambda: mine.append(fn()), timeout)  # the result is for this rank alone
    return mine[0]
