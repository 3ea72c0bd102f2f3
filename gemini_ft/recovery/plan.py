"""Decides which state to resume: inventories -> plan, pure.

The newest version of which every shard has a complete copy wins; versions are never mixed. Where none is left
in memory, the newest whole checkpoint in storage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gemini_ft.core.versions import Version
from gemini_ft.errors import RecoveryError, WorldSizeError
from gemini_ft.wire.worker_messages import SlotInfo


@dataclass(frozen=True, kw_only=True)
class RecoveryPlan:
    """The version to resume, and its sources."""

    kind: Literal["nothing", "memory", "storage"]  # where from
    version: Version | None = None  # which state; None: nothing
    # owner -> hosts with a complete copy (from storage: once it has been laid down there)
    sources: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    age: float = 0.0  # seconds since the copy was made (from storage: once it has been laid down)
    lost: int | None = None  # steps that copies existed of which cannot be resumed: not of all shards, or refused (kind: storage)
    incomplete: Mapping[int, Sequence[int]] = field(default_factory=dict)  # iteration -> owners without any copy
    world_size: int = 0  # ranks of the job that made it, which is the number of its owners
    # owner -> root of its shard (`gemini_ft.core.roots`); none where a checkpoint in storage does not say it
    roots: Mapping[int, str] = field(default_factory=dict)


def plan_recovery(
    holdings: Mapping[str, Sequence[SlotInfo]],  # host -> the copies that its agent has
    world_size: int,  # ranks of the job now
    stored: Version | None = None,  # the newest whole checkpoint in storage
    stored_world_size: int | None = None,  # ranks of the job that wrote it
    refused: Sequence[Version] = (),  # versions that led to failure after failure, or whose copies are damaged
    resizable: bool = False,  # whether this job can load what another number of ranks has made
) -> RecoveryPlan:
    """Chooses the newest version that is whole: in memory, else in storage.

    Raises WorldSizeError: all there is was made by another number of ranks, and that cannot be loaded.
    """
    held = by_version(holdings, refused)
    for version in sorted(held, reverse=True):  # the first one is mostly whole: then no other is looked at
        if stored is not None and version < stored:
            break
        kept = genuine(held[version])
        if _is_whole(kept) and (resizable or kept[0][1].world_size == world_size):
            return _from_memory(version, kept)
    copies = {version: kept for version, each in held.items() if (kept := genuine(each))}
    if stored is not None:
        assert stored_world_size is not None
        if stored_world_size != world_size and not resizable:
            raise _wrong_size(stored_world_size, world_size, "the checkpoint in storage")
        newest = max((info.version.iteration for each in holdings.values() for info in each), default=None)
        lost = max(0, newest - stored.iteration) if newest is not None else None
        return RecoveryPlan(kind="storage", version=stored, lost=lost, incomplete=_incomplete(copies), world_size=stored_world_size)
    sizes = {info.world_size for each in copies.values() for _, info in each}
    if sizes and world_size not in sizes and not resizable:
        raise _wrong_size(max(sizes), world_size, "the snapshot in memory")
    return RecoveryPlan(kind="nothing", incomplete=_incomplete(copies))


def _wrong_size(then: int, now: int, what: str) -> WorldSizeError:
    return WorldSizeError(
        f"{what} was made by {then} ranks, this job has {now}. Start {then} ranks to resume it, or set resume='never' "
        "(GEMINI_RESUME=never) or another run id (GEMINI_RUN_ID) to start from the beginning."
    )


def _from_memory(version: Version, copies: Sequence[tuple[str, SlotInfo]]) -> RecoveryPlan:
    sources: dict[int, list[str]] = {}
    for host, info in copies:
        sources.setdefault(info.owner, []).append(host)
    by_owner = {owner: tuple(sorted(hosts)) for owner, hosts in sorted(sources.items())}
    age, roots = min(info.age for _, info in copies), {info.owner: info.root for _, info in copies}
    return RecoveryPlan(kind="memory", version=version, sources=by_owner, age=age, world_size=len(by_owner), roots=roots)


def in_doubt(holdings: Mapping[str, Sequence[SlotInfo]], refused: Collection[Version], than: Version | None) -> Version | None:
    """The newest version after ``than`` that would be whole if it were known which of two copies that differ is damaged."""
    for version, held in sorted(by_version(holdings, refused).items(), key=lambda each: each[0], reverse=True):
        if than is not None and version <= than:
            break
        if _is_whole(held) and not _is_whole(genuine(held)):
            return version
    return None


def by_version(holdings: Mapping[str, Sequence[SlotInfo]], refused: Collection[Version] = ()) -> dict[Version, list[tuple[str, SlotInfo]]]:
    """Version -> all copies of it, by host."""
    copies: dict[Version, list[tuple[str, SlotInfo]]] = {}
    for host, slots in holdings.items():
        for info in slots:
            if info.version not in refused:
                copies.setdefault(info.version, []).append((host, info))
    return copies


def genuine(held: Sequence[tuple[str, SlotInfo]]) -> list[tuple[str, SlotInfo]]:
    """The genuine copies of one version, by host: those that were committed.

    Where no host has heard of the commit, all copies of a shard must have one root: which of two is damaged cannot be told then.
    """
    copies: dict[int, list[SlotInfo]] = {}
    for _, info in held:
        copies.setdefault(info.owner, []).append(info)
    roots = {owner: {each.root for each in of if each.committed} or {each.root for each in of} for owner, of in copies.items()}
    return [(host, info) for host, info in held if roots[info.owner] == {info.root}]


def _is_whole(held: Sequence[tuple[str, SlotInfo]]) -> bool:
    agreed = len({(info.layout_hash, info.world_size) for _, info in held}) == 1  # and there is any
    return agreed and {info.owner for _, info in held} == set(range(held[0][1].world_size))


def _incomplete(copies: Mapping[Version, Sequence[tuple[str, SlotInfo]]]) -> dict[int, list[int]]:
    def missing(held: Sequence[tuple[str, SlotInfo]]) -> list[int]:
        everyone = set(range(max(info.world_size for _, info in held)))
        return sorted(everyone - {info.owner for _, info in held})

    return {version.iteration: missing(held) for version, held in sorted(copies.items())}


def describe(plan: RecoveryPlan) -> str:
    """The outcome in one line, unmistakably different for each kind."""
    if plan.version is None:
        if not plan.incomplete:
            return "nothing to resume yet: starting from the beginning"
        newest = max(plan.incomplete)
        return (
            f"copies of iteration {newest} exist, but none of the shards of ranks {list(plan.incomplete[newest])}, "
            "and no checkpoint in storage: starting from the beginning"
        )
    if plan.kind == "memory":
        return f"resuming at iteration {plan.version.iteration} from memory ({plan.age:.1f} s old)"
    lost = f", {plan.lost} steps lost" if plan.lost else ""
    refused = "no copies in memory" if plan.lost is None else "no copies in memory that can be resumed"
    why = "copies in memory exist but no common iteration" if plan.incomplete else refused
    return f"{why}: falling back to storage, iteration {plan.version.iteration}{lost}"


def require(plan: RecoveryPlan) -> None:
    """Enforces ``resume="require"``. Raises RecoveryError: there is nothing to resume."""
    if plan.version is None:
        raise RecoveryError(f"resume='require', but {describe(plan)}. Set resume='auto' to allow that, or check run_id and storage.url.")
