"""Waits for rank 0's key-value store before torch asks for it.

A client of torch's that comes a moment before the store listens sleeps 0.25 to 0.75 s, and forked workers all come in the same moment.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

_MOST_SECONDS = 10.0  # then it is left to torch
_PAUSE, _LONGEST_PAUSE = 0.002, 0.03  # seconds
_LINE = 150  # bytes: of more, the kernel goes through all connections before it shows the first line
_LISTENS = b"0A"  # TCP_LISTEN, as the kernel writes it


def await_store(environ: Mapping[str, str], seconds: float = _MOST_SECONDS) -> None:
    """Returns once rank 0's store listens, if this process can see that: as one of the other ranks on rank 0's host.

    Nothing is sent. A connection on trial would be no help to ranks of other hosts: the store looks up the name of everyone who calls,
    which may take it seconds where names cannot be resolved.

    ``seconds``: after which it is left to torch, at most 10.
    """
    try:
        rank, host, port = int(environ["RANK"]), int(environ["GROUP_RANK"]), int(environ["MASTER_PORT"])
    except (KeyError, ValueError):
        return
    if rank == 0 or host != 0:
        return
    end, pause = time.monotonic() + min(seconds, _MOST_SECONDS), _PAUSE
    while is_listening(port) is False and time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def is_listening(port: int) -> bool | None:
    """Whether any process of this host listens at a TCP port; None: the kernel does not say."""
    known = False
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path, "rb", buffering=_LINE) as table:
                next(table, None)
                for line in table:
                    _, local, _, state, *_ = line.split(maxsplit=4)
                    if state != _LISTENS:
                        break  # those that listen come first
                    if int(local.rpartition(b":")[2], 16) == port:
                        return True
        except OSError:
            continue
        known = True
    return False if known else None
