"""Decides when a host's agent may leave, as its memory goes with it; and knows the launches of its run, and which of them are alive."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Set
from datetime import datetime

from gemini_ft import failpoints
from gemini_ft.agent.stream import Stream
from gemini_ft.agent.watchdog import START_TIMEOUT
from gemini_ft.agent.workers import WorkerConnection
from gemini_ft.config import load_config
from gemini_ft.errors import RunAliveError, StateError
from gemini_ft.hosts import began
from gemini_ft.wire.worker_messages import Launch, Left

PARTING_SECONDS = 3.0  # for processes that have been killed to end; until then they count as alive


class Launches:
    """The launches of one run that workers of this host have named."""

    def __init__(self) -> None:
        self._first: Launch | None = None
        self._refused: tuple[Launch, str] | None = None  # the last one whose state was refused, and why
        self._known: dict[tuple[int, int], Launch] = {}  # process id and beginning of who started the workers -> launch

    def note(self, launch: Launch) -> None:
        """Records that a worker of this launch has come.

        An agent may outlive the first launch, and linger for the next one, which has not asked for the first one's faults: they end here.
        """
        self._first = self._first or launch
        if failpoints.armed is not None and not launch.is_same(self._first):
            failpoints.disarm()
        self._known = {place: known for place, known in self._known.items() if began(place[0]) == place[1]}
        self._known[launch.pid, launch.ticks] = launch

    def alive(self, workers: Collection[tuple[int, Launch]] = ()) -> list[Launch]:
        """Launches of which a launcher, or one of ``workers`` (process id, launch), is alive."""
        living = [known for (pid, ticks), known in self._known.items() if began(pid) == ticks]
        return [*living, *(launch for pid, launch in workers if began(pid) is not None)]

    def note_refusal(self, launch: Launch, text: str) -> None:
        """The state of a launch was refused; a restart of its workers, which not every launcher leaves out, must not talk that away."""
        self._refused = launch, text

    def refuse_again(self, newcomer: Launch) -> None:
        if self._refused is not None and self._refused[0].is_same(newcomer):
            raise StateError(f"a worker of this launch has ended with this refusal, which a restart does not change: {self._refused[1]}")

    def refuse_second(self, run: str, host: str, newcomer: Launch, workers: Collection[tuple[int, Launch]]) -> None:
        for launch in self.alive(workers):
            if not launch.is_same(newcomer):
                raise RunAliveError(is_alive(run, host, launch))


def is_alive(run: str, host: str, launch: Launch) -> str:
    """The text of the error with which a second launch is refused."""
    since = datetime.fromtimestamp(launch.started).astimezone()
    return (
        f"run {run} is alive on host {host}: process {launch.pid} has run it since {since:%Y-%m-%d %H:%M:%S} "
        f"({' '.join(launch.command)}, in {launch.folder}). It is neither joined nor taken over. To run another job beside it, give that "
        "an id of its own: `gemini run --run-id NAME`, or GEMINI_RUN_ID=NAME, or GEMINI_RUN_ID_VARIABLES=LR,SEED with the variables that "
        f"tell the jobs apart. To start this one anew, end that process first: kill {launch.pid}"
    )


_PARTING = 5.0  # seconds for the leader's word that all have finished
_VERDICT = 20.0  # seconds for which a launcher may ask what was not stored, after the last worker has gone
_OTHERS_END = 330.0  # seconds for which a launcher that lives may do so: torch's launchers wait 300 s for each other at the end
_UNKNOWN = "the leader's word on the last upload has not come; whether it has been stored is not known"


class Departure:
    """The reasons to stay and to go, as workers and launchers have given them."""

    def __init__(self, streams: Mapping[str, Stream], workers: Set[WorkerConnection], launches: Launches) -> None:
        self._streams, self._workers, self._launches = streams, workers, launches
        # seconds for which the agent stays without a worker, as the last worker has said. Until one comes, at least those that whoever has
        # started the agent may take: an agent that left before would take the memory it has inherited along.
        self.linger = max(load_config().linger, START_TIMEOUT)
        self.idle_since = time.monotonic()  # when the last worker was seen, on the monotonic clock
        self._asked_to_leave = False
        self.follows = False  # whether it leaves after its workers, as it was told to end while they are drained
        self._interrupted: set[WorkerConnection] = set()  # by Ctrl-C: the other workers will follow, and the job does not come back
        self._finished: set[WorkerConnection] = set()  # have finished their work, and not said how their processes end
        self._ended: set[int] = set()  # process ids of those that have ended well, since the last worker came
        self._askers: list[WorkerConnection] = []  # launchers that wait for the end
        self._waits_until = 0.0  # for the last upload, on the monotonic clock

    def stay(self, linger: float) -> None:
        """Takes back every wish to leave, but for that of a drained host: a worker has come."""
        self.linger, self._asked_to_leave, self._waits_until = linger, False, 0.0
        self._interrupted.clear()
        self._finished = {worker for worker in self._finished if worker.alive}
        self._ended.clear()

    def ask(self, asker: WorkerConnection, finished: bool) -> None:
        """Takes the wish of a launcher, or of the user; ``finished``: the job has, and the asker waits for the last upload."""
        self._asked_to_leave = True
        if finished:
            self._askers.append(asker)
            # Askers ask again and again: the first one counts, or a stream that nobody ends would keep them for ever.
            self._waits_until = self._waits_until or time.monotonic() + self._patience

    def finish(self, worker: WorkerConnection) -> None:
        """Records that a worker has finished; its script may still fail, unless it was reported as ended before."""
        if worker.pid not in self._ended:
            self._finished.add(worker)

    def ended(self, pid: int) -> None:
        self._finished = {worker for worker in self._finished if worker.pid != pid}
        self._ended.add(pid)

    def interrupt(self, worker: WorkerConnection) -> None:
        self._interrupted.add(worker)

    @property
    def _patience(self) -> float:
        """Seconds for which the leader's word on the last upload may take."""
        return _PARTING + max((stream.patience for stream in self._streams.values()), default=0.0)

    @property
    def is_followed(self) -> bool:
        """Whether there are workers that the user has not interrupted: they start another agent when this one leaves."""
        return any(worker.alive and worker.rank >= 0 for worker in self._workers - self._interrupted)

    @property
    def _is_awaited(self) -> bool:
        """Whether a launcher is at work that will ask how the last upload has ended; it cannot tell an agent that left from a lost one."""
        asked = {asker.pid for asker in self._askers}
        has_end = any(stream.stores and (stream.finished or stream.finishing) for stream in self._streams.values())
        return has_end and any(launch.is_of_run and launch.pid not in asked for launch in self._launches.alive())

    def is_due(self) -> bool:
        now, streams = time.monotonic(), self._streams.values()
        uploading = any(stream.uploading for stream in streams)
        if self.is_followed:
            self.idle_since = now
            return self._asked_to_leave and not uploading
        is_dismissed = (self._asked_to_leave and not self._askers) or self.follows or bool(self._interrupted)
        if not is_dismissed and now - self.idle_since < _OTHERS_END and self._is_awaited:
            return False
        is_storing = uploading or any(stream.finishing or stream.unstored for stream in streams)
        if now - self.idle_since > self.linger + (self._patience if is_storing else 0.0):
            return True
        finished = bool(streams) and all(stream.finished for stream in streams) and not self._finished
        if any(stream.finishing for stream in streams) and now < self._waits_until:
            return False  # the leader's word on the last upload is still to come
        if any(stream.unstored for stream in streams) and not self._asked_to_leave and now - self.idle_since < _VERDICT:
            return False  # a launcher, if there is one, will ask how it has ended
        return (self._asked_to_leave or self.follows or bool(self._interrupted) or finished) and not uploading

    def tell_askers(self) -> None:
        """Tells the launchers that wait what was not stored, as far as is known."""
        reasons = [_UNKNOWN if stream.finishing and stream.stores else stream.unstored for stream in self._streams.values()]
        unstored = "; ".join(filter(None, reasons))
        for asker in self._askers:
            asker.send(Left(unstored=unstored))
