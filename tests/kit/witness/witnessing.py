"""Writes what agents and workers of a real job do as lines of a history (tests/kit/simulation/history.py has the rules).

All processes of one machine append to one file. Their clock is the machine's, so that lines stand in the order in which things were done:
each line is written before anybody can hear of what it says.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

_present: dict[str, Any] = {"of": "None"}  # of this agent: the incarnation that it has begun


def _record(event: str, **facts: Any) -> None:
    line = json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n"
    file = os.open(os.environ["WITNESS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def _text(version: Any) -> str | None:
    return None if version is None else f"{version.incarnation}:{version.iteration}"


def _around(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    method = getattr(owner, name)
    if method.__module__ != __name__:  # a forked process may find it watched
        setattr(owner, name, make(method))


def watch_agent(stream: ModuleType) -> None:
    """Watches the memory, the decisions and the incarnations of this agent."""
    from gemini_ft.agent.context import StreamContext
    from gemini_ft.agent.memory.slot_memory import SlotMemory
    from gemini_ft.core.decisions import Abort, Commit
    from gemini_ft.core.protocol import Host

    if "--host" not in sys.argv:  # a worker that imports the module
        return
    host = sys.argv[sys.argv.index("--host") + 1]

    def begin() -> None:
        if "began" not in _present:
            _present["began"] = os.getpid()
            _record("agent began", host=host)

    def opens(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(holder: Host, *args: Any, **options: Any) -> Any:
            begin()
            result = method(holder, *args, **options)
            _present["of"] = str(holder.incarnation)
            hosts = sorted({each for several in holder.holders.values() for each in several})
            _record("opened", host=host, of=_present["of"], resumed=_text(holder.committed), hosts=hosts, agent=os.getpid())
            return result

        return call

    def completes(method: Callable[..., Any]) -> Callable[..., Any]:
        """Also where a slot that an agent before this one has filled is taken over."""

        def call(holder: Host, owner: int, *args: Any, **options: Any) -> Any:
            begin()
            result = method(holder, owner, *args, **options)
            version = args[method.__name__ == "adopt"]
            if version is not None and (slot := holder.slots(owner).complete_version(version)) is not None:
                _record("copy", host=host, owner=owner, version=_text(version), root=slot.root)
            return result

        return call

    def gives_up(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(memory: Any) -> Any:
            if memory.version is not None:
                facts = {"host": host, "owner": memory.shape.owner, "version": _text(memory.version), "of": _present["of"]}
                _record("dropped", **facts, sound=True, sealed=False)
            return method(memory)

        return call

    def decides(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(this: Any, message: Any) -> Any:
            if isinstance(message, Commit):
                _record("commit", **_commit(host, this, message))
            elif isinstance(message, Abort):
                _record("abort", host=host, version=_text(message.version))
            return method(this, message)

        return call

    def is_led(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(context: Any, epoch: int, leader: str) -> Any:
            _record("led", host=host, of=_present["of"], epoch=epoch, agent=os.getpid())
            return method(context, epoch, leader)

        return call

    _around(Host, "open", opens)
    _around(Host, "reopen", opens)
    for completing in ("adopt", "completed", "rebuilt"):
        _around(Host, completing, completes)
    _around(SlotMemory, "clear", gives_up)
    _around(SlotMemory, "drop", gives_up)
    _around(stream.Stream, "decide", decides)
    _around(StreamContext, "led", is_led)


def _commit(host: str, stream: Any, message: Any) -> dict[str, Any]:
    """A commit as this host hears it, or as its leader decides it."""
    spec, session = stream.context.spec, stream.present_session
    leader = session.failover.leader if session is not None else None
    facts = {"host": host, "version": _text(message.version), "leads": leader is not None, "of": str(spec.incarnation)}
    facts["resumed"] = _text(spec.resumed)
    if leader is not None:
        facts |= {"epoch": session.succession.epoch, "excluded": sorted(map(list, leader.book.excluded))}
        facts["holders"] = {str(owner): list(hosts) for owner, hosts in spec.holders.items()}
    return facts


def watch_worker(recorder: ModuleType) -> None:
    """Watches what this worker resumes, and the commits that it is told of."""
    from gemini_ft.core.decisions import Commit

    def begins(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(this: Any, *args: Any, **options: Any) -> Any:
            result = method(this, *args, **options)
            spec, plan = this.session.spec, this.session.plan
            facts = {"rank": this.session.rank, "of": str(spec.incarnation), "version": _text(plan.version), "kind": plan.kind}
            _record("resumed", **facts, given_up=sorted(filter(None, map(_text, spec.given_up))), hosts=sorted({*spec.hosts}))
            return result

        return call

    def hears(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(this: Any, message: Any) -> Any:
            if isinstance(message, Commit):
                _record("heard", rank=this.session.rank, version=_text(message.version), of=str(this.session.spec.incarnation))
            return method(this, message)

        return call

    _around(recorder.Recorder, "__init__", begins)
    _around(recorder.Recorder, "_on_event", hears)
