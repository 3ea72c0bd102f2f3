"""Turns what happens in a simulated job into events of its history: decisions, choices, and what becomes of stored objects."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gemini_ft.agent.memory import slot_memory
from gemini_ft.agent.stream import Stream
from gemini_ft.core.decisions import Abort, Commit, Holders, Thaw
from gemini_ft.core.versions import Version
from gemini_ft.errors import CorruptDataError, FormatError
from gemini_ft.storage import checkpoints
from gemini_ft.storage.checkpoints import MANIFEST, Manifest, checked, checkpoint_folder
from gemini_ft.storage.shard import ShardRecord
from gemini_ft.wire.peer_messages import PeerMessage
from simulation.loop import PROCESS
from simulation.made import EXTRAS, checksums, content, text
from simulation.storage import READING
from simulation.worker import Script

if TYPE_CHECKING:
    from simulation.hosts import Host
    from simulation.world import World

_HEADER = 4096  # bytes of a slot's header, behind which there are the checksums of its chunks


def on_storage(world: World, event: str, key: str, **facts: Any) -> None:
    facts["key"] = key
    if event == "put" and key.endswith(MANIFEST):
        body = json.loads(world.bucket.objects[key])
        manifest = Manifest.model_validate({name: value for name, value in body.items() if name != "xxh3"})
        facts |= {
            "version": text(manifest.version),
            "shards": sorted(record.key for record in manifest.shards.values()),
            "lineage": [text(version) for version in manifest.lineage or ()],
            "unsound": sorted(
                record.key for owner, record in manifest.shards.items() if not _is_made(world, owner, manifest.version, record)
            ),
        }
    elif event == "put" and key.endswith(".stored.json"):
        facts["stored"] = text(checkpoints.Mark.model_validate(checked(world.bucket.objects[key])).version)
    elif event == "put" and READING in key:
        facts["holds"] = json.loads(world.bucket.objects[key])["folder"]
    process = PROCESS.get()
    leads = any(agent.process is process for agent in world.leading)
    if event == "listing":
        world.led_when_listing[process, key] = leads
        return
    if event == "putting":
        if not key.endswith(MANIFEST):
            return
        facts["leads"] = leads or world.led_when_listing.get((process, key.removesuffix(MANIFEST.lstrip("/"))), False)
    world.record(event, by=process.name if process is not None else "", **facts)


def _is_made(world: World, owner: int, version: Version, record: ShardRecord) -> bool:
    """Whether a stored shard has the bytes that its owner has made."""
    body, at = world.bucket.objects.get(record.key, b""), record.data.offset
    return body[at : at + record.data.nbytes] == content(owner, version, world.size_at(version.iteration))


def copies(world: World, hosts: list[Host], only: Version | None = None) -> dict[str, dict[int, list[str]]]:
    """Version -> owner -> hosts that have all bytes of its shard, as they were made, in memory that lives."""
    found: dict[str, dict[int, list[str]]] = {}
    for host in hosts:
        seen = set()
        for fd in _descriptors(world, host):
            if (inode := os.fstat(fd).st_ino) not in seen:
                seen.add(inode)
                if (copy := sound(fd, world.size_at, only)) is not None and host.name not in (
                    where := found.setdefault(text(copy[1]), {}).setdefault(copy[0], [])
                ):
                    where.append(host.name)
    return found


def _descriptors(world: World, host: Host) -> list[int]:
    fds = [memory.fd for memory in host.agent.memory] if host.agent is not None else []
    for worker in host.workers:
        fds += worker.fds
        if worker.client is not None:
            fds += worker.client.custody.values()
    return fds


def on_decision(world: World, stream: Stream, message: PeerMessage) -> None:
    """A host hears a decision, the leader's own before it has told anybody."""
    name, spec = stream.context.host.name, stream.context.spec
    assert spec is not None
    if isinstance(message, Commit):
        session = stream.present_session
        leads = session is not None and session.failover.leader is not None
        facts: dict[str, Any] = {"host": name, "version": text(message.version), "leads": leads, "freeze": message.freeze}
        facts |= {"of": str(spec.incarnation), "resumed": text(spec.resumed) if spec.resumed is not None else None}
        if leads:
            assert session is not None
            assert session.failover.leader is not None
            book = session.failover.leader.book
            world.commits += 1
            facts["epoch"], facts["leads_in"] = session.succession.epoch, session.failover.leader._epoch
            facts["folder"] = checkpoint_folder(world.run, stream.context.name, message.version)
            facts["copies"] = copies(world, world.hosts, message.version).get(text(message.version), {})
            facts["holders"] = {owner: list(hosts) for owner, hosts in spec.holders.items()}
            facts["excluded"] = sorted(map(list, book.excluded))
        world.record("commit", **facts)
    elif isinstance(message, Abort):
        world.record("abort", host=name, version=text(message.version))
    elif isinstance(message, Thaw):
        world.record("thaw", host=name, folder=checkpoint_folder(world.run, stream.context.name, message.version), error=message.error)
    elif isinstance(message, Holders):
        world.record("holders", host=name, excluded=sorted(map(list, message.excluded)))


def on_committed(world: World, stream: Stream, message: Commit) -> None:
    """A host has taken a commit in: of the copies that it keeps, tells those with other roots than that says."""
    kept = {owner: slots.complete_version(message.version) for owner, slots in stream.context.host.shards.items()}
    others = sorted(owner for owner, slot in kept.items() if slot is not None and slot.root != message.roots.get(owner, slot.root))
    if others and stream.context.host.committed == message.version:
        world.record("kept", host=stream.context.host.name, version=text(message.version), owners=others)


def on_choice(world: World, script: Script, choice: Any) -> None:
    if script.rank == 0 and not script.attempt.broken:  # else nobody resumes what it has chosen
        version = choice.plan.version
        world.record(
            "chosen",
            kind=choice.plan.kind,
            version=text(version) if version is not None else None,
            given_up=sorted(map(text, choice.given_up)),
            hosts=[host.name for host in script.attempt.hosts],
            ranks=world.ranks,
            copies=copies(world, script.attempt.hosts),
            lineage=[text(each) for each in choice.descent.lineage or ()],
            hidden=sorted({key.rpartition("/")[0] for key in world.bucket.hidden(world.loop.time())}),
        )


def slots(world: World) -> Iterator[tuple[str, int, int, int]]:
    """Yields (host, owner, slots there, slots that there should be)."""
    for host in world.hosts:
        for stream in host.agent.streams.by_name.values() if host.agent is not None and host.worker is not None else ():
            own, holders = 2 + (world.config.storage is not None), stream.context.host.holders
            for owner, slots in stream.context.host.shards.items():
                due = {True: own, False: 2 * (host.name in holders[owner])}[holders[owner][0] == host.name]
                yield host.name, owner, len(slots.slots), due


def state(world: World) -> dict[str, Any]:
    """The state at the end: who is left out of the commits, and what memory is counted and what there is."""
    streams = [(host, stream) for host in world.hosts if host.agent is not None for stream in host.agent.streams.by_name.values()]
    sessions = [stream.session for _, stream in streams if stream.present_session is not None]
    books = [(each._spec.incarnation, each.leads_in, each.failover.leader) for each in sessions if each.leads_in is not None]
    _, _, leader = max(books, key=lambda each: each[:2], default=(None, None, None))
    return {
        "excluded": sorted(map(list, leader.book.excluded)) if leader is not None else [],
        "stores": world.config.storage is not None,
        "memory": [
            [host.name, host.agent.run.budget.used, sum(memory.shape.total for memory in host.agent.memory)]
            for host, _ in streams
            if host.agent is not None
        ],
    }


def sound(fd: int, size_at: Callable[[int], int], only: Version | None = None) -> tuple[int, Version] | None:
    """(owner, version) of the copy in a slot, if its bytes, and the checksums beside them, are those that its owner has made."""
    try:
        header, _ = slot_memory._read_header(os.pread(fd, _HEADER, 0), os.fstat(fd).st_size)
    except (CorruptDataError, FormatError):
        return None
    version = header.version
    if version is None or only not in (None, version):
        return None
    shape = header.shape(b"\0" * header.layout_bytes)
    nbytes = size_at(version.iteration)
    data = os.pread(fd, nbytes + header.extras_bytes, shape.data_offset)
    table = b"".join(each.to_bytes(8, "little") for each in checksums(shape.owner, version, nbytes, header.chunk_bytes))
    is_made = data == content(shape.owner, version, nbytes) + EXTRAS and os.pread(fd, len(table), _HEADER) == table
    return (shape.owner, version) if is_made else None
