"""The ``gemini`` sub-commands that look after agents and checkpoints. Each takes its arguments and returns an exit status."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from gemini_ft.agent import lifecycle
from gemini_ft.agent.client import as_error
from gemini_ft.agent.memory import slot_files
from gemini_ft.agent.metrics_page import check_metrics
from gemini_ft.config import load_config
from gemini_ft.core.versions import Version
from gemini_ft.core.words import in_words, table
from gemini_ft.errors import AgentError, ConfigError, CorruptDataError, StorageError
from gemini_ft.hosts import host_id
from gemini_ft.launch.out_of_use import out_of_use, wish_back
from gemini_ft.recovery.agent_memory import Remembered, remembered
from gemini_ft.storage.base import Storage
from gemini_ft.storage.checkpoints import Manifest, examine, list_checkpoints
from gemini_ft.storage.opening import open_existing
from gemini_ft.storage.shard import StoredShard
from gemini_ft.wire.messages import Failed
from gemini_ft.wire.worker_messages import AskDrain, Draining, GetStatus, Status

Row = tuple[str, ...]
_STATE = 6  # column of a row
_TAKE_BACK_SECONDS = 10.0  # for a launcher to take a host back
_POLL = 0.1  # seconds
_WRONG = ("damaged", "unreadable")  # how states begin that --verify exits with 1 for


def agent(arguments: Sequence[str]) -> int:
    """``gemini agent``: be this host's agent, in the foreground, for a service manager to look after."""
    options = _with_run("agent", "Own the snapshot memory of this host until told to leave.").parse_args(arguments)
    from gemini_ft.agent import main

    check_metrics(load_config())
    return main.main(["--run", _run(options), "--host", options.host])


def status(arguments: Sequence[str]) -> int:
    """``gemini status``: what the agents of a run hold and do on this machine."""
    parser = _with_run("status", "Show what a run's agent holds and does on this host.")
    parser.add_argument("--json", action="store_true", help="print the agent's own account, for programs")
    parser.add_argument("--at-work", action="store_true", help="for probes: status 1, too, unless a worker of this host has joined the run")
    options = parser.parse_args(arguments)
    if options.run_id:
        document = lifecycle.status(options.run_id, options.host)
        documents = [json.loads(document)] if document is not None else []
    else:
        documents = documents_of(options.host)
    if not documents:
        print(f"no agent of run {options.run_id!r} on host {options.host!r}" if options.run_id else f"no agent on host {options.host!r}")
        return 1
    if len(runs := {document["run"] for document in documents}) > 1:
        raise ConfigError(f"which run? give --run-id or set GEMINI_RUN_ID; here are {', '.join(sorted(runs))} (gemini ps)")
    for document in documents:
        document["out_of_use"] = out_of_use(document["run"])
        print(json.dumps(document) if options.json else _describe(document))
    return int(options.at_work and not any(document["workers"] for document in documents))


def ps(arguments: Sequence[str]) -> int:
    """``gemini ps``: the runs of this host."""
    parser = argparse.ArgumentParser(
        prog="gemini ps", description="List the runs of which this host has an agent, those that have ended too."
    )
    parser.add_argument("--all", action="store_true", help="of all hosts that this machine stands for (GEMINI_HOST_ID)")
    options = parser.parse_args(arguments)
    rows = [_process(document) for document in documents_of(None if options.all else host_id())]
    head = ("run", "host", "command", "state", "step", "age", "memory", "linger left")
    print(table([head, *rows]) if rows else "no run has an agent here")
    return 0


def documents_of(host: str | None) -> list[dict[str, Any]]:
    """The accounts of this user's agents on a host, or on all of this machine, that answer; by run and host."""
    found = [json.loads(answer.document) for answer in lifecycle.ask_all(GetStatus()) if isinstance(answer, Status)]
    wanted = [document for document in found if host in (None, document["host"])]
    return sorted(wanted, key=lambda document: (document["run"], document["host"]))


def _process(document: dict[str, Any]) -> Row:
    streams = list(document["streams"].values())
    none: dict[str, Any] = {"committed": None, "committed_age": None, "command": []}
    newest: dict[str, Any] = max(streams, key=lambda stream: stream["committed"] or -1, default=none)
    if document["workers"]:
        state = "training"
    elif document["launches"]:
        state = "restarting"
    else:
        state = "finished" if streams and all(stream["finished"] for stream in streams) else "ended"
    left = "-" if document["workers"] else in_words(document["linger"] - document["idle"])
    step = "-" if newest["committed"] is None else str(newest["committed"])
    age = "-" if newest["committed_age"] is None else in_words(newest["committed_age"])
    command = " ".join(newest["command"]) or "?"
    return (document["run"], document["host"], command, state, step, age, f"{document['memory']['used']:,}", left)


def leave(arguments: Sequence[str]) -> int:
    """``gemini leave``: end this host's agent; what it holds is gone."""
    options = _with_run("leave", "End this host's agent. The snapshots it holds are gone; uploads under way are finished.").parse_args(
        arguments
    )
    run = _run(options)
    account = lifecycle.status(run, options.host)
    is_gone = account is None or lifecycle.leave(run, options.host) or lifecycle.status(run, options.host) is None  # or it hangs: an error
    document = json.loads(account) if account is not None else {"workers": {}, "memory": {"used": 0}}
    files = _forget_files(run, options.host, account is not None) if not document["workers"] else None
    if account is None and not files:
        print(f"no agent of run {run!r} on host {options.host!r}: there is nothing to forget here (gemini ps lists the runs of this host)")
        return 1
    if document["workers"]:
        print(
            f"run {run} is at work: its workers {sorted(document['workers'].values())} start another agent and give it the memory back. "
            "To forget the run, end it first"
        )
    elif not is_gone:
        print(f"run {run} has been told to leave host {options.host}: its memory goes when the uploads under way are over")
    else:
        what = f"{document['memory']['used']:,} bytes of memory" if account is not None else f"what lay in {files}"
        print(f"run {run} is forgotten on host {options.host}: {what}; what is in storage stays")
    return 0


def _forget_files(run: str, host: str, has_left: bool) -> Path | None:
    """Removes the slots that the run keeps as files on this host, unless an agent is at work; returns the folder they were in.

    ``has_left``: whether an agent has just been told to leave, which may still be about to end.

    Raises AgentError: an agent uses them that cannot be told.
    """
    if (parent := load_config().memory.folder) is None or lifecycle.is_listening(run, host):
        return None
    folder = slot_files.folder_of(parent, run, host)
    if not folder.exists():
        return None
    if not has_left and slot_files.in_use(folder):
        raise AgentError(f"an agent is at work in {folder} that does not listen here: try again, or run this where it runs (its container)")
    slot_files.remove(folder)
    return folder


def drain(arguments: Sequence[str]) -> int:
    """``gemini drain [HOST]``: a host of a run leaves it after a step that is committed; a spare takes its place."""
    text = "Have a host's workers end after a step that is committed; its `gemini run` ends with status 85."
    parser = _with_run("drain", text, "host whose agent is asked")
    parser.add_argument("drained", nargs="?", metavar="HOST", help="id of the host (default: the one whose agent is asked)")
    options = parser.parse_args(arguments)
    answer = lifecycle.ask(_run(options), options.host, AskDrain(host=options.drained or ""))
    if isinstance(answer, Failed):
        raise as_error(answer)
    if not isinstance(answer, Draining):
        raise AgentError(f"no agent of run {options.run_id!r} on host {options.host!r}; `gemini ps` lists the runs of a host")
    if not (answer.relayed or answer.workers):
        raise AgentError(f"run {options.run_id!r} has no worker at work on host {options.host!r}")
    print(f"host {options.drained or options.host} is drained: its workers end after a step that is committed")
    return 0


def hosts(arguments: Sequence[str]) -> int:
    """``gemini hosts``: the hosts that a run has put out of use, and the way back, where `gemini run` is at work, or waits."""
    description = "List the hosts that a run has put out of use, as its `gemini run` on this host knows them, or take one back."
    parser = argparse.ArgumentParser(prog="gemini hosts", description=description)
    parser.add_argument("--run-id", default=os.environ.get("GEMINI_RUN_ID"), help="run id (default: GEMINI_RUN_ID)")
    parser.add_argument("--take-back", metavar="HOST", help="the next `gemini run` on this host may join again")
    options = parser.parse_args(arguments)
    run, name = _run(options), options.take_back
    found = out_of_use(run)
    if name is None:
        print(table([("host", "why"), *sorted(found.items())]) if found else f"run {run} has put no host out of use")
        return 0
    if name not in found:
        raise ConfigError(f"--take-back {name!r}: not out of use; those are: {', '.join(sorted(found)) or 'none'}")
    wish_back(run, name)
    end = time.monotonic() + _TAKE_BACK_SECONDS
    while name in out_of_use(run):
        if time.monotonic() > end:
            print(f"no `gemini run` of {run} is at work here that would take host {name} back: ask on another host of the job")
            return 1
        time.sleep(_POLL)
    print(f"host {name} is taken back: the next `gemini run` there may join")
    return 0


def checkpoints(arguments: Sequence[str]) -> int:
    """``gemini checkpoints [URL]``: what there is in storage and in the memory of this machine's agents."""
    description = """List checkpoints, newest first: those in storage, and those in the memory of this machine's agents.

state: whole; whole, newest: what a job would resume; else what is wrong with it. The exit status is 1 where --verify finds
something that is damaged or cannot be read."""
    parser = argparse.ArgumentParser(
        prog="gemini checkpoints", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", nargs="?", help="storage URL, as in storage.url (default: that of GEMINI_STORAGE or GEMINI_CONFIG)")
    parser.add_argument("--run-id", help="only this run's")
    parser.add_argument("--endpoint-url", help="of an S3-compatible store (default: boto3's own choice)")
    parser.add_argument("--verify", action="store_true", help="read every byte in storage and compare it with its checksum")
    options = parser.parse_args(arguments)
    settings = load_config().storage if options.url is None else None
    url = options.url or (settings.url if settings is not None else None)
    rows = [row for memory in remembered(options.run_id) for row in _in_memory(memory)]
    failure: StorageError | ConfigError | None = None
    stored: list[Row] = []
    if url is not None:
        reopen = partial(open_existing, url, options.endpoint_url or (settings.endpoint_url if settings is not None else None))
        try:
            stored += _in_storage(reopen, options.run_id, options.verify)
        except (StorageError, ConfigError) as error:  # the copies in memory matter all the more
            failure = error
    rows += stored
    head = ("run", "stream", "step", "age", "bytes", "ranks", "state", "where")
    if rows or failure is None:
        print(table([head, *rows]) if rows else f"no checkpoints in {url or 'memory; give the URL of a storage to look there'}")
    if failure is not None:
        raise failure
    return int(options.verify and any(row[_STATE].startswith(_WRONG) for row in stored))


def _in_storage(reopen: Callable[[], Storage], run: str | None, verify: bool) -> Iterator[Row]:
    storage = reopen()
    newest: dict[tuple[str, str], bool] = {}  # line -> whether its newest whole checkpoint has been listed
    for info, manifest, reason in examine(storage, run):
        line = (info.run, info.stream)
        if not reason and verify and manifest is not None and (reason := _damage(storage, manifest)):
            reason = _damage(reopen(), manifest)  # on another connection before it is believed
        if reason.startswith(_WRONG) and info not in list_checkpoints(storage, info.run, info.stream):
            reason = "deleted meanwhile"
        if manifest is None:
            yield (*line, str(info.iteration), "?", "?", "?", reason, storage.url)
            continue
        state = reason or ("whole" if newest.get(line) else "whole, newest")
        newest[line] = newest.get(line, False) or not reason
        size = sum(record.nbytes for record in manifest.shards.values())
        age = (datetime.now(UTC) - manifest.created).total_seconds()
        yield (*line, str(info.iteration), in_words(age), f"{size:,}", str(manifest.world_size), state, storage.url)


def _damage(storage: Storage, manifest: Manifest) -> str:
    for record in manifest.shards.values():
        try:
            StoredShard(storage, record).verify()
        except CorruptDataError:
            return f"damaged: {record.key.rpartition('/')[2]} does not match its checksum"
        except StorageError as error:
            return f"unreadable: {error}"
    return ""


def _in_memory(memory: Remembered) -> Iterator[Row]:
    for version, held in memory.copies.items():
        slots = {slot.owner: slot for copies in held.values() for slot in copies}
        world_size = max(slot.world_size for slot in slots.values())
        size, age = sum(slot.data_bytes + slot.extras_bytes for slot in slots.values()), min(slot.age for slot in slots.values())
        where = "memory of " + ", ".join(sorted(held))
        state = _state_in_memory(memory, version)
        yield (memory.run, memory.stream, str(version.iteration), in_words(age), f"{size:,}", str(world_size), state, where)


def _state_in_memory(memory: Remembered, version: Version) -> str:
    if missing := memory.missing(version):
        return f"incomplete: no copy of ranks {missing} on this machine"
    if not memory.is_committed(version):
        return "whole, not committed"
    return "whole, newest" if version == memory.committed else "whole"


def _with_run(name: str, description: str, host: str = "host id") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"gemini {name}", description=description)
    parser.add_argument("--run-id", default=os.environ.get("GEMINI_RUN_ID"), help="run id (default: GEMINI_RUN_ID)")
    parser.add_argument("--host", default=host_id(), help=f"{host} (default: GEMINI_HOST_ID, or this machine's)")
    return parser


def _run(options: argparse.Namespace) -> str:
    if not options.run_id:
        raise ConfigError("which run? give --run-id or set GEMINI_RUN_ID (gemini ps lists the runs of this host)")
    return str(options.run_id)


def _describe(document: dict[str, Any]) -> str:
    memory = document["memory"]
    left = "" if document["workers"] else f"; without one it leaves in {in_words(document['linger'] - document['idle'])}"
    lines = [
        f"run {document['run']} on host {document['host']}: agent {document['pid']}, "
        f"{memory['used']:,} of {memory['limit']:,} bytes, workers {document['workers'] or 'none'}{left}"
    ]
    if document.get("metrics"):
        page = f", page: http://{document['metrics']}/" if document.get("page") else ""
        lines.append(f"  metrics: http://{document['metrics']}/metrics{page}")
    lines += [
        f"  out of use: host {name}: {why}; taken back by `gemini hosts --take-back {name}`"
        for name, why in sorted(document["out_of_use"].items())
    ]
    for name, stream in document["streams"].items():
        age = "" if stream["committed_age"] is None else f", {in_words(stream['committed_age'])} ago"
        state = "finished" if stream["finished"] else f"committed iteration {stream['committed']}{age}"
        lines.append(f"  {name}: incarnation {stream['incarnation']}, {stream['world_size']} ranks, {state}")
        lines += [f"    shard of rank {owner}: {', '.join(slots)}" for owner, slots in stream["shards"].items()]
        if slow := stream.get("stragglers"):
            lines.append(f"    stragglers: ranks {slow}")
        if (hang := stream.get("hang")) is not None:
            lines.append(f"    last hang: {hang['text']}; {hang['report']} has the report")
        lines += [f"    left out: host {host} for rank {owner}" for owner, host in stream["excluded"]]
        lines += describe_gradients(stream["gradients"])
        lines += _describe_storage(stream["storage"], stream["committed"]) if stream["storage"] else []
    return "\n".join(lines)


def describe_gradients(gradients: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """A line for each rule, as the first rank on this host has it."""
    first = min(gradients, key=int, default=None)
    if first is None:
        return []
    return [f"    gradients of rank {first}, {rule}: {', '.join(_figures(figures))}" for rule, figures in gradients[first].items()]


def _figures(figures: dict[str, float]) -> Iterator[str]:
    """The figures of a stream's gradients in words; see `gemini_ft.state.gradients.GradientState`."""
    rest = dict(figures)
    if "bytes_before" in rest and "bytes_after" in rest:
        yield f"{rest.pop('bytes_before'):,.0f} -> {rest.pop('bytes_after'):,.0f} bytes"
    for name in ("encode", "communication", "decode"):
        if (value := rest.pop(f"{name}_ms", None)) is not None:
            yield f"{name} {value:.2f} ms"
    for name in ("overlap", "density"):
        if (value := rest.pop(name, None)) is not None:
            yield f"{name} {value:.1%}"
    yield from (f"{name} {value:g}" for name, value in rest.items())


def _describe_storage(storage: dict[str, Any], committed: int | None) -> list[str]:
    lines = []
    if storage["uploading"]:
        left = "" if storage["seconds_left"] is None else f", {storage['seconds_left']:.0f} s left"
        lines.append(f"    uploading {storage['uploading']}: {storage['done_bytes']:,} of {storage['total_bytes']:,} bytes{left}")
    if storage["stored"] is not None:
        behind = f", {committed - storage['stored']} steps behind memory" if committed is not None else ""
        lines.append(f"    stored: iteration {storage['stored']}, {in_words(time.time() - storage['stored_at'])} ago{behind}")
    else:
        lines.append(f"    nothing is stored yet in {storage['url']}")
    if storage["failing_since"]:
        since = datetime.fromtimestamp(storage["failing_since"]).astimezone()
        lines.append(f"    storage fails since {since:%Y-%m-%d %H:%M:%S}: {storage['error']}")
    return lines
