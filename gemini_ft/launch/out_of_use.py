"""Word that launchers of a run and ``gemini hosts`` leave each other in files of this user on a machine: which hosts are out of use."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote

from gemini_ft.errors import ConfigError
from gemini_ft.wire.private import runtime_folder

_LIST = "out-of-use.json"
_BACK = "take-back-"  # and the name of a host


def out_of_use(run: str) -> dict[str, str]:
    """Host -> why it is out of use, as launchers of a run on this machine have seen it last."""
    try:
        found = json.loads((_folder(run) / _LIST).read_text())
    except (OSError, ValueError, ConfigError):
        return {}
    return {str(name): str(why) for name, why in found.items()} if isinstance(found, dict) else {}


def publish(run: str, hosts: Mapping[str, str]) -> None:
    """Replaces what `out_of_use` returns."""
    folder = _folder(run, make=True)
    new = folder / f"new-{os.getpid()}"
    new.write_text(json.dumps(dict(hosts)))
    new.replace(folder / _LIST)


def wish_back(run: str, name: str) -> None:
    """Has the launchers of a run on this machine take a host back into the job."""
    (_folder(run, make=True) / f"{_BACK}{quote(name, safe='')}").touch()


def wished_back(run: str, names: Iterable[str]) -> set[str]:
    """Which of these hosts are wished back. The wishes for others are over, and are forgotten."""
    wishes = {path.name: path for path in _folder(run).glob(f"{_BACK}*")}
    back = {name for name in names if wishes.pop(f"{_BACK}{quote(name, safe='')}", None) is not None}
    for path in wishes.values():
        path.unlink(missing_ok=True)
    return back


def _folder(run: str, *, make: bool = False) -> Path:
    folder = runtime_folder() / f"hosts-{quote(run, safe='')}"
    if make:
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder
