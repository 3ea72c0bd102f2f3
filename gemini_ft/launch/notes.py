"""Workers' notes to their launcher: words in a file that the launcher alone keeps, so that it is gone with it. Standard library only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote

NOTES = "GEMINI_NOTES_FILE"  # names the file in the worker's environment
FIXED = "fixed"  # the job's state can be loaded by the same number of ranks only
PROTECTED = "protected"  # this worker asks to join a run; if it must not, its error says why
REFUSED = "refused"  # this worker ends with an error that no restart may talk away
LACKS = "lacks"  # the state is not whole without hosts that are absent, and this host is none of those that had it
DRAINED = "drained"  # this worker has left after a step that is committed, because its host is drained
DRAINED_STATUS = 85  # ERESTART; with which a worker leaves then, and its launcher

_TOTAL = "total="  # and the number of optimizer steps of the whole job
_HOSTS = "hosts="  # and a stream, and the names of the hosts that took part when something of it was committed, all as in URLs

step: int | None = None  # iterations that this worker's newest stream has done; None: it has none


def say(word: str) -> None:
    """Tells ``gemini run``, if that has started this worker."""
    if path := os.environ.get(NOTES):
        with contextlib.suppress(OSError), open(path, "a") as file:  # the launcher is gone, and with it the job
            file.write(f"{word}\n")


def say_total(steps: int) -> None:
    """Tells ``gemini run`` how many optimizer steps the whole job has; what is said last counts."""
    say(f"{_TOTAL}{steps}")


def say_committed(run: str, stream: str, hosts: Collection[str]) -> None:
    """Tells ``gemini run``, if it does not know yet, that something of a stream was committed, or resumed, and which hosts have it."""
    if {*hosts} == hosts_of_commits(run, stream):
        return
    say(",".join([_HOSTS + _name(run, stream), *map(quote, sorted(hosts))]))


def hosts_of_commits(run: str, stream: str) -> frozenset[str]:
    """The hosts of which this host's workers of this launch have said last that they have something of a stream; none: nobody has."""
    try:
        lines = Path(os.environ[NOTES]).read_text().splitlines()
    except (KeyError, OSError, ValueError):
        return frozenset()
    about = [line.split(",")[1:] for line in lines if line.startswith(f"{_HOSTS}{_name(run, stream)},")]
    return frozenset(map(unquote, about[-1])) if about else frozenset()


def _name(run: str, stream: str) -> str:
    return quote(f"{run}/{stream}")


class Notes:
    """The launcher's end."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("gemini-notes", os.MFD_CLOEXEC)

    @property
    def path(self) -> str:
        """For processes of this user on this machine, as long as this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def have(self, word: str) -> bool:
        """Whether a worker has said it."""
        return word in self._words()

    def count(self, word: str) -> int:
        """How often workers have said it."""
        return self._words().count(word)

    @property
    def total(self) -> int | None:
        """The optimizer steps of the whole job, once a worker has said how many they are."""
        said = [word for word in self._words() if word.startswith(_TOTAL)]
        return int(said[-1].removeprefix(_TOTAL)) if said else None

    def _words(self) -> list[str]:
        return os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode().split()

    def close(self) -> None:
        os.close(self._fd)


@contextmanager
def notes_of_workers() -> Iterator[Notes]:
    """The notes of workers that are started inside."""
    notes = Notes()
    os.environ[NOTES] = notes.path
    try:
        yield notes
    finally:
        os.environ.pop(NOTES, None)
        notes.close()
