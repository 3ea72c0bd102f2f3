"""The launches of a run that this host's agent has heard of, and which of them are alive."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from gemini_ft.errors import RunAliveError, StateError
from gemini_ft.hosts import began
from gemini_ft.wire.worker_messages import Launch

PARTING_SECONDS = 3.0  # for processes that have been killed to end; until then they count as alive


class Launches:
    """The launches of one run that workers of this host have named."""

    def __init__(self) -> None:
        self._refused: tuple[Launch, str] | None = None  # the last one whose state was refused, and why
        self._known: dict[tuple[int, int], Launch] = {}  # process id and beginning of who started the workers -> launch

    def note(self, launch: Launch) -> None:
        """A worker of this launch has come."""
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
        """Raises StateError if the state of this launch was refused."""
        if self._refused is not None and self._refused[0].is_same(newcomer):
            raise StateError(f"a worker of this launch has ended with this refusal, which a restart does not change: {self._refused[1]}")

    def refuse_second(self, run: str, host: str, newcomer: Launch, workers: Collection[tuple[int, Launch]]) -> None:
        """Raises RunAliveError if a launch other than the newcomer's is alive."""
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
