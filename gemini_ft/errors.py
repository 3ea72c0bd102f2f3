"""Every exception that gemini-ft raises, split by the party that has to act.

    GeminiError
    ├── ConfigError               the user: an option is wrong
    │   ├── SecretError           the run secret is missing, unreadable, or differs between hosts
    │   ├── RunAliveError         the run is at work already, started by somebody else
    │   └── MemoryBudgetError     the state does not fit the hosts' memory budget
    ├── StateError                the user: the training state is not what it must be
    │   ├── UnsupportedStateError a tensor or object cannot be captured; named
    │   ├── LayoutMismatchError   another model under the same run id
    │   ├── WorldSizeError        the copies were made by another number of ranks
    │   ├── ReplicaDivergedError  ranks that must hold the same bytes do not
    │   ├── ReplayError           an iteration that was computed again has other bits
    │   ├── AveragingError        gradients are averaged no more, because another rank or the network has failed
    │   └── ConcurrentWriteError  a tensor was written while it was being copied
    ├── RecoveryError             the operator: nothing can be resumed although it was required
    ├── CorruptDataError          a checksum does not match; another copy is tried where there is one
    ├── AgentError                the host's agent is gone, refuses, or does not answer
    │   ├── AgentTimeoutError     no answer within a stated time
    │   ├── SupersededError       this worker belongs to an older incarnation of the job
    │   └── ProtocolError         the agent is of another version of gemini-ft
    ├── PeerError                 another host's agent is gone, refuses, or does not answer
    └── StorageError              the slow tier cannot be read or written
        ├── FormatError           the data are sound, but of a format that this version does not read
        ├── ObjectGoneError       an object was listed, but is not there any more
        └── StorageUnclearError   it cannot be told now what there is to resume; nothing has been begun

A message says what was given, what is allowed, and the way out. Where a class has an ``exit_status`` other than 1, that is how a
worker of ``gemini run`` ends with such an error, and ``gemini run`` itself, which does not try again. A state that is refused stays
refused: a process that begins anew may no longer see what is wrong with it.
"""

from __future__ import annotations

_MOST = 8000  # characters of a text
FINAL = 70  # EX_SOFTWARE: the exit status for a state that no restart may talk away


def printable(text: str) -> str:
    """A text in which storage, peers or files have had a say, as one line for a log or a terminal.

    Escapes what moves a cursor, turns the direction of writing or begins another line, and leaves out the middle of a very long text.
    """
    if len(text) > _MOST:
        text = f"{text[: _MOST // 2]} ... {len(text) - _MOST} characters are left out ... {text[-_MOST // 2 :]}"
    # Not by a pattern for the blanks around the end of a line: its time grows with the square of their number.
    line = " ".join(filter(None, map(str.strip, text.split("\n")))) if "\n" in text else text
    return line if line.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


class GeminiError(Exception):
    """Base of all errors of this package, whose text is `printable`."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(GeminiError):
    """An option is wrong; the message names it, its value, and what is allowed."""


class SecretError(ConfigError):
    """The run secret is missing, readable by others, or not the same on all hosts."""


class RunAliveError(ConfigError):
    """Another launch is at work on this run; the message names it, and the way to a run of one's own."""

    exit_status = 75  # EX_TEMPFAIL


class MemoryBudgetError(ConfigError):
    """The state does not fit the memory budget; the message has needed, allowed and available bytes."""


class StateError(GeminiError):
    """The training state is not what it must be for an exact snapshot."""

    exit_status = FINAL


class UnsupportedStateError(StateError):
    """A tensor or object cannot be captured exactly; the message names it."""


class LayoutMismatchError(StateError):
    """The snapshot belongs to a model or optimizer of another shape."""


class WorldSizeError(StateError):
    """The snapshot was made by another number of ranks."""

    exit_status = 1  # the missing hosts may come back


class ReplicaDivergedError(StateError):
    """Ranks that must hold the same bytes hold different ones."""

    exit_status = 1  # a bit may have flipped: what was committed before is sound


class ReplayError(StateError):
    """A second computation gave other bits, or something in memory has changed that nobody wrote."""

    exit_status = 1  # what was committed before is sound


class AveragingError(StateError):
    """Gradients are averaged no more: another rank has failed, the network has, or the ranks have drifted apart."""

    exit_status = 1  # the failure of another, which a restart mends


class ConcurrentWriteError(StateError):
    """A tensor was written while its copy was under way; that snapshot was discarded."""

    exit_status = 1


class RecoveryError(GeminiError):
    """Resuming was required and is not possible."""


class CorruptDataError(GeminiError):
    """Bytes do not match their checksum."""


class AgentError(GeminiError):
    """The host's agent is gone or refused a request."""


class AgentTimeoutError(AgentError):
    """The host's agent did not answer in time."""


class SupersededError(AgentError):
    """A newer incarnation of the job has taken over; this process must stop."""


class ProtocolError(AgentError):
    """Another version of gemini-ft has started the agent, whose memory this one cannot use; the message has the ways out."""

    exit_status = FINAL


class PeerError(GeminiError):
    """Another host's agent is unreachable, refused, or did not answer in time."""


class StorageError(GeminiError):
    """The slow tier could not be read or written."""


class ObjectGoneError(StorageError):
    """An object that was listed is not there any more, because retention or another process has deleted it."""


class FormatError(StorageError):
    """An object is sound, and of a format that this version of gemini_ft does not read."""

    exit_status = FINAL


class StorageUnclearError(StorageError):
    """Storage does not say now what there is to resume, and memory does not have it; the job must not begin without it."""

    exit_status = 74  # EX_IOERR
