"""Figures of agents as ``gemini top`` and ``gemini watch`` read them: of this machine's agents, or of pages at ``/metrics``."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, HTTPResponse
from urllib.request import ProxyHandler, build_opener

from gemini_ft.agent import lifecycle
from gemini_ft.agent.figures import samples
from gemini_ft.agent.metrics_page import check_metrics
from gemini_ft.cli.commands import documents_of
from gemini_ft.config import load_config
from gemini_ft.core.promql import Sample
from gemini_ft.errors import GeminiError, printable

Answers = Mapping[str, list[Sample] | None]  # by agent, as people read its name; None: it has not answered
PAGE_SECONDS = 5.0  # for a page
PAGE_BYTES = 2**26  # bytes of one
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

    Raises:
        ConfigError: an address is none, or prometheus-client, which reads pages, is not installed.
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
        with build_opener(ProxyHandler({})).open(f"http://{address}/metrics", timeout=PAGE_SECONDS) as answer:
            families = text_string_to_metric_families(_text_of(answer))
            found = [sample for family in families for sample in family.samples]
        return [(each.name, {name: printable(value) for name, value in each.labels.items()}, each.value) for each in found]
    except (OSError, ValueError, HTTPException):  # it is away, or dies meanwhile, or something else listens there
        return None


def _text_of(answer: HTTPResponse) -> str:
    """The text of a page, fetched in bounded time and length; raises TimeoutError or ValueError."""
    end, found = time.monotonic() + PAGE_SECONDS, bytearray()
    while part := answer.read1(2**16):
        found += part
        if time.monotonic() > end:
            raise TimeoutError
        if len(found) > PAGE_BYTES:
            raise ValueError
    return found.decode()
