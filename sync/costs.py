"""The cost of each scheme on a network, by the formulas of Zen (OSDI 2025, section 2.4 and appendix B), with latency. Pure.

The paper counts elements, whose index is as long as the value: 2 d M bytes for density d of M bytes. Here a unit of ``unit``
bytes has an index of ``index`` bytes, so it is (1 + index / unit) d M, which for float32 elements is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True)
class Link:
    """The cost of a message for a rank: ``alpha`` seconds, and ``beta`` seconds per byte in each direction."""

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        if not (self.alpha >= 0 and self.beta > 0 and math.isfinite(self.alpha + self.beta)):
            raise ValueError(f"alpha={self.alpha} s, beta={self.beta} s/byte: must be finite, alpha >= 0, beta > 0")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """A gradient as it is spread over the ranks (section 2.1)."""

    ranks: int  # n
    nbytes: int  # of the dense tensor, M
    unit: int  # bytes of one unit's values: of a row, or of an element
    # for 1, 2, 4, ... and n ranks the share of units that are present in the sum over so many; of the fullest rank, or set of ranks.
    densities: Mapping[int, float] = field(hash=False)
    push_skew: float = 1.0  # how much more than its share of one rank's units the fullest of n even parts has, 1 to n
    pull_skew: float = 1.0  # the same of the units of the sum
    push_blocks: float = 1.0  # share of nonzero blocks in the fullest part of a rank; pull_blocks: the same of the sum
    pull_blocks: float = 1.0
    index: int = 4  # bytes of one index
    block: int = 1024  # bytes of one block

    @property
    def density(self) -> float:
        """The density of one rank's gradient, d."""
        return self.densities[1]

    def pairs(self, ranks: int) -> float:
        """Bytes of the indices and values of the sum over ``ranks`` ranks."""
        return self.nbytes * self.densities[ranks] * (1 + self.index / self.unit)

    def coo(self, ranks: int) -> float:
        """The same of a message, which is dense where that is shorter."""
        return min(float(self.nbytes), self.pairs(ranks))

    def coo_part(self, ranks: int, skew: float) -> float:
        """Bytes of the fullest of n even parts of it."""
        return min(float(self.nbytes), self.pairs(ranks) * skew) / self.ranks


Formula = Callable[[Traffic], tuple[float, float]]


def dense(t: Traffic) -> tuple[float, float]:
    """Ring all-reduce."""
    return 2 * (t.ranks - 1), 2 * (t.ranks - 1) / t.ranks * t.nbytes


def agsparse(t: Traffic) -> tuple[float, float]:
    return t.ranks - 1, (t.ranks - 1) * t.coo(1)


def ssar_recursive_doubling(t: Traffic) -> tuple[float, float]:
    """Equation 2; two more messages where n is no power of two."""
    rounds = t.ranks.bit_length() - 1
    extra = t.coo(1) + t.coo(t.ranks) if t.ranks != 1 << rounds else 0.0
    return rounds + 2 * bool(extra), sum(t.coo(1 << i) for i in range(rounds)) + extra


def single_ps(t: Traffic) -> tuple[float, float]:
    """All ranks' gradients come in at the server, one after the other, and as many sums go out: `textbook`'s 2 p d, less its own."""
    return 2 * (t.ranks - 1), (t.ranks - 1) * (t.coo(1) + t.coo(t.ranks))


def sparse_ps(t: Traffic) -> tuple[float, float]:
    """Appendix B, with the skew before the sum for the push and that after it for the pull."""
    return 2 * (t.ranks - 1), _push(t) + (t.ranks - 1) * t.coo_part(t.ranks, t.pull_skew)


def ssar_split_allgather(t: Traffic) -> tuple[float, float]:
    return 2 * (t.ranks - 1), _push(t) + (t.ranks - 1) / t.ranks * t.coo(t.ranks)


def dsar_split_allgather(t: Traffic, share: float = 1.0) -> tuple[float, float]:
    """``share``: bytes of the dense phase as part of the dense tensor's: in b bits of float32 b / 32, and 8 bytes a bucket."""
    return 2 * (t.ranks - 1), _push(t) + (t.ranks - 1) / t.ranks * t.nbytes * share


def omnireduce(t: Traffic) -> tuple[float, float]:
    blocks = t.push_blocks + t.pull_blocks
    return 2 * (t.ranks - 1), (t.ranks - 1) / t.ranks * t.nbytes * blocks * (1 + t.index / t.block)


def zen(t: Traffic) -> tuple[float, float]:
    """Equation 1 with the bitmap: one bit per unit in place of the pull's indices, and of the push's where that is shorter."""
    bitmap = t.nbytes / (8 * t.unit)
    push = min(t.pairs(1), t.nbytes * t.density + bitmap)
    return 2 * (t.ranks - 1), (t.ranks - 1) / t.ranks * (push + t.nbytes * t.densities[t.ranks] + bitmap)


FORMULAS: Mapping[str, Formula] = {
    "dense": dense,
    "agsparse": agsparse,
    "ssar-recursive-doubling": ssar_recursive_doubling,
    "ssar-split-allgather": ssar_split_allgather,
    "dsar-split-allgather": dsar_split_allgather,
    "single-ps": single_ps,
    "sparse-ps": sparse_ps,
    "omnireduce": omnireduce,
    "zen": zen,
}
"""By scheme: (messages one after the other, bytes through the busiest rank's link in its busier direction)."""


def textbook(ranks: int, nbytes: int, link: Link) -> dict[str, float]:
    """Seconds of a dense sum over all ranks by the textbook's four patterns, in the alpha-beta model.

    Every rank's link, the server's too, carries both directions at once. "parameter server": one server, whose link brings in all ranks'
    gradients, one after the other, and takes out as many sums, 2 alpha + 2 p d beta. "ring": reduce-scatter and all-gather. "tree":
    recursive doubling, with a round more where p is no power of two. "switch": sums are made under way, 2 alpha + d beta whatever p is.
    """
    if ranks == 1:
        return dict.fromkeys(("parameter server", "ring", "tree", "switch"), 0.0)
    rounds = math.ceil(math.log2(ranks))
    return {
        "parameter server": 2 * link.alpha + 2 * ranks * nbytes * link.beta,
        "ring": 2 * (ranks - 1) * link.alpha + 2 * (ranks - 1) / ranks * nbytes * link.beta,
        "tree": rounds * (link.alpha + nbytes * link.beta),
        "switch": 2 * link.alpha + nbytes * link.beta,
    }


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A switch as its ranks use it. Its link is as fast as those of all ranks together."""

    slots: int = 256  # packets that a rank has under way at once
    packet: int = 1408  # bytes of a packet's values
    header: int = 64  # bytes that go before them: 36 of the packet, 28 of IP and UDP

    def stream(self, packets: int, link: Link) -> float:
        """Seconds of ``packets`` packets with values, of which each comes back as a sum before its slot takes the next one.

        Where a slot's round trip, 2 alpha and a packet's own time, is shorter than the slots' packets take one after the other, the link
        never waits. Else every round of the slots lasts a round trip. A round without values goes ahead of all others: it says what the
        switch must know of the packets of the first one.
        """
        if not packets:
            return 0.0
        one = (self.packet + self.header) * link.beta
        slots = min(self.slots, packets)
        full = -(-packets // slots) - 1
        ahead = 2 * link.alpha + slots * self.header * link.beta
        return ahead + full * max(2 * link.alpha + one, slots * one) + 2 * link.alpha + (packets - full * slots) * one


_POOL = Pool()
_BLOCK = 1024  # bytes of OmniReduce's


def switchml(elements: int, link: Link, pool: Pool = _POOL) -> float:
    """SwitchML: every rank sends each value once, in 4 bytes, and receives each sum once at the same time, however many ranks there are."""
    return pool.stream(-(-4 * elements // pool.packet), link)


def fpisa(elements: int, link: Link, itemsize: int = 4) -> float:
    """FPISA: as SwitchML, but float16 and bfloat16 travel in ``itemsize`` 2."""
    return _POOL.stream(-(-itemsize * elements // _POOL.packet), link)


def omnireduce_streaming(nbytes: int, density: float, link: Link, pool: Pool = _POOL, colocated: int = 1) -> float:
    """OmniReduce with aggregators: blocks that any rank has travel once in each direction; ``density`` is their share of all blocks.

    A rank that lacks a block of the others sends only its number, so the direction to the rank is the busier one.

    Args:
        nbytes: of the dense gradient.
        density: of the sum over all ranks, in blocks of 1024 bytes, 0 to 1.
        colocated: ranks on whose hosts the aggregators are, with a part of the slots each. Their links then carry in both directions what
            the other ranks' shares need, so that each has 2 (p - 1) / p times the bytes, as a ring has.
    """
    if colocated > 1:
        link = Link(alpha=link.alpha, beta=link.beta * 2 * (colocated - 1) / colocated)
    return replace(pool, packet=_BLOCK).stream(math.ceil(round(density * -(-nbytes // _BLOCK), 6)), link)


DENSITIES = (1.0, 0.1, 0.01)
"""Shares of blocks for which `switched` shows OmniReduce."""


def switched(ranks: int, elements: int, link: Link) -> dict[str, float]:
    """Seconds of a sum by each scheme that goes through a switch, with the default pool; OmniReduce at several densities of blocks."""
    found = {"switchml": switchml(elements, link), "fpisa": fpisa(elements, link), "fpisa, 16 bits": fpisa(elements, link, itemsize=2)}
    found |= {f"omnireduce-streaming, {share:.0%}": omnireduce_streaming(4 * elements, share, link) for share in DENSITIES}
    return found if ranks > 1 else dict.fromkeys(found, 0.0)


def seconds(scheme: str, traffic: Traffic, link: Link) -> float:
    """Time that a scheme takes by its formula, transfers only. Raises ValueError: there is no formula of that name."""
    if scheme not in FORMULAS:
        raise ValueError(f"scheme {scheme!r}: there are formulas for {', '.join(FORMULAS)}")
    messages, nbytes = FORMULAS[scheme](traffic)
    return messages * link.alpha + nbytes * link.beta


def _push(t: Traffic) -> float:
    return (t.ranks - 1) * t.coo_part(1, t.push_skew)
