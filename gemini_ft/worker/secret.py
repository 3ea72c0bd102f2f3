"""The run secret: the agreement of the ranks on one that readers of the rendezvous cannot see."""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from gemini_ft.errors import SecretError
from gemini_ft.worker.introductions import Introduction
from gemini_ft.worker.rendezvous import exchange

_SEALED = b"gemini-ft run secret"  # names the sealed message, so that no other is taken for it


def agree_on_secret(everyone: Sequence[Introduction], mine: bytes, rank: int, timeout: float) -> bytes:
    """Agrees on the secret of the run, the same on all ranks. Collective.

    It is that of the agent with the newest incarnation, under which older state was signed. Ranks whose agent has it already
    take nothing from the network: they have it through their agent's Unix socket. The others are sent it sealed for a key
    that each of them makes up on the spot, so that a reader of the rendezvous store learns nothing.

    Args:
        everyone: introductions in rank order; of secrets they have fingerprints only.
        mine: the secret that this rank's agent has.
        rank: this rank.
        timeout: seconds to wait for the other ranks.

    Raises:
        SecretError: the ranks were given different secrets.
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
