"""What a host does with shards that come in over one connection (docs/design.md, sections 6 and 7)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gemini_ft.agent.memory import SlotMemory, SlotShape
from gemini_ft.agent.receiving import Receiver
from gemini_ft.messages import Ack, Begin, Drop, End, Message
from gemini_ft.versions import Version


class Room:
    """A host with a slot for everything that comes."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.failed: list[int] = []
        self.memories: list[SlotMemory] = []

    def begin_receive(self, owner: int, iteration: int, committed: Version | None) -> SlotMemory:
        self.memories.append(SlotMemory.create(SlotShape("run", "main", owner, 1, "0" * 16, b"layout", 8, 8, 8)))
        return self.memories[-1]

    def end_receive(self, end: End) -> bool:
        self.kept.append(end.iteration)
        return True

    def fail_receive(self, owner: int, iteration: int) -> None:
        self.failed.append(iteration)

    def holds(self, owner: int, iteration: int) -> bool:
        return iteration in self.kept


class Wire:
    """The way back to the sender."""

    def __init__(self) -> None:
        self.acknowledged: list[tuple[int, bool]] = []

    def send(self, message: Message) -> None:
        assert isinstance(message, Ack)
        self.acknowledged.append((message.iteration, message.ok))


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room()
    yield room
    for memory in room.memories:
        memory.close()


def begin(iteration: int) -> Begin:
    return Begin(owner=0, iteration=iteration, committed=None)


def end(iteration: int) -> End:
    return End(owner=0, iteration=iteration, extras_bytes=0, chunks=0, layout="0" * 16, digest="")


def hear(room: Room, *messages: Message) -> list[tuple[int, bool]]:
    """What is acknowledged."""
    wire = Wire()
    receiver = Receiver(room, wire, "b")  # type: ignore[arg-type]
    for message in messages:
        receiver.on_message(message)
    return wire.acknowledged


def test_a_sender_that_goes_on_leaves_the_older_iteration_behind(room: Room) -> None:
    """Section 7: what was late "is then skipped"; the newer one takes its place."""
    assert hear(room, begin(2), begin(3), end(2), end(3)) == [(3, True)]
    assert (room.failed, room.kept) == ([2], [3])


def test_an_older_iteration_that_starts_over_does_not_push_out_the_newer(room: Room) -> None:
    """Section 7: the commit of 3 waits for all holders; it must not wait for what this one has thrown away."""
    assert hear(room, begin(3), begin(2), end(2), end(3), Drop(owner=0, iteration=2)) == [(3, True), (2, False)]
    assert (room.failed, room.kept) == ([], [3])


def test_an_iteration_that_is_here_already_is_acknowledged_again(room: Room) -> None:
    """Section 6: a connection that breaks is dialled again, and what was not acknowledged comes once more."""
    assert hear(room, begin(2), end(2)) == [(2, True)]
    assert hear(room, begin(2), end(2)) == [(2, True)]
