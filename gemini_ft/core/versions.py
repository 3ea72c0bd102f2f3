"""Names for the replicated state: the incarnation of the job, and its iteration."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import NamedTuple

from gemini_ft.errors import RecoveryError

MOST = 10**15 - 1  # the highest number of an incarnation: whatever names one has room for as many digits


class Incarnation(NamedTuple):
    """One rendezvous of the job. A later one has a higher number; the nonce tells apart two that never met."""

    number: int
    nonce: str

    @classmethod
    def after(cls, known: Iterable[Incarnation]) -> Incarnation:
        """Returns a fresh incarnation above every one in ``known``.

        Raises RecoveryError: there is none: no job comes that far, and what such a one stored could not be found again.
        """
        highest = max(known, key=lambda item: item.number, default=cls(0, ""))
        if highest.number >= MOST:
            raise RecoveryError(
                f"incarnation {highest} leaves no higher number, and no job comes that far: whoever wrote it was no gemini-ft. Remove what "
                "storage has of it (`gemini checkpoints URL` lists it), or give another run id (GEMINI_RUN_ID)"
            )
        return cls(highest.number + 1, secrets.token_hex(4))

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
