"""The ``gemini`` sub-commands that look after agents and checkpoints. Each takes its arguments and returns an exit status."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from gemini_ft.agent import lifecycle
from gemini_ft.errors import ConfigError
from gemini_ft.storage.base import open_storage
from gemini_ft.storage.checkpoints import list_checkpoints, newest_whole, read_manifest


def agent(arguments: Sequence[str]) -> int:
    """``gemini agent``: be this host's agent, in the foreground, for a service manager to look after."""
    options = _with_run("agent", "Own the snapshot memory of this host until told to leave.").parse_args(arguments)
    from gemini_ft.agent import main

    return main.main(["--run", _run(options), "--host", options.host])


def status(arguments: Sequence[str]) -> int:
    """``gemini status``: what this host's agent holds and does."""
    parser = _with_run("status", "Show what this host's agent holds and does.")
    parser.add_argument("--json", action="store_true", help="print the agent's own account, for programs")
    options = parser.parse_args(arguments)
    document = lifecycle.status(_run(options), options.host)
    if document is None:
        print(f"no agent of run {_run(options)!r} on host {options.host!r}")
        return 1
    print(document if options.json else _describe(json.loads(document)))
    return 0


def leave(arguments: Sequence[str]) -> int:
    """``gemini leave``: end this host's agent; what it holds is gone."""
    options = _with_run("leave", "End this host's agent. The snapshots it holds are gone; uploads under way are finished.").parse_args(
        arguments
    )
    lifecycle.leave(_run(options), options.host)
    return 0


def checkpoints(arguments: Sequence[str]) -> int:
    """``gemini checkpoints URL``: what there is in storage."""
    parser = argparse.ArgumentParser(prog="gemini checkpoints", description="List the checkpoints in storage, newest first.")
    parser.add_argument("url", help="storage URL, as in storage.url")
    parser.add_argument("--run-id", help="only this run's")
    parser.add_argument("--endpoint-url", help="of an S3-compatible store (default: boto3's own choice)")
    options = parser.parse_args(arguments)
    storage = open_storage(options.url, options.endpoint_url)
    rows = [("run", "stream", "step", "ranks", "bytes", "written", "newest whole")]
    newest: dict[tuple[str, str], str | None] = {}
    for info in list_checkpoints(storage, options.run_id):
        line = (info.run, info.stream)
        if line not in newest:
            whole = newest_whole(storage, *line)
            newest[line] = whole.folder if whole is not None else None
        manifest = read_manifest(storage, info.folder)
        size = sum(record.nbytes for record in manifest.shards.values())
        mark = "yes" if newest[line] == info.folder else ""
        rows.append((*line, str(info.iteration), str(manifest.world_size), f"{size:,}", f"{manifest.created:%Y-%m-%d %H:%M:%S}", mark))
    print(_table(rows) if len(rows) > 1 else f"no checkpoints in {options.url}")
    return 0


def _with_run(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"gemini {name}", description=description)
    parser.add_argument("--run-id", default=os.environ.get("GEMINI_RUN_ID"), help="run id (default: GEMINI_RUN_ID)")
    parser.add_argument("--host", default=lifecycle.host_id(), help="host id (default: GEMINI_HOST_ID, or this machine's)")
    return parser


def _run(options: argparse.Namespace) -> str:
    if not options.run_id:
        raise ConfigError("which run? give --run-id or set GEMINI_RUN_ID (a job without one logs its id at start)")
    return str(options.run_id)


def _describe(document: dict[str, Any]) -> str:
    memory = document["memory"]
    lines = [
        f"run {document['run']} on host {document['host']}: agent {document['pid']}, "
        f"{memory['used']:,} of {memory['limit']:,} bytes, workers {document['workers'] or 'none'}"
    ]
    for name, stream in document["streams"].items():
        state = "finished" if stream["finished"] else f"committed iteration {stream['committed']}"
        lines.append(f"  {name}: incarnation {stream['incarnation']}, {stream['world_size']} ranks, {state}")
        lines += [f"    shard of rank {owner}: {', '.join(slots)}" for owner, slots in stream["shards"].items()]
        lines += [f"    left out: host {host} for rank {owner}" for owner, host in stream["excluded"]]
        if stream["uploading"]:
            lines.append(f"    uploading {stream['uploading']}")
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
