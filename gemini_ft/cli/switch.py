"""``gemini switch``: a process that adds up the gradients of other hosts, as a programmable switch in the network would."""

from __future__ import annotations

import argparse
import json
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace

from gemini_ft.agent.lifecycle import leave_no_core
from gemini_ft.cli.planning import nbytes
from gemini_ft.config import load_config
from gemini_ft.errors import ConfigError
from gemini_ft.sync.switch_server import Limits, SwitchServer
from gemini_ft.wire.network import bound
from gemini_ft.wire.trust import switch_key


def command(argv: Sequence[str]) -> int:
    """Serves until SIGINT or SIGTERM, after one line that names the address; then prints a line of JSON with all counts."""
    limits = Limits()
    parser = argparse.ArgumentParser(
        prog="gemini switch",
        description="Add up the gradients of other hosts, for sync schemes that go through a switch. Needs GEMINI_SECRET_FILE.",
        epilog='Then in a rule of the gradient pipeline: {"params": "*", "sync": {"scheme": "switchml", "switch": "HOST:PORT"}}',
    )
    parser.add_argument("--host", default="0.0.0.0", help="interface to listen on (default: all IPv4 ones)")
    parser.add_argument("--port", type=int, default=29600, help="UDP port to listen on; 0: any free one (default: %(default)s)")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="which part of the slots, with N switches (default: %(default)s)")
    parser.add_argument("--memory", type=nbytes, default="256MiB", help="for the slots of all jobs (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=limits.jobs, help="at once (default: %(default)s)")
    parser.add_argument(
        "--idle", type=float, default=limits.idle, help="seconds after which a silent job makes room for another (default: %(default)g)"
    )
    options = parser.parse_args(argv)
    leave_no_core()  # with the key
    part, parts = _part(options.part)
    limits = replace(limits, memory=int(options.memory), jobs=options.jobs, idle=options.idle)
    with bound(options.host, options.port, socket.SOCK_DGRAM) as listening:
        server = SwitchServer(listening, switch_key(load_config()), limits, part, parts)
        stop, stopped = socket.socketpair()
        stopped.setblocking(False)
        signal.set_wakeup_fd(stopped.fileno())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        print(f"switch ready on {options.host}:{listening.getsockname()[1]}, part {part + 1} of {parts}", flush=True)
        server.serve(stop)
        print(json.dumps(server.report()))
    return 0


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise ConfigError(f"--part {text}: must be K/N with K from 1 to N, such as 2/4 for the second of four switches")
    return int(number) - 1, int(count)
