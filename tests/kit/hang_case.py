"""Jobs in which one rank does what the others do not, in the ways in which jobs come to hang."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from agent_kit import eventually
from session_case import loop

from gemini_ft.events import read_events

AT = 6  # the iteration after which it does so
TIMEOUT = 3.0  # seconds: on a busy machine a step may take one
SUMMARY = "Job summary: 3 processes, 1 node"
Act = Callable[[], bool | None]  # True: it leaves the loop


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def locks() -> None:
    """Waits for a lock that nobody releases."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def waits_for_an_event() -> None:
    threading.Event().wait()


def reads_a_queue() -> None:
    queue.Queue[None]().get()


def computes() -> None:
    while True:
        sum(range(1000))


def broadcasts() -> None:
    dist.broadcast(torch.ones(3, 2), dist.get_rank())


def meets() -> None:
    dist.barrier()


def gathers() -> None:
    dist.all_gather([torch.empty(5) for _ in range(dist.get_world_size())], torch.ones(5))


def leaves() -> bool:
    return True


def _odd_one(act: Act, culprit: int, at: int, iteration: int, *_: Any) -> bool:
    return bool(act()) if (iteration, dist.get_rank()) == (at, culprit) else False


def answer_as_nccl(address: str) -> None:
    """Answers one question at an address, as NCCL's RAS does."""

    def serve(listener: socket.socket) -> None:
        with listener, listener.accept()[0] as asker:
            asker.recv(100)
            asker.sendall(f"OK\n{SUMMARY}\n".encode())

    host, port = address.split(":")
    threading.Thread(target=serve, args=[socket.create_server((host, int(port)))], daemon=True).start()


def hang(act: Act, culprit: int, at: int = AT) -> dict[str, Any]:
    """Trains, and then waits until the job has been judged: the end of this process would make the others fail."""
    if os.environ["RANK"] == "0" and (address := os.environ.get("NCCL_RAS_ADDR")):
        answer_as_nccl(address)
    during = partial(_odd_one, act, culprit, at)
    result = loop(10**6, during=during, hang_timeout=TIMEOUT, close=True)
    eventually(lambda: hangs(os.environ["GEMINI_EVENTS"]))
    return result


def hangs(path: str | Path) -> list[dict[str, Any]]:
    """The verdicts, of each host."""
    return [event for event in read_events(path) if event["event"] == "hang"]
