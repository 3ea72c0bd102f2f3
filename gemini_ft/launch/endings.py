"""Failures that are final: what another attempt would only repeat ends the job, with a status of its own.

A worker may say so itself, by its exit status, or by a note where the others fail of its end first. And where the same exception comes at
the same place of the same step as in the attempt before, it will come again: training is repeated bit for bit. What hosts, networks and
stores do to a worker is never taken for that.
"""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from gemini_ft.core.words import in_words
from gemini_ft.errors import FINAL, RunAliveError, StorageUnclearError
from gemini_ft.launch.drain import LEFT, HostDrain, account_of, await_workers
from gemini_ft.launch.grace import await_news
from gemini_ft.launch.notes import DRAINED, PROTECTED, REFUSED, Notes
from gemini_ft.launch.replaced import replaced
from gemini_ft.launch.script import may_go_away

_log = logging.getLogger(__name__)

ENDED_ELSEWHERE = 69  # EX_UNAVAILABLE
NOT_STORED = 73  # EX_CANTCREAT
OVERTAKEN = 76  # EX_PROTOCOL
_BY_WORKERS = {StorageUnclearError.exit_status, RunAliveError.exit_status}
UNPROTECTED_SECONDS = 120.0
_OVER = (WorkerState.FAILED, WorkerState.SUCCEEDED)


class Endings:
    """The failures of one job's workers on this host.

    Attributes:
        status: with which the job ends for good; 0: not yet.
        shown: the failure that is final, of one worker; the others' failures mostly follow from it, or are the same.
        has_begun: whether workers have been started.
        has_drained: whether a worker has left after a committed step; where a drain has begun, workers may as well have failed before.
    """

    def __init__(self, notes: Notes, run: str) -> None:
        self.status = 0
        self.shown: ProcessFailure | None = None
        self.has_begun = self.has_drained = False
        self._notes, self._run = notes, run
        self._before: set[tuple[str, str, str, str]] = set()
        self._since = time.monotonic()
        self._has_warned = False

    def judge(self, failures: Iterable[ProcessFailure]) -> bool:
        """Workers have failed; whether that is final."""
        failed = list(failures)
        self.status = next((failure.exitcode for failure in failed if failure.exitcode in _BY_WORKERS), 0)
        found = {place: failure for failure in failed if (place := _place(failure.error_file_data)) is not None}
        repeated, self._before = found.keys() & self._before, {*found}
        if not self.status and self._notes.have(REFUSED):
            self.status = FINAL
            self.shown = next((failure for failure in failed if failure.exitcode == FINAL), None)
            _log.error("the state of the job was refused, and no restart would change that. %s", self._kept())
        elif not self.status and repeated:
            self.status = FINAL
            kind, _, where, step = first = min(repeated)
            self.shown = found[first]
            when = {"": "", "0": ", before the first step"}.get(step, f", after step {step}")
            text = "the same %s for the second time%s, at %s: another restart would only repeat it. %s"
            _log.error(text, kind, when, where, self._kept())
        self.look(has_failed=True)
        return bool(self.status)

    def look(self, has_failed: bool = False) -> None:
        """Says once that nothing is protected, when that has cost something or workers have had time to join a run."""
        if not self._has_warned and (has_failed or time.monotonic() - self._since > UNPROTECTED_SECONDS):
            self._has_warned = True
            if not self._notes.have(PROTECTED):
                _log.warning(
                    "nothing in this job is protected%s: no worker has joined a run, so a restart begins at the beginning. %s loop needs a "
                    'gemini_ft.Checkpointer, Lightning strategy="gemini", transformers\' Trainer a gemini_ft.huggingface.GeminiCallback, '
                    'and DeepSpeed a "gemini" section in its configuration; see the README',
                    "" if has_failed else f" after {UNPROTECTED_SECONDS:g} s",
                    "Unless the script has failed before it came that far: a" if has_failed else "A",
                )

    def _kept(self) -> str:
        """Tells what the job leaves behind."""
        document = account_of(self._run)
        if not document and self._notes.have(PROTECTED):
            return "What memory keeps is not known, as no agent answers on this host"
        committed = {name: stream["committed"] for name, stream in document.get("streams", {}).items() if stream["committed"]}
        if not committed:
            return "Nothing was recorded."
        steps = ", ".join(f"step {step} of {name}" if len(committed) > 1 else f"step {step}" for name, step in committed.items())
        return (
            f"Memory keeps {steps} for {in_words(document['linger'])}: the same command goes on from there, and "
            f"`gemini leave --run-id {self._run}` forgets it"
        )


def _place(data: Any) -> tuple[str, str, str, str] | None:
    """Exception, its text without numbers, where it was raised, and after which step; None if it may go away."""
    message = data.get("message") if isinstance(data, dict) else None
    about = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    kinds, text = about.get("kinds"), str(message.get("message", "")) if isinstance(message, dict) else ""
    if not kinds:
        return None
    if may_go_away(kinds, text):
        return None
    return kinds[0], re.sub(r"0x[0-9a-f]+|\d+", "#", text), about["place"], "" if about["step"] is None else str(about["step"])


@contextmanager
def final_endings(notes: Notes, run: str, drain: HostDrain, *, interval: float) -> Iterator[Endings]:
    """Inside, torch's launcher restarts no workers whose failure is final, and none of a host that is drained.

    Args:
        notes: of this host's workers.
        run: of which they are.
        drain: of this host.
        interval: seconds after which torch's launcher looks at the workers though there is no news of them.
    """
    original, endings = LocalElasticAgent._monitor_workers, Endings(notes, run)

    def monitor(agent: LocalElasticAgent, group: WorkerGroup) -> RunResult:
        endings.has_begun = True
        await_news(agent._pcontext, interval)
        if notes.have(DRAINED):
            await_workers(agent._pcontext)
        result: RunResult = original(agent, group)
        # A script that takes the end of a drained rank for its own has not finished, either: as a success it would end the whole job.
        if (result.is_failed() and drain.begun) or (result.state in _OVER and notes.have(DRAINED)):
            drain.await_uploads()
            endings.status, endings.has_drained = LEFT, notes.have(DRAINED)
            raise SignalException("this host is drained", signal.SIGTERM)  # the one end after which the others' rendezvous goes on
        if result.is_failed() and endings.judge(result.failures.values()):
            agent._remaining_restarts = 0
        elif result.state == WorkerState.HEALTHY:
            endings.look()
        return result

    with replaced(LocalElasticAgent, _monitor_workers=monitor):
        yield endings
