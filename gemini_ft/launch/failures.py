"""The exception that ends a worker: its report for the launcher, and whether it may go away or is final. It loads next to nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import sys
import time
import traceback
import types
from collections.abc import Collection

from gemini_ft.errors import FINAL, GeminiError, PeerError
from gemini_ft.launch import notes

_STARTERS = (
    *(os.path.join(os.path.dirname(__file__), name) for name in ("script.py", "forkserver.py", "failures.py")),
    runpy.__file__,
    "<frozen runpy>",
    "<string>",  # of `gemini_ft.launch.script.starter`
)
# Bases of exceptions that come from outside of the script, and go away as they have come.
_PASSING = {"OSError", "DistError", "AgentError", "PeerError", "StorageError", "CorruptDataError", "BotoCoreError", "ClientError"}
_PASSING |= {"AcceleratorError", "KeyboardInterrupt"}
_LASTING = {"FileNotFoundError", "NotADirectoryError", "IsADirectoryError", "PermissionError"}  # of the OSErrors
_OF_PEERS = re.compile(
    # Data loaders' processes may be told to end before the rank that is stopped with them, because another has failed.
    r"nccl|gloo|connection|timed? ?out|socket|broken pipe|cuda error|another rank|killed by signal: (terminated|killed)",
    re.IGNORECASE,
)
_REPORTED = 4000  # characters of an exception that the launcher's report repeats; the worker's own stderr has all


def record(error: BaseException) -> None:
    """Writes the exception where torch's launcher looks for its report, in the form it expects.

    Whole or not at all: the launcher itself fails on a file whose writer it has killed half-way. Torch's own
    ``record`` writes such files.
    """
    error.__traceback__ = frames_of_script(error.__traceback__)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or isinstance(error, KeyboardInterrupt):
        return
    is_exit = isinstance(error, SystemExit)
    errors = [error, error.__context__] if is_exit and error.__context__ is not None else [error]  # why the script has ended itself
    message = _shortened(", after ".join("".join(traceback.format_exception_only(each)).rstrip("\n") for each in errors))
    *_, innermost = [("?", 0), *((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))]
    if isinstance(error, SyntaxError):  # of a file that no frame is in
        innermost = (error.filename or "?", error.lineno or 0)
    extra = {
        "py_callstack": message if is_exit else _shortened("".join(traceback.format_exception(error))),
        "timestamp": str(int(time.time())),
        # The entries below are read by `gemini_ft.launch.endings`, not by torch.
        "kinds": [kind.__name__ for each in errors for kind in type(each).__mro__],
        "place": "{}:{}".format(*innermost),
        "step": notes.step,
    }
    with contextlib.suppress(OSError), open(f"{path}.part", "w") as file:  # a full disk must not hide the exception
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)
        file.close()
        os.replace(f"{path}.part", path)


def begin_anew() -> None:
    """Notes that training begins: an error of before, of a notebook's cell or of the parent of this process, does not end it."""
    with contextlib.suppress(AttributeError):  # there is none, or it takes no attributes
        sys.last_value._gemini_is_over = True  # type: ignore[union-attr]


def error_at_end() -> BaseException | None:
    """The error that has ended the script, for handlers that run at its end."""
    error: BaseException | None = sys.exception() or getattr(sys, "last_value", None)
    return None if hasattr(error, "_gemini_is_over") else error


def may_go_away(kinds: Collection[str], text: str) -> bool:
    """Whether an exception, by the names of its bases and its text, comes from a host, network, store or another rank."""
    return bool(_PASSING & {*kinds} and not _LASTING & {*kinds}) or _OF_PEERS.search(text) is not None


def refusal_behind(error: BaseException | None) -> GeminiError | None:
    """The refusal of the job's state that ``error`` is, comes from, or has hidden when it was raised; None: it has another reason.

    No restart may talk it away, whether the state is that of this process or is kept by another version. What comes from outside (a
    connection, another rank, a store) hides none: it may come long after the script has handled a refusal and gone on without the state.
    """
    behind, seen = [error], set[int]()
    while behind:
        error = behind.pop()
        if error is None or id(error) in seen:
            continue
        if isinstance(error, GeminiError) and getattr(error, "exit_status", 1) == FINAL:
            return error
        seen.add(id(error))
        behind += [own_failure(error), error.__cause__, *(error.exceptions if isinstance(error, BaseExceptionGroup) else ())]
        if not _is_of_its_own(error):
            behind.append(error.__context__)
    return None


def own_failure(error: BaseException) -> BaseException:
    """The failure of this rank, where torch.distributed.checkpoint has wrapped those of all ranks into an error; else the error.

    Its CheckpointException is no Exception, and hides the end of a drained rank, a refusal, or an attempt that is over. A PeerError where
    only other ranks have failed.
    """
    kind = type(error)
    if kind.__name__ != "CheckpointException" or not kind.__module__.startswith("torch.distributed.checkpoint"):
        return error
    failures: dict[int, tuple[BaseException, object]] = getattr(error, "failures", {})
    # One that no process has sent has its traceback: without a process group its number is 0 on every rank.
    own = [each for rank, (each, _) in failures.items() if each.__traceback__ is not None or str(rank) == os.environ.get("RANK", "0")]
    texts = [f"rank {rank}: {type(each).__name__}: {text_of(each)}" for rank, (each, _) in failures.items()]
    return own[0] if own else PeerError(f"another rank has failed: {'; '.join(texts)}")


def raise_own(error: BaseException) -> None:
    """Raises `own_failure`, with the traceback of ``error``, which is being handled, if it is another error."""
    if (own := own_failure(error)) is not error:
        raise own.with_traceback(error.__traceback__)


def _is_of_its_own(error: BaseException) -> bool:
    """Whether an error is judged by itself, whatever was being handled when it was raised: restarts are for it, or it has a status."""
    has_status = isinstance(error, GeminiError) and hasattr(error, "exit_status")
    text = text_of(error).replace(text_of(error.__context__), "")  # which it may repeat
    return has_status or may_go_away([kind.__name__ for kind in type(error).__mro__], text)


def text_of(error: BaseException | None) -> str:
    """The error's text; empty if it has none that can be had."""
    try:
        return str(error)
    except Exception:
        return ""


def _shortened(text: str) -> str:
    """The text for a report, without its middle if it is long."""
    left_out = len(text) - _REPORTED
    if left_out <= 0:
        return text
    return f"{text[: _REPORTED // 2]}\n... {left_out} characters, which the worker has written to its stderr ...\n{text[-_REPORTED // 2 :]}"


def frames_of_script(frames: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the frames between the interpreter and the script."""
    while frames is not None and frames.tb_frame.f_code.co_filename in _STARTERS:
        frames = frames.tb_next
    return frames
