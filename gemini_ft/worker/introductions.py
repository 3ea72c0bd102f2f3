"""The ranks' accounts of themselves and their hosts, with which every start begins; what many have in common is said once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gemini_ft.core.versions import Version
from gemini_ft.faults.inject import Orders
from gemini_ft.wire.worker_messages import Inventory, Welcome
from gemini_ft.worker.rendezvous import exchange_alike, exchange_or_raise, mark_of


@dataclass(frozen=True)
class Introduction:
    """A rank's account of itself and its host for the other ranks.

    What it has in common with other ranks, with its host's or with all, is long, and said together with them: `introduced`.
    """

    run: str
    welcome: Welcome
    inventory: Inventory
    configured_secret: str  # fingerprint, empty when none was configured
    config: str
    orders: Orders
    stored: Version | None = None  # the host's note of the newest stored version
    launch: str = ""  # that opened the stream on this host last; empty: unknown


@dataclass(frozen=True)
class _Brief:
    """An introduction without what others say too, and the marks of that."""

    about: Introduction
    marks: list[bytes]
    ages: dict[Version, float]  # of the copies: each rank has asked at another moment


def introduced(introduce: Callable[[], Introduction], timeout: float) -> list[Introduction]:
    """All ranks' introductions. Collective; raises as `exchange_or_raise` does."""
    common: list[bytes] = []

    def brief() -> _Brief:
        about = introduce()
        ages = {slot.version: slot.age for slot in about.inventory.slots}
        slots = [slot.model_copy(update={"age": 0.0}) for slot in about.inventory.slots]
        common[:] = [about.inventory.model_copy(update={"slots": slots, "call": 0}).model_dump_json().encode(), about.config.encode()]
        bare = replace(about, inventory=Inventory(slots=[]), config="")
        return _Brief(bare, [mark_of(blob) for blob in common], ages)

    briefs = exchange_or_raise(brief, timeout)
    blobs = exchange_alike(common, [each.marks for each in briefs], timeout)
    inventories: dict[bytes, Inventory] = {}
    everyone = []
    for each, (inventory, config) in zip(briefs, blobs, strict=True):
        if each.marks[0] not in inventories:
            inventories[each.marks[0]] = Inventory.model_validate_json(inventory)
        held = inventories[each.marks[0]]
        slots = [slot.model_copy(update={"age": each.ages[slot.version]}) for slot in held.slots]
        everyone.append(replace(each.about, inventory=held.model_copy(update={"slots": slots}), config=config.decode()))
    return everyone
