"""The host and the job step as SLURM's variables describe them. Standard library only.

Everything here is a default: an option or a ``GEMINI_*`` variable that the user gives is never replaced.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_FIRST_PORT, _PORTS = 20000, 10000  # below the ports that the kernel gives to connections


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The place where the hosts of a step meet, as torchrun's options have it."""

    hosts: int
    endpoint: str
    name: str
    is_host: bool  # whether this host serves the store


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def is_step(environ: Mapping[str, str]) -> bool:
    """Whether this process belongs to a job step that ``srun`` has started, and not to a batch script or an interactive shell."""
    return "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ and "SLURM_STEP_NODELIST" in environ


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The ``GEMINI_*`` variables that follow from those of SLURM.

    The domain is the switch above this node, where ``topology.conf`` names one, and the agents' ports are those that
    ``srun --resv-ports`` has reserved.
    """
    found = {}
    *above, _ = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if above and kinds[-2:] == ["switch", "node"]:
        found["GEMINI_DOMAIN"] = above[-1]
    if re.fullmatch(r"\d+-\d+", ports := environ.get("SLURM_STEP_RESV_PORTS", "")):
        found["GEMINI_PORT_RANGE"] = ports
    return {name: value for name, value in found.items() if name not in environ}


def rendezvous(environ: Mapping[str, str], resolves: Callable[[str], bool] = _resolves) -> Rendezvous | None:
    """The rendezvous of a step of several nodes, one task each; None: this is none, or its tasks are the workers themselves.

    Its first node serves the store. The port follows from the numbers of job and step, so that jobs which share a node do not meet. Where
    nodes have names that are no host names, the address is that of the node where ``srun`` runs: in a batch script the first one.
    """
    nodes = int(environ.get("SLURM_STEP_NUM_NODES", "1"))
    if not is_step(environ) or nodes == 1 or environ.get("SLURM_STEP_NUM_TASKS") != str(nodes):
        return None
    job, step = int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"])
    port = _FIRST_PORT + (job * 16 + step) % _PORTS
    first = first_node(environ["SLURM_STEP_NODELIST"])
    address = first if resolves(first) else environ.get("SLURM_LAUNCH_NODE_IPADDR", first)
    return Rendezvous(hosts=nodes, endpoint=f"{address}:{port}", name=f"{job}.{step}", is_host=environ.get("SLURM_NODEID") == "0")


def first_node(nodes: str) -> str:
    """The first of a node list as SLURM writes it: ``n[3-4,7],m1`` begins with ``n3``."""
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", nodes).partition(",")[0]
