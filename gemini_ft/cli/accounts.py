"""Figures of agents as ``gemini top`` and ``gemini watch`` read them: of this machine's agents, or of pages at ``/metrics``."""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from io import BytesIO
from types import SimpleNamespace
from typing import cast

from gemini_ft.agent import lifecycle
from gemini_ft.agent.figures import samples
from gemini_ft.agent.metrics_page import check_metrics
from gemini_ft.cli.commands import documents_of
from gemini_ft.config import load_config
from gemini_ft.core.promql import Sample
from gemini_ft.errors import GeminiError, printable
from gemini_ft.ordered import on_thread

Answers = Mapping[str, list[Sample] | None]  # by agent, as people read its name; None: it has not answered
PAGE_SECONDS = 5.0  # for a page, from the first packet to the last byte
PAGE_BYTES = 2**23  # bytes of one, with its headers
_AT_A_TIME = 32  # pages


def parser_of(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Returns a parser with the arguments that say which agents are asked."""
    parser = argparse.ArgumentParser(prog=f"gemini {name}", description=description, epilog=epilog)
    text = "where agents serve their figures, which have the option `metrics` (default: all agents of this user on this machine)"
    parser.add_argument("addresses", nargs="*", metavar="HOST:PORT", help=text)
    parser.add_argument("--run-id", default=os.environ.get("GEMINI_RUN_ID"), help="of this machine's agents those of a run (GEMINI_RUN_ID)")
    return parser


def asking(options: argparse.Namespace) -> Callable[[], Answers]:
    """Returns a function that asks all agents which are meant.

    Raises ConfigError: an address is none, or prometheus-client, which reads pages, is not installed.
    """
    pages = [load_config({"metrics": address}).metrics or "" for address in options.addresses]
    if not pages:
        return lambda: here(options.run_id)
    check_metrics(load_config({"metrics": pages[0]}))

    def ask() -> Answers:
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            return dict(zip(pages, pool.map(page_at, pages), strict=True))

    return ask


def here(run: str | None) -> Answers:
    """The answers of this machine's agents, or of those of a run."""
    # Agents of an earlier version, which goes on at work after an upgrade, lack the figures.
    documents = [document for document in documents_of(None) if run in (None, document["run"]) and "began" in document]
    return {f"{document['run']}/{document['host']}": list(samples(document)) for document in documents}


def has_left(agent: str) -> bool:
    """Whether an agent of this machine that does not answer has ended as it should: its log says so."""
    run, _, host = agent.rpartition("/")
    try:
        return lifecycle.has_left(run, host)
    except (GeminiError, OSError):
        return False


def page_at(address: str) -> list[Sample] | None:
    """The figures of the page at an address; None: there is none, or only a part of it."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        # On a thread that can be given up, as a name server may be slow.
        text = on_thread(partial(_text_at, address, time.monotonic() + PAGE_SECONDS), "gemini-page").result(PAGE_SECONDS)
        families = text_string_to_metric_families(text)
        found = [sample for family in families for sample in family.samples]
        return [(each.name, {name: printable(value) for name, value in each.labels.items()}, each.value) for each in found]
    except (OSError, ValueError, HTTPException, RuntimeError):  # it is away, or dies, or something else listens there; or no thread is left
        return None


def _text_at(address: str, end: float) -> str:
    """The text of a page, fetched until a time of `time.monotonic`, and in bounded length, without proxies and redirects.

    Raises OSError, HTTPException, ValueError: there is none, or only a part of it.
    """
    host, _, port = address.rpartition(":")
    found = bytearray()
    with socket.create_connection((host.strip("[]"), int(port)), PAGE_SECONDS) as connection:
        connection.sendall(f"GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
        while (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            if not (part := connection.recv(2**16)):
                break
            found += part
            if len(found) > PAGE_BYTES:
                raise ValueError
        else:
            raise TimeoutError
    answer = HTTPResponse(cast("socket.socket", SimpleNamespace(makefile=lambda _: BytesIO(found))))
    answer.begin()
    if answer.status != HTTPStatus.OK:
        raise ValueError
    return answer.read().decode()
