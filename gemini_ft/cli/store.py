"""``gemini store``: a key-value store in a process of its own, so that a rendezvous survives the loss of any training host."""

from __future__ import annotations

import argparse
import signal
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemini_ft.wire.network import bound

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


def open_store(host: str, port: int) -> TCPStore:
    """Serves a store on ``host:port`` from a thread of this process, for as long as the result is kept.

    Every process that reaches the port can read and write: give an interface that only the training hosts reach.

    Args:
        host: name or address of the interface to listen on; 0.0.0.0 or :: for all.
        port: TCP port; 0 for any free one (see ``.port`` of the result).

    Raises ConfigError: the address cannot be listened on.
    """
    from torch._C._distributed_c10d import TCPStore  # takes seconds that --help does without

    listener = bound(host, port, socket.SOCK_STREAM)
    port = listener.getsockname()[1]
    # torch would listen on all interfaces, whatever the host: hand it our socket instead.
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def command(argv: Sequence[str]) -> int:
    """Serves a store until SIGINT or SIGTERM, after one line that names its address."""
    parser = argparse.ArgumentParser(
        prog="gemini store",
        description="Serve the store of a c10d rendezvous apart from the training hosts, so that the job survives the loss of any of them.",
        epilog="Then on each training host: gemini run --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT --rdzv-conf=is_host=0 ...",
    )
    parser.add_argument("--host", default="0.0.0.0", help="interface to listen on (default: all)")
    parser.add_argument("--port", type=int, default=29400, help="port to listen on; 0: any free one (default: %(default)s)")
    options = parser.parse_args(argv)
    # Blocked before the store's threads start, which inherit that: a signal can only end the wait below.
    stops = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    store = open_store(options.host, options.port)
    print(f"store ready on {options.host}:{store.port}", flush=True)
    signal.sigwait(stops)
    return 0
