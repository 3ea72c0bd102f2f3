"""Looks at the storage before the first step: whether it can be written to, and whether all hosts share it. Collective.

A bucket is tried by one rank of the job, and each host reads once what that rank has written: a thousand hosts that all write, list
and delete at the same moment are more than a store takes. A folder is another one where a mount is missing, so every host writes to it.
One rank of a host looks for all of them, its speaker.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gemini_ft.config import GeminiConfig
from gemini_ft.errors import StorageError
from gemini_ft.storage.base import Storage, find_sign
from gemini_ft.storage.decisions import about_to_begin
from gemini_ft.storage.lookout import within
from gemini_ft.storage.opening import open_storage
from gemini_ft.storage.retention import Retention
from gemini_ft.wire.worker_messages import Hello
from gemini_ft.worker.rendezvous import exchange, exchange_or_raise
from gemini_ft.worker.resume_choice import Choice

_log = logging.getLogger("gemini_ft")
_CHECK_SECONDS = 20.0  # for one small object to be written, read and deleted


def storage_opener(config: GeminiConfig) -> Callable[[], Storage] | None:
    """Opens the storage that was configured; nothing is touched before it is used.

    Raises ConfigError: there is none that this version can open.
    """
    settings = config.storage
    if settings is None:
        return None
    reopen = partial(open_storage, settings.url, settings.endpoint_url, settings.max_bandwidth, settings.kept is not None)
    reopen()
    return reopen


def check_storage(config: GeminiConfig, reopen: Callable[[], Storage], choice: Choice, hello: Hello, hosts: Sequence[str]) -> None:
    """Makes sure that storage can be written to, and that all hosts have the same.

    Raises:
        ConfigError: hosts do not share the storage.
        StorageError: it cannot be written, it is required, and the job does not resume from memory.
    """
    speakers = sorted({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())
    writers = speakers[:1] if reopen().is_one_place else speakers
    make_room = partial(_make_room, config, reopen, hello, choice)
    if _is_writable(config, reopen, choice, hello.rank in writers, make_room):
        try:
            _check_shared(config, reopen, hosts, speakers, writers, hello.rank)
        except StorageError as error:  # from a host that had not tried it yet; where the job resumes from storage, it has been read there
            assert config.storage is not None
            if config.storage.required and choice.plan.kind not in ("memory", "storage"):
                raise
            _log.warning("some hosts cannot use the storage now: training goes on, uploads are tried when they are due (%s)", error)


def _is_writable(config: GeminiConfig, reopen: Callable[[], Storage], choice: Choice, speaks: bool, make_room: Callable[[], None]) -> bool:
    """Finds out on those that try whether storage can be written; if not, returns False, and the job goes on without it.

    Where it cannot, ``make_room`` is called before that is believed: storage may be full of what uploads of the past have left.
    """
    settings = config.storage
    assert settings is not None
    seconds = min(config.timeout, _CHECK_SECONDS)

    def check() -> str:
        if not speaks:
            return ""
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


def _make_room(config: GeminiConfig, reopen: Callable[[], Storage], hello: Hello, choice: Choice) -> None:
    """Deletes from storage, on rank 0, old checkpoints and leftovers of earlier uploads."""
    if hello.rank != 0:
        return
    settings = config.storage
    assert settings is not None
    retention = Retention(
        reopen, hello.run, hello.stream, settings.kept, settings.keep_every, damaged=choice.damaged, present=choice.present
    )
    try:
        within(min(config.timeout, _CHECK_SECONDS), settings.url, lambda: retention.tidy(about_to_begin(choice.descent)))
    except StorageError as error:
        _log.warning("%s", error)


def _check_shared(
    config: GeminiConfig, reopen: Callable[[], Storage], hosts: Sequence[str], speakers: Sequence[int], writers: Sequence[int], rank: int
) -> None:
    """Makes every host read what a writer, the one before it, has written: a folder of the same name may differ between hosts.

    Raises ConfigError: it is; both hosts are named. StorageError: a host that has written nothing cannot read either.
    """
    if len(speakers) == 1:
        return
    storage, seconds = reopen(), min(config.timeout, _CHECK_SECONDS)
    own = f"gemini-check-{secrets.token_hex(8)}"

    def attempt(work: Callable[[], None]) -> None:
        try:
            within(seconds, storage.url, work)
        except StorageError as error:  # it was well a moment ago: that is no proof of anything
            _log.warning("could not check whether all hosts share the storage: %s", error)

    def leave() -> str:
        if rank in writers:
            attempt(lambda: storage.put(own, [own.encode()]))
        return own

    def find() -> None:
        if rank in speakers and writers != [rank]:
            before = writers[speakers.index(rank) % len(writers) - 1]
            look = partial(find_sign, storage, signs[before], hosts[before], hosts[rank])
            if rank in writers:
                attempt(look)
            else:
                within(seconds, storage.url, look)

    signs = exchange_or_raise(leave, seconds + config.timeout)
    try:
        exchange_or_raise(find, seconds + config.timeout)
    finally:
        if rank in writers:
            attempt(lambda: storage.delete(own))


def _by_text(said: Mapping[int, str]) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {}
    for rank, text in said.items():
        out.setdefault(text, []).append(rank)
    return out
