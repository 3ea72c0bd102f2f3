"""Joining a run: find the host's agent, agree with the other ranks on secret, plan and placement, open the incarnation.

Everything here is collective over the default process group and runs on the training thread, before the first step.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from gemini_ft import placement
from gemini_ft.agent import lifecycle
from gemini_ft.agent.client import AgentClient
from gemini_ft.choice import Choice, Chooser, Introduction
from gemini_ft.config import GeminiConfig
from gemini_ft.errors import ConfigError, SecretError, StorageError
from gemini_ft.faults import Orders
from gemini_ft.messages import (
    GetInventory,
    Hello,
    HostInfo,
    Inventory,
    Message,
    Opened,
    OpenSession,
    Proof,
    SessionSpec,
)
from gemini_ft.network import bind_address, is_loopback
from gemini_ft.recovery import Plan, Sources, describe
from gemini_ft.rendezvous import exchange, exchange_or_raise
from gemini_ft.runid import default_run_id
from gemini_ft.storage.base import Storage, open_storage
from gemini_ft.storage.checkpoints import list_checkpoints
from gemini_ft.transport.wire import fingerprint
from gemini_ft.versions import Incarnation

_log = logging.getLogger("gemini_ft")


@dataclass
class Session:
    """This rank's part in one incarnation."""

    rank: int
    world_size: int
    run: str
    host: str
    config: GeminiConfig
    client: AgentClient
    hello: Hello
    secret: bytes
    spec: SessionSpec
    plan: Plan
    infos: list[HostInfo]
    orders: Orders  # faults to inject

    @property
    def sources(self) -> Sources:
        """Where the resumed version can be read."""
        claims = Proof(run=self.run, stream=self.spec.stream, host=self.host, role="fetch", incarnation=None, nonce=b"", mac=b"")
        return Sources(
            self.client,
            self.host,
            self.plan,
            self.spec.addresses,
            claims,
            self.secret,
            self.config.timeout,
            self.hello.tls,
        )


def rank_and_world() -> tuple[int, int]:
    """(rank, world size) of the default process group.

    Raises:
        ConfigError: this looks like one of several ranks, and there is no process group yet.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but there is no process group; call gemini_ft.init_process_group() "
            "(or torch's) before the Checkpointer is used"
        )
    return 0, 1


def read_secret(config: GeminiConfig) -> bytes:
    """The run secret from the user: ``secret_file``, or GEMINI_SECRET; empty when there is none.

    Raises:
        SecretError: the file is missing, empty, or readable by others.
    """
    if config.secret_file is None:
        return os.environ.get("GEMINI_SECRET", "").encode()
    path = Path(config.secret_file)
    try:
        mode, secret = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise SecretError(f"secret_file={path}: {error.strerror}; create it with `umask 077; openssl rand -hex 32 > {path}`") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SecretError(f"secret_file={path} has mode {stat.S_IMODE(mode):04o} and may be read by others; `chmod 600 {path}`")
    if not secret:
        raise SecretError(f"secret_file={path} is empty; it must hold the run secret, the same on all hosts")
    return secret


def join(config: GeminiConfig, stream: str, on_event: Callable[[Message], None], resizable: bool = False) -> Session:
    """Take part in the run: collective.

    Args:
        config: options.
        stream: which of the run's streams of snapshots.
        on_event: for what the agent says of its own accord; on a thread of the client.
        resizable: whether what another number of ranks has made can be resumed.

    Raises:
        GeminiError: some rank could not; all ranks raise the same text.
    """
    rank, _ = rank_and_world()
    run = exchange(config.run_id or default_run_id(), config.timeout)[0]
    secret = exchange_or_raise(lambda: read_secret(config), config.timeout)[rank]
    hello = _hello(config, run, stream, rank, secret)
    clients: list[AgentClient] = []

    def introduce() -> Introduction:
        clients.append(AgentClient(run, lifecycle.host_id(), hello, on_event, config.timeout))
        return _introduction(config, clients[0], run, fingerprint(secret))

    try:
        everyone = exchange_or_raise(introduce, config.timeout + 10)
        session = _agree(config, clients[0], hello, everyone, rank, resizable)
    except BaseException:
        for client in clients:
            client.close()  # the agent must not wait for us to choose
        raise
    if rank == 0:
        _announce(session, bool(everyone[0].configured_secret))
    return session


def _introduction(config: GeminiConfig, client: AgentClient, run: str, configured_secret: str) -> Introduction:
    lifecycle.set_oom_score(500)
    if lifecycle.shares_fate(client.welcome.pid):
        _log.warning(
            "the agent of host %s shares a cgroup with its workers: if the job step or container ends, its memory goes too. "
            "Run `gemini agent` as a service of the host (docs/deploy.md).",
            client.welcome.info.host,
        )
    inventory = client.call(GetInventory(), Inventory)[0]
    shared = config.model_dump_json(exclude={"domain", "secret_file", "tls", "memory_limit", "interface"})
    return Introduction(run, client.welcome, inventory, configured_secret, shared, Orders.read(run))


def _agree(config: GeminiConfig, client: AgentClient, hello: Hello, everyone: list[Introduction], rank: int, resizable: bool) -> Session:
    """Everything that all ranks must see alike, and the opening of the incarnation."""
    run, stream = hello.run, hello.stream
    secret = _agree_on_secret(everyone)
    _agree_on_config(everyone)
    orders = Orders.agree([about.orders for about in everyone])
    storage = _open_storage(config)
    choice = Chooser(config, client, everyone, stream, storage, rank, resizable).choose()
    make_spec = partial(_make_spec, config, stream, everyone, choice, storage)
    spec = exchange_or_raise(lambda: make_spec() if rank == 0 else None, config.timeout)[0]
    assert spec is not None
    opening = OpenSession(spec=spec, secret=secret)
    exchange_or_raise(lambda: client.call(opening, Opened)[0], config.timeout + 10)
    host, infos = client.welcome.info.host, [about.welcome.info for about in everyone]
    return Session(rank, len(everyone), run, host, config, client, hello, secret, spec, choice.plan, infos, orders)


def _hello(config: GeminiConfig, run: str, stream: str, rank: int, secret: bytes) -> Hello:
    tls = {name: str(value.resolve()) for name, value in config.tls.model_dump().items()} if config.tls is not None else None
    return Hello(
        run=run,
        stream=stream,
        rank=rank,
        secret=secret,
        bind=bind_address(config.interface),
        ports=config.port_range,
        memory_limit=config.memory_limit,
        domain=config.domain or "",
        linger=config.linger,
        tls=tls,
    )


def _agree_on_secret(everyone: list[Introduction]) -> bytes:
    given = {about.configured_secret: rank for rank, about in reversed(list(enumerate(everyone)))}
    if len(given) > 1:
        who = ", ".join(f"rank {rank} has {print_ or 'none'}" for print_, rank in given.items())
        raise SecretError(
            f"the ranks were given different run secrets (fingerprints: {who}); give all hosts the same GEMINI_SECRET_FILE, or none"
        )
    # An agent that lived before this incarnation has the secret under which older state was signed.
    chosen = max(everyone, key=lambda about: about.welcome.info.known or (0, ""))
    return chosen.welcome.secret


def _agree_on_config(everyone: list[Introduction]) -> None:
    for rank, about in enumerate(everyone):
        if about.config != everyone[0].config:
            raise ConfigError(f"rank {rank} has other gemini options than rank 0: {about.config} instead of {everyone[0].config}")


def _open_storage(config: GeminiConfig) -> Storage | None:
    settings = config.storage
    if settings is None:
        return None

    found: list[Storage] = []

    def check() -> None:
        found.append(open_storage(settings.url, settings.endpoint_url, settings.max_bandwidth))
        found[0].check()

    try:
        exchange_or_raise(check, config.timeout)
        return found[0]
    except StorageError as error:
        if settings.required:
            raise
        _log.warning("storage is unusable and not required, so this run has no slow tier: %s", error)
        return None


def _make_spec(config: GeminiConfig, stream: str, everyone: list[Introduction], choice: Choice, storage: Storage | None) -> SessionSpec:
    hosts = [about.welcome.info.host for about in everyone]
    infos = {about.welcome.info.host: about.welcome.info for about in everyone}
    domains = {host: info.domain for host, info in infos.items()}
    if any(domains.values()) and not all(domains.values()):
        missing = sorted(host for host, domain in domains.items() if not domain)
        raise ConfigError(f"hosts {missing} have no failure domain, others have one; set GEMINI_DOMAIN on all hosts or on none")
    placed = placement.place(sorted(infos), config.replicas, domains if all(domains.values()) else None)
    _check_addresses(infos.values())
    plan = choice.plan
    rebuildable = plan.sources if plan.world_size == len(everyone) else {}  # shards of another cut are never asked for again
    known = [info.known for info in infos.values() if info.known is not None]
    known += [plan.version.incarnation] if plan.version is not None else []
    if storage is not None:  # even those that are damaged or not wanted: what comes now must count as newer
        known += [checkpoint.version.incarnation for checkpoint in list_checkpoints(storage, everyone[0].run, stream)]
    return SessionSpec(
        stream=stream,
        incarnation=Incarnation.after(known),
        world_size=len(everyone),
        hosts=hosts,
        addresses={host: info.address for host, info in infos.items()},
        holders={rank: list(placed[host]) for rank, host in enumerate(hosts)},
        leader=hosts[0],
        resumed=plan.version,
        sources={owner: list(holders) for owner, holders in rebuildable.items()},
        given_up=sorted(choice.given_up),
        replica_timeout=config.replica_timeout,
        hang_timeout=config.hang_timeout,
        chunk_bytes=config.chunk_bytes,
        storage=config.storage.model_dump() if config.storage is not None and storage is not None else None,
        interval=config.fixed_interval,
        traffic=config.traffic,
    )


def _check_addresses(infos: Collection[HostInfo]) -> None:
    machines = {info.machine for info in infos}
    deaf = sorted(info.host for info in infos if is_loopback(info.address[0]))
    if len(machines) > 1 and deaf:
        raise ConfigError(
            f"the agents of hosts {deaf} listen on a loopback address, where other machines cannot reach them; "
            "set interface (GEMINI_INTERFACE) to the network of the training hosts"
        )


def _announce(session: Session, configured_secret: bool) -> None:
    """Rank 0 says once where the job stands, and what it survives."""
    spec = session.spec
    placed = {host: tuple(spec.holders[rank]) for rank, host in enumerate(spec.hosts)}
    _log.info("run %s, incarnation %d: %s", session.run, spec.incarnation.number, describe(session.plan))
    if spec.incarnation.number == 1:
        if not configured_secret and len(placed) > 1:
            _log.warning(
                "no run secret was configured: a made-up one travels through the rendezvous store, and is as safe as that store "
                "(GEMINI_SECRET_FILE)"
            )
        _log.info("%s", placement.describe(placed))
        machines: dict[str, list[str]] = {}
        for info in {info.host: info for info in session.infos}.values():
            machines.setdefault(info.machine, []).append(info.host)
        for hosts in machines.values():
            if len(hosts) > 1:
                _log.warning("hosts %s share one machine: its loss takes all their copies with it", ", ".join(sorted(hosts)))
