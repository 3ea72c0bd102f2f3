"""Takes away, in workers of ``gemini run``, locks that killed workers have left where torch builds extensions, DeepSpeed's among them.

Torch makes an empty file in the folder in which it builds or loads an extension and deletes it afterwards. A process that finds the file
waits, without an end, until it is gone: a worker that is killed in between would hold every later start of the job. So workers write
into the file which process they are, and one that finds the file of a dead process of this machine deletes it. About a file in which
nothing is written nothing is known: it stays, and a warning names it. ``GEMINI_WRAP=0`` leaves torch as it is.

Standard library only: every worker runs this before its script, whatever the script is.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gemini_ft.hosts import began, machine_id
from gemini_ft.launch.hooks import extend

_log = logging.getLogger("gemini_ft")
_OLD_SECONDS = 60.0  # most builds have ended by then


def install() -> None:
    """Extends torch's lock as soon as it is there. May be called any number of times."""
    extend("torch.utils.file_baton", "FileBaton.try_acquire", _acquire)


def _acquire(original: Callable[[Any], bool], baton: Any) -> bool:
    path = Path(baton.lock_file_path).absolute()
    is_ours = original(baton) or (_took_away(path) and original(baton))
    if is_ours:
        with contextlib.suppress(OSError), open(path, "r+") as file:  # an empty file is a lock as well
            file.write(f"{_place()} {os.getpid()} {began(os.getpid())}\n")
    return is_ours


def _took_away(path: Path) -> bool:
    """Whether there is no such lock any longer, because its owner is dead."""
    try:
        with _alone_in(path.parent):
            if not (words := path.read_text().split()):
                if (age := time.time() - path.stat().st_mtime) > _OLD_SECONDS:
                    _log.warning(
                        "torch waits for the lock %s, which is %.0f s old and does not say which process has made it. If that was killed, "
                        "and no other one builds an extension there, delete the file: nothing else will",
                        path,
                        age,
                    )
            elif len(words) == 4 and " ".join(words[:2]) == _place() and str(began(int(words[2]))) != words[3]:
                path.unlink()
                _log.warning("%s is taken away: process %s was killed while it built or loaded an extension there", path, words[2])
                return True
    except FileNotFoundError:
        return True  # let go of meanwhile
    except (OSError, ValueError):
        pass  # torch will wait for it, and say what is wrong
    return False


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Inside, no other worker deletes a lock there: it might be the new one."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _place() -> str:
    """Where process ids mean what they mean here: the machine, and the namespace in it."""
    return f"{machine_id()} {os.stat('/proc/self/ns/pid').st_ino}"
