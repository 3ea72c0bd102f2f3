"""The ranks of a host, which a rule with ``within: host`` has train together, and the ranks that average between hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from gemini_ft.errors import ConfigError
from gemini_ft.hosts import host_id
from gemini_ft.pipeline.averager import own_group
from gemini_ft.pipeline.routes import of_all_ranks
from gemini_ft.pipeline.rules import Rule


@dataclass(frozen=True, kw_only=True)
class HostGroups:
    """Process groups of a rank.

    Attributes:
        host: of the ranks of its host.
        peers: of the ranks that have its place in each host.
        control: of the ranks of its host, on CPUs.
    """

    host: Any
    peers: Any
    control: Any


def hosts_of(rule: Rule, group: Any) -> list[int]:
    """The number of each rank's host, where the ranks of a host train together by this rule; []: each rank trains alone. Collective.

    Raises ConfigError: hosts do not have as many ranks. On all ranks.
    """
    if rule.within is None:
        return []
    names = of_all_ranks(host_id(), group)
    order = list(dict.fromkeys(names))
    if len(set(sizes := list(Counter(names).values()))) > 1:
        raise ConfigError(
            f"{rule}: within: host needs as many ranks on each host, and they have {', '.join(map(str, sizes))}: each host counts as much "
            "as any other in an average. Start as many on each, or leave within out"
        )
    return [order.index(name) for name in names]


def host_groups(ranks: Sequence[int], hosts: Sequence[int], group: Any) -> HostGroups:
    """Makes the groups of this rank. Collective: all ranks make as many, as torch names them by their number.

    ``hosts``: of each rank, the number of its host. ``group``: as long as this one waits, so do the new ones; None: the default group.
    """
    members = [[rank for rank, its in zip(ranks, hosts, strict=True) if its == host] for host in range(max(hosts) + 1)]
    mine = members[hosts[ranks.index(dist.get_rank())]]
    peers = [each[mine.index(dist.get_rank())] for each in members]
    return HostGroups(host=own_group(mine, group), peers=own_group(peers, group), control=own_group(mine, group, "gloo"))
