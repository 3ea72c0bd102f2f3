"""The memory that a job's snapshots need on every host, compared with its limit before the first copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gemini_ft.agent.memory import SlotShape
from gemini_ft.core.layout import Layout
from gemini_ft.errors import MemoryBudgetError
from gemini_ft.worker.session import Session


def slot_bytes(session: Session, layout: Layout, room: int) -> int:
    """Bytes that one slot of this rank takes of an agent's budget."""
    spec, blob = session.spec, layout.to_bytes()
    size, chunk = layout.nbytes, spec.chunk_bytes
    return SlotShape(session.run, spec.stream, session.rank, session.world_size, layout.logical_hash, blob, size, room, chunk).total


def check_memory(session: Session, slot_bytes: Sequence[int]) -> None:
    """Refuses, before the first copy and on all ranks alike, a state that would exceed the memory in the middle of the training."""
    need: dict[str, int] = {}
    for owner, holders in session.spec.holders.items():
        for place, host in enumerate(holders):
            slots = 3 if place == 0 and session.spec.storage is not None else 2
            need[host] = need.get(host, 0) + slots * slot_bytes[owner]
    limits: Mapping[str, int] = {info.host: info.memory_limit for info in session.infos}
    for host, limit in limits.items():
        if need.get(host, 0) > limit:
            raise MemoryBudgetError(
                f"host {host} must hold {need[host]:,} bytes of snapshots; its agent may hold {limit:,}. "
                f"Raise memory_limit (GEMINI_MEMORY_LIMIT), lower replicas (now {session.config.replicas}), or use more hosts."
            )
