"""How a job ends on this host: by a drain, by a failure that is final, or by one that another attempt may get over.

At a signal the host is drained: its workers finish their step, commit it, and end; only then does the launcher, with a status that says so.
The wish goes by way of the host's agent and not by a signal to the workers, so that handlers of scripts and frameworks, which stop a
job in their own ways, are left for the case that this one does not come to an end in time.

What another attempt would only repeat ends the job, with a status of its own. A worker may say so itself, by its exit status, or by a note
where the others fail of its end first. And where the same exception comes at the same place of the same step as in the attempt before, it
will come again: training is repeated bit for bit. What hosts, networks and stores do to a worker is never taken for that.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from tempfile import mkdtemp
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as torch_api
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from gemini_ft import failpoints
from gemini_ft.agent import lifecycle
from gemini_ft.core.words import in_words, named
from gemini_ft.errors import FINAL, AgentTimeoutError, ConfigError, GeminiError, RunAliveError, StorageUnclearError
from gemini_ft.hosts import began, host_id, lasting_names
from gemini_ft.launch import grace
from gemini_ft.launch.failures import may_go_away
from gemini_ft.launch.health import HostHealth
from gemini_ft.launch.notes import DRAINED, DRAINED_STATUS, PROTECTED, REFUSED, WAITS, Notes
from gemini_ft.launch.replaced import replaced
from gemini_ft.wire.private import newest_first, runtime_folder
from gemini_ft.wire.worker_messages import AskDrain, Draining, GetStatus, Status, TellSpares, ToWorker

LEFT = DRAINED_STATUS
ENDED_ELSEWHERE = 69  # EX_UNAVAILABLE
NOT_STORED = 73  # EX_CANTCREAT
OVERTAKEN = 76  # EX_PROTOCOL
_BY_WORKERS = {StorageUnclearError.exit_status, RunAliveError.exit_status}
UNPROTECTED_SECONDS = 120.0
_STRAGGLERS = 10.0  # seconds for the other workers of a host, once one has left
_RESTART = 10.0  # seconds for workers that are being restarted to join their run once more
_POLL = 0.1  # seconds
_UNHEARD_SECONDS = 0.5  # for the agent to say which hosts it has lost: other launchers wait for this one
_HANG_SECONDS = 0.5  # for the agent to say why workers were killed: a restart waits for it
_OVER = (WorkerState.FAILED, WorkerState.SUCCEEDED)
_WELL = "gemini/well"  # in the store of an attempt: the number of hosts whose workers have all ended well
_REPORTS = "launch-"  # how the names of folders for reports begin
_KEPT = 20  # folders for reports of jobs that have failed
_log = logging.getLogger(__name__)


class HostDrain:
    """The drain of this host, which a signal to the launcher begins.

    Args:
        signum: the signal; None: only workers, and the host's agent, can be told.
        have_joined: whether workers of this launcher have joined the run: if there are none now, they are being restarted.
    """

    def __init__(self, run: str, seconds: float, signum: signal.Signals | None, have_joined: Callable[[], bool] = lambda: False) -> None:
        self._run, self._seconds, self._signum, self._have_joined = run, seconds, signum, have_joined
        self._begun_at: float | None = None
        self._has_heard = self._given_up = False
        self._over = threading.Event()
        self._is_heeded = False
        self._sending = threading.Lock()  # held while the signal is sent once more, and while `_is_heeded` changes

    @property
    def begun(self) -> bool:
        """Whether workers have been told, and are still given time."""
        return self._begun_at is not None and not self._given_up

    def heard(self) -> bool:
        """Takes the signal, on the thread that hears all of them; False: it ends the job as SIGTERM does."""
        if self._given_up:
            return False
        is_first, self._has_heard = not self._has_heard, True
        if is_first:
            self.heard_once()
        else:
            self._give_up("the signal has come a second time")
        return True

    def heard_once(self) -> None:
        """Begins the drain without the signal, unless it has begun."""
        if self._begun_at is None:
            self._begun_at = time.monotonic()
            threading.Thread(target=self._tell, name="gemini-drain", daemon=True).start()

    def _tell(self) -> None:
        try:
            answer = self._asked()
        except (GeminiError, OSError) as error:
            self._give_up(str(error))
            return
        if not isinstance(answer, Draining) or not answer.workers:
            self._give_up("no worker of this host has joined a run, so there is nothing to finish")
            return
        _log.warning("this host is drained: its workers end after a step that is committed, within %g s", self._seconds)
        if not self._over.wait(self._seconds):
            self._give_up(f"no step has been committed within {self._seconds:g} s (drain_seconds)")

    def _asked(self) -> ToWorker | None:
        """The agent's answer. One that hangs is killed by its workers, and its successor asked: there is time for that.

        The same goes for workers that are being restarted. From then on the agent tells all those that this launcher starts.
        """
        begun = time.monotonic()
        while True:
            try:
                answer = lifecycle.ask(self._run, host_id(), AskDrain())
                is_told = isinstance(answer, Draining) and answer.workers
                if is_told or not self._have_joined() or time.monotonic() > begun + min(_RESTART, self._seconds):
                    return answer
            except AgentTimeoutError:
                if time.monotonic() > begun + self._seconds:
                    raise
            if self._over.wait(_POLL):
                return None

    def _give_up(self, why: str) -> None:
        with self._sending:
            if not self._is_heeded:
                return  # nobody takes the signal any more: it would end this process
            _log.warning("ending the workers without a drain: %s", why)
            self._given_up = True
            assert self._signum is not None
            os.kill(os.getpid(), self._signum)  # once more, and this time it is passed on

    def _at_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._given_up:
            getattr(torch_api, grace.TO_HANDLER)(signal.SIGTERM, frame)

    def await_uploads(self) -> None:
        """Returns when this host's part of the upload that the drain has asked for is over, or the time is. The workers have left."""
        self._over.set()
        end = (self._begun_at or time.monotonic()) + self._seconds
        while uploading := _uploading(self._run):
            if time.monotonic() > end:
                _log.warning("left before the upload of %s was over: %g s (drain_seconds) have passed", ", ".join(uploading), self._seconds)
                return
            time.sleep(_POLL)

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Inside, the signal begins the drain. To be entered by the main thread."""
        if self._signum is None:
            yield
            return
        before = signal.signal(self._signum, self._at_signal)
        grace.watched[self._signum] = self.heard
        self._is_heeded = True
        try:
            yield
        finally:
            self._over.set()
            with self._sending:
                self._is_heeded = False
            del grace.watched[self._signum]
            signal.signal(self._signum, before)


def account_of(run: str, seconds: float = lifecycle.ANSWER_SECONDS) -> dict[str, Any]:
    """The account that this host's agent gives of a run, as `gemini status --json` has it; empty: there is none to be had in that time."""
    try:
        answer = lifecycle.ask(run, host_id(), GetStatus(), seconds)
        return dict(json.loads(answer.document)) if isinstance(answer, Status) else {}
    except (GeminiError, OSError, ValueError):
        return {}


def unheard(run: str) -> set[str]:
    """The lasting names of the hosts of which this host's agent hears nothing, if it leads the commits of a run."""
    streams = account_of(run, _UNHEARD_SECONDS).get("streams", {}).values()
    return {name for stream in streams for host in stream.get("unheard", ()) for name in lasting_names(host)}


def tell_spares(run: str, waiting: int, lacking: int) -> bool:
    """Tells this host's agent how many hosts wait as spares, and how many the job lacks; returns whether it has heard."""
    try:
        return lifecycle.ask(run, host_id(), TellSpares(waiting=waiting, lacking=lacking), _UNHEARD_SECONDS) is not None
    except (GeminiError, OSError):
        return False


def _uploading(run: str) -> list[str]:
    """The versions that this host's agent still takes part in storing."""
    try:
        streams = json.loads(lifecycle.status(run) or "{}").get("streams", {})
    except AgentTimeoutError:
        return ["a version that is not known, as the agent does not answer,"]
    except (GeminiError, OSError):
        return []
    return [store["uploading"] for stream in streams.values() if (store := stream["storage"]) and store["uploading"]]


def await_workers(context: Any) -> None:
    """Waits for the workers of torch's process context: one may be in the midst of its farewell, or wait for one that has left."""
    end = time.monotonic() + _STRAGGLERS
    while any(handler.proc.poll() is None for handler in context.subprocess_handlers.values()):
        if time.monotonic() > end:
            context.close(signal.SIGKILL)  # SIGTERM would be another wish to save, which a worker that waits for others never hears
            return
        time.sleep(_POLL)


class Endings:
    """The failures of one job's workers on this host.

    Args:
        join_seconds: for which absent hosts are waited for that alone may have what was committed.

    Attributes:
        status: with which the job ends for good; 0: not yet.
        shown: the failure that is final, of one worker; the others' failures mostly follow from it, or are the same.
        has_begun: whether workers have been started.
        has_drained: whether a worker has left after a committed step; where a drain has begun, workers may as well have failed before.
        waits_since: when the workers first failed only because such hosts are absent, and have in each attempt since; None: they have not.
    """

    def __init__(self, notes: Notes, run: str, join_seconds: float = math.inf) -> None:
        self.status = 0
        self.shown: ProcessFailure | None = None
        self.has_begun = self.has_drained = False
        self._notes, self._run, self._join_seconds = notes, run, join_seconds
        self.waits_since: float | None = None
        self._attempt: object = None  # torch's context of the workers that were looked at last
        self._waits = 0  # how often workers had said so before that attempt
        self._ended = 0  # how many workers had ended well before it
        self.success: RunResult | None = None  # of that attempt, on this host
        self._success_until = 0.0  # for how long the other hosts' is waited for
        self._before: set[tuple[str, str, str, str]] = set()
        self._since = time.monotonic()
        self._has_warned = False
        self._hang: dict[str, Any] | None = None  # the last one that was said
        self.hung: set[int] = set()  # ranks that kept the job waiting, if the last failure is that

    def follow(self, attempt: object) -> None:
        """Begins with another attempt, if it is one: mostly the one before has not failed here, but on another host."""
        if attempt is not self._attempt:
            before, self._attempt, self._waits, self._ended = self._waits, attempt, self._notes.count(WAITS), len(self._notes.ended)
            self.success = None
            if self._waits == before:
                self.waits_since = None

    def shared_success(self, agent: LocalElasticAgent, group: WorkerGroup, result: RunResult) -> RunResult:
        """The success of this host's workers, once all hosts have had it, or as long after it as torch's launcher waits for them.

        Until then this host goes on without workers, and takes part in a restart: in the barrier of torch's launcher it would see none, and
        the host that has failed would wait for it in vain.
        """
        if (size := group.group_world_size or 1) == 1:
            return result
        store: Any = agent._store
        try:
            if self.success is None:
                self.success, self._success_until = result, time.monotonic() + agent._exit_barrier_timeout
                store.add(_WELL, 1)
            if store.add(_WELL, 0) >= size:
                return result
        except DistError:  # the store is lost, and with it perhaps its host
            return result
        if time.monotonic() < self._success_until:
            return RunResult(WorkerState.HEALTHY)
        agent._exit_barrier_timeout = 0.001  # it has been waited for here; of 0, stores in files make no end
        return result

    @property
    def ended_well(self) -> list[str]:
        """The ranks of this attempt whose scripts have ended with status 0; their processes may live a little longer."""
        return self._notes.ended[self._ended :]

    def judge(self, failures: Iterable[ProcessFailure]) -> bool:
        """Workers have failed; whether that is final."""
        failed, self.hung = list(failures), set()
        if any(failure.exitcode == -signal.SIGKILL for failure in failed):
            self._say_hangs()
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
        self._judge_wait(failed)
        if not self.status:
            failpoints.reached("launcher_restarts")
        return bool(self.status)

    def _judge_wait(self, failed: Sequence[ProcessFailure]) -> None:
        """Ends the job where absent hosts have been waited for long enough."""
        if self.status or self._notes.count(WAITS) == self._waits:
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = time.monotonic()
            text = "hosts that are absent may have what was committed (see above): the job waits for them, for %g s at most (join_timeout)"
            _log.warning(text, self._join_seconds)
        elif time.monotonic() - self.waits_since >= self._join_seconds:
            self.status, self.shown = 1, next(iter(failed), None)
            text = "hosts that may have what was committed have not come back within %g s (join_timeout): the job ends"
            _log.error(text, self._join_seconds)

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

    def _say_hangs(self) -> None:
        """Says why the job hung, if this host's agent has killed its workers for that."""
        for stream in account_of(self._run, _HANG_SECONDS).get("streams", {}).values():
            if (hang := stream.get("hang")) is not None and hang != self._hang:
                self._hang = hang
                self.hung = {*hang["ranks"]}
                _log.error("the job hung: %s; %s has the report", hang["text"], hang["report"])

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
def final_endings(
    notes: Notes, run: str, drain: HostDrain, health: HostHealth, *, interval: float, join_seconds: float = math.inf
) -> Iterator[Endings]:
    """Inside, torch's launcher restarts no workers whose failure is final, and none of a host that is drained.

    Args:
        health: told which ranks are here, and of hangs that they caused.
        interval: seconds after which torch's launcher looks at the workers though there is no news of them.
        join_seconds: in which a host must have joined.
    """
    original, endings = LocalElasticAgent._monitor_workers, Endings(notes, run, join_seconds)

    def monitor(agent: LocalElasticAgent, group: WorkerGroup) -> RunResult:
        endings.has_begun = True
        endings.follow(agent._pcontext)
        health.ranks = {worker.global_rank for worker in group.workers}
        grace.await_news(agent._pcontext, interval)
        early = endings.ended_well  # later ones may obey the signal by which torch's launcher ends the others
        if notes.have(DRAINED):
            await_workers(agent._pcontext)
        result: RunResult = endings.success or original(agent, group)
        # A script that takes the end of a drained rank for its own has not finished, either: as a success it would end the whole job.
        if (result.is_failed() and drain.begun) or (result.state in _OVER and notes.have(DRAINED)):
            drain.await_uploads()
            endings.status, endings.has_drained = LEFT, notes.have(DRAINED)
            raise SignalException("this host is drained", signal.SIGTERM)  # the one end after which the others' rendezvous goes on
        if result.is_failed() and early:
            text = "rank %s ended with status 0 before others failed. If that was early, by sys.exit() for example, they have failed of it"
            _log.warning(text, named(early))
        if result.is_failed() and endings.judge(result.failures.values()):
            agent._remaining_restarts = 0
        elif result.is_failed() and endings.waits_since is not None:
            agent._remaining_restarts += 1  # the restart that follows is none of a failure
        elif result.is_failed() and endings.hung & health.ranks:
            health.suspect("as it kept the job waiting")
        elif result.state == WorkerState.HEALTHY:
            endings.look()
        return endings.shared_success(agent, group, result) if result.state == WorkerState.SUCCEEDED else result

    with replaced(LocalElasticAgent, _monitor_workers=monitor):
        yield endings


@contextmanager
def own_log_dir(options: argparse.Namespace) -> Iterator[None]:
    """Inside, ``options.log_dir`` is set, unless the user has given one or wants the workers' output in files.

    The folder is removed when the job ends well; those of failed jobs, and of launchers that were killed, when there are many.

    Raises ConfigError: it cannot be made.
    """
    if options.log_dir or (options.redirects, options.tee) != ("0", "0"):
        yield
        return
    try:
        folder = runtime_folder()
        left = [path for path in folder.glob(f"{_REPORTS}*") if began(int(path.name.split("-")[1])) is None]
        for _, path in newest_first(left)[_KEPT:]:
            shutil.rmtree(path, ignore_errors=True)
        options.log_dir = mkdtemp(prefix=f"{_REPORTS}{os.getpid()}-", dir=folder)
    except OSError as error:
        raise ConfigError(
            f"there is no place for the reports of workers ({error}): make room there, or name another folder (--log-dir, TMPDIR)"
        ) from None
    yield
    shutil.rmtree(options.log_dir, ignore_errors=True)
