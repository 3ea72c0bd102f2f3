"""The ranks' accounts of themselves and their hosts, with which every start begins; what many have in common is said once."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gemini_ft.core.versions import Version
from gemini_ft.faults.inject import Orders
from gemini_ft.wire.worker_messages import Inventory, Welcome
from gemini_ft.worker.rendezvous import exchange_alike, exchange_or_raise, mark_of


@dataclass(frozen=True)
class Introduction:
    """A rank's account of itself and its host for the other ranks.

    What it has in common with its host's other ranks, or with all, is long, and said together with them: `introduced`.
    """

    run: str
    welcome: Welcome
    inventory: Inventory
    configured_secret: str  # fingerprint, empty when none was configured
    config: str
    orders: Orders
    stored: Version | None = None  # the host's note of the newest stored version
    launch: str = ""  # that opened the stream on this host last; empty: unknown
    goes_on: bool = False  # the stream was opened here by an earlier process of this same launch
    ages: dict[Version, float] = field(default_factory=dict)  # of the newest copy of each version, in tenths of a second


@dataclass(frozen=True)
class _Brief:
    """The part of an introduction in which ranks of a host may differ, as each has asked at another moment, and the marks of the rest."""

    marks: list[bytes]
    ages: dict[Version, float]


def introduced(introduce: Callable[[], Introduction], timeout: float) -> list[Introduction]:
    """All ranks' introductions; copies in the inventories have no ages of their own. Collective; raises as `exchange_or_raise` does."""
    common: list[bytes] = []

    def brief() -> _Brief:
        about, ages = introduce(), dict[Version, float]()
        for slot in about.inventory.slots:
            ages[slot.version] = round(min(slot.age, ages.get(slot.version, slot.age)), 1)
        slots = [slot.model_copy(update={"age": 0.0}) for slot in about.inventory.slots]
        inventory = about.inventory.model_copy(update={"slots": slots, "call": 0})
        bare = replace(about, inventory=Inventory(slots=[]), config="", welcome=about.welcome.model_copy(update={"call": 0}))
        common[:] = [pickle.dumps(bare), inventory.model_dump_json().encode(), about.config.encode()]
        return _Brief([mark_of(blob) for blob in common], ages)

    briefs = exchange_or_raise(brief, timeout)
    blobs = exchange_alike(common, [each.marks for each in briefs], timeout)
    alike: dict[tuple[bytes, ...], Introduction] = {}  # marks -> what these ranks have in common
    everyone: dict[int, Introduction] = {}  # number of a brief's object, as ranks that have said the same share it
    for each, (bare, inventory, config) in zip(briefs, blobs, strict=True):
        if (marks := tuple(each.marks)) not in alike:
            held = Inventory.model_validate_json(inventory)
            alike[marks] = replace(pickle.loads(bare), inventory=held, config=sys.intern(config.decode()))
        if id(each) not in everyone:
            everyone[id(each)] = replace(alike[marks], ages=each.ages)
    return [everyone[id(each)] for each in briefs]
