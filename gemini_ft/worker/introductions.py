"""The ranks' accounts of themselves and their hosts, with which every start begins, and the run secret on which they agree then.

What many accounts have in common is said once. The secret is agreed on so that readers of the rendezvous cannot see it.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from gemini_ft.core.versions import Version
from gemini_ft.errors import SecretError
from gemini_ft.faults.inject import Orders
from gemini_ft.wire.worker_messages import Inventory, Welcome
from gemini_ft.worker.rendezvous import exchange, exchange_alike, exchange_or_raise, mark_of

_SEALED = b"gemini-ft run secret"  # names the sealed message, so that no other is taken for it


@dataclass(frozen=True, kw_only=True)
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
    seen: tuple[int, float] = (0, 0.0)  # of the run's time, by its host's agent: `RunTime.extent`
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
    return _put_together(briefs, exchange_alike(common, [each.marks for each in briefs], timeout))


def _put_together(briefs: Sequence[_Brief], blobs: Sequence[Sequence[bytes]]) -> list[Introduction]:
    alike: dict[tuple[bytes, ...], Introduction] = {}  # marks -> what these ranks have in common
    everyone: dict[int, Introduction] = {}  # number of a brief's object, as ranks that have said the same share it
    for each, (bare, inventory, config) in zip(briefs, blobs, strict=True):
        if (marks := tuple(each.marks)) not in alike:
            held = Inventory.model_validate_json(inventory)
            alike[marks] = replace(pickle.loads(bare), inventory=held, config=sys.intern(config.decode()))
        if id(each) not in everyone:
            everyone[id(each)] = replace(alike[marks], ages=each.ages)
    return [everyone[id(each)] for each in briefs]


def agree_on_secret(everyone: Sequence[Introduction], mine: bytes, rank: int, timeout: float) -> bytes:
    """Agrees on the secret of the run, the same on all ranks. Collective.

    It is that of the agent with the newest incarnation, under which older state was signed. Ranks whose agent has it already
    take nothing from the network: they have it through their agent's Unix socket. The others are sent it sealed for a key
    that each of them makes up on the spot, so that a reader of the rendezvous store learns nothing.

    ``everyone``: introductions in rank order; of secrets they have fingerprints only. ``mine``: the secret that this rank's agent has.

    Raises SecretError: the ranks were given different secrets.
    """
    given = {about.configured_secret: rank for rank, about in reversed(list(enumerate(everyone)))}
    if len(given) > 1:
        who = ", ".join(f"rank {rank} has {print_ or 'none'}" for print_, rank in given.items())
        raise SecretError(
            f"the ranks were given different run secrets (fingerprints: {who}); give all hosts the same GEMINI_SECRET_FILE, or none"
        )
    giver = max(range(len(everyone)), key=lambda one: everyone[one].welcome.info.known or (0, ""))
    chosen = everyone[giver].welcome.info.fingerprint
    lacking = {one for one, about in enumerate(everyone) if about.welcome.info.fingerprint != chosen}
    if not lacking:
        return mine
    key = X25519PrivateKey.generate()
    suite = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.CHACHA20_POLY1305)
    public = exchange(key.public_key().public_bytes_raw(), timeout)

    def seal(one: int) -> bytes:
        return suite.encrypt(mine, X25519PublicKey.from_public_bytes(public[one]), _SEALED)

    sealed = exchange({one: seal(one) for one in lacking} if rank == giver else {}, timeout)
    return suite.decrypt(sealed[giver][rank], key, _SEALED) if rank in lacking else mine
