"""``gemini hosts``: the hosts that a run has put out of use, and the way back."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

from gemini_ft.core.words import table
from gemini_ft.errors import ConfigError
from gemini_ft.launch.out_of_use import out_of_use, wish_back

_SECONDS = 10.0  # for a launcher to take a host back
_POLL = 0.1  # seconds


def command(arguments: Sequence[str]) -> int:
    """Lists the hosts, or takes one back; to be called on a host on which `gemini run` is at work, or waits.

    Raises:
        ConfigError: no run is named, or the host is not out of use.
    """
    description = "List the hosts that a run has put out of use, as its `gemini run` on this host knows them, or take one back."
    parser = argparse.ArgumentParser(prog="gemini hosts", description=description)
    parser.add_argument("--run-id", default=os.environ.get("GEMINI_RUN_ID"), help="run id (default: GEMINI_RUN_ID)")
    parser.add_argument("--take-back", metavar="HOST", help="the next `gemini run` on this host may join again")
    options = parser.parse_args(arguments)
    if not options.run_id:
        raise ConfigError("which run? give --run-id or set GEMINI_RUN_ID (gemini ps lists the runs of this host)")
    found, name = out_of_use(options.run_id), options.take_back
    if name is None:
        print(table([("host", "why"), *sorted(found.items())]) if found else f"run {options.run_id} has put no host out of use")
        return 0
    if name not in found:
        raise ConfigError(f"--take-back {name!r}: not out of use; those are: {', '.join(sorted(found)) or 'none'}")
    wish_back(options.run_id, name)
    end = time.monotonic() + _SECONDS
    while name in out_of_use(options.run_id):
        if time.monotonic() > end:
            print(f"no `gemini run` of {options.run_id} is at work here that would take host {name} back: ask on another host of the job")
            return 1
        time.sleep(_POLL)
    print(f"host {name} is taken back: the next `gemini run` there may join")
    return 0
