"""Machines with equal numbers of ranks, and the members of each collective. Pure.

Ranks of a machine are neighbours: rank r is the (r mod ranks)-th of machine r div ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Scope(Enum):
    """The members of a collective: all ranks, those of one machine, or those of the same place in each machine."""

    FLAT = "flat"
    INTRA = "intra"
    INTER = "inter"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """``machines`` with ``ranks`` each."""

    machines: int
    ranks: int

    def __post_init__(self) -> None:
        if self.machines < 1 or self.ranks < 1:
            raise ValueError(f"{self.machines} machines with {self.ranks} ranks each: there must be at least one of both")

    def __str__(self) -> str:
        return f"{self.machines} x {self.ranks} ranks"

    @classmethod
    def of(cls, world: int, ranks_per_machine: int) -> Topology:
        """The topology of ``world`` ranks, ``ranks_per_machine`` on each machine. Raises ValueError: they do not fill machines."""
        if ranks_per_machine < 1 or world % ranks_per_machine:
            raise ValueError(f"ranks_per_machine={ranks_per_machine}: must divide the number of ranks, {world}")
        return cls(machines=world // ranks_per_machine, ranks=ranks_per_machine)

    @property
    def world(self) -> int:
        return self.machines * self.ranks

    @property
    def flat_only(self) -> bool:
        """Whether there is no hierarchy."""
        return self.machines == 1 or self.ranks == 1

    def members(self, scope: Scope) -> int:
        """Ranks that one collective of this scope connects."""
        return {Scope.FLAT: self.world, Scope.INTRA: self.ranks, Scope.INTER: self.machines}[scope]

    def place(self, rank: int, scope: Scope) -> int:
        """The position of a rank among the members of a scope, from 0."""
        return {Scope.FLAT: rank, Scope.INTRA: rank % self.ranks, Scope.INTER: rank // self.ranks}[scope]

    def group(self, rank: int, scope: Scope) -> range:
        """The ranks that a collective of this scope connects with ``rank``, itself among them."""
        at = rank % self.ranks
        groups = {
            Scope.FLAT: range(self.world),
            Scope.INTRA: range(rank - at, rank - at + self.ranks),
            Scope.INTER: range(at, self.world, self.ranks),
        }
        return groups[scope]
