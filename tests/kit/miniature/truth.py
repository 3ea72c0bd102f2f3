"""What sessions really come to, whatever hosts believe of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gemini_ft.core.decisions import Abort, Commit, Decision
from gemini_ft.core.versions import Version

if TYPE_CHECKING:
    from miniature.host import Node
    from miniature.worker import Session


class BrokenPromiseError(AssertionError):
    """The protocol has let something happen that must never happen."""


def check(holds: bool, text: str) -> None:
    if not holds:
        raise BrokenPromiseError(text)


def has(node: Node, owner: int, version: Version) -> bool:
    """Whether a host has all bytes of a shard, and knows it."""
    shard = node.host.shards.get(owner)
    slot = shard.complete_version(version) if shard is not None else None
    return slot is not None and node.memory[owner, slot.index].holds(version, owner)


@dataclass
class Truth:
    """Of one session.

    Attributes:
        session: None: before the first one.
        safe: the newest version that must not get lost.
        keepers: of each owner's shard of it all these hosts keep their copies.
        committed: in this session, in order.
    """

    session: Session | None = None
    safe: Version | None = None
    keepers: dict[int, set[Node]] = field(default_factory=dict)
    committed: list[Version] = field(default_factory=list)
    roots: dict[tuple[Version, int], str] = field(default_factory=dict)  # said with commits, by whatever ledger
    _aborted: set[Version] = field(default_factory=set)

    def lose(self, node: Node) -> None:
        """A host is gone."""
        self.keepers = {owner: hosts - {node} for owner, hosts in self.keepers.items()}

    def find(self, node: Node) -> None:
        """An agent has copies again. One that goes on in a session that is over has promised them to nobody."""
        if self.safe is not None and node.session in (None, self.session):
            found = {owner for owner in self.keepers if has(node, owner, self.safe)}
            self.keepers = {owner: hosts | {node} if owner in found else hosts for owner, hosts in self.keepers.items()}

    def is_kept_by(self, hosts: list[Node]) -> bool:
        """Whether there is a copy of every shard among them."""
        return bool(self.keepers) and all(not keepers.isdisjoint(hosts) for keepers in self.keepers.values())

    def verify(self) -> None:
        """Nobody may have given up what is safe."""
        if self.safe is None:
            return
        for owner, keepers in self.keepers.items():
            lacking = [node.name for node in keepers if node.alive and not has(node, owner, self.safe)]
            check(not lacking, f"{self.safe} is committed, but {lacking} had rank {owner}'s shard of it and have it no more")

    def witness(self, node: Node, decision: Decision, nodes: Mapping[str, Node]) -> None:
        """The session's ledger, on this host, has decided."""
        assert self.session is not None
        if isinstance(decision, Abort):
            check(decision.version not in self.committed, f"{decision.version} was committed, and is aborted now")
            self._aborted.add(decision.version)
        elif isinstance(decision, Commit) and decision.version.incarnation == self.session.incarnation:
            check(decision.version not in self._aborted, f"{decision.version} was aborted, and is committed now")
            for owner, root in decision.roots.items():
                known = self.roots.setdefault((decision.version, owner), root)
                check(known == root, f"rank {owner}'s {decision.version} is committed with the root {root}, and was with {known}")
            if decision.version not in self.committed:
                self._commit(node, decision.version, nodes)

    def _commit(self, node: Node, version: Version, nodes: Mapping[str, Node]) -> None:
        assert self.session is not None
        assert node.ledger is not None
        if self.safe is not None and version < self.safe and version.incarnation == self.safe.incarnation:
            self.committed.append(version)  # by a ledger that has been replaced, and did not know yet
            return
        self.keepers = {}
        for owner, names in self.session.holders.items():
            check((owner, names[0]) not in node.ledger.excluded, f"rank {owner}'s own copy was left out")
            counted = [nodes[name] for name in names if (owner, name) not in node.ledger.excluded]
            here = [holder for holder in counted if holder.alive and holder.session is self.session]
            keepers = {holder for holder in here if has(holder, owner, version)}
            for holder in set(here) - keepers:  # a copy that its agent has forgotten counts when a worker has handed it back
                held = [memory for worker in holder.workers for of, memory in worker.held if of == owner]
                kept = any(memory.header == version and memory.holds(version, owner) for memory in held)
                check(kept, f"{version} is committed, but {holder.name} lacks rank {owner}'s shard")
            self.keepers[owner] = keepers
        self.safe = version
        self.committed.append(version)
