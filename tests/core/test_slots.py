"""The life of a slot, told as short stories (docs/design.md, sections 6 to 9; GEMINI, SOSP'23, section 5).

Any order of events is tried in test_protocol_machine.py; here is what the rules look like one by one.
"""

from __future__ import annotations

from gemini_ft.core.slots import Slot, SlotSet, SlotState
from gemini_ft.core.versions import Incarnation, Version


def version(iteration: int, incarnation: int = 1) -> Version:
    return Version(Incarnation(incarnation, "nonce"), iteration)


def write(slots: SlotSet, what: Version) -> Slot:
    """A slot is granted and filled to the last byte."""
    slot = slots.begin(what)
    assert slot is not None
    assert slots.complete(what)
    return slot


def shard(count: int, *committed: Version) -> SlotSet:
    """``count`` slots that have seen these versions come and be committed."""
    slots = SlotSet()
    slots.add(count)
    for each in committed:
        write(slots, each)
        slots.commit(each)
    return slots


def states(slots: SlotSet) -> list[tuple[SlotState, int | None]]:
    return [(slot.state, slot.version.iteration if slot.version else None) for slot in slots.slots.values()]


def test_a_slot_is_empty_then_written_then_complete() -> None:
    """GEMINI, section 5: of two buffers one holds the complete checkpoint, one the checkpoint in progress."""
    slots = shard(2)
    assert states(slots) == [(SlotState.EMPTY, None), (SlotState.EMPTY, None)]
    slots.begin(version(1))
    assert states(slots) == [(SlotState.WRITING, 1), (SlotState.EMPTY, None)]
    assert slots.newest is None  # half a copy is no copy
    slots.complete(version(1))
    assert states(slots) == [(SlotState.COMPLETE, 1), (SlotState.EMPTY, None)]
    assert slots.newest == version(1)


def test_an_iteration_is_overwritten_only_when_the_next_one_is_complete_everywhere() -> None:
    """Section 7: "A slot with iteration i-1 is overwritten only when i is complete everywhere." """
    slots = shard(2, version(1))
    write(slots, version(2))
    assert slots.begin(version(3)) is None  # 2 is complete here, but perhaps only here
    assert states(slots) == [(SlotState.COMPLETE, 1), (SlotState.COMPLETE, 2)]
    slots.commit(version(2))
    slots.begin(version(3))
    assert states(slots) == [(SlotState.WRITING, 3), (SlotState.COMPLETE, 2)]


def test_the_committed_version_stays_even_where_it_has_the_only_free_slot() -> None:
    """Section 7: "Otherwise a failure in between leaves no common iteration." """
    slots = shard(2, version(1), version(2))
    old = slots.find(version(1))
    assert old is not None
    old.readers.add("a peer that recovers")
    assert slots.begin(version(3)) is None
    assert slots.newest == version(2)
    old.readers.clear()
    assert slots.begin(version(3)) is old


def test_of_three_slots_the_oldest_is_written_next() -> None:
    """Section 7: "one complete, one in progress"; what is older is worth nothing."""
    slots = shard(3, version(1), version(2), version(3))
    assert states(slots) == [(SlotState.COMPLETE, 1), (SlotState.COMPLETE, 2), (SlotState.COMPLETE, 3)]
    slots.begin(version(4))
    assert states(slots) == [(SlotState.WRITING, 4), (SlotState.COMPLETE, 2), (SlotState.COMPLETE, 3)]


def test_a_holder_that_missed_the_commit_keeps_the_newest_it_has() -> None:
    """Section 8: "Lost copies are rebuilt in the background afterwards"; until then an older one stays in their stead."""
    slots = shard(2, version(1), version(2))
    slots.commit(version(5))  # everywhere that counts: not here
    slots.slots[0].readers.add("fetch:b")
    assert slots.begin(version(6)) is None
    slots.slots[0].readers.clear()
    assert slots.begin(version(6)) is slots.slots[0]


def test_a_slot_is_not_granted_while_somebody_reads_it() -> None:
    """Section 6: used again "only when every reader (replica, recovery, upload) has acknowledged the bytes"."""
    slots = shard(2, version(1), version(2))
    slots.slots[0].readers.update({"send:b", "fetch:c"})
    slots.slots[0].readers.discard("send:b")
    assert slots.begin(version(3)) is None
    slots.slots[0].readers.discard("fetch:c")
    assert slots.begin(version(3)) is slots.slots[0]


def test_a_slot_that_is_uploaded_leaves_the_rotation_and_the_third_takes_its_place() -> None:
    """Section 7: "the slot that is being uploaded leaves the rotation until the manifest is written"."""
    slots = shard(3, version(1))
    slots.slots[0].frozen = True
    for iteration in range(2, 8):
        write(slots, version(iteration))
        slots.commit(version(iteration))
    assert states(slots) == [(SlotState.COMPLETE, 1), (SlotState.COMPLETE, 6), (SlotState.COMPLETE, 7)]
    slots.slots[0].frozen = False
    slots.begin(version(8))
    assert states(slots) == [(SlotState.WRITING, 8), (SlotState.COMPLETE, 6), (SlotState.COMPLETE, 7)]


def test_with_two_slots_an_upload_makes_the_next_iteration_wait() -> None:
    """Section 7: "there is a third one for the owner's shard"; this is why."""
    slots = shard(2, version(1))
    slots.slots[0].frozen = True
    write(slots, version(2))
    slots.commit(version(2))
    assert slots.begin(version(3)) is None


def test_what_was_given_up_is_out_of_reach_until_its_writer_has_stopped() -> None:
    """Section 5: a snapshot may be discarded at any time; its bytes may still be on their way."""
    slots = shard(2, version(1))
    torn = slots.begin(version(2))
    assert torn is not None
    slots.discard(version(2))
    assert torn.state is SlotState.TORN
    assert slots.begin(version(3)) is None
    slots.let_go(version(2))
    assert slots.begin(version(3)) is torn


def test_a_copy_that_ends_after_it_was_given_up_is_not_complete() -> None:
    """Section 7: reports may come late; a decision, once made, stands."""
    slots = shard(2, version(1))
    slots.begin(version(2))
    slots.discard(version(2))
    assert not slots.complete(version(2))
    assert states(slots) == [(SlotState.COMPLETE, 1), (SlotState.EMPTY, None)]


def test_an_owner_that_goes_on_says_that_what_lies_between_was_aborted() -> None:
    """Section 7: a late iteration is "skipped and counted"; no replica waits for it for ever."""
    slots = shard(2, version(1))
    write(slots, version(2))
    slots.supersede(version(3), committed=version(1))
    assert states(slots) == [(SlotState.COMPLETE, 1), (SlotState.EMPTY, None)]
    write(slots, version(3))
    slots.commit(version(3))
    slots.supersede(version(4), committed=version(1))  # that word was older than ours
    assert slots.newest == version(3)
    assert slots.begin(version(4)) is slots.slots[0]


def test_while_a_new_incarnation_chooses_nothing_becomes_complete_and_nothing_complete_goes() -> None:
    """Section 8: the plan is made "from inventories"; what an inventory has promised must still be there."""
    slots = shard(2, version(1))
    slots.begin(version(2))
    slots.sealed = True
    assert not slots.complete(version(2))
    assert slots.begin(version(3)) is None
    slots.retire()
    slots.commit(version(3))
    assert [slot.version for slot in slots.reap()] == [None]  # and the retired slot of 1 stays
    assert slots.newest == version(1)


def test_a_new_incarnation_discards_what_is_newer_than_the_version_it_resumes() -> None:
    """Section 7: "recovery discards newer slots everywhere before the first step", and not before all hosts are sure to take it."""
    slots = shard(3, version(1), version(2))
    slots.begin(version(3))
    slots.rewind(version(1))
    assert states(slots) == [(SlotState.COMPLETE, 1), (SlotState.COMPLETE, 2), (SlotState.EMPTY, None)]
    assert slots.newest == version(1)
    slots.sealed = True
    slots.drop_past()
    assert slots.complete_version(version(2)) is not None
    slots.sealed = False
    slots.drop_past()
    assert states(slots) == [(SlotState.COMPLETE, 1), (SlotState.EMPTY, None), (SlotState.EMPTY, None)]
    again = write(slots, version(2, incarnation=2))  # computed once more: another version than the 2 of before
    assert again is not slots.slots[0]
    assert slots.find(version(2)) is None


def test_what_a_new_incarnation_leaves_behind_is_not_overwritten_by_a_copy_that_is_rebuilt() -> None:
    slots = shard(2, version(2))
    slots.rewind(version(1))
    assert slots.begin(version(1)) is slots.slots[1]
    assert slots.complete_version(version(2)) is not None


def test_a_version_that_was_left_behind_can_be_resumed_after_all() -> None:
    slots = shard(2, version(1), version(2))
    slots.rewind(version(1))
    slots.rewind(version(2))
    slots.drop_past()
    assert slots.newest == version(2)


def test_the_same_iteration_of_an_earlier_incarnation_is_older() -> None:
    """Section 7: "Receivers, commits and manifests refuse older incarnations." """
    slots = shard(2, version(7, incarnation=1))
    write(slots, version(3, incarnation=2))
    slots.commit(version(3, incarnation=2))
    slots.commit(version(8, incarnation=1))
    assert slots.committed == version(3, incarnation=2)
    assert slots.begin(version(4, incarnation=2)) is slots.slots[0]


def test_a_process_believed_dead_keeps_its_old_slots_and_can_complete_nothing() -> None:
    """Section 7: "new workers get fresh memory unless the old writer is proven dead"."""
    slots = shard(2, version(1))
    zombies = slots.begin(version(2))
    slots.retire()
    slots.rewind(version(1))
    slots.add(2)
    assert not slots.complete(version(2))
    for iteration in range(2, 8):
        granted = write(slots, version(iteration, incarnation=2))
        assert granted is not zombies
        assert not granted.retired
        slots.commit(version(iteration, incarnation=2))


def test_a_version_that_awaits_its_commit_in_a_retired_slot_is_waited_for() -> None:
    """Section 7: one iteration is complete, one in progress; another layout in between makes no third."""
    slots = shard(2, version(1))
    write(slots, version(2))
    slots.retire()
    slots.add(2)
    assert slots.begin(version(3)) is None
    slots.commit(version(2))
    assert slots.begin(version(3)) is not None


def test_retired_slots_stay_readable_until_their_version_is_outdated_and_nobody_reads() -> None:
    """Section 6: a slot ends its life as it is used again: when every reader is gone."""
    slots = shard(2, version(1))
    slots.slots[0].readers.add("fetch:b")
    slots.retire()
    assert [slot.index for slot in slots.reap()] == [1]  # it held nothing
    slots.add(2)
    write(slots, version(2))
    assert slots.reap() == []  # 1 is still what everybody has
    slots.commit(version(2))
    assert slots.reap() == []  # still being read
    slots.slots[0].readers.clear()
    assert [slot.index for slot in slots.reap()] == [0]
