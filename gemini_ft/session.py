"""Joining a run: find the host's agent, agree with the other ranks on secret, plan and placement, open the incarnation.

Everything here is collective over the default process group and runs on the training thread, before the first step.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from gemini_ft import placement
from gemini_ft.agent import lifecycle
from gemini_ft.agent.client import AgentClient
from gemini_ft.config import GeminiConfig
from gemini_ft.errors import ConfigError, CorruptDataError, SecretError, StorageError
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
    Verified,
    Verify,
    Welcome,
)
from gemini_ft.network import bind_address
from gemini_ft.recovery import Holding, Plan, Sources, describe, plan_recovery, require
from gemini_ft.rendezvous import exchange, exchange_or_raise
from gemini_ft.runid import default_run_id
from gemini_ft.storage.base import Storage, open_storage
from gemini_ft.storage.checkpoints import Manifest, newest_whole
from gemini_ft.storage.shard import StoredShard
from gemini_ft.transport.wire import fingerprint
from gemini_ft.versions import Incarnation, Version

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
    storage: Storage | None = None
    manifest: Manifest | None = None

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
            self.storage,
            self.manifest,
        )


@dataclass(frozen=True)
class _Introduction:
    """What a rank tells the others of itself and its host."""

    run: str
    world_size: int
    welcome: Welcome
    inventory: Inventory
    configured_secret: str  # fingerprint, empty when none was configured
    config: str
    orders: Orders


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


def join(config: GeminiConfig, stream: str, on_event: Callable[[Message], None]) -> Session:
    """Take part in the run: collective.

    Raises:
        GeminiError: some rank could not; all ranks raise the same text.
    """
    rank, world_size = rank_and_world()
    run = exchange(config.run_id or default_run_id())[0]
    secret = exchange_or_raise(lambda: read_secret(config))[rank]
    host = lifecycle.host_id()

    def introduce() -> tuple[AgentClient, Hello, _Introduction]:
        hello = _hello(config, run, stream, rank, secret)
        client = AgentClient(run, host, hello, on_event, config.timeout)
        lifecycle.set_oom_score(500)
        if lifecycle.shares_fate(client.welcome.pid):
            _log.warning(
                "the agent of host %s shares a cgroup with its workers: if the job step or container ends, its memory goes too. "
                "Run `gemini agent` as a service of the host (docs/deploy.md).",
                host,
            )
        inventory = client.call(GetInventory(), Inventory)[0]
        shared = config.model_dump_json(exclude={"domain", "secret_file", "tls", "memory_limit", "interface"})
        return client, hello, _Introduction(run, world_size, client.welcome, inventory, fingerprint(secret), shared, Orders.read(run))

    mine: list[tuple[AgentClient, Hello]] = []

    def introduction() -> _Introduction:
        client, hello, about = introduce()
        mine.append((client, hello))
        return about

    everyone = exchange_or_raise(introduction, config.timeout + 10)
    client, hello = mine[0]
    secret = _agree_on_secret(everyone)
    _agree_on_config(everyone)
    orders = Orders.agree([about.orders for about in everyone])
    storage = _open_storage(config, rank)
    plan, manifest = _agree_on_plan(config, client, everyone, run, stream, storage, rank, world_size)
    make_spec = partial(_make_spec, config, stream, everyone, plan, manifest, storage is not None)
    spec = exchange_or_raise(lambda: make_spec() if rank == 0 else None)[0]
    assert spec is not None
    opening = OpenSession(spec=spec, secret=secret)
    exchange_or_raise(lambda: client.call(opening, Opened)[0], config.timeout + 10)
    infos = [about.welcome.info for about in everyone]
    session = Session(rank, world_size, run, host, config, client, hello, secret, spec, plan, infos, orders, storage, manifest)
    if rank == 0:
        _announce(session, bool(everyone[0].configured_secret))
    return session


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


def _agree_on_secret(everyone: list[_Introduction]) -> bytes:
    given = {about.configured_secret: rank for rank, about in reversed(list(enumerate(everyone)))}
    if len(given) > 1:
        who = ", ".join(f"rank {rank} has {print_ or 'none'}" for print_, rank in given.items())
        raise SecretError(
            f"the ranks were given different run secrets (fingerprints: {who}); give all hosts the same GEMINI_SECRET_FILE, or none"
        )
    # An agent that lived before this incarnation has the secret under which older state was signed.
    chosen = max(everyone, key=lambda about: about.welcome.info.known or (0, ""))
    return chosen.welcome.secret


def _agree_on_config(everyone: list[_Introduction]) -> None:
    for rank, about in enumerate(everyone):
        if about.config != everyone[0].config:
            raise ConfigError(f"rank {rank} has other gemini options than rank 0: {about.config} instead of {everyone[0].config}")


def _open_storage(config: GeminiConfig, rank: int) -> Storage | None:
    settings = config.storage
    if settings is None:
        return None

    def check() -> Storage:
        storage = open_storage(settings.url)
        storage.check()
        return storage

    try:
        return exchange_or_raise(check, config.timeout)[rank]
    except StorageError as error:
        if settings.required:
            raise
        _log.warning("storage is unusable and not required, so this run has no slow tier: %s", error)
        return None


def _agree_on_plan(
    config: GeminiConfig,
    client: AgentClient,
    everyone: list[_Introduction],
    run: str,
    stream: str,
    storage: Storage | None,
    rank: int,
    world_size: int,
) -> tuple[Plan, Manifest | None]:
    """Plan, check the copies the plan needs against their checksums, and plan again without those that are damaged."""
    refused: set[Version] = {version for about in everyone for version in about.inventory.given_up}
    for about in everyone:
        stuck = about.welcome.resumed
        if stuck is not None and about.welcome.attempts >= config.max_retries:
            refused.add(stuck)
            if rank == 0:
                _log.warning("%s was resumed %d times in a row without one step of progress: giving it up", stuck, about.welcome.attempts)
    if config.resume == "never":
        return Plan("nothing"), None
    folders: set[str] = set()
    holdings = {about.welcome.info.host: Holding(about.welcome.info.host, about.inventory.slots) for about in everyone}
    while True:
        manifest = exchange(_newest(storage, run, stream, folders, refused) if rank == 0 else None, config.timeout)[0]
        stored = manifest.version if manifest is not None else None
        stored_size = manifest.world_size if manifest is not None else None
        plan = plan_recovery(list(holdings.values()), world_size, stored, stored_size, sorted(refused))
        if plan.kind == "memory":
            damaged = _check_memory(client, plan, everyone, config.timeout)
            if not damaged:
                break
            holdings = {h: _without(holding, plan.version, damaged.get(h, set())) for h, holding in holdings.items()}
        elif plan.kind == "storage" and manifest is not None and storage is not None:
            if all(exchange(_is_sound(storage, manifest, rank), 600.0)):
                break
            _log.warning("%s in storage is damaged: trying the one before", manifest.folder)
            folders.add(manifest.folder)
        else:
            break
    if config.resume == "require":
        require(plan)
    return plan, manifest if plan.kind == "storage" else None


def _newest(storage: Storage | None, run: str, stream: str, folders: set[str], refused: set[Version]) -> Manifest | None:
    while storage is not None:
        manifest = newest_whole(storage, run, stream, folders)
        if manifest is None or manifest.version not in refused:
            return manifest
        folders.add(manifest.folder)
    return None


def _is_sound(storage: Storage, manifest: Manifest, rank: int) -> bool:
    """Every rank reads the shard of its own number; a checkpoint of another size is refused before this."""
    try:
        StoredShard(storage, manifest.shards[rank]).verify()
    except (CorruptDataError, StorageError) as error:
        _log.warning("%s", error)
        return False
    return True


def _check_memory(client: AgentClient, plan: Plan, everyone: list[_Introduction], timeout: float) -> dict[str, set[int]]:
    """host -> owners whose copies of the planned version are damaged there."""
    assert plan.version is not None
    sound = client.call(Verify(version=plan.version), Verified)[0].sound
    by_host = dict(zip((about.welcome.info.host for about in everyone), exchange(sound, timeout), strict=True))
    damaged: dict[str, set[int]] = {}
    for owner, hosts in plan.sources.items():
        for host in hosts:
            if owner not in by_host[host]:
                damaged.setdefault(host, set()).add(owner)
    for host, owners in damaged.items():
        _log.warning(
            "host %s: the copies of ranks %s of %s do not match their checksums and are ignored", host, sorted(owners), plan.version
        )
    return damaged


def _without(holding: Holding, version: Version | None, owners: set[int]) -> Holding:
    return replace(holding, slots=[s for s in holding.slots if s.version != version or s.owner not in owners])


def _make_spec(
    config: GeminiConfig, stream: str, everyone: list[_Introduction], plan: Plan, manifest: Manifest | None, with_storage: bool
) -> SessionSpec:
    hosts = [about.welcome.info.host for about in everyone]
    infos = {about.welcome.info.host: about.welcome.info for about in everyone}
    domains = {host: info.domain for host, info in infos.items()}
    if any(domains.values()) and not all(domains.values()):
        missing = sorted(host for host, domain in domains.items() if not domain)
        raise ConfigError(f"hosts {missing} have no failure domain, others have one; set GEMINI_DOMAIN on all hosts or on none")
    placed = placement.place(sorted(infos), config.replicas, domains if all(domains.values()) else None)
    known = [info.known for info in infos.values() if info.known is not None]
    known += [manifest.incarnation] if manifest is not None else []
    known += [plan.version.incarnation] if plan.version is not None else []
    given_up = {version for about in everyone for version in about.inventory.given_up}
    given_up |= {
        about.welcome.resumed for about in everyone if about.welcome.resumed is not None and about.welcome.attempts >= config.max_retries
    }
    return SessionSpec(
        stream=stream,
        incarnation=Incarnation.after(known),
        world_size=len(everyone),
        hosts=hosts,
        addresses={host: info.address for host, info in infos.items()},
        holders={rank: list(placed[host]) for rank, host in enumerate(hosts)},
        leader=hosts[0],
        resumed=plan.version,
        sources={owner: list(holders) for owner, holders in plan.sources.items()},
        given_up=sorted(given_up),
        replica_timeout=config.replica_timeout,
        hang_timeout=config.hang_timeout,
        chunk_bytes=config.chunk_bytes,
        storage=config.storage.model_dump() if config.storage is not None and with_storage else None,
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
