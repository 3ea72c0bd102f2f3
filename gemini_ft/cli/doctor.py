"""``gemini doctor``: looks at a host before its first job, and says what is wrong there and the way out."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import os
import re
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil

from gemini_ft.agent import lifecycle
from gemini_ft.agent.memory import slot_files
from gemini_ft.agent.memory.budget import available_memory
from gemini_ft.config import GeminiConfig, load_config, unknown_variables
from gemini_ft.core.placement import describe, place
from gemini_ft.errors import ConfigError, GeminiError
from gemini_ft.hosts import host_id
from gemini_ft.launch import slurm
from gemini_ft.storage.lookout import within
from gemini_ft.storage.opening import open_storage
from gemini_ft.wire.network import bind_addresses, is_loopback
from gemini_ft.wire.trust import read_secret

_FEW_DESCRIPTORS = 4096
SHARED_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
CONTROL_GROUP = Path("/proc/self/cgroup")
GPUS = Path("/dev/nvidiactl")
_SLOW_LINK = 10_000  # Mbit/s
STORAGE_SECONDS = 20.0  # for one small object to be written, read and deleted
_VENDORS = ("torch", "lightning", "pytorch-lightning", "deepspeed", "transformers", "accelerate", "boto3")
_TIME_ERROR = 5  # of adjtimex: the clock is not synchronised
_MANAGED = re.compile(r"slurm|step_|kubepods|docker|\.service")

Level = Literal["ok", "warn", "wrong"]


CheckResult = tuple[Level, str]  # wrong: a job would fail here, or lose what it should keep; the text has the way out
Check = Callable[[GeminiConfig, int], Iterator[CheckResult]]


def command(arguments: Sequence[str]) -> int:
    """Prints what was found; returns 1 if something is wrong, else 0. Warnings are no fault, unless ``--strict``."""
    parser = argparse.ArgumentParser(
        prog="gemini doctor",
        description="Look at this host before its first job, with the options that GEMINI_* and GEMINI_CONFIG give. Run it on every host, "
        "where `gemini run` will run. Exit status 1: something is wrong.",
    )
    parser.add_argument("--hosts", type=int, default=_hosts(), help="hosts of the job (default: those of the SLURM step, or 2)")
    parser.add_argument("--strict", action="store_true", help="count warnings as well")
    options = parser.parse_args(arguments)
    if options.hosts < 1:
        raise ConfigError(f"--hosts {options.hosts}: must be at least 1")
    config = load_config()
    levels = set()
    for about, check in CHECKS.items():
        for level, text in _looked(check, config, options.hosts):
            levels.add(level)
            print(f"{level:5}  {about:11}  {text}")
    return int("wrong" in levels or (options.strict and "warn" in levels))


def _looked(check: Check, config: GeminiConfig, hosts: int) -> Iterator[CheckResult]:
    """The findings of one check; an error of this package is one, and says what to do by itself."""
    try:
        yield from check(config, hosts)
    except GeminiError as error:
        yield "wrong", str(error)


def _hosts() -> int:
    place = slurm.rendezvous(os.environ, lambda name: True)
    return place.hosts if place is not None else 2


def _host(config: GeminiConfig, hosts: int) -> Iterator[CheckResult]:
    yield "ok", f"{host_id()!r}, domain {slurm.settings(os.environ).get('GEMINI_DOMAIN', config.domain) or 'none'}"


def _options(config: GeminiConfig, hosts: int) -> Iterator[CheckResult]:
    for text in unknown_variables(os.environ):
        yield "warn", text


def _network(config: GeminiConfig, hosts: int) -> Iterator[CheckResult]:
    for address in bind_addresses(config.interface, None if "MASTER_ADDR" in os.environ else "198.51.100.1"):
        yield _network_of(address, hosts)


def _network_of(address: str, hosts: int) -> CheckResult:
    found = psutil.net_if_addrs()
    name = next((name for name, entries in found.items() if address in (entry.address.partition("%")[0] for entry in entries)), "?")
    if is_loopback(address):
        return "wrong" if hosts > 1 else "ok", f"{address} reaches this machine only; name the network (GEMINI_INTERFACE)"
    speed = 0
    with suppress(OSError, KeyError):
        speed = psutil.net_if_stats()[name].speed
    if not speed:
        return "ok", f"replicas leave by {name} ({address}), which does not say how fast it is"
    if speed < _SLOW_LINK:
        text = f"replicas leave by {name} ({address}), a link of {speed:,} Mbit/s; if there is a faster one, name it (GEMINI_INTERFACE)"
        return "warn", text
    return "ok", f"replicas leave by {name} ({address}), {speed:,} Mbit/s"


def _ports(config: GeminiConfig, hosts: int) -> Iterator[CheckResult]:
    if config.port_range is None:
        yield "ok", "the agent takes any free port; where a firewall stands between hosts, set GEMINI_PORT_RANGE"
        return
    first, last = config.port_range
    free = sum(_is_free(port) for port in range(first, last + 1))
    if free:
        yield "ok", f"{free} of {last - first + 1} ports from {first} to {last} are free"
    else:
        yield "wrong", f"no port from {first} to {last} is free (GEMINI_PORT_RANGE); every run on this host needs one"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _memory(config: GeminiConfig, hosts: int) -> Iterator[CheckResult]:
    available = available_memory()
    limit = config.memory_limit if config.memory_limit is not None else int(0.6 * available)
    if limit > available:
        text = f"memory_limit is {limit:,} bytes, and {available:,} are available here (the limits of the control group count); lower it"
        yield "wrong", text
    else:
        yield "ok", f"the agent may hold {limit:,} of {available:,} bytes: enough for a state of {_state(limit, config, hosts):,}"
    pages = SHARED_PAGES.read_text().partition("[")[2].partition("]")[0] if SHARED_PAGES.exists() else "never"
    if config.memory.folder is None and pages in ("never", "deny"):
        text = f"slots have pages of 4 KiB, which take ten times as long to make as huge ones; `echo advise > {SHARED_PAGES}`"
        yield "ok", f"{text} (now {pages})"
    if (folder := config.memory.folder) is not None:
        files = slot_files.SlotFiles(folder, "gemini-doctor", host_id())
        files.clear()
        room = os.statvfs(folder)
        free = room.f_bavail * room.f_frsize
        text = f"memory.folder={str(folder)!r} has room for {free:,} bytes"
        yield "ok" if free >= limit else "warn", text + ("" if free >= limit else f", and the agent may hold {limit:,}")


def _state(limit: int, config: GeminiConfig, hosts: int) -> int:
    """Bytes of a state whose part on each host fits ``limit``: two slots for each shard held, and one more for own ones with storage."""
    return limit * hosts // (2 * min(config.replicas, hosts) + (config.storage is not None))


def _limits(config: GeminiConfig, hosts: int) -> Iterator[CheckResult]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < _FEW_DESCRIPTORS:
        text = f"at most {most} descriptors (ulimit -Hn); every slot, worker and peer takes one: raise it to {_FEW_DESCRIPTORS} or more"
        yield "wrong" if most < 256 else "warn", text
    else:
        yield "ok", f"{'any number of' if most == resource.RLIM_INFINITY else most} descriptors"
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and GPUS.exists():
        yield "warn", f"{locked:,} bytes may be locked (ulimit -l), and workers on GPUs lock their slots: `ulimit -l unlimited`"


def _control_group(config: GeminiConfig, hosts: int) -> Iterator[CheckResult]:
    mine = CONTROL_GROUP.read_text().strip().rpartition(":")[2]
    if not _MANAGED.search(mine):
        yield "ok", f"the agent outlives its workers here ({mine})"
    elif config.memory.folder is not None:
        yield "ok", f"all of {mine} may be ended at once; slots in {config.memory.folder} outlive that"
    else:
        text = (
            f"an agent that is started here ends with its workers, when {mine} is ended: start it elsewhere (docs/deploy.md), or "
            "keep slots in a folder (GEMINI_MEMORY__FOLDER)"
        )
        yield "warn", text


def _clock(config: GeminiConfig, hosts: int) -> Iterator[CheckResult]:
    buffer = ctypes.create_string_buffer(512)  # struct timex, zeroed: nothing is changed
    if ctypes.CDLL(None).adjtimex(buffer) == _TIME_ERROR:
        yield "warn", "not synchronised. Recovery does without, but S3 refuses hosts that are minutes off: start chrony or ntpd"
    else:
        yield "ok", "synchronised"


def _secret(config: GeminiConfig, hosts: int) -> Iterator[CheckResult]:
    if read_secret(config):
        yield "ok", "configured; all hosts need the same"
    elif hosts > 1:
        text = "none: agents make one up, and a writer to the rendezvous can come between hosts. Give all of them a GEMINI_SECRET_FILE"
        yield "warn", text


def _storage(config: GeminiConfig, hosts: int) -> Iterator[CheckResult]:
    if config.storage is None:
        yield "warn", "none: what all holders of a shard lose together is lost. Set GEMINI_STORAGE__URL and an interval"
        return
    settings = config.storage
    storage = open_storage(settings.url, settings.endpoint_url, settings.max_bandwidth, settings.kept is not None)
    within(STORAGE_SECONDS, settings.url, storage.check)
    yield "ok", f"{settings.url} can be written and read"


def _versions(config: GeminiConfig, hosts: int) -> Iterator[CheckResult]:
    found = {}
    for name in _VENDORS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    yield "ok", f"gemini-ft {importlib.metadata.version('gemini-ft')}, " + ", ".join(f"{n} {v}" for n, v in found.items())
    for name, wanted in _unsupported(found):
        yield "warn", f"{name} {found[name]} is outside of {wanted}, with which gemini-ft was tested (docs/versions.md)"


def _unsupported(found: dict[str, str]) -> Iterator[tuple[str, str]]:
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:  # not a dependency, but nearly always there
        return
    for line in importlib.metadata.requires("gemini-ft") or []:
        wanted = Requirement(line)
        if wanted.name in found and not wanted.specifier.contains(found[wanted.name], prereleases=True):
            yield wanted.name, str(wanted.specifier)


def _placement(config: GeminiConfig, hosts: int) -> Iterator[CheckResult]:
    level: Level = "warn" if hosts > 1 and config.replicas == 1 else "ok"
    yield level, describe(place([f"host{number:06}" for number in range(hosts)], min(config.replicas, hosts)))


def _agents(config: GeminiConfig, hosts: int) -> Iterator[CheckResult]:
    count = len(lifecycle.addresses())
    if count:
        yield "ok", f"{count} of this user at work or keeping a run's memory (gemini ps)"


CHECKS: dict[str, Check] = {
    "host": _host,
    "options": _options,
    "network": _network,
    "ports": _ports,
    "memory": _memory,
    "limits": _limits,
    "group": _control_group,
    "clock": _clock,
    "secret": _secret,
    "storage": _storage,
    "versions": _versions,
    "placement": _placement,
    "agents": _agents,
}
