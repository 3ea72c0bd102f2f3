"""Judges the history that agents and workers of a real job have written (`witness/witnessing.py`), by the rules of the simulation.

What only a simulation can see is left out: bytes, silence, readers. Copies of an agent that has begun since count as unknown.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from simulation.history import Check
from simulation.history_storage import Event, order


def witness(folder: Path) -> dict[str, str]:
    """Variables by which the processes of a job write their history into a folder."""
    paths = [str(Path(__file__).with_name("witness")), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"WITNESS": str(folder / "history"), "PYTHONPATH": os.pathsep.join(paths)}


def read(folder: Path) -> list[Event]:
    """The events of that folder's history, in the order of their times."""
    events = [json.loads(line) for line in (folder / "history").read_text().splitlines()]
    for event in events:
        if "holders" in event:
            event["holders"] = {int(owner): hosts for owner, hosts in event["holders"].items()}
    return sorted(events, key=lambda event: event["at"])


def violations(events: list[Event]) -> list[str]:
    """Everything in a history that must not be."""
    check = Witnessed()
    for event in events:
        check.take(event)
    return check.found


class Witnessed(Check):
    """The rules that a real job can be judged by."""

    def __init__(self) -> None:
        super().__init__()
        self._ever: set[tuple[str, int, str]] = set()  # (host, owner, version) of copies that were whole once
        self._gone: set[tuple[str, int, str]] = set()  # and of those that were given up since
        self._roots: dict[tuple[int, str], str] = {}  # (owner, version) -> root
        self._plans: dict[str, str | None] = {}  # incarnation -> what its ranks resume

    def _agent_began(self, event: Event) -> None:
        """Forgets the copies of the agent before: they may be lost, or handed over to this one."""
        self.copies = {copy: at for copy, at in self.copies.items() if copy[0] != event["host"]}

    def _copy(self, event: Event) -> None:
        """All whole copies of a shard have the same root."""
        copy = event["host"], event["owner"], event["version"]
        self.copies[copy] = event["at"]
        self._ever.add(copy)
        self._gone.discard(copy)
        what = f"rank {copy[1]}'s shard of {copy[2]} is whole on {copy[0]}, with another root than elsewhere"
        self._must(event["root"] == self._roots.setdefault(copy[1:], event["root"]), event, what)

    def _dropped(self, event: Event) -> None:
        """A copy stays while nothing newer is safe; one that was never complete, or of which nothing is known, may go."""
        if (copy := (event["host"], event["owner"], event["version"])) not in self.copies:
            return
        super()._dropped(event)
        self._gone.add(copy)
        self.copies.pop(copy, None)

    def _holds(self, event: Event, version: str, owner: int, host: str, has_left: bool) -> None:
        """A holder that counts has made its copy, and has not given it up, unless it has left."""
        copy = host, owner, version
        self._must(copy in self._ever, event, f"{version} is committed, and {host} has never had rank {owner}'s shard of it")
        self._must(has_left or copy not in self._gone, event, f"{version} is committed, and {host} has rank {owner}'s shard of it no more")

    def _resumed(self, event: Event) -> None:
        """All ranks of an incarnation resume the same, and pass over nothing newer of which their hosts have all copies."""
        of, version = event["of"], event["version"]
        if of in self._plans:
            self._must(self._plans[of] == version, event, f"rank {event['rank']} resumes {version}, and another one {self._plans[of]}")
            return
        self._plans[of] = version
        at = order(version) if version is not None else (0, "", 0)
        here = {copy for copy in self.copies if copy[0] in event["hosts"]}
        owners = {copy[1] for copy in self._ever}
        for other in sorted(self.safe - {*event["given_up"]}, key=order):
            if order(other) > at and other.rpartition(":")[0] != of:
                lacking = [owner for owner in owners if not any(copy[1:] == (owner, other) for copy in here)]
                self._must(bool(lacking), event, f"{other} is committed and whole on {event['hosts']}, and {version} is resumed")
