"""Names for the replicated state: the incarnation of the job, and its iteration."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import NamedTuple


class Incarnation(NamedTuple):
    """One rendezvous of the job. A later one has a higher number; the nonce tells apart two that never met."""

    number: int
    nonce: str

    @classmethod
    def after(cls, known: Iterable[Incarnation]) -> Incarnation:
        """Returns a fresh incarnation above every one in ``known``."""
        return cls(max((item.number for item in known), default=0) + 1, secrets.token_hex(4))

    def __str__(self) -> str:
        return f"{self.number}-{self.nonce}"


class Version(NamedTuple):
    """The state after one iteration of one incarnation: what commits, is recovered and is never mixed.

    Ordered by incarnation first: once an incarnation has moved on from an older snapshot, whatever the
    previous one had computed beyond it is another history.
    """

    incarnation: Incarnation
    iteration: int

    def __str__(self) -> str:
        return f"iteration {self.iteration} of incarnation {self.incarnation.number}"
