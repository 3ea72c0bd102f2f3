"""The ledger that counts, against the one that walks over all ranks at every report (tests/kit/reference_ledger.py).

Both hear the same history, of a kind that a network, restarted agents and damaged memory can make: reports repeated, late, out of order,
skipped, of other incarnations, with other roots; holders that are left out and come back; hosts that join again; uploads.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from reference_ledger import ReferenceLedger

from gemini_ft.core.decisions import Abort, Cadence, Commit, Decision, Fatal, Holders, Thaw, WriteManifest
from gemini_ft.core.effects import Completed, Copies, Gathered, GatheredSkips, Skipped
from gemini_ft.core.ledger import Ledger
from gemini_ft.core.versions import Incarnation, Version

TIMEOUT = 10.0
EITHER = Ledger | ReferenceLedger


def version(rng: Random, newest: int) -> Version:
    """Mostly of the present incarnation and near the newest."""
    iteration = max(1, newest - int(rng.expovariate(0.8)) + rng.choice([0, 0, 1]))
    return Version(Incarnation(rng.choice([1, 2, 2, 2, 2, 2, 2, 2]), "n"), iteration)


class History:
    """Makes up what happens, and lets both ledgers hear it."""

    def __init__(self, seed: int, bundled: bool = False) -> None:
        self._bundled = bundled
        self.rng = rng = Random(seed)
        hosts = [f"h{i}" for i in range(rng.randint(1, 4))]
        replicas = rng.randint(1, len(hosts))
        homes = [host for host in hosts for _ in range(rng.choice([0, 1, 1, 2, 2]))] or hosts[:1]
        rng.shuffle(homes)
        rings = {host: tuple((hosts * 2)[at : at + replicas]) for at, host in enumerate(hosts)}
        self.holders = {owner: rings[home] for owner, home in enumerate(homes)}
        self.hosts, self.now, self.newest, self.sick = hosts, 0.0, 1, rng.random() < 0.3
        self.is_calm = rng.random() < 0.5  # nothing happens but that some holders are late, or have damaged copies, for many steps
        self.troubled: dict[tuple[int, str], str] = {}  # these, and the roots of their copies; empty: none comes
        start = rng.choice([None, Version(Incarnation(1, "n"), 1)])
        every, seconds = rng.choice([None, 1, 2]), rng.choice([None, 3.0])
        self.both: list[EITHER] = [
            kind(self.holders, start, TIMEOUT, Cadence(every_steps=every, every_seconds=seconds)) for kind in (Ledger, ReferenceLedger)
        ]

    def step(self) -> list[list[Decision]]:
        """One event; the decisions of both."""
        rng = self.rng
        self.now += rng.choice([0.0, 0.1, 1.0, 4.0])
        bundles = 8 if self._bundled else 0
        weights = [10, 1, 0.5, 5, 0.5, 1, 0, bundles, bundles / 8] if self.is_calm else [4, 10, 1, 3, 1, 2, bundles, bundles, bundles / 4]
        kinds = ["round", "report", "skip", "tick", "rejoin", "upload", "bundle", "gather", "skip_together", "finish"]
        name = rng.choices(kinds, [*weights, 0.1])[0]
        return getattr(self, f"_{name}")()

    def _tell(self, *args: object, call: str) -> list[list[Decision]]:
        return [_untold(deepcopy(getattr(each, call)(*args))) for each in self.both]

    def _report(self, what: Version | None = None, owner: int | None = None, host: str | None = None) -> list[list[Decision]]:
        rng = self.rng
        owner = rng.choice(list(self.holders)) if owner is None else owner
        host = host or rng.choice([*self.holders[owner]] * 5 + self.hosts)
        root = rng.choice(["bad  0", ""]) if rng.random() < (0.3 if self.sick else 0.03) else f"root {owner}"
        odd = rng.random() < 0.02
        layout, digest = (rng.choice(["", "m"]), rng.choice(["", "e"])) if odd else ("l", "d")
        report = Completed(owner=owner, host=host, version=what or version(rng, self.newest), layout=layout, digest=digest, root=root)
        return self._tell(report, self.now, call="report")

    def _round(self) -> list[list[Decision]]:
        """Nearly all copies of the newest version, in any order."""
        rng, outcome = self.rng, [list[Decision](), list[Decision]()]
        what = Version(Incarnation(2, "n"), self.newest)
        pairs = [(owner, host) for owner, hosts in self.holders.items() for host in hosts]
        if rng.random() < 0.1:
            replicas = [(owner, host) for owner, host in pairs if host != self.holders[owner][0]]
            self.troubled = {pair: rng.choice(["", "bad  0"]) for pair in replicas if rng.random() < 0.3}
        rng.shuffle(pairs)
        for owner, host in pairs:
            if self.is_calm and (root := self.troubled.get((owner, host), f"root {owner}")):
                told = self._tell(
                    Completed(owner=owner, host=host, version=what, layout="l", digest="d", root=root), self.now, call="report"
                )
            elif not self.is_calm and rng.random() < 0.95:
                told = self._report(what, owner, host)
            else:
                continue
            for made, more in zip(outcome, told, strict=True):
                made += more
        self.newest += rng.random() < 0.9
        return outcome

    def _bundle(self) -> list[list[Decision]]:
        """Copies of one host in one message, of which the reference hears one by one."""
        rng = self.rng
        host, what = rng.choice(self.hosts), version(rng, self.newest)
        roots = {owner: "bad  0" if rng.random() < 0.05 else f"root {owner}" for owner in self.holders if rng.random() < 0.8}
        copies = Copies(host=host, version=what, layout="m" if rng.random() < 0.02 else "l", digest="d", roots=roots)
        ours, reference = self.both
        one_by_one = [decision for each in copies.each() for decision in reference.report(each, self.now)]
        return [deepcopy(ours.report(copies, self.now)), deepcopy(one_by_one)]

    def _gather(self) -> list[list[Decision]]:
        """Copies of several hosts in one message; often of all hosts in two or three, so that nothing but these makes a commit."""
        rng = self.rng
        what, outcome, left = Version(Incarnation(2, "n"), self.newest), [list[Decision](), list[Decision]()], list(self.hosts)
        if rng.random() < 0.2:
            what, left = version(rng, self.newest), rng.sample(self.hosts, rng.randint(1, len(self.hosts)))
        while left:
            together, left = left[:2], left[2:]
            roots = {owner: "bad  0" if rng.random() < 0.02 else f"root {owner}" for owner in self.holders}
            held = {host: sorted(owner for owner, hosts in self.holders.items() if host in hosts) for host in together}
            told = {host: "".join(roots[owner] for owner in owners) for host, owners in held.items() if owners}
            gathered = Gathered(
                version=what, layout="m" if rng.random() < 0.02 else "l", digest=rng.choice(["", "d", "d", "d"]), roots=told
            )
            outcome[0] += deepcopy(self.both[0].report(gathered, self.now)) if told else []
            for copies in gathered.each(held):
                for each in copies.each():
                    outcome[1] += deepcopy(self.both[1].report(each, self.now))
            if rng.random() < 0.1:
                return outcome
        self.newest += rng.random() < 0.9
        return outcome

    def _skip(self) -> list[list[Decision]]:
        return self._tell(Skipped(self.rng.choice(list(self.holders)), version(self.rng, self.newest), "late"), self.now, call="report")

    def _skip_together(self) -> list[list[Decision]]:
        """Several owners have no snapshot of a version, and the reference hears it one by one."""
        owners = self.rng.sample(list(self.holders), self.rng.randint(1, len(self.holders)))
        what, (ours, reference) = version(self.rng, self.newest + 1), self.both
        one_by_one = [decision for owner in owners for decision in reference.report(Skipped(owner, what, "late"), self.now)]
        told = ours.report(GatheredSkips(what, "late", {"h0": owners}), self.now), one_by_one
        return [
            sorted(deepcopy(each), key=lambda each: str(getattr(each, "version", ""))) for each in told
        ]  # any of these owners can be the one that is named

    def _finish(self) -> list[list[Decision]]:
        return self._tell(self.rng.choice(list(self.holders)), call="finish")

    def _tick(self) -> list[list[Decision]]:
        self.now += self.rng.choice([0.0, TIMEOUT])
        return self._tell(self.now, [host for host in self.hosts if self.rng.random() < 0.2], call="tick")

    def _rejoin(self) -> list[list[Decision]]:
        rng = self.rng
        known = rng.choice([None, self.both[0].committed, version(rng, self.newest)])
        roots = {owner: rng.choice(["", f"root {owner}", "bad"]) for owner in self.holders if rng.random() < 0.5}
        return self._tell(known, self.now, roots, call="rejoin")

    def _upload(self) -> list[list[Decision]]:
        rng = self.rng
        what = self.both[0].uploading or version(rng, self.newest)
        match rng.choice(["uploaded", "uploaded", "over", "obstacle", "unobstructed", "last"]):
            case "uploaded":
                return self._tell(rng.choice(list(self.holders)), what, "record", call="uploaded")
            case "over":
                return self._tell(what, rng.choice(["", "full"]), call="upload_over")
            case "obstacle":
                for each in self.both:
                    each.obstacle = "clutter"
                return [[], []]
            case "unobstructed":
                return self._tell(self.now, call="unobstructed")
            case _:
                return self._tell(call="upload_last")


def _untold(decisions: list[Decision]) -> list[Decision]:
    """Without what is said of a conflict."""
    return [replace(each, text="") if isinstance(each, Fatal) else each for each in decisions]


def state(book: EITHER) -> tuple[Any, ...]:
    return book.committed, book.agreed, book.roots, book.epoch, book.excluded, book.uploading, book.upload_error, book.aborted


def follow(seed: int, steps: int) -> set[type[Decision]]:
    """Both come to the same; returns the kinds of decisions that were made."""
    history, kinds = History(seed), set[type[Decision]]()
    for _ in range(steps):
        ours, reference = history.step()
        assert ours == reference
        assert state(history.both[0]) == state(history.both[1])
        kinds.update(map(type, ours))
    return kinds


@settings(max_examples=300)
@given(st.integers(0, 2**32 - 1))
def test_any_history_leads_to_the_decisions_of_the_reference(seed: int) -> None:
    follow(seed, 60)


def plain(decisions: list[Decision]) -> list[object]:
    """Without reasons, which name the ranks that were known at that moment, and repetitions."""
    out: list[object] = []
    for decision in decisions:
        bare = decision.version if isinstance(decision, Abort) else decision.error if isinstance(decision, Fatal) else decision
        out += [bare] if bare not in out else []
    return out


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_bundled_reports_lead_to_the_decisions_of_single_ones(seed: int) -> None:
    history = History(seed, bundled=True)
    for _ in range(60):
        ours, reference = history.step()
        assert plain(ours) == plain(reference)
        if any(isinstance(decision, Fatal) for decision in ours):
            return  # the job is over
        *known, aborted = zip(*map(state, history.both), strict=True)
        assert all(mine == theirs for mine, theirs in known)
        assert aborted[0].keys() == aborted[1].keys()


def test_the_histories_lead_to_every_kind_of_decision() -> None:
    """Else their agreement would prove little."""
    kinds = set[type[Decision]]().union(*(follow(seed, 60) for seed in range(40)))
    assert kinds == {Commit, Abort, Holders, Fatal, WriteManifest, Thaw}
