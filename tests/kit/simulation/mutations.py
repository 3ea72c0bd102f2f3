"""The package broken on purpose, in one place at a time: the measure of what the simulation and its checker see."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from types import ModuleType
from typing import Any, NamedTuple


class Mutation(NamedTuple):
    """A function of the package with one thing changed."""

    where: str  # module:name or module:class.name
    old: str
    new: str
    breaks: str
    seed: int = 1  # of a history in which that is seen, if there is a known one

    def broken(self) -> str:
        """The source of the broken function. Raises AssertionError: the package does not have any more what is to be changed."""
        source = textwrap.dedent(inspect.getsource(_function(vars(self._holder)[self._name])))
        assert self.old in source, f"{self.where} has no {self.old!r} any more"
        return "from __future__ import annotations\n" + source.replace(self.old, self.new, 1)

    def apply(self) -> None:
        """Breaks it, in this process."""
        scope, before = dict[str, object](), getattr(self._holder, self._name)
        exec(compile(self.broken(), self.where, "exec"), vars(self._module), scope)
        setattr(self._holder, self._name, scope[self._name])
        for other in [*sys.modules.values()] if self._holder is self._module else []:  # which have imported it by its name
            if vars(other).get(self._name) is before:
                setattr(other, self._name, scope[self._name])

    @property
    def _module(self) -> ModuleType:
        return importlib.import_module(f"gemini_ft.{self.where.partition(':')[0]}")

    @property
    def _holder(self) -> object:
        owner, _, _ = self.where.partition(":")[2].rpartition(".")
        return getattr(self._module, owner) if owner else self._module

    @property
    def _name(self) -> str:
        return self.where.partition(":")[2].rpartition(".")[2]


def _function(named: object) -> Any:
    """The function of a name, also of a property."""
    return named.fget if isinstance(named, property) else named


_HOST, _SLOTS, _LEDGER = "core.protocol:Host.", "core.slots:SlotSet.", "core.ledger:Ledger."
MUTATIONS = (
    Mutation(
        _SLOTS + "begin",
        "self.sealed or self.find(version) is not None or self.undecided()",
        "self.find(version) is not None",
        "a slot is overwritten before its version is decided, also while ranks choose",
        2,
    ),
    Mutation(_SLOTS + "_is_free", "slot.version != keep", "True", "the committed version is overwritten", 7),
    Mutation(_SLOTS + "_is_free", "slot.frozen or slot.readers", "False", "a slot is overwritten while it is read or uploaded", 7),
    Mutation(
        _SLOTS + "abort", "not self.sealed or self.complete_version(version) is None", "True", "a copy goes that an inventory promised", 12
    ),
    Mutation(_SLOTS + "complete", "or self.sealed", "", "copies become complete while ranks choose", 1),
    Mutation(
        _SLOTS + "rewind",
        "slot.past = slot.version != resumed and (slot.past or left)",
        "slot.clear() if slot.version != resumed else None",
        "all but the resumed version goes before all hosts have opened the incarnation",
        2,
    ),
    Mutation(
        _SLOTS + "rewind", "slot.past = slot.version != resumed and (slot.past or left)", "pass", "copies of a history that is over stay", 1
    ),
    Mutation(_SLOTS + "discard", "slot.state = SlotState.TORN", "slot.clear()", "a slot is granted while its writer still writes"),
    Mutation(
        _HOST + "_discard_damaged",
        "slot.root != self.roots.get(owner, slot.root)",
        "False",
        "a copy with another root than the committed one stays",
        4,
    ),
    Mutation(_HOST + "on_abort", "self.committed is not None and version <= self.committed", "False", "what is committed can be aborted"),
    Mutation(_HOST + "_undecided", "slot.state is SlotState.COMPLETE", "True", "copies that are not whole are reported again"),
    Mutation(
        _HOST + "_is_of_present",
        "self.incarnation in (None, version.incarnation)",
        "True",
        "a leader of the past hears of what is not its own",
    ),
    Mutation(_HOST + "reopen", "slots.commit(committed)", "pass", "an agent that was restarted forgets the commit", 1),
    Mutation(
        "agent.own_shards:OwnShards._copied",
        "if not memory.finish(version, message.extras_bytes, message.root or None):",
        "if not memory.finish(version, message.extras_bytes, None) and False:",
        "the owner's root is not compared",
        6,
    ),
    Mutation(
        "agent.replication.receive:Receiver._whole",
        "if digest == chunk.digest:",
        "if True:",
        "what arrives is not compared with its checksum",
    ),
    Mutation(
        "agent.replication.receive:Inbound.end_receive",
        "self._context.host.completed(end.owner, version, end.layout, end.digest, memory.root)",
        "[]",
        "a replica is not reported",
    ),
    Mutation(
        "agent.replication.receive:Receiver._begin",
        "memory = self._inbound.begin_receive(begin.owner, begin.iteration, begin.committed)",
        "memory = self._inbound.begin_receive(begin.owner, begin.iteration, None)",
        "replicas do not hear what is committed",
        2,
    ),
    Mutation(
        "agent.memory.slot_store:SlotStore._check", "if not damaged and memory.is_genuine:", "if True:", "damaged copies are resumed", 15
    ),
    Mutation(
        "agent.memory.slot_store:SlotStore.sync_headers",
        "memory.clear()",
        "pass",
        "slots that are overwritten keep the name of what they had",
        1,
    ),
    Mutation("agent.stream:Stream.seal", "self.context.host.seal()", "pass", "hosts go on while ranks choose", 2),
    Mutation("agent.stream:Stream.open", "self.close_session()", "None", "connections of the incarnation before stay", 3),
    Mutation(
        "agent.session:Incoming.accept", "claims.incarnation != spec.incarnation", "False", "hosts of another incarnation are taken in", 1
    ),
    Mutation("agent.session:AgentSession.undecided", "*host.reports(), ", "", "what is undecided is not repeated to the next leader", 3),
    Mutation(
        "recovery.plan:_is_whole",
        "set(range(held[0][1].world_size))",
        "{info.owner for _, info in held}",
        "a version that is not whole is resumed",
        3,
    ),
    Mutation("recovery.plan:plan_recovery", "sorted(held, reverse=True)", "sorted(held)", "the oldest version is resumed", 2),
    Mutation(
        "recovery.plan:genuine", "{each.root for each in of if each.committed} or ", "", "copies that were not committed count as genuine"
    ),
    Mutation(
        _LEDGER + "tick",
        "late = frozenset((owner, host) for owner, host in missing if self.holders[owner][0] not in silent)",
        "late = frozenset(missing)",
        "copies of silent hosts are left out",
        7,
    ),
    Mutation(_LEDGER + "rejoin", "self._close(newest)", "pass", "a leader does not learn what was committed before it", 6),
    Mutation(
        "agent.uploads:Uploader.over",
        "self._clear_away(written - orphans)",
        "self._clear_away(written | {key for keys in self._written.values() for key in keys})",
        "shards of another upload are deleted",
    ),
    Mutation("agent.uploads:Uploader._write", "self._leftovers.discard(key)", "pass", "what is uploaded again is deleted as a leftover"),
    Mutation("storage.retention:Retention._delete_all", "if one.folder in held:", "if False:", "what is being read is deleted", 28),
    Mutation(
        "storage.lookout:Lookout._look", "if mark is not None:", "if False:", "a list that lacks the newest checkpoint is believed", 3
    ),
    Mutation(
        "agent.uploads:Uploader._clear_away",
        "self._leftovers.update(keys)",
        "self._clearing.__enter__(); self._leftovers.update(keys); self._clearing.__exit__()",
        "the event loop waits for a deletion",
        3,
    ),
    Mutation(
        "core.rounds:Round.complete",
        "self.own_since is not None and not self._awaited and next(self.missing(), None) is None",
        "self.own_since is not None",
        "what is committed may have no replicas",
    ),
    Mutation(
        _LEDGER + "uploaded",
        "if self._records.keys() != self.holders.keys():",
        "if not self._records:",
        "a manifest is written before all shards are",
        2,
    ),
    Mutation("core.tree:Succession._is_ahead", "self.epoch < epoch", "self.epoch != epoch and epoch", "an older epoch is obeyed again", 1),
    Mutation(
        "agent.commit.failover:Failover.hear",
        "if self.leader is not None:",
        "if False:",
        "a leader goes on that has heard of the next one",
        8,
    ),
    Mutation(
        "agent.commit.collector:Collector._tick",
        "silent = sorted({*self._gone, *(host for host in self._gathering.greeted if now - self._ports[host].heard > SILENCE)})",
        "silent = []",
        "a collector does not say which hosts it has lost",
        52,
    ),
    Mutation(_SLOTS + "commit", "version > self.committed", "version != self.committed", "what is committed moves back", 7),
    Mutation(
        "agent.replication.receive:Receiver._end",
        "elif self._inbound.end_receive(end):",
        "elif self._inbound.end_receive(end) or True:",
        "a replica is acknowledged that is not whole",
        3,
    ),
    Mutation(
        "agent.stream:Stream.open",
        "spec.incarnation.number <= before.incarnation.number",
        "False",
        "an incarnation begins after a newer one",
        16,
    ),
    Mutation("agent.uploads:Uploader.write_manifest", "if not self._is_written(manifest):", "if False:", "a manifest is not read back", 10),
    Mutation("agent.uploads:Uploader._write", "StoredShard(self._storage, record).sample()", "pass", "a shard is not read back", 3),
    Mutation(
        "agent.uploads:Uploader._check_leads",
        "if epoch is None or self._term.leads_in != epoch:",
        "if False:",
        "a manifest is written by a host that does not lead any more",
        7,
    ),
    Mutation("core.protocol:Host.hold", "slot.readers.add(reader)", "pass", "what is read may be overwritten"),
    Mutation(
        "storage.decisions:superseded_by",
        "enough = len(kept) >= keep_last",
        "enough = True",
        "fewer checkpoints are kept than should be",
        1,
    ),
    Mutation(
        "storage.retention:Retention._delete",
        "storage.delete(manifest)\n    for key in files_of(storage, one.folder)",
        "for key in reversed(files_of(storage, one.folder))",
        "the shards of a checkpoint are deleted before its manifest",
        2,
    ),
    Mutation("storage.shard:write_shard", "if committed is not None:", "if False:", "copies are uploaded that were damaged in memory"),
    Mutation(
        "worker.resume_choice:Chooser._find",
        "in_doubt(self._holdings, refused | checked, memory)",
        "None",
        "a newer version is passed over of which two copies differ",
        14,
    ),
    Mutation("recovery.readers:_compare", "if found != digest:", "if False:", "what a host reads from another one is not compared", 5),
    Mutation(
        "recovery.plan:plan_recovery",
        "if stored is not None and version < stored:",
        "if False:",
        "memory is resumed although storage is newer",
        9,
    ),
    Mutation(
        "storage.decisions:_in_order",
        "sorted(line, key=place, reverse=True)",
        "sorted(line, key=place)",
        "the oldest checkpoint is resumed",
        8,
    ),
)
