"""Frames: what is packed comes back, and nothing else is ever let in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import UnionType
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.agent.context import RunContext
from gemini_ft.core.decisions import Commit, Holders
from gemini_ft.core.effects import Completed, Skipped
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import PeerError
from gemini_ft.wire.messages import PROTOCOL_VERSION, Channel, Chunk, Failed, Notice, kind_of, pack
from gemini_ft.wire.peer_messages import Astray, Claims, End, PeerMessage, Refused, Rejoin, peers
from gemini_ft.wire.worker_messages import Goodbye, Opened, OpenSession, SessionSpec, ToAgent, ToWorker, to_agent, to_worker

incarnations = st.builds(Incarnation, st.integers(0, 2**31), st.text(max_size=8))
versions = st.builds(Version, incarnations, st.integers(0, 2**53))
sizes = st.integers(0, 2**53)
every = st.one_of(
    st.builds(Chunk, owner=sizes, iteration=sizes, index=sizes, offset=sizes, nbytes=sizes, digest=st.integers(0, 2**64 - 1)),
    st.builds(Commit, version=versions, freeze=st.booleans(), digest_at=st.none() | sizes, roots=st.dictionaries(sizes, st.text())),
    st.builds(Completed, owner=sizes, host=st.text(), version=versions, layout=st.text(), digest=st.text(), root=st.text()),
    st.builds(Skipped, sizes, versions, st.text()),
    st.builds(End, owner=sizes, iteration=sizes, extras_bytes=sizes, chunks=sizes, layout=st.text(), digest=st.text(), root=st.text()),
    st.builds(Holders, epoch=sizes, excluded=st.frozensets(st.tuples(sizes, st.text())), newly=st.just(frozenset())),
    st.builds(Rejoin, committed=st.none() | versions, uploading=st.none() | versions),
    st.builds(
        Claims,
        run=st.text(),
        stream=st.text(),
        host=st.text(),
        role=st.sampled_from(["replicate", "report", "fetch"]),
        incarnation=st.none() | incarnations,
        to=st.text(),
    ),
)
channels = st.sampled_from([to_agent, to_worker, peers])
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3),
    max_leaves=10,
)


@given(every)
def test_a_message_comes_back_as_it_was(message: Any) -> None:
    frame = pack(message)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    back = peers.unpack(frame[4:])
    assert back == message
    assert type(back) is type(message)


@given(st.text(), st.sampled_from([partial(Failed, error="PeerError"), Notice, partial(Refused, owner=0), Astray]))
def test_a_text_of_another_process_is_one_printable_line(text: str, kind: Callable[..., PeerMessage]) -> None:
    heard = peers.unpack(pack(kind(text=f"{text}\x1b[2J\n12:00:00 committed"))[4:])
    assert heard.text.isprintable()  # type: ignore[union-attr]


def test_no_text_passes_for_another_line_of_an_agents_log(capsys: pytest.CaptureFixture[str]) -> None:
    RunContext("run", "host").log("one\n12:00:00 [main] two\r12:00:00 three\u202802:00:00 four\x1b[2J")
    first, *others = capsys.readouterr().err.splitlines()
    assert first.endswith(" one")
    assert others == ["    12:00:00 [main] two", "    12:00:00 three", "    02:00:00 four\\x1b[2J"]


@given(channels, st.binary(max_size=200))
def test_noise_is_refused(channel: Channel[Any], noise: bytes) -> None:
    with pytest.raises(PeerError, match=f"not a message of protocol {PROTOCOL_VERSION}"):
        channel.unpack(noise)


@pytest.mark.parametrize("noise", [b"", b"\xc1", b"\x81\x90\xc0", b"\x91" * 5000, b"\xdf\xff\xff\xff\xff", b"\xa4\xff\xff\xff\xff"])
def test_noise_that_msgpack_stumbles_over_is_refused(noise: bytes) -> None:
    with pytest.raises(PeerError, match=f"not a message of protocol {PROTOCOL_VERSION}"):
        peers.unpack(noise)


kinds = st.sampled_from(["chunk", "hello", "proof", "open_session", "fetch", "reserve", "commit", "abort", "completed", "no_such_kind"])


@given(channels, kinds, st.dictionaries(st.text(max_size=9), anything))
def test_maps_that_are_no_message_are_refused(channel: Channel[Any], kind: str, fields: dict[str, Any]) -> None:
    with pytest.raises(PeerError, match=f"not a message of protocol {PROTOCOL_VERSION}"):
        channel.unpack(msgpack.packb(fields | {"kind": kind}))


def test_a_message_of_another_channel_is_refused() -> None:
    with pytest.raises(PeerError, match="'goodbye'"):
        peers.unpack(pack(Goodbye(finished=True))[4:])
    with pytest.raises(PeerError, match="'opened'"):
        to_agent.unpack(pack(Opened())[4:])


@pytest.mark.parametrize(
    "fields",
    [
        {"more": 2},
        {"version": None},
        {"version": [[1, "a"], "soon"]},
        {"version": [[1, "a"], 1.5]},
        {"version": [[1, "a"]]},
        {"freeze": []},
        {"roots": {"zero": "r"}},
    ],
)
def test_a_field_too_many_missing_or_wrong_refuses_the_whole(fields: dict[str, Any]) -> None:
    sound = {"kind": "commit", "version": [[1, "a"], 1], "freeze": False}
    assert isinstance(peers.unpack(msgpack.packb(sound)), Commit)
    with pytest.raises(PeerError, match="both sides must run the same gemini-ft"):
        peers.unpack(msgpack.packb(sound | fields))


def test_versions_keep_their_type_and_order() -> None:
    spec = SessionSpec(
        stream="main",
        incarnation=Incarnation(2, "b"),
        world_size=1,
        hosts=["a"],
        addresses={"a": ("::1", 1)},
        holders={0: ["a"]},
        leader="a",
        resumed=Version(Incarnation(1, "a"), 7),
        given_up=[Version(Incarnation(1, "a"), 9)],
    )
    back = to_agent.unpack(pack(OpenSession(spec=spec, secret=b"s"))[4:])
    assert isinstance(back, OpenSession)
    assert back.spec == spec
    assert back.spec.resumed is not None
    assert back.spec.resumed < Version(Incarnation(1, "a"), 8) < Version(Incarnation(2, "a"), 1)
    assert list(back.spec.holders) == [0]


@pytest.mark.parametrize("kinds", [ToAgent, ToWorker, PeerMessage], ids=["to an agent", "to a worker", "between agents"])
def test_every_kind_is_told_apart_by_its_name(kinds: UnionType) -> None:
    names = {kind_of(kind) for kind in get_args(kinds)}
    assert len(names) == len(get_args(kinds)) > 20
