"""All hosts of a run over all its incarnations."""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial
from random import Random

from gemini_ft.core.decisions import Decision, WriteManifest
from gemini_ft.core.ledger import Ledger
from gemini_ft.core.placement import place
from gemini_ft.core.slots import Slot, SlotState
from gemini_ft.core.tree import FAN_IN
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.recovery.plan import RecoveryPlan, plan_recovery
from gemini_ft.wire.worker_messages import SlotInfo
from miniature.host import Below, Member, Node, Refusal
from miniature.transfer import Fetch, Receiver, Server
from miniature.truth import BrokenPromiseError, Truth, check, has
from miniature.wire import CHUNKS, Connection, Handler, Memory, Step, Tag
from miniature.worker import Session, Uploading, Worker


class Storage:
    """The slow tier."""

    def __init__(self) -> None:
        self.objects: dict[tuple[Version, int], list[Tag | None]] = {}
        self.manifests: list[Version] = []
        self.overtaken: set[Version] = set()  # of these, shards were deleted after a later upload, since there was no manifest
        self.under_way: list[WriteManifest] = []  # that leaders have written that do not lead any more; they may arrive, or not

    def arrive(self, manifest: WriteManifest) -> None:
        """A manifest arrives late. It must be whole, unless a later upload is over: then it goes as well where its shards have gone."""
        self.under_way.remove(manifest)
        newest = max(self.manifests, default=manifest.version)
        is_late = manifest.version in self.overtaken or newest > manifest.version
        if not is_late or all(self.holds(manifest.version, owner) for owner in manifest.records):
            self.write_manifest(manifest.version, manifest.records.keys())

    def write_manifest(self, version: Version, owners: Set[int]) -> None:
        for owner in owners:
            if not self.holds(version, owner):
                raise BrokenPromiseError(f"the manifest of {version} names {self.objects.get((version, owner))} of rank {owner}")
        self.manifests.append(version)

    def holds(self, version: Version, owner: int) -> bool:
        return self.objects.get((version, owner)) == [(version, owner)] * CHUNKS


class Job:
    """``events`` and ``workers`` say what may happen next; the faults and ``restart`` are whoever drives it's to choose."""

    def __init__(self, hosts: int, ranks_per_host: int, replicas: int, every: int | None, fan_in: int = FAN_IN) -> None:
        self.fan_in = fan_in
        self.size, self.ranks_per_host, self.replicas, self.every = hosts, ranks_per_host, min(replicas, hosts), every
        self.world_size = hosts * ranks_per_host
        self.now = 0.0
        self.storage = Storage()
        self.nodes: dict[str, Node] = {}
        self.connections: list[Connection] = []
        self.lies = 0  # chunks that will be exchanged on their way
        self.hung: set[tuple[str, str]] = set()  # (from, to): nothing gets through, and nobody is told
        self.stopped: set[Node] = set()  # whose agents hear, do and decide nothing, while their connections stay
        self.layout_changes: list[int] = []  # iterations from which shards have another shape
        self.truth = Truth()
        self._former: Truth | None = None  # what holds if not all hosts open the session that has been chosen
        self.phase = "broken"  # then gathering, opening, running
        self._attempts = 0
        self._refuse = False
        self._todo: list[Node] = []  # hosts still to be asked, or to be told
        self.crew: list[Node] = []  # hosts of the present attempt, in the order of their ranks
        self._sealed: dict[Node, list[tuple[int, Version]]] = {}  # and the copies that their inventories have promised
        self._holdings: dict[str, list[SlotInfo]] = {}

    @property
    def session(self) -> Session | None:
        return self.truth.session

    # -- what may happen next

    def events(self) -> list[Step]:
        """Everything that can happen by itself; training and faults are choices."""
        found = [event for connection in self.connections for event in connection.events()]
        for node in self.nodes.values():
            if node.alive:
                found.extend(node.events())
        step = {"gathering": self.gather, "opening": self._open, "running": None, "broken": None}[self.phase]
        if step is not None:
            found.extend((node, partial(step, node)) for node in self._todo if node not in self.stopped)
        found.extend((self.storage, partial(self.storage.arrive, manifest)) for manifest in self.storage.under_way)
        if self.phase == "broken":
            found.extend((node, partial(self._unseal, node)) for node in self._sealed if node not in self.stopped)
        return found

    def workers(self) -> list[Worker]:
        return [worker for node in self.nodes.values() if node.alive for worker in node.workers if worker.alive]

    def trainers(self) -> list[Worker]:
        """Workers that can begin another iteration; those of the past included."""
        return [worker for worker in self.workers() if worker.may_train()]

    def slowest(self, session: Session) -> int:
        mates = [worker.iteration for node in self.nodes.values() for worker in node.workers if worker.session is session]
        return min(mates) if len(mates) == self.world_size else -1

    def is_open(self, session: Session) -> bool:
        return self.session is session and all(node.session is session for node in self.crew)

    def change_layout(self) -> None:
        """The optimizer has created its state, say: from the next iteration on every rank's shard has another shape."""
        begun = [worker.iteration for node in self.nodes.values() for worker in node.workers]
        self.layout_changes.append(max(begun, default=0) + 1)

    def shape_at(self, iteration: int) -> int:
        return sum(change <= iteration for change in self.layout_changes)

    # -- the network

    def accepts(self, node: Node, name: str) -> bool:
        """The agent's duty: only hosts of one incarnation talk to each other."""
        peer = self.nodes.get(name)
        if peer is None or not peer.alive or peer in self.stopped:
            return False
        return node.session is not None and peer.session is node.session

    def connect(self, node: Node, name: str, role: str, near: Handler, epoch: int = 0) -> Connection | None:
        """Whoever wants to read is let in whatever the incarnation; nobody else is."""
        peer = self.nodes.get(name)
        if peer is None or not peer.alive or peer in self.stopped or (role != "fetch" and not self.accepts(node, name)):
            return None
        far = peer.join(node.name, epoch, node.epoch) if role == "report" else Receiver(peer) if role == "replicate" else Server(peer)
        connection = far.connection = Connection(self, role, (node.name, name), near, far)
        if isinstance(far, Below):
            far.join(node.name)
        if isinstance(far, Member | Below | Refusal):
            far.welcome()
        self.connections = [c for c in self.connections if c.near_open or c.far_open] + [connection]
        return connection

    def connections_to(self, node: Node) -> list[Connection]:
        return [connection for connection in self.connections if connection.far_open and connection.far.node is node]

    def links(self) -> list[Connection]:
        return [connection for connection in self.connections if connection.near_open and connection.far_open]

    def disconnect(self, node: Node) -> None:
        """An agent is dead: its own ends do nothing any more, the others will notice."""
        for connection in self.connections:
            if connection.near.node is node:
                connection.close_near(tell=False)
        for connection in self.connections_to(node):
            connection.close_far(tell=False)

    # -- time and faults

    def pause(self) -> None:
        """A moment: whoever was told to try again does."""
        for connection in self.links():
            if isinstance(connection.far, Receiver) and connection.far.node not in self.stopped:
                connection.far.ask_again()

    def wait(self, seconds: float = 11.0) -> None:
        """Longer than anybody's patience."""
        self.now += seconds
        self.pause()
        for node in [node for node in self.nodes.values() if node.alive and node not in self.stopped]:
            node.tick()
            for link in node.links.values():
                link.insist()

    def read(self, rng: Random) -> None:
        """Somebody reads a complete shard, whichever, and keeps it from being overwritten meanwhile."""
        alive = [node for node in self.nodes.values() if node.alive]
        shards = [(node, o, slot.version) for node in alive for o, shard in node.host.shards.items() for slot in shard.slots.values()]
        readable = [(node, o, v) for node, o, v in shards if v is not None and node.host.slots(o).complete_version(v) is not None]
        if readable:
            node, owner, version = rng.choice(readable)
            reader = rng.choice(alive)
            if reader in self.stopped:
                return
            reader.fetch(Fetch(reader, owner, version, None, lambda whole: None), node.name)

    def crash(self, node: Node) -> None:
        """Host, memory and workers are gone."""
        node.alive = False
        self.stopped.discard(node)
        for worker in node.workers:
            worker.die()
        self.disconnect(node)
        if node in self.crew:
            self._break()
        for truth in self._truths():
            truth.lose(node)

    # -- restarts

    def _break(self) -> None:
        """The present attempt is over. A session that not all hosts have opened has never been."""
        self.phase = "broken"
        if self._former is not None:
            self.truth, self._former = self._former, None

    def _truths(self) -> list[Truth]:
        return [truth for truth in (self.truth, self._former) if truth is not None]

    def restart(self, rng: Random, surviving: float = 0.0, refuse: bool = False) -> None:
        """A new rendezvous of the hosts that are left, and fresh ones. Ranks move; workers survive with some probability.

        ``refuse``: the version that would be resumed has led to failure after failure, an older one is taken.
        """
        self._break()
        for worker in self.workers():
            if rng.random() >= surviving:
                worker.die()
        crew = [node for node in self.nodes.values() if node.alive]
        rng.shuffle(crew)
        del crew[self.size :]
        if len(crew) > 1 and rng.random() < 0.1:
            crew.pop()  # cut off, and taken for lost
        while len(crew) < self.size:
            crew.append(self._fresh_host(rng))
        rng.shuffle(crew)
        self.crew, self.phase, self._todo, self._holdings, self._refuse = crew, "gathering", list(crew), {}, refuse

    def _fresh_host(self, rng: Random) -> Node:
        lost = [name for name, node in self.nodes.items() if not node.alive]
        name = rng.choice(lost) if lost and rng.random() < 0.5 else f"host{len(self.nodes)}"
        self.nodes[name] = node = Node(self, name)
        return node

    def gather(self, node: Node) -> None:
        self._todo.remove(node)
        node.host.seal()  # the agent's duty
        slots = [(owner, slot) for owner, shard in node.host.shards.items() for slot in shard.slots.values()]
        whole = [(owner, slot.index, slot.version) for owner, slot in slots if slot.state is SlotState.COMPLETE and slot.version]
        self._sealed[node] = [(owner, version) for owner, _, version in whole]
        self._holdings[node.name] = [self._info(node, owner, v, node.memory[owner, index]) for owner, index, v in whole]
        if not self._todo:
            self._plan()

    def _info(self, node: Node, owner: int, version: Version, memory: Memory) -> SlotInfo:
        return SlotInfo(
            owner=owner,
            version=version,
            world_size=self.world_size,
            layout_hash=f"layout {memory.shape}",
            data_bytes=CHUNKS,
            extras_bytes=0,
            age=0.0,
            root=memory.root(version, owner),
            committed=version == node.host.committed,
        )

    def returned(self, node: Node, brought: bool) -> None:
        """A worker has handed slots back to an agent. Those to whom it has given its inventory without a copy start over."""
        for truth in self._truths():
            truth.find(node)
        answered = node in self._sealed and node in self.crew and (self.phase == "opening" or node not in self._todo)
        if brought and answered:
            self._break()  # the agent's duty: their session is not opened here

    def forgotten(self, node: Node) -> None:
        """An agent was restarted. Those who were choosing what to resume had its promise, and start over."""
        for truth in self._truths():
            truth.lose(node)
        if self._sealed.pop(node, None) is not None:
            self._break()

    def _unseal(self, node: Node) -> None:
        """Those who were choosing are dead."""
        del self._sealed[node]
        if node.alive:
            node.perform(node.host.unseal())

    def _plan(self) -> None:
        plan = self._choose([])
        safe = self.truth.safe
        lost = safe is not None and (plan.version is None or plan.version < safe)
        text = f"{safe} was committed and a copy of every shard is here, but {plan.version or 'nothing'} would be resumed"
        check(not lost or not self.truth.is_kept_by(self.crew), text)
        older = self._choose([plan.version]) if self._refuse and plan.version is not None else plan
        self._begin(older if older.version is not None else plan)

    def _choose(self, refused: list[Version]) -> RecoveryPlan:
        stored = max(self.storage.manifests, default=None)
        return plan_recovery(self._holdings, self.world_size, stored, self.world_size, refused)

    def _begin(self, plan: RecoveryPlan) -> None:
        before = [session for node in self.crew if (session := node.session or node.interrupted) is not None]
        known = [session.incarnation.number for session in before]
        known += [version.incarnation.number for version in (plan.version, *self.storage.manifests) if version is not None]
        self._attempts += 1
        incarnation = Incarnation(max(known, default=0) + 1, f"{self._attempts:04}")
        placement = place([node.name for node in self.crew], self.replicas)
        hosts = tuple(node.name for node in self.crew for _ in range(self.ranks_per_host))
        holders = {rank: placement[host] for rank, host in enumerate(hosts)}
        session = Session(incarnation, hosts, holders, plan.version, dict(plan.sources), dict(plan.roots), self.fan_in)
        keepers = {owner: {self.nodes[name] for name in names} for owner, names in plan.sources.items()}
        self.truth, self._former = Truth(session, plan.version, keepers), self.truth
        self.phase, self._todo = "opening", list(self.crew)

    def _open(self, node: Node) -> None:
        assert self.session is not None
        self._todo.remove(node)
        self._sealed.pop(node, None)
        node.open(self.session)
        if not self._todo:
            self.phase, self._former = "running", None

    # -- the truth

    def is_written(self, memory: Memory) -> bool:
        return self.is_filled(memory) or any(worker.memory is memory for worker in self.workers())

    def is_filled(self, memory: Memory) -> bool:
        """By a peer's bytes."""
        receivers = (c.far for c in self.connections if c.far_open and isinstance(c.far, Receiver))
        fetches = (fetch for node in self.nodes.values() if node.alive for fetch in node.fetches)
        return any(receiver.fills(memory) for receiver in receivers) or any(fetch.target is memory for fetch in fetches)

    def witness(self, node: Node, decision: Decision) -> None:
        """A ledger has decided. Decisions of the past bind nobody any more."""
        for truth in self._truths():
            if truth.session is not None and node.session is truth.session:
                truth.witness(node, decision, self.nodes)

    def verify(self) -> None:
        """What must hold between any two events."""
        alive = [node for node in self.nodes.values() if node.alive]
        for node in alive:
            for owner, shard in node.host.shards.items():
                for slot in shard.slots.values():
                    if wrong := self._wrong(owner, slot, node.memory[owner, slot.index]):
                        raise BrokenPromiseError(f"{node.name}, rank {owner}: {wrong}: {slot}, {node.memory[owner, slot.index]}")
                versions = [slot.version for slot in shard.slots.values() if slot.version is not None]
                if len(versions) != len(set(versions)):
                    raise BrokenPromiseError(f"{node.name}, rank {owner}: two slots of one version: {versions}")
        for truth in self._truths():
            truth.verify()
        for node, promised in self._sealed.items():
            gone = [f"rank {owner}'s {version}" for owner, version in promised if node.alive and not has(node, owner, version)]
            check(not gone, f"{node.name}'s inventory has promised {gone}, and they are gone")

    def _wrong(self, owner: int, slot: Slot, memory: Memory) -> str:
        if slot.state is SlotState.COMPLETE:
            whole = slot.version is not None and memory.holds(slot.version, owner) and memory.header == slot.version
            return "" if whole else "a complete slot holds something else"
        if slot.frozen or memory.header is not None:
            return "frozen, or named in its header, but not complete"
        return "" if (slot.version is None) == (slot.state is SlotState.EMPTY) else "neither empty nor of any version"

    # -- to the end

    def settle(self, rng: Random, uploads: bool = True, limit: int = 20_000) -> None:
        """Let everything happen that can, in any order, until nothing does."""
        for _ in range(limit):
            events = [event for who, event in self.events() if uploads or not isinstance(who, Uploading)]
            if not events:
                return
            rng.choice(events)()
        raise BrokenPromiseError("messages go round in circles")

    def drain(self, rng: Random, hang: bool) -> None:
        """Everything is delivered and all workers keep training: commits advance, replicas return, uploads end, memory is freed.

        Commits advance even while storage hangs, without anybody's patience; only a peer that hangs, or an agent
        that forgot what it was sending, is waited for.
        """
        self.hung.clear()
        self.stopped.clear()
        self.lies = 0
        self.settle(rng)
        if self.phase != "running" or len(self._mates()) < self.world_size:
            self.restart(rng)
            self.settle(rng)
        check(self.phase == "running", "the job does not come up")
        assert self.session is not None
        self.wait()  # a leader that is lost is missed after a while
        self.settle(rng)
        check(self.leader is not None, "nobody leads")
        pairs = [(names[0], name) for names in self.session.holders.values() for name in names[1:]]
        self.hung = {rng.choice(pairs)} if pairs and hang else set()
        patient = bool(self.hung) or any(node.adopted for node in self.crew)
        commits = len(self.truth.committed) + 6
        self._train_until("commits do not advance", lambda: len(self.truth.committed) >= commits, rng, uploads=False, patient=patient)
        self.hung.clear()
        self._train_until("replicas that were left out do not come back", self._all_count, rng)
        manifests = len(self.storage.manifests) + 1
        self._train_until("nothing is uploaded any more", lambda: not self.every or len(self.storage.manifests) >= manifests, rng)
        self._check_memory()

    @property
    def leader(self) -> Ledger | None:
        """The ledger of the newest epoch, if all hosts know of no other."""
        newest = max(node.epoch for node in self.crew)
        books = [node.ledger for node in self.crew if node.ledger is not None and node.epoch == newest]
        return books[0] if {node.epoch for node in self.crew} == {newest} and len(books) == 1 else None

    def _all_count(self) -> bool:
        return self.leader is not None and not self.leader.excluded

    def _mates(self) -> list[Worker]:
        return [worker for worker in self.workers() if worker.session is self.session and worker.state != "failed"]

    def _train_until(self, text: str, done: Callable[[], bool], rng: Random, uploads: bool = True, patient: bool = True) -> None:
        for _ in range(40):
            if done():
                return
            for worker in self.trainers():
                worker.train()
            self.settle(rng, uploads)
            self.wait() if patient else self.pause()
            self.settle(rng, uploads)
            self.verify()
        raise BrokenPromiseError(text)

    def _check_memory(self) -> None:
        for node in self.crew:
            for owner, shard in node.host.shards.items():
                slots = list(shard.slots.values())
                holds = node.name in node.host.holders[owner]
                check(holds or not slots, f"{node.name} keeps rank {owner}'s shard, which it does not hold: {slots}")
                check(len(slots) <= 3 or node.adopted, f"{node.name} needs {len(slots)} slots for rank {owner}'s shard: {slots}")
