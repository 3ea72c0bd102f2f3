"""Joins a run: finds the host's agent, agrees with the other ranks on secret, plan and placement, opens the incarnation.

Everything here is collective over the default process group and runs on the training thread, before the first step.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any

import torch.distributed as dist

from gemini_ft import failpoints
from gemini_ft.agent import lifecycle
from gemini_ft.agent.client import AgentClient
from gemini_ft.agent.departure import PARTING_SECONDS
from gemini_ft.agent.memory.slot_files import SlotFiles
from gemini_ft.agent.metrics_page import check_metrics
from gemini_ft.config import GeminiConfig, load_config, unknown_variables
from gemini_ft.core import placement
from gemini_ft.core.goodput import PastTime, longer
from gemini_ft.core.versions import Incarnation
from gemini_ft.core.words import in_words
from gemini_ft.errors import ConfigError, RunAliveError
from gemini_ft.faults.inject import Orders
from gemini_ft.hosts import host_id
from gemini_ft.launch.launched import changes, default_run_id, is_passing, launch_id, this_launch, without_secrets
from gemini_ft.recovery.plan import RecoveryPlan, describe
from gemini_ft.recovery.readers import ShardReaders
from gemini_ft.storage.checkpoints import recall_on_host
from gemini_ft.wire.messages import PROTOCOL_VERSION
from gemini_ft.wire.network import bind_addresses, check_rdma, is_loopback
from gemini_ft.wire.peer_messages import Claims
from gemini_ft.wire.trust import fingerprint, read_secret
from gemini_ft.wire.worker_messages import GetInventory, Hello, HostInfo, Inventory, Launch, Opened, OpenSession, SessionSpec, ToWorker
from gemini_ft.worker.introductions import Introduction, agree_on_secret, introduced
from gemini_ft.worker.rendezvous import exchange, exchange_or_raise, on_all_ranks, refuse_import
from gemini_ft.worker.resume_choice import Choice, Chooser
from gemini_ft.worker.storage_check import check_storage, storage_opener

_log = logging.getLogger("gemini_ft")


@dataclass(kw_only=True)
class WorkerSession:
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
    past: PastTime
    plan: RecoveryPlan
    infos: list[HostInfo]
    orders: Orders  # faults to inject
    began: float = field(default_factory=time.monotonic)
    restored: float | None = None  # when this rank had its state back
    replayed: tuple[float, int] | None = None  # when the last step that was trained again ended, and its number
    _sources: ShardReaders | None = field(default=None, init=False)

    @property
    def sources(self) -> ShardReaders:
        """The places where the resumed version can be read; with what they keep open, as long as the agent is the same."""
        if self._sources is not None and self._sources.client is not self.client:
            self.forget_sources()
        if self._sources is None:
            stream, config = self.spec.stream, self.config
            claims = Claims(run=self.run, stream=stream, host=self.host, to="", role="fetch", incarnation=None, encrypt=config.encrypt)
            spec, client = self.spec, self.client
            self._sources = ShardReaders(
                client, self.host, self.plan, spec.addresses, claims, self.secret, config.timeout, further=spec.further
            )
        return self._sources

    def step_over(self, iteration: int) -> None:
        """Notes that a step has ended, for an agent that comes in the place of the present one and has not seen it."""
        if (before := self.past.time) is not None and iteration <= before.furthest:
            self.replayed = time.monotonic(), iteration

    @property
    def so_far(self) -> PastTime:
        """The time of the run before now, for such an agent."""
        now = time.monotonic()
        return replace(
            self.past,
            under_way=now - self.began,
            restored=now - self.restored if self.restored is not None else None,
            replayed=(now - self.replayed[0], self.replayed[1]) if self.replayed is not None else None,
        )

    def forget_sources(self) -> None:
        """Closes the readers of the resumed version: it has been loaded, or will not be."""
        if self._sources is not None:
            self._sources.close()
            self._sources = None


def rank_and_world() -> tuple[int, int]:
    """(rank, world size) of the default process group.

    Raises ConfigError: this looks like one of several ranks, and there is no process group yet.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but there is no process group; call gemini_ft.init_process_group() "
            "(or torch's) before the Checkpointer is used"
        )
    return 0, 1


def join(config: GeminiConfig, stream: str, on_event: Callable[[ToWorker], None], resizable: bool = False) -> WorkerSession:
    """Joins the run. Collective.

    Args:
        on_event: for what the agent says of its own accord; on a thread of the client.
        resizable: whether what another number of ranks has made can be resumed.

    Raises:
        ConfigError: a process that multiprocessing starts is importing the script.
        GeminiError: some rank could not; all ranks raise the same text.
    """
    refuse_import()
    rank, _ = rank_and_world()
    everyone = exchange((config.run_id or default_run_id(), launch_id(), PROTOCOL_VERSION), config.timeout)
    _check_versions(everyone)
    run, launch = everyone[0][:2]
    failpoints.arm(run, host_id())
    now = this_launch(launch)
    hello = on_all_ranks(lambda: _hello(config, run, stream, rank, now), config.timeout)  # with the secret, which does not leave this rank
    clients: list[AgentClient] = []

    def introduce() -> Introduction:
        _check_for_agents(config, run)
        clients.append(_connect(run, hello, on_event, config.timeout))
        return _introduction(config, clients[0], run, stream, fingerprint(hello.secret), now)

    try:
        with _no_collections():  # what all have said is let go before it ends
            return _agree(config, clients, hello, introduced(introduce, config.timeout + 10), rank, resizable)
    except BaseException:
        for client in clients:
            client.close()  # the agent must not wait for us to choose
        raise


def _check_versions(everyone: Sequence[tuple[str | int, ...]]) -> None:
    """Refuses ranks of another gemini-ft, before anything is said that only the same one understands.

    Raises ConfigError: there are some.
    """
    spoken = {said[2:]: rank for rank, said in reversed(list(enumerate(everyone)))}
    if len(spoken) > 1:
        said = ", ".join(f"rank {rank}: {version[0] if version else 'an old one'}" for version, rank in reversed(spoken.items()))
        raise ConfigError(f"ranks speak different protocols ({said}): their versions of gemini-ft differ; install the same on all hosts")


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Keeps the garbage collector still: it would look through the whole process again and again, as all hosts' inventories are read."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_for_agents(config: GeminiConfig, run: str) -> None:
    """Refuses a folder for slots, processors, or an address of metrics that this host's agent cannot use, or does not hear of.

    Raises ConfigError: it is one.
    """
    theirs = load_config()
    for name, variable, given, heard in (
        ("memory.folder", "GEMINI_MEMORY__FOLDER", config.memory.folder, theirs.memory.folder),
        ("agent_cpus", "GEMINI_AGENT_CPUS", config.agent_cpus, theirs.agent_cpus),
        ("metrics", "GEMINI_METRICS", config.metrics, theirs.metrics),
        ("page_token_file", "GEMINI_PAGE_TOKEN_FILE", config.page_token_file, theirs.page_token_file),
    ):
        if given is not None and heard != given:
            raise ConfigError(
                f"{name}={str(given)!r} was given as an argument; agents are processes of their own and read it elsewhere: give it as "
                f"{variable}, or in the file that GEMINI_CONFIG names"
            )
    check_metrics(config)
    if config.memory.folder is not None:
        SlotFiles(config.memory.folder, run, host_id())
    if (processors := config.agent_cpus) is not None:
        with ThreadPoolExecutor(1) as pool:  # whose thread alone is moved there
            pool.submit(lifecycle.keep_to, processors).result()


def _warn_of_folder(config: GeminiConfig, client: AgentClient, run: str) -> None:
    """Says so where an agent that ran already keeps slots elsewhere: it goes on with the copies that it has, which may be the only ones."""
    wanted = str(config.memory.folder.absolute()) if config.memory.folder is not None else ""
    host, used = client.welcome.info.host, client.welcome.memory_folder
    if wanted and used != wanted:
        _log.warning(
            "memory.folder=%r has no effect: the agent of host %s (pid %d) was started before, and keeps slots in %s. To have another that "
            "uses the folder, let the job end or reach storage and give `gemini leave --run-id %s --host %s`; its copies are lost then",
            *(wanted, host, client.welcome.pid, used or "memory that has no name and is gone with its last process", run, host),
        )


def _connect(run: str, hello: Hello, on_event: Callable[[ToWorker], None], timeout: float) -> AgentClient:
    """This rank's connection to its agent; processes that have just been killed are given time to end."""
    end = time.monotonic() + PARTING_SECONDS
    while True:
        try:
            return AgentClient(run, host_id(), hello, on_event, timeout)
        except RunAliveError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)


def _introduction(config: GeminiConfig, client: AgentClient, run: str, stream: str, configured_secret: str, now: Launch) -> Introduction:
    lifecycle.set_oom_score(500)
    lifecycle.write_stacks_on_request()
    if lifecycle.shares_fate(client.welcome.pid):
        _log.warning(
            "the agent of host %s shares a cgroup with its workers: if the job step or container ends, its memory goes too. "
            "Run `gemini agent` as a service of the host (docs/deploy.md).",
            client.welcome.info.host,
        )
    _warn_of_folder(config, client, run)
    inventory = client.call(GetInventory(), Inventory)[0]
    before = client.welcome.launch
    is_same = before is not None and before.is_same(now)
    launch = "" if before is None else now.id if is_same else before.id
    goes_on = is_same and before is not None and before.pid != os.getpid()  # a process that joins again was not restarted
    own = {"secret": b"", "launch": None, "memory_folder": "", "time": None}  # exchanges between ranks travel openly
    welcome = client.welcome.model_copy(update=own)
    mark = recall_on_host(config.storage.url, run, stream) if config.storage is not None else None
    return Introduction(
        run=run,
        welcome=welcome,
        inventory=inventory,
        configured_secret=configured_secret,
        config=config.model_dump_json(
            exclude={"domain", "secret_file", "memory_limit", "interface", "agent_cpus", "metrics", "page_token_file"}
        ),
        orders=Orders.read(run),
        stored=mark.version if mark is not None else None,
        launch=launch,
        seen=client.welcome.time.extent if client.welcome.time is not None else (0, 0.0),
        goes_on=goes_on,
    )


def _agree(
    config: GeminiConfig, clients: list[AgentClient], hello: Hello, everyone: list[Introduction], rank: int, resizable: bool
) -> WorkerSession:
    """Agrees on everything that all ranks must see alike, opens the incarnation, and announces it."""
    run, stream, client = hello.run, hello.stream, clients[0]
    secret = agree_on_secret(everyone, client.welcome.secret, rank, config.timeout)
    _agree_on_config(everyone)
    orders = Orders.agree([about.orders for about in everyone])
    reopen = storage_opener(config)
    choice = Chooser(config, client, everyone, stream, reopen, rank=rank, resizable=resizable).choose()
    version = choice.plan.version
    failpoints.reached("worker_chosen", version.iteration if version is not None else None, rank)
    if reopen is not None:
        check_storage(config, reopen, choice, hello, [about.welcome.info.host for about in everyone])
    make_spec = partial(_make_spec, config, stream, everyone, choice)
    seen = max(range(len(everyone)), key=lambda one: everyone[one].seen)
    own = client.welcome.time if rank == seen else None
    said = exchange_or_raise(lambda: (make_spec() if rank == 0 else None, own, choice.waited), config.timeout)
    spec, past = said[0][0], PastTime(time=longer(said[seen][1], choice.time), waited=said[0][2])
    assert spec is not None
    opening = OpenSession(spec=spec, secret=secret, past=past)
    exchange_or_raise(lambda: client.call(opening, Opened)[0], config.timeout + 10)
    failpoints.reached("worker_opened", version.iteration if version is not None else None, rank)
    session = WorkerSession(
        rank=rank,
        world_size=len(everyone),
        run=run,
        host=client.welcome.info.host,
        config=config,
        client=client,
        hello=hello,
        secret=secret,
        spec=spec,
        past=past,
        plan=choice.plan,
        infos=[about.welcome.info for about in everyone],
        orders=orders,
    )
    if rank == 0:
        for warning in unknown_variables(os.environ) if "GEMINI_LAUNCHER_PID" not in os.environ else ():  # the launcher has said it
            _log.warning("%s", warning)
        _announce(session, bool(everyone[0].configured_secret))
        _announce_resumption(session, {about.launch for about in everyone} - {""})
    return session


def _hello(config: GeminiConfig, run: str, stream: str, rank: int, launch: Launch) -> Hello:
    bind = bind_addresses(config.interface)
    if config.traffic.transport == "rdma":
        check_rdma(bind)
    return Hello(
        run=run,
        stream=stream,
        rank=rank,
        secret=read_secret(config),
        bind=bind[0],
        further=bind[1:],
        ports=config.port_range,
        memory_limit=config.memory_limit,
        domain=config.domain or "",
        linger=0.0 if config.run_id is None and is_passing() else config.linger,  # nobody can come back for it
        encrypt=config.encrypt,
        agent_timeout=config.agent_timeout,
        start_timeout=config.start_timeout,
        launch=launch,
    )


def _agree_on_config(everyone: list[Introduction]) -> None:
    for rank, about in enumerate(everyone):
        if about.config != everyone[0].config:
            first, other = (_flat(json.loads(each.config)) for each in (everyone[0], about))
            names = [name for name in sorted(first.keys() | other.keys()) if first.get(name) != other.get(name)]
            texts = without_secrets([f"{name} is {other.get(name, 'not set')} and not {first.get(name, 'set')}" for name in names])
            raise ConfigError(f"rank {rank} has other gemini options than rank 0: {'; '.join(texts)}")


def _flat(options: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Options by their full names, those of sections too; their values as text."""
    found: dict[str, str] = {}
    for name, value in options.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": json.dumps(value)}
    return found


def _make_spec(config: GeminiConfig, stream: str, everyone: list[Introduction], choice: Choice) -> SessionSpec:
    hosts = [about.welcome.info.host for about in everyone]
    infos = {about.welcome.info.host: about.welcome.info for about in everyone}
    domains = {host: info.domain for host, info in infos.items()}
    if any(domains.values()) and not all(domains.values()):
        missing = sorted(host for host, domain in domains.items() if not domain)
        raise ConfigError(f"hosts {missing} have no failure domain, others have one; set GEMINI_DOMAIN on all hosts or on none")
    replicas = min(config.replicas, len(infos)) if config.elastic else config.replicas
    placed = placement.place(sorted(infos), replicas, domains if all(domains.values()) else None)
    check_addresses(infos.values())
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
        further={host: info.further for host, info in infos.items() if info.further},
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
        present=sorted(choice.present),
        replica_timeout=config.replica_timeout,
        leader_timeout=config.leader_timeout,
        hang_timeout=config.hang_timeout,
        straggler_factor=config.straggler_factor,
        chunk_bytes=config.chunk_bytes,
        storage=config.storage.model_dump() if config.storage is not None else None,
        interval=config.fixed_interval,
        traffic=config.traffic,
    )


def check_addresses(infos: Collection[HostInfo]) -> None:
    machines = {info.machine for info in infos}
    deaf = sorted(info.host for info in infos if any(map(is_loopback, (info.address[0], *info.further))))
    if len(machines) > 1 and deaf:
        raise ConfigError(
            f"the agents of hosts {deaf} listen on a loopback address, where other machines cannot reach them; "
            "set interface (GEMINI_INTERFACE) to the network of the training hosts"
        )


def _announce(session: WorkerSession, configured_secret: bool) -> None:
    """Announces once, on rank 0, where the job stands, and which losses it survives."""
    spec = session.spec
    placed = {host: tuple(spec.holders[rank]) for rank, host in enumerate(spec.hosts)}
    _log.info("run %s, incarnation %d: %s", session.run, spec.incarnation.number, describe(session.plan))
    if spec.incarnation.number == 1 or session.plan.world_size not in (0, session.world_size):
        if not configured_secret and len(placed) > 1:
            _log.warning(
                "no run secret was configured: hosts send each other a random one through the rendezvous, sealed against readers but "
                "not against whoever can write there (GEMINI_SECRET_FILE)"
            )
        _log.info("%s", placement.describe(placed))
        machines: dict[str, list[str]] = {}
        for info in {info.host: info for info in session.infos}.values():
            machines.setdefault(info.machine, []).append(info.host)
        for hosts in machines.values():
            if len(hosts) > 1:
                _log.warning("hosts %s share one machine: its loss takes all their copies with it", ", ".join(sorted(hosts)))


def _announce_resumption(session: WorkerSession, launches: Collection[str]) -> None:
    """Says, on rank 0, that what is resumed is not of this launch: the user may have meant another job.

    ``launches``: those that the hosts have served last, where that is known.
    """
    plan, now, before = session.plan, session.hello.launch, session.client.welcome.launch
    assert now is not None
    if plan.version is None or now.id in launches or (not launches and plan.kind == "memory"):
        return  # in memory without a launch: the agent has been restarted
    begun, different = "", "what the script, its arguments and its environment were is not known"
    if before is not None:
        begun = f", begun {datetime.fromtimestamp(before.started).astimezone():%Y-%m-%d %H:%M:%S} by process {before.pid}"
        different = "; ".join(changes(before, now)) or "nothing in the command, the script and the environment"
    _log.warning(
        "what another launch has left is resumed: iteration %d, from %s, %s old%s. Different since: %s. The state is as it was then, "
        "hyperparameters of optimizers and schedulers included. To start from the beginning: GEMINI_RESUME=never. To forget what memory "
        "holds: `gemini leave --run-id %s`. A job of its own needs another id: GEMINI_RUN_ID=NAME",
        plan.version.iteration,
        plan.kind,
        in_words(plan.age),
        begun,
        different,
        session.run,
    )
