"""Joins a run: finds the host's agent, agrees with the other ranks on secret, plan and placement, opens the incarnation.

Everything here is collective over the default process group and runs on the training thread, before the first step.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from gemini_ft.agent import lifecycle
from gemini_ft.agent.client import AgentClient
from gemini_ft.config import GeminiConfig
from gemini_ft.core import placement
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import ConfigError, StorageError
from gemini_ft.faults.inject import Orders
from gemini_ft.hosts import host_id
from gemini_ft.launch.run_id import default_run_id
from gemini_ft.recovery.plan import Plan, describe
from gemini_ft.recovery.readers import Sources
from gemini_ft.storage.base import Storage, find_sign
from gemini_ft.storage.decisions import Sighting
from gemini_ft.storage.lookout import within
from gemini_ft.storage.marks import recall_on_host
from gemini_ft.storage.opening import open_storage
from gemini_ft.storage.retention import Retention
from gemini_ft.wire.network import bind_address, is_loopback
from gemini_ft.wire.peer_messages import Claims
from gemini_ft.wire.trust import fingerprint
from gemini_ft.wire.worker_messages import GetInventory, Hello, HostInfo, Inventory, Opened, OpenSession, SessionSpec, ToWorker
from gemini_ft.worker.choice import Choice, Chooser, Introduction
from gemini_ft.worker.rendezvous import exchange, exchange_or_raise
from gemini_ft.worker.secret import agree_on_secret, read_secret

_log = logging.getLogger("gemini_ft")
_CHECK_SECONDS = 20.0  # for one small object to be written, read and deleted


@dataclass
class Session:
    """The part of this rank in one incarnation."""

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
        """The places where the resumed version can be read."""
        claims = Claims(run=self.run, stream=self.spec.stream, host=self.host, to="", role="fetch", incarnation=None)
        return Sources(
            self.client,
            self.host,
            self.plan,
            self.spec.addresses,
            claims,
            self.secret,
            self.config.timeout,
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


def join(config: GeminiConfig, stream: str, on_event: Callable[[ToWorker], None], resizable: bool = False) -> Session:
    """Joins the run. Collective.

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
    given: list[bytes] = []
    exchange_or_raise(lambda: given.append(read_secret(config)), config.timeout)  # only that it can be read is for all
    secret = given[0]
    hello = _hello(config, run, stream, rank, secret)
    clients: list[AgentClient] = []

    def introduce() -> Introduction:
        clients.append(AgentClient(run, host_id(), hello, on_event, config.timeout))
        return _introduction(config, clients[0], run, stream, fingerprint(secret))

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


def _introduction(config: GeminiConfig, client: AgentClient, run: str, stream: str, configured_secret: str) -> Introduction:
    lifecycle.set_oom_score(500)
    lifecycle.write_stacks_on_request(run, client.welcome.info.host)
    if lifecycle.shares_fate(client.welcome.pid):
        _log.warning(
            "the agent of host %s shares a cgroup with its workers: if the job step or container ends, its memory goes too. "
            "Run `gemini agent` as a service of the host (docs/deploy.md).",
            client.welcome.info.host,
        )
    inventory = client.call(GetInventory(), Inventory)[0]
    shared = config.model_dump_json(exclude={"domain", "secret_file", "memory_limit", "interface"})
    welcome = client.welcome.model_copy(update={"secret": b""})  # exchanges between ranks travel openly
    mark = recall_on_host(config.storage.url, run, stream) if config.storage is not None else None
    stored = mark.version if mark is not None else None
    return Introduction(run, welcome, inventory, configured_secret, shared, Orders.read(run), stored)


def _agree(config: GeminiConfig, client: AgentClient, hello: Hello, everyone: list[Introduction], rank: int, resizable: bool) -> Session:
    """Agrees on everything that all ranks must see alike, and opens the incarnation."""
    run, stream = hello.run, hello.stream
    secret = agree_on_secret(everyone, client.welcome.secret, rank, config.timeout)
    _agree_on_config(everyone)
    orders = Orders.agree([about.orders for about in everyone])
    reopen = storage_opener(config)
    choice = Chooser(config, client, everyone, stream, reopen, rank, resizable).choose()
    if reopen is not None and _check_storage(config, reopen, choice, partial(_make_room, config, reopen, run, stream, rank, choice)):
        _check_shared(config, reopen, everyone, rank)
    make_spec = partial(_make_spec, config, stream, everyone, choice)
    spec = exchange_or_raise(lambda: make_spec() if rank == 0 else None, config.timeout)[0]
    assert spec is not None
    opening = OpenSession(spec=spec, secret=secret)
    exchange_or_raise(lambda: client.call(opening, Opened)[0], config.timeout + 10)
    host, infos = client.welcome.info.host, [about.welcome.info for about in everyone]
    return Session(rank, len(everyone), run, host, config, client, hello, secret, spec, choice.plan, infos, orders)


def _hello(config: GeminiConfig, run: str, stream: str, rank: int, secret: bytes) -> Hello:
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
        encrypt=config.encrypt,
        agent_timeout=config.agent_timeout,
        start_timeout=config.start_timeout,
    )


def _agree_on_config(everyone: list[Introduction]) -> None:
    for rank, about in enumerate(everyone):
        if about.config != everyone[0].config:
            raise ConfigError(f"rank {rank} has other gemini options than rank 0: {about.config} instead of {everyone[0].config}")


def storage_opener(config: GeminiConfig) -> Callable[[], Storage] | None:
    """Opens the storage that was configured; nothing is touched before it is used.

    Raises:
        ConfigError: there is none that this version can open.
    """
    settings = config.storage
    if settings is None:
        return None
    reopen = partial(open_storage, settings.url, settings.endpoint_url, settings.max_bandwidth, settings.kept is not None)
    reopen()
    return reopen


def _check_storage(config: GeminiConfig, reopen: Callable[[], Storage], choice: Choice, make_room: Callable[[], None]) -> bool:
    """Finds out on every host whether storage can be written; if not, returns False, and the job goes on without it.

    Where it cannot, ``make_room`` is called before that is believed: storage may be full of what uploads of the past have left.

    Raises:
        StorageError: it cannot, it is required, and the job does not resume from memory.
    """
    settings = config.storage
    assert settings is not None
    seconds = min(config.timeout, _CHECK_SECONDS)

    def check() -> str:
        try:
            within(seconds, settings.url, lambda: reopen().check())
        except StorageError as error:
            return str(error)
        return ""

    room_made = False
    pause, end = 1.0, time.monotonic() + (settings.patience if choice.plan.kind == "storage" and settings.required else 0.0)
    while failed := {rank: text for rank, text in enumerate(exchange_or_raise(check, seconds + config.timeout)) if text}:
        text = "; ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {said}" for said, ranks in _by_text(failed).items())
        if choice.plan.kind == "memory" or not settings.required:
            why = "the job resumes from memory" if settings.required else "it is not required"
            _log.warning("storage cannot be used now, and %s: training goes on, uploads are tried when they are due (%s)", why, text)
            return False
        if not room_made:
            room_made = True
            exchange_or_raise(make_room, seconds + config.timeout)
            continue
        if exchange(end - time.monotonic(), config.timeout)[0] <= 0:
            raise StorageError(text)
        time.sleep(pause)
    return True


def _make_room(config: GeminiConfig, reopen: Callable[[], Storage], run: str, stream: str, rank: int, choice: Choice) -> None:
    """Deletes from storage, on rank 0, old checkpoints and leftovers of earlier uploads."""
    if rank != 0:
        return
    settings = config.storage
    assert settings is not None
    this = Sighting("", Version(Incarnation(sys.maxsize, ""), 0), "torn", choice.descent)
    retention = Retention(reopen, run, stream, settings.kept, settings.keep_every, choice.damaged)
    try:
        within(min(config.timeout, _CHECK_SECONDS), settings.url, lambda: retention.tidy(this))
    except StorageError as error:
        _log.warning("%s", error)


def _check_shared(config: GeminiConfig, reopen: Callable[[], Storage], everyone: list[Introduction], rank: int) -> None:
    """Makes every rank read what the one before has written: a folder of the same name may differ between hosts.

    Raises:
        ConfigError: it is; both hosts are named.
    """
    hosts = [about.welcome.info.host for about in everyone]
    if len({*hosts}) == 1:
        return
    storage, seconds = reopen(), min(config.timeout, _CHECK_SECONDS)
    own = f"gemini-check-{secrets.token_hex(8)}"

    def attempt(work: Callable[[], None]) -> None:
        try:
            within(seconds, storage.url, work)
        except StorageError as error:  # it was well a moment ago: that is no proof of anything
            _log.warning("whether all hosts share the storage could not be looked at: %s", error)

    def leave() -> str:
        attempt(lambda: storage.put(own, [own.encode()]))
        return own

    signs = exchange_or_raise(leave, seconds + config.timeout)
    before = rank - 1
    try:
        find = partial(find_sign, storage, signs[before], hosts[before], hosts[rank])
        exchange_or_raise(lambda: attempt(find), seconds + config.timeout)
    finally:
        attempt(lambda: storage.delete(own))


def _by_text(said: Mapping[int, str]) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {}
    for rank, text in said.items():
        out.setdefault(text, []).append(rank)
    return out


def _make_spec(config: GeminiConfig, stream: str, everyone: list[Introduction], choice: Choice) -> SessionSpec:
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
    # Even those that are damaged or not wanted: the new incarnation must count as newer.
    known += [*choice.descent.overtaken, *(version.incarnation for version in choice.descent.lineage or ())]
    return SessionSpec(
        stream=stream,
        incarnation=Incarnation.after(known),
        world_size=len(everyone),
        hosts=hosts,
        addresses={host: info.address for host, info in infos.items()},
        holders={rank: list(placed[host]) for rank, host in enumerate(hosts)},
        leader=hosts[0],
        resumed=plan.version,
        lineage=list(choice.descent.lineage or ()),
        overtaken=sorted(choice.descent.overtaken),
        aside=sorted(choice.descent.aside),
        sources={owner: list(holders) for owner, holders in rebuildable.items()},
        roots=dict(plan.roots) if rebuildable else {},
        given_up=sorted(choice.given_up),
        damaged=sorted(choice.damaged),
        replica_timeout=config.replica_timeout,
        hang_timeout=config.hang_timeout,
        chunk_bytes=config.chunk_bytes,
        storage=config.storage.model_dump() if config.storage is not None else None,
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
    """Announces once, on rank 0, where the job stands, and which losses it survives."""
    spec = session.spec
    placed = {host: tuple(spec.holders[rank]) for rank, host in enumerate(spec.hosts)}
    _log.info("run %s, incarnation %d: %s", session.run, spec.incarnation.number, describe(session.plan))
    if spec.incarnation.number == 1:
        if not configured_secret and len(placed) > 1:
            _log.warning(
                "no run secret was configured: hosts send each other a made-up one through the rendezvous, sealed against readers but "
                "not against whoever can write there (GEMINI_SECRET_FILE)"
            )
        _log.info("%s", placement.describe(placed))
        machines: dict[str, list[str]] = {}
        for info in {info.host: info for info in session.infos}.values():
            machines.setdefault(info.machine, []).append(info.host)
        for hosts in machines.values():
            if len(hosts) > 1:
                _log.warning("hosts %s share one machine: its loss takes all their copies with it", ", ".join(sorted(hosts)))
