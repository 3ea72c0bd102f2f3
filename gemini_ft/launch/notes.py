"""Workers' notes to their launcher: words in a file that the launcher alone keeps, so that it is gone with it. Standard library only."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote

NOTES = "GEMINI_NOTES_FILE"  # names the file in the worker's environment
FIXED = "fixed"  # the job's state can be loaded by the same number of ranks only
PROTECTED = "protected"  # this worker asks to join a run; if it must not, its error says why
REFUSED = "refused"  # this worker ends with an error that no restart may talk away
WAITS = "waits"  # this worker has found that the state is not whole without hosts that are absent, and is about to fail
LACKS = "lacks"  # the state is not whole without hosts that are absent, and this host is none of those that had it
STORES = "stores"  # what the job commits last is to be in storage when it ends
DRAINED = "drained"  # this worker has left after a step that is committed, because its host is drained
SUSPECTED = "suspected"  # this worker was named as one with other results than it should have
DRAINED_STATUS = 85  # ERESTART; with which a worker leaves then, and its launcher

_ENDED = "ended="  # and the rank of a worker whose script has ended with status 0
_TOTAL = "total="  # and the number of optimizer steps of the whole job
_HOSTS = "hosts="  # and a stream, and the names of the hosts that took part when something of it was committed, all as in URLs
_TOLD = "told="  # and the same, which the launcher has from others

step: int | None = None  # iterations that this worker's newest stream has done; None: it has none


def say(word: str) -> None:
    """Tells ``gemini run``, if that has started this worker."""
    if path := os.environ.get(NOTES):
        with contextlib.suppress(OSError), open(path, "a") as file:  # the launcher is gone, and with it the job
            file.write(f"{word}\n")


def say_total(steps: int) -> None:
    """Tells ``gemini run`` how many optimizer steps the whole job has; the last value counts."""
    say(f"{_TOTAL}{steps}")


def say_ended() -> None:
    """Tells ``gemini run`` that this worker's script has ended with status 0."""
    say(f"{_ENDED}{os.environ.get('RANK', '')}")


def say_committed(run: str, stream: str, hosts: Collection[str]) -> None:
    """Tells ``gemini run``, if it does not know yet, that something of a stream was committed, or resumed, and which hosts have it."""
    word = ",".join([_HOSTS + _name(run, stream), *map(quote, sorted(hosts))])
    if _of(_words_here()).get(_name(run, stream)) != word:
        say(word)


def hosts_of_commits(run: str, stream: str) -> frozenset[str]:
    """The hosts of which workers of this launch have said last that they have something of a stream; empty: none has."""
    return frozenset(map(unquote, _of(_words_here()).get(_name(run, stream), "").split(",")[1:]))


def _words_here() -> list[str]:
    """All words in the notes file: of the workers of this host, and of its launcher."""
    try:
        return Path(os.environ[NOTES]).read_text().split()
    except (KeyError, OSError, ValueError):
        return []


def _of(words: Iterable[str]) -> dict[str, str]:
    """Stream -> what was said last of the hosts that have something of it."""
    said = [word for word in words if word.startswith((_HOSTS, _TOLD))]
    return {word.partition(",")[0].partition("=")[2]: word for word in said}


def _name(run: str, stream: str) -> str:
    return quote(f"{run}/{stream}", safe="")


class Notes:
    """The launcher's end."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("gemini-notes", os.MFD_CLOEXEC)

    @property
    def path(self) -> str:
        """For processes of this user on this machine, as long as this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def have(self, word: str) -> bool:
        return word in self._words()

    def count(self, word: str) -> int:
        return self._words().count(word)

    def keeps(self) -> bool:
        """Whether a worker has said that it has something that was committed."""
        return any(word.startswith(_HOSTS) for word in self._words())

    def kept(self) -> dict[str, str]:
        """Stream -> the hosts that have what was committed of it last, for `learn` of another launcher; pickled once for all streams."""
        return {name: sys.intern(word.partition(",")[2]) for name, word in _of(self._words()).items()}

    def said(self) -> dict[str, str]:
        """The same, as far as workers here have said it since `learn`."""
        return {name: word.partition(",")[2] for name, word in _of(self._words()).items() if word.startswith(_HOSTS)}

    def learn(self, kept: Mapping[str, str]) -> None:
        """Takes in what other launchers know of that; what workers here have said before is older."""
        with open(self.path, "a") as file:  # where workers write, too
            file.writelines(f"{_TOLD}{name},{about}\n" for name, about in kept.items())

    @property
    def ended(self) -> list[str]:
        """The ranks of all workers whose scripts have ended with status 0, the latest last."""
        return [word.removeprefix(_ENDED) for word in self._words() if word.startswith(_ENDED)]

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
    notes = Notes()
    os.environ[NOTES] = notes.path
    try:
        yield notes
    finally:
        os.environ.pop(NOTES, None)
        notes.close()
