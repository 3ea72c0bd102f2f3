"""A worker in reserve: a spare's, which runs its script up to `gemini_ft.run` while it waits. Standard library only.

It has no rank yet. A script that asks for one before `gemini_ft.run` would go on with a wrong one: the worker ends there, before it has
trained anything, and another one is started once the host is needed. What asks elsewhere, in a process that it has started, say, finds no
number there.
"""

from __future__ import annotations

import os
import sys

RESERVE = "GEMINI_RESERVE"  # in the environment of a worker in reserve
# Variables that torch's launcher gives its workers by the place of their host in a round.
_ASSIGNED = {f"{of}_{what}" for of in ("GROUP", "ROLE") for what in ("RANK", "WORLD_SIZE")} | {"RANK", "WORLD_SIZE", "ROLE_NAME"}
_ASSIGNED |= {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"}
_ASSIGNED |= {"TORCHELASTIC_USE_AGENT_STORE"}
_UNKNOWN = "in reserve"  # the value of each of them


class _WithoutRank(os._Environ):  # type: ignore[type-arg]
    def __getitem__(self, key: str) -> str:
        if key in _ASSIGNED and self._data.get(self.encodekey(key), _UNKNOWN.encode()) == _UNKNOWN.encode():  # type: ignore[attr-defined]
            print(f"gemini run: a worker in reserve ends, as the script asks for {key} before gemini_ft.run", file=sys.stderr, flush=True)
            os._exit(1)
        value: str = super().__getitem__(key)
        return value


def variables(place: int, places: int) -> dict[str, str]:
    """The variables of a worker in reserve besides its launcher's; ``place``: its local rank, of ``places``."""
    return {**dict.fromkeys(_ASSIGNED, _UNKNOWN), "LOCAL_RANK": str(place), "LOCAL_WORLD_SIZE": str(places), RESERVE: "1"}


def begin() -> None:
    """Watches from now on what the script asks for, in a worker in reserve."""
    if RESERVE in os.environ:
        os.environ.__class__ = _WithoutRank
        os.register_at_fork(after_in_child=_stop_watching)


def end() -> bool:
    """Ends the watch, as the script has come to `gemini_ft.run`; returns whether this worker is in reserve."""
    if os.environ.pop(RESERVE, None) is None:
        return False
    _stop_watching()
    for name in _ASSIGNED:
        if os.environ.get(name) == _UNKNOWN:
            del os.environ[name]
    return True


def _stop_watching() -> None:
    os.environ.__class__ = os._Environ
