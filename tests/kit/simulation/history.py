"""Checks what was recorded of a run; pure.

The events of a run, in the order in which they happened, are dicts with ``event`` and ``at``, in seconds. Versions are texts,
``3-0a1b2c3d:120``: incarnation and iteration. What must hold:

``commit``    every holder that counts has made a whole copy, and has it unless something has happened to it since;
              commits of an incarnation go on, whoever leads, nothing that was aborted is committed, and no host commits for another one,
              nor in another epoch than the newest that it has heard of;
              a leader that has no part in an incarnation that all of its hosts have begun is *left behind*: what it commits still may lack
              the copies of those hosts, is heard in its own incarnation only, and nothing older may go for it anywhere else
``led``       a host obeys no older epoch than before
``opened``    incarnations follow each other on every host, and all slots there know what it knows to be committed; that never moves back,
              and is never counted as aborted
``copy``      a whole copy has the root that its writer has formed, where the writer forms it
``kept``      a copy whose root is not the committed one is given up
``unsound``   no copy is whole with other bytes than were made, unless these were damaged while their owner wrote them
``heard``     a rank is told of no commit but one that a leader has decided
``chosen``    nothing that was committed is passed over while memory of the hosts that choose has a sound copy of every shard, and nothing
              that is stored while storage has all of it, unless no list has it yet, and it was never reported as stored; or it was made
              good again after they had begun
``read``      what is resumed has the bytes that were made, and is what was chosen; a host that has a copy asks no other one
``visited``   what another process reads in the agents' memory was committed
``putting``   only a host that leads, as far as it has heard, begins to write a manifest, or to look for its shards right before that
``put``       a manifest is written only of what was committed, and when all of its shards are there with the bytes that were made;
              a checkpoint is reported as stored only when storage has kept all of it
``delete``    a checkpoint that is whole, and was reported as stored, goes only when ``keep_last`` newer ones are, and nobody reads it;
              that of an upload that failed may go, and nothing that an upload under way has written; its manifest goes first
``dropped``   a sound copy stays where it is until something newer was committed, its version was aborted, or all hosts have left it behind;
              and while ranks choose
``granted``   nobody reads, uploads or writes a slot that is given to a writer; nor can that happen to one that a reader is given
``whole``     nothing becomes complete while ranks choose
``report``    a host reports only whole copies
``promised``  a host promises to ranks that choose only copies that it keeps
``left out``  no copy is left out while nothing is heard, or can be, of its owner's own host, nor after one payload that arrived damaged
``end``       when nothing fails any more, the job comes up, all holders count, something is stored, and memory is counted as it is;
              and after each single fault then it commits again, with no more attempts than the fault explains, and nothing lost
``cruise``    meanwhile the last two steps at most are uncommitted, agents say nothing, and each host has the slots that it should
``finished``  when all ranks have ended well, their agents leave, and what was committed last is that of the last step, and stored;
              where an incarnation is found in storage that no list had when this one was begun, they may say why it is not
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from simulation.history_storage import Event, StorageRules, order

_HARM = frozenset({"host lost", "agent killed", "replaced", "left", "flip", "killed"})  # events after which a host may lack what it had
_ATTEMPTS = {  # that follow a single fault: two without hosts that may know more, and others while hosts boot
    **dict.fromkeys(("restart_all", "stop", "stop_leader", "kill_worker", "damage", "ruin"), 3),
    "lose_crew": 10,
}


def violations(history: Iterable[Event]) -> list[str]:
    """Everything in a history that must not be."""
    check = Check()
    for event in history:
        check.take(event)
    return check.found


class Check(StorageRules):
    """All rules."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[tuple[str, int, str], float] = {}  # (host, owner, version) -> when a sound copy was made there
        self.formed: dict[tuple[int, str], str] = {}  # (owner, version) -> the root that its rank has formed
        self.harm: dict[str, float] = {}  # host -> when something happened to it last
        self.flipped: set[tuple[str, int, str]] = set()  # (host, owner, version) of copies that were damaged
        self.epochs: dict[tuple[str, float, str], int] = {}  # (host, when its agent began, incarnation) -> newest epoch obeyed
        self.last_opened: dict[tuple[str, Any], tuple[int, str, int]] = {}  # (host, when its agent began) -> newest incarnation
        self.latest: str | None = None  # that was committed last
        self.safe: set[str] = set()  # committed, or resumed by an incarnation that all of its hosts have begun
        self.late: set[str] = set()  # committed by leaders that were left behind
        self.opened: dict[str, set[str]] = {}  # incarnation -> hosts that have begun it
        self.hosts: dict[str, set[str]] = {}  # and all of its hosts
        self.resumed: dict[str, str | None] = {}  # and what it has resumed
        self.aborted: set[str] = set()
        self.newest: dict[tuple[str, str, int], tuple[int, str, int]] = {}  # (incarnation, leader, epoch) -> its last commit
        self.last: dict[str, tuple[int, str, int]] = {}  # incarnation -> its last commit
        self.brought_late: set[str] = set()  # hosts whose agents have been given memory back since ranks asked what is there
        self.chosen: str | None = None
        self.chosen_at = 0.0
        self.held: dict[int, list[str]] = {}  # owner -> hosts that had a sound copy of it then
        self.commits_since_calm: int | None = None
        self.commits = 0
        self.begun = set[str]()
        self.unknown = False  # whether something was passed over that no list had yet, and of which nobody had been told
        self.probed = ""  # the single fault under way
        self.probed_at = 0.0
        self.attempts = 0

    def take(self, event: Event) -> None:
        """Judges the next event of the history."""
        kind = event["event"]
        self.number += 1
        if kind in _HARM and "host" in event:
            self.harm[event["host"]] = event["at"]
        judge = getattr(self, f"_{kind.replace(' ', '_')}", None)
        if judge is not None:
            judge(event)

    # -- commits

    def _copy(self, event: Event) -> None:
        """Remembers a whole copy with the bytes that were made, also where one was damaged before."""
        self.flipped.discard((event["host"], event["owner"], event["version"]))
        self.copies.setdefault((event["host"], event["owner"], event["version"]), event["at"])
        formed = self.formed.get((event["owner"], event["version"]), event.get("root"))
        what = (
            f"rank {event['owner']}'s shard of {event['version']} is whole on {event['host']}, with another root than its writer has formed"
        )
        self._must(event.get("root") == formed, event, what)

    def _copied(self, event: Event) -> None:
        """Remembers the root that a rank has formed of its shard."""
        if event["root"]:
            self.formed[event["rank"], event["version"]] = event["root"]

    def _kept(self, event: Event) -> None:
        """A copy that is not the one that was committed is given up."""
        what = f"{event['host']} keeps shards of ranks {event['owners']} of {event['version']}, whose roots are not the committed ones"
        self._must(False, event, what)

    def _abort(self, event: Event) -> None:
        """A version that is committed is never taken back."""
        self._must(event["version"] not in self.committed, event, f"{event['version']} was committed, and is aborted")
        self.aborted.add(event["version"])

    def _commit(self, event: Event) -> None:
        """A version is committed when every holder that counts has a whole copy; commits go on, and are of the present incarnation."""
        version, host = event["version"], event["host"]
        if not event["leads"]:
            self._must(version in self.committed, event, f"host {host} hears of a commit of {version}, which no leader has decided")
            self._hears_in_time(event, f"host {host}")
            return
        incarnation, resumed = version.rpartition(":")[0], event.get("resumed")
        self._must(
            event.get("of") in (None, incarnation) or version == resumed, event, f"{host} is at {event.get('of')} and commits {version}"
        )
        leads_in = event.get("leads_in", event["epoch"])
        self._must(leads_in == event["epoch"], event, f"{host} has heard of epoch {event['epoch']}, and commits {version} in {leads_in}")
        place = incarnation, host, event["epoch"]
        before = self.newest.setdefault(place, order(version))
        self._must(order(version) >= before, event, f"the leader on {host} commits {version} after iteration {before[2]}")
        self.newest[place] = max(before, order(version))
        begun = self._left_behind(host, event.get("of") or incarnation)
        self.commits += begun is None
        if self.commits_since_calm is not None:
            self.commits_since_calm += begun is None
        if event.get("freeze") and begun is None:  # of one that was left behind nothing is stored, as others upload no shard of it
            self.active.setdefault(event["folder"], self.number)
        if version in self.committed:
            return  # it is said again, by this leader or the next
        self.committed.add(version)
        if begun is None:
            self.latest = version
            self.safe.add(version)
        else:
            self.late.add(version)
        if event.get("of") not in (None, incarnation):
            return  # what was resumed is said again: it was chosen as it was whole, whether it had been committed or not
        last = self.last.setdefault(incarnation, order(version))
        goes_on = order(version) >= last or order(version) < before
        self._must(goes_on, event, f"{version} is committed, and iteration {last[2]} was by another leader")
        self.last[incarnation] = max(last, order(version))
        self._must(version not in self.aborted, event, f"{version} was aborted, and is committed")
        excluded = {(owner, name) for owner, name in event["excluded"]}
        for owner, hosts in event["holders"].items():
            self._must((owner, hosts[0]) not in excluded, event, f"{version} is committed without rank {owner}'s own copy")
            for name in hosts:
                if (owner, name) not in excluded:
                    self._holds(event, version, owner, name, name in (begun or ()))

    def _left_behind(self, host: str, incarnation: str) -> set[str] | None:
        """The hosts of the incarnations that have left a leader behind; None: it is not left behind."""
        begun = [*self.opened]  # one after the other; where all who knew the last number were lost, a number comes twice
        newer = begun[begun.index(incarnation) + 1 :] if incarnation in begun else begun
        apart = [self.hosts[each] for each in newer if self._is_open(each) and host not in self.hosts[each]]
        return set[str]().union(*apart) if apart else None

    def _hears_in_time(self, event: Event, who: str) -> None:
        """A commit of a leader that was left behind is heard in its own incarnation only."""
        version = event["version"]
        own = version not in self.late or event["of"] == version.rpartition(":")[0]
        self._must(own, event, f"{who} is at {event.get('of')} and hears of a commit of {version} by a leader that was left behind")

    def _holds(self, event: Event, version: str, owner: int, host: str, has_left: bool) -> None:
        """A holder that counts has its copy when that is committed, unless something has happened to it since, or it has left."""
        made = self.copies.get((host, owner, version))
        if (host, owner, version) in self.flipped:
            return
        self._must(made is not None, event, f"{version} is committed, and {host} has never had rank {owner}'s shard of it")
        if made is not None and not has_left and self.harm.get(host, -1.0) < made:
            has = host in event["copies"].get(owner, [])
            self._must(has, event, f"{version} is committed, and {host} has rank {owner}'s shard of it no more")

    def _heard(self, event: Event) -> None:
        """A rank hears of no commit but of those that a leader has decided."""
        version = event["version"]
        self._must(version in self.committed, event, f"rank {event['rank']} hears of a commit of {version}, which no leader has decided")
        self._hears_in_time(event, f"rank {event['rank']}")

    # -- slots

    def _flip(self, event: Event) -> None:
        """Remembers a bit that flips; in a copy that is being written it may reach the others."""
        self.flipped.add((event["host"], event["owner"], event["version"]))
        if (event["host"], event["owner"], event["version"]) not in self.copies:
            self.stained.add((event["owner"], event["version"]))

    def _unsound(self, event: Event) -> None:
        """Bytes are used only after they were verified: no copy is whole that has others than were made, unless the writer's own did."""
        owner, version = event["owner"], event["version"]
        what = f"rank {owner}'s shard of {version} is whole on {event['host']}, with other bytes than were made"
        self._must((owner, version) in self.stained, event, what)

    def _led(self, event: Event) -> None:
        """A host obeys in one epoch only, and never in a lower one than before."""
        agent, epoch = (event["host"], event["agent"], event["of"]), event["epoch"]
        before = self.epochs.get(agent, -1)
        self._must(epoch > before, event, f"{event['host']} obeys in epoch {epoch} after {before}")
        self.epochs[agent] = max(epoch, before)

    def _opened(self, event: Event) -> None:
        """Incarnations follow each other on every host."""
        incarnation = event["of"]
        agent, place = (event["host"], event.get("agent")), order(f"{incarnation}:0")
        before = self.last_opened.setdefault(agent, place)
        self._must(place >= before, event, f"{event['host']} begins {incarnation} after {before[0]}-{before[1]}")
        self.last_opened[agent] = max(before, place)
        what = f"{event['host']} begins {incarnation} at {event['resumed']}, of which the slots of ranks {event.get('behind')} know nothing"
        self._must(not event.get("behind"), event, what)
        self.hosts[incarnation], self.resumed[incarnation] = {*event["hosts"]}, event["resumed"]
        self.opened.setdefault(incarnation, set()).add(event["host"])
        self.late.discard(event["resumed"])  # where it was whole all the same
        if event["resumed"] is not None and self._is_open(incarnation):
            self.safe.add(event["resumed"])
        self.active.clear()  # uploads die with their incarnation

    def _is_open(self, incarnation: str) -> bool:
        """Whether all hosts of an incarnation have begun it."""
        return incarnation in self.hosts and self.hosts[incarnation] <= self.opened[incarnation]

    def _dropped(self, event: Event) -> None:
        """A sound copy stays while nothing newer is safe, and while ranks choose."""
        version, host, owner = event["version"], event["host"], event["owner"]
        if not event["sound"] or (host, owner, version) in self.flipped:
            return
        what = f"{host} gives rank {owner}'s shard of {version} up"
        self._must(not event["sealed"], event, f"{what} while ranks choose")
        at = order(version)
        of = event["of"]
        left_behind = of != version.rpartition(":")[0] and self._is_open(of) and version != self.resumed[of]
        newer = any(order(other) > at for other in self.safe | {each for each in self.late if each.rpartition(":")[0] == of})
        self._must(newer or version in self.aborted or left_behind, event, f"{what}, and nothing newer is safe")

    def _moved_back(self, event: Event) -> None:
        """The newest commit that slots know of never moves back."""
        self._must(False, event, f"slots know {event['now']} to be committed, and knew of {event['version']} before")

    def _taken_back(self, event: Event) -> None:
        """A host never counts as aborted what it knows to be committed."""
        self._must(False, event, f"{event['host']} counts {event['version']} as aborted, and knows of a commit")

    def _unheld(self, event: Event) -> None:
        """Whoever reads a slot keeps it from being overwritten."""
        what = f"{event['reader']} reads rank {event['owner']}'s {event['version']} on {event['host']}, and does not hold it"
        self._must(False, event, what)

    def _granted(self, event: Event) -> None:
        """Nobody reads, uploads or writes a slot that is given to a writer."""
        what = f"{event['host']} has a slot for rank {event['owner']}'s {event['version']}"
        self._must(not event["readers"], event, f"{what}, and {event['readers']} read it")
        self._must(not event["frozen"], event, f"{what}, and it is uploaded")
        self._must(not event["written"], event, f"{what}, and a worker writes it")

    def _whole(self, event: Event) -> None:
        """Nothing becomes complete while ranks choose."""
        what = f"rank {event['owner']}'s shard of {event['version']} becomes complete on {event['host']}"
        self._must(not event["sealed"], event, f"{what} while ranks choose")

    def _report(self, event: Event) -> None:
        """A host reports only whole copies."""
        self._must(
            event["whole"], event, f"{event['host']} reports rank {event['owner']}'s shard of {event['version']}, and it is not whole"
        )

    def _promised(self, event: Event) -> None:
        """A host promises to ranks that choose only copies that it keeps."""
        self._must(False, event, f"{event['host']} promises copies that it does not keep: {', '.join(event['lost'])}")

    def _reconnected(self, event: Event) -> None:
        """A rank of an attempt that is over may bring its memory to another agent when the ranks of the next have asked what is there."""
        self.brought_late.add(event["host"])

    def _sealing(self, event: Event) -> None:
        """Nothing changes on a host from which ranks choose."""
        self.brought_late.discard(event["host"])
        self._must(event["held"], event, f"ranks choose, and {event['host']} goes on")

    def _left_out(self, event: Event) -> None:
        """No copy is left out while its owner's host may have the only other one, nor because of one payload that arrived damaged."""
        for owner, host in event["pairs"]:
            silent = event["owners"][owner] in event["silent"]
            self._must(not silent, event, f"rank {owner}'s copy on {host} is left out, and nothing is heard of its owner's host")
            self._must(self.probed != "garble", event, f"rank {owner}'s copy on {host} is left out, as a payload arrived damaged once")

    # -- resuming

    def _chosen(self, event: Event) -> None:
        """The newest version that was committed and is whole, in memory or in storage, is resumed; a single fault loses nothing."""
        self.chosen = version = event["version"]
        loses = not self.probed or self.probed in (
            "lose_crew",
            "damage",
            "ruin",
        )  # with a checkpoint in storage nobody waits for absent hosts
        self._must(loses or version == self.latest, event, f"{self.latest} is lost by a single fault ({self.probed})")
        self.chosen_at, self.held = event["at"], event["copies"].get(version, {})
        at = order(version) if version is not None else (0, "", 0)
        ranks = range(event["ranks"])
        passed_over = [other for other in self.committed - {*event["given_up"]} if order(other) > at]
        for other in sorted(passed_over, key=order):
            held = event["copies"].get(other, {})
            damaged = {(host, owner) for host, owner, version_of in self.flipped if version_of == other}
            whole = all(any((host, owner) not in damaged for host in {*held.get(owner, ())} - self.brought_late) for owner in ranks)
            self._must(not whole, event, f"{other} is committed and whole on {event['hosts']}, and {version} is resumed")
        for folder in [folder for folder, (stored, _) in self.manifests.items() if order(stored) > at]:
            stored, is_whole = self.manifests[folder][0], self._is_whole(folder) and folder not in self.mended
            is_known = stored in self.stored or folder not in event.get("hidden", ())  # else its leader was lost before it could say so
            if not is_whole:
                self.passed_over.add(folder)
            self.unknown |= not is_known
            if stored not in event["given_up"] and is_known:
                self._must(not is_whole, event, f"{stored} is whole in storage, and {version} is resumed")

    def _read(self, event: Event) -> None:
        """All ranks resume what was chosen, from their own host where that has it."""
        what = f"rank {event['rank']} resumes {event['version']}, and {self.chosen} was chosen"
        self._must(event["version"] == self.chosen, event, what)
        rank, host, where = event["rank"], event.get("host", ""), event.get("where", "")
        what = f"rank {rank} on {host} reads {event['version']} from {where}"
        is_lost = self.harm.get(host, -1.0) >= self.chosen_at or (host, rank, event["version"]) in self.flipped
        has_own = host in self.held.get(rank, ()) and not is_lost
        self._must(not (where.startswith("peer") and has_own), event, f"{what}, and its own host has it")

    def _visited(self, event: Event) -> None:
        """Only committed versions are exported, and where nothing fails the newest."""
        version, newest = event["version"], event["committed"]
        self._must(version in self.safe, event, f"{version} is exported, which was never committed")
        current = newest is None or order(version) >= order(newest)
        self._must(not self._is_of_probe(event) or current, event, f"{version} is exported, and {newest} is committed")

    def _is_of_probe(self, event: Event) -> bool:
        """Whether a visitor has come when nothing failed, and nothing has failed since."""
        return self.probed == "visit" and event.get("begun", self.probed_at) >= self.probed_at

    def _visit_failed(self, event: Event) -> None:
        """Where nothing fails, the newest snapshot can be exported."""
        self._must(not self._is_of_probe(event), event, f"nothing fails, and nothing can be exported: {event.get('error')}")

    def _wrong_bytes(self, event: Event) -> None:
        """A reader gets the bytes that were written."""
        self._must(False, event, f"rank {event['rank']} reads other bytes of {event['version']} from {event['where']} than were made")

    # -- the end

    def _calm(self, event: Event) -> None:
        """From now on nothing fails."""
        self.commits_since_calm, self.stored_since_calm = 0, False

    def _end(self, event: Event) -> None:
        """When nothing fails any more, the job comes up, every holder counts, something is stored, and memory is counted as it is."""
        if not self.commits_since_calm:
            self._must(False, event, "nothing fails any more, and nothing is committed")
            return
        self._must(not event.get("excluded"), event, f"nothing fails any more, and {event.get('excluded')} are left out")
        self._must(self.stored_since_calm or not event.get("stores"), event, "nothing fails any more, and nothing is stored")
        for host, counted, there in event.get("memory", ()):
            self._must(counted == there, event, f"{host} counts {counted} bytes of memory, and has {there}")

    def _cruise(self, event: Event) -> None:
        """Begins to count steps and commits."""
        self.begun, self.cruised = set[str](), len(self.committed)

    def _begin(self, event: Event) -> None:
        """Remembers a step that was made."""
        self.begun.add(event["version"])

    def _cruise_end(self, event: Event) -> None:
        """While nothing fails, every step is committed, agents say nothing, and each host has the slots that it should."""
        steps, commits = len(self.begun), len(self.committed) - self.cruised
        self._must(commits >= steps - 2, event, f"nothing fails, and of {steps} steps {commits} are committed")
        for line in event["lines"]:
            self._must(False, event, f"nothing fails, and an agent says: {line}")
        for host, owner, slots, due in event["slots"]:
            self._must(due <= slots <= max(due, 3) * bool(due), event, f"{host} has {slots} slots for rank {owner}, and {due} are due")

    def _finished(self, event: Event) -> None:
        """A job that has ended leaves no agent behind, and its last step is committed, and stored."""
        who = sorted({*event["at_work"], *event["waiting"]})
        self._must(not who, event, f"all ranks have come to their end, and {', '.join(who)} are still there")
        if not who:
            last = self.latest or ""
            self._must(last.endswith(f":{event['last']}"), event, f"the job has ended after {event['last']} steps, and {last} is committed")
            is_named = self.unknown and bool(self.refusal)  # it may be another job's, for all that anybody can know
            self._must(not event["stores"] or last in self.stored or is_named, event, f"the job has ended, and {last} is not stored")

    def _probe(self, event: Event) -> None:
        """A single fault strikes."""
        self.commits, self.probed, self.probed_at, self.attempts = 0, event["fault"], event["at"], 0

    def _attempt(self, event: Event) -> None:
        """Counts attempts."""
        self.attempts += 1
        self.mended.clear()

    def _probe_end(self, event: Event) -> None:
        """After a single fault the job commits again, with no more attempts than that explains."""
        self._must(self.attempts <= _ATTEMPTS.get(self.probed, 0), event, f"{self.attempts} attempts follow a single fault ({self.probed})")
        self.probed = ""
        self._must(bool(self.commits), event, f"nothing is committed any more after a single fault ({event['fault']})")
