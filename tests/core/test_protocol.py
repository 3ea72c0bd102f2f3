"""One host's part in the protocol, told as short stories (docs/design.md, sections 6 to 9; GEMINI, SOSP'23, section 5).

Host ``a`` runs rank 0 and keeps a replica for rank 1; ``b`` the other way round. What the hosts would do to memory and
sockets is in the lists of effects. Any order of events is tried in test_protocol_machine.py.
"""

from __future__ import annotations

from gemini_ft.core.effects import CancelSend, Completed, Damaged, Free, Grant, Lacking, Send, Skipped, Tell, Upload, Withdraw
from gemini_ft.core.protocol import Host
from gemini_ft.core.slots import SlotState
from gemini_ft.core.versions import Incarnation, Version

HOLDERS = {0: ("a", "b"), 1: ("b", "a")}


def version(iteration: int, incarnation: int = 1) -> Version:
    return Version(Incarnation(incarnation, "nonce"), iteration)


def begun(resumed: Version | None = None, slots: int = 2) -> Host:
    """Host ``a`` at the start of an incarnation."""
    host = Host(name="a")
    host.open(HOLDERS, resumed)
    for owner in HOLDERS:
        host.renew(owner, slots)
    return host


def snapshot(host: Host, what: Version) -> None:
    """Rank 0 copies its shard, and the replica is acknowledged."""
    grant = host.request(0, what)[0]
    assert isinstance(grant, Grant)
    host.completed(0, what)
    host.sent(0, grant.slot, "b")


def replicate(host: Host, what: Version, committed: Version | None = None) -> None:
    """The shard of rank 1 comes in."""
    assert host.receive(1, what, committed) is not None
    host.completed(1, what)


def committed(host: Host, what: Version, freeze: bool = False) -> None:
    snapshot(host, what)
    replicate(host, what, host.committed)
    host.on_commit(what, freeze)


def test_a_snapshot_is_granted_copied_sent_and_reported() -> None:
    """Section 6: a chunk "travels as soon as it is copied": the sending begins together with the copying."""
    host = begun()
    assert host.request(0, version(1)) == [Grant(owner=0, slot=0, version=version(1)), Send(owner=0, slot=0, version=version(1), peer="b")]
    report = Completed(owner=0, host="a", version=version(1), layout="a layout", digest="a digest")
    assert host.completed(0, version(1), "a layout", "a digest") == [Tell(report)]
    assert host.reports() == [report]


def test_a_commit_that_found_all_copies_alike_has_their_roots_without_saying_them() -> None:
    """Section 7: the roots that count are those that this host has reported."""
    host = begun()
    grant = host.request(0, version(1))[0]
    assert isinstance(grant, Grant)
    host.completed(0, version(1), root="root 0")
    assert host.receive(1, version(1), None) is not None
    host.completed(1, version(1), root="root 1")
    host.on_commit(version(1), freeze=False, agreed=True)
    assert host.committed_roots(version(1)) == {0: "root 0", 1: "root 1"}


def test_what_ranks_agree_on_is_what_the_leader_has_compared() -> None:
    """Whatever digests this host has seen: those of the others may have come later, or not at all."""
    host = begun()
    for iteration, compared in ((1, True), (2, False)):
        committed(host, version(iteration))
        host.on_commit(version(iteration), freeze=False, compared=compared)
    assert (host.committed, host.agreed) == (version(2), version(1))


def test_a_replica_is_reported_by_the_host_that_holds_it() -> None:
    """Section 7: "when all holders have reported, iteration i is committed"."""
    host = begun()
    assert host.receive(1, version(1), None) is not None
    assert host.reports() == []
    assert host.completed(1, version(1)) == [Tell(Completed(owner=1, host="a", version=version(1)))]


def test_a_replica_that_was_committed_with_another_root_is_damaged() -> None:
    """Section 7: this host was left out of the commit; what it has is not what was committed."""
    host = begun()
    assert host.receive(1, version(1), None) is not None
    assert host.completed(1, version(1), root="mine") == [Tell(Completed(owner=1, host="a", version=version(1), root="mine"))]
    assert host.reports() == [Completed(owner=1, host="a", version=version(1), root="mine")]
    assert host.on_commit(version(1), False, {1: "theirs"}) == [Damaged(1, version(1))]
    assert host.slots(1).complete_version(version(1)) is None
    assert host.receive(1, version(1), None) is not None
    assert host.completed(1, version(1), root="mine") == [Damaged(1, version(1))]  # as late as that
    assert host.receive(1, version(1), None) is not None
    assert host.completed(1, version(1), root="theirs") == [Tell(Completed(owner=1, host="a", version=version(1), root="theirs"))]


def test_a_copy_that_the_plan_does_not_know_is_given_up_before_it_is_served() -> None:
    """Section 8: every rank resumes the copies with the roots of the plan."""
    host = begun()
    committed(host, version(1))
    assert host.open(HOLDERS, version(1), {1: "of the plan"}) == [Damaged(1, version(1))]
    assert host.hold(1, version(1), "reader") is None
    assert host.hold(0, version(1), "reader") is not None


def test_a_copy_of_the_past_that_is_handed_back_late_does_not_wait_for_its_commit() -> None:
    """Section 4: workers hand memory back one by one; the first has let the incarnation go on, and the second has a newer left-over."""
    host = Host(name="a")
    host.adopt(0, 0, version(2), "")
    host.reopen(HOLDERS, version(2), Incarnation(2, "nonce"))
    host.adopt(0, 1, version(3), "")
    assert host.slots(0).complete_version(version(3)) is not None
    assert host.request(0, version(3, incarnation=2))[0] == Grant(owner=0, slot=1, version=version(3, incarnation=2))


def test_what_the_agent_before_knew_to_be_committed_stays_until_all_hosts_have_opened_the_next_incarnation() -> None:
    """Section 8: some host may fail before it has opened the next incarnation, and what that resumes need never have been committed."""
    host = Host(name="a")
    host.adopt(0, 0, version(1), committed=True)
    host.adopt(0, 1, version(2))
    host.open({0: ("b", "c")}, version(2), incarnation=Incarnation(2, "nonce"))
    host.slots(0).reap()
    assert host.slots(0).complete_version(version(1)) is not None
    host.on_commit(version(3, incarnation=2), freeze=False)
    assert host.slots(0).complete_version(version(1)) is None


def test_the_mark_of_a_version_that_was_given_up_does_not_count_for_a_session_that_resumed_an_older_one() -> None:
    """Section 8: both slots bear the mark of a commit, the session went back to the older one, and its agent was restarted at once."""
    host = Host(name="a")
    host.adopt(0, 0, version(4), committed=True)
    host.adopt(0, 1, version(5), committed=True)
    host.reopen(HOLDERS, version(4), Incarnation(2, "nonce"))
    assert host.slots(0).committed == version(4)
    assert host.request(0, version(5, incarnation=2))[0] == Grant(owner=0, slot=1, version=version(5, incarnation=2))
    assert host.slots(0).complete_version(version(4)) is not None


def test_a_mark_that_no_worker_has_heard_of_yet_does_not_keep_the_copy_from_being_reported() -> None:
    """Section 7: the agent died between the mark and the word to its workers, so that other hosts may not have heard of the commit."""
    host = Host(name="a")
    host.adopt(0, 0, version(8), committed=True)
    host.adopt(0, 1, version(9), committed=True)
    host.reopen(HOLDERS, version(8), Incarnation(1, "nonce"))
    assert [report.version for report in host.reports()] == [version(9)]
    assert host.request(0, version(10)) == []
    assert host.slots(0).complete_version(version(8)) is not None


def test_the_newest_marked_version_and_the_one_that_workers_know_to_be_committed_outlive_the_start_of_the_next_session() -> None:
    """Section 8: some host may still go on with either, until all have opened the next incarnation."""
    host = Host(name="a")
    for iteration, marked in ((3, True), (4, True), (5, False)):
        host.adopt(0, iteration, version(iteration), committed=marked)
    host.reopen(HOLDERS, version(3), Incarnation(1, "nonce"))
    host.open({0: ("b", "c")}, version(5), incarnation=Incarnation(2, "nonce"))
    host.slots(0).reap()
    assert all(host.slots(0).complete_version(version(iteration)) for iteration in (3, 4, 5))
    host.on_commit(version(6, incarnation=2), freeze=False)
    assert not host.slots(0).slots


def test_the_next_iteration_waits_for_the_commit_of_the_last_but_one() -> None:
    """Section 7: "A slot with iteration i-1 is overwritten only when i is complete everywhere." """
    host = begun()
    committed(host, version(1))
    snapshot(host, version(2))
    assert host.request(0, version(3)) == []
    assert host.on_commit(version(2), freeze=False) == [
        Grant(owner=0, slot=0, version=version(3)),
        Send(owner=0, slot=0, version=version(3), peer="b"),
    ]


def test_the_slot_waits_for_the_peer_even_after_the_commit() -> None:
    """Section 6: used again "only when every reader (replica, recovery, upload) has acknowledged the bytes"."""
    host = begun()
    host.request(0, version(1))
    host.completed(0, version(1))
    host.on_commit(version(1), freeze=False)  # b was left out, and still reads
    snapshot(host, version(2))
    assert host.on_commit(version(2), freeze=False) == [CancelSend(0, version(1), "b")]
    assert host.request(0, version(3)) == []
    assert host.sent(0, 0, "b")[0] == Grant(owner=0, slot=0, version=version(3))


def test_a_replica_is_refused_while_the_committed_one_would_have_to_go() -> None:
    """Section 7: "Otherwise a failure in between leaves no common iteration." """
    host = begun()
    committed(host, version(1))
    replicate(host, version(2), version(1))
    host.hold(1, version(1), "somebody who recovers")
    assert host.receive(1, version(3), version(2)) is None  # 2 is committed now, and 1 is being read
    host.release(1, 0, "somebody who recovers")
    slot = host.receive(1, version(3), version(2))
    assert slot is not None
    assert slot.index == 0


def test_a_sender_that_breaks_off_leaves_nothing_that_counts() -> None:
    """Section 6: what counts is what was received and verified; half a shard is nothing."""
    host = begun()
    host.receive(1, version(1), None)
    host.receive_failed(1, version(1))
    assert host.completed(1, version(1)) == []
    assert host.reports() == []
    assert host.receive(1, version(1), None) is not None  # the connection is made anew, and everything comes again


def test_a_late_iteration_is_skipped_and_the_next_takes_its_slot() -> None:
    """Section 7: i+1 "is then skipped and counted"; its peer is told to forget it."""
    host = begun()
    host.request(0, version(1))
    skipped = Skipped(0, version(1), "late")
    assert host.give_up(0, version(1), "late") == [CancelSend(0, version(1), "b"), Tell(skipped)]
    host.sent(0, 0, "b")
    assert host.request(0, version(2))[0] == Grant(owner=0, slot=0, version=version(2))
    assert host.completed(0, version(1)) == []


def test_a_complete_snapshot_cannot_be_taken_back() -> None:
    """Section 7: "when all holders have reported, iteration i is committed": it may be already."""
    host = begun()
    snapshot(host, version(1))
    assert host.give_up(0, version(1), "late") == []
    assert host.slots(0).newest == version(1)


def test_an_aborted_iteration_goes_from_every_host() -> None:
    """Section 7: an iteration is complete everywhere or nowhere; iterations never mix."""
    host = begun()
    replicate(host, version(1))
    host.request(0, version(1))
    assert host.on_abort(version(1)) == [CancelSend(0, version(1), "b"), Withdraw(0, version(1))]
    assert host.completed(0, version(1)) == []
    assert host.reports() == [Skipped(0, version(1), "repeated")]  # to a ledger that is restarted: earlier ones will not come either
    assert host.receive(1, version(1), None) is None
    assert host.request(0, version(1)) == [Withdraw(0, version(1))]


def test_an_abort_that_comes_after_the_commit_is_not_obeyed() -> None:
    """Section 7: "Reports may be repeated or late"; what is committed stays committed."""
    host = begun()
    committed(host, version(1))
    assert host.on_abort(version(1)) == []
    assert host.slots(0).newest == host.slots(1).newest == version(1)


def test_a_crashed_worker_leaves_the_committed_version_and_nothing_half_written() -> None:
    """Section 4: the agent's memory "survives its death"; section 7: "complete everywhere" or not at all."""
    host = begun()
    committed(host, version(1))
    host.request(0, version(2))
    assert Tell(Skipped(0, version(2), "its worker died")) in host.worker_lost(0)
    assert host.slots(0).newest == version(1)
    assert [slot.state for slot in host.slots(0).slots.values()] == [SlotState.COMPLETE, SlotState.EMPTY]


def test_a_restart_resumes_the_older_version_and_computes_the_newer_again() -> None:
    """Section 7: else "an iteration that is computed again after a restart would mix with its earlier copy"."""
    host = begun()
    committed(host, version(1))
    snapshot(host, version(2))
    host.request(0, version(3))
    host.open(HOLDERS, version(1))
    assert host.reports() == []
    assert host.completed(0, version(2)) == []
    assert host.request(0, version(2, incarnation=2))[0] == Grant(owner=0, slot=1, version=version(2, incarnation=2))
    assert host.slots(0).newest == version(1)


def test_word_from_the_incarnation_before_changes_nothing() -> None:
    """Section 7: "Receivers, commits and manifests refuse older incarnations." """
    host = begun()
    committed(host, version(1))
    host.open(HOLDERS, version(1))
    committed(host, version(2, incarnation=2))
    assert host.receive(1, version(9), version(8)) is not None  # a slot of the rotation, not the committed one
    host.completed(1, version(9))
    host.on_commit(version(9), freeze=False)
    host.on_abort(version(9))
    assert host.committed == version(2, incarnation=2)
    assert host.slots(1).newest == version(2, incarnation=2)


def test_what_an_inventory_promised_stays_until_the_new_incarnation_begins() -> None:
    """Section 8: "every rank reports its host's inventory": from then on nothing here may change."""
    host = begun()
    committed(host, version(1))
    replicate(host, version(2), version(1))
    host.request(0, version(2))
    host.seal()
    assert host.completed(0, version(2)) == []
    host.on_abort(version(2))
    host.receive(1, version(3), version(1))
    assert (host.slots(0).newest, host.slots(1).newest) == (version(1), version(2))
    host.unseal()  # those who were choosing have died: now the abort counts
    assert host.slots(1).newest == version(1)
    assert host.receive(1, version(3), version(1)) is not None


def test_a_promise_holds_for_shards_that_come_after_it() -> None:
    """Section 8: the plan is made "from inventories": a copy that none of them names must not become complete."""
    host = begun()
    host.seal()
    host.renew(7, 2)
    assert host.receive(7, version(1), None) is None


def test_what_was_promised_can_be_resumed_though_it_was_aborted_meanwhile() -> None:
    """Section 8: what is resumed is the choice of "a pure function" of the inventories, not of the ledger of before."""
    host = begun()
    replicate(host, version(1))
    host.seal()
    host.on_abort(version(1))
    host.open(HOLDERS, version(1))
    host.seal()
    host.unseal()  # another restart that did not come about: the abort was of another time
    assert host.slots(1).newest == version(1)


def rebuilding() -> Host:
    """Version 2 is resumed, but here is only version 1 of rank 0: it is kept while the lost copy comes in."""
    host = begun()
    committed(host, version(1))
    host.open(HOLDERS, version(2))
    slot = host.rebuild(0, version(2))
    assert slot is not None
    assert slot.index == 1
    assert host.request(0, version(3, incarnation=2)) == []
    return host


def test_when_a_lost_copy_is_rebuilt_the_waiting_worker_gets_its_slot() -> None:
    """Section 8: "Lost copies are rebuilt in the background afterwards", while the worker goes on."""
    assert rebuilding().rebuilt(0, version(2))[0] == Grant(owner=0, slot=0, version=version(3, incarnation=2))
    assert rebuilding().receive_failed(0, version(2))[0] == Grant(owner=0, slot=1, version=version(3, incarnation=2))


def test_a_lost_copy_is_rebuilt_even_if_the_worker_dies_meanwhile() -> None:
    """Section 8: it is fetched from a peer; it is not what the worker was writing."""
    host = rebuilding()
    assert host.worker_lost(0) == []
    host.rebuilt(0, version(2))
    assert host.slots(0).newest == version(2)


def test_only_an_agent_that_was_restarted_can_have_lost_what_was_committed() -> None:
    """A claim before the first step would be believed else, and nothing would be committed any more."""
    host = Host(name="a")
    host.open(HOLDERS, None, incarnation=Incarnation(1, "nonce"))
    assert not host.may_be_committed(version(10**6))
    host.reopen(HOLDERS, None, Incarnation(1, "nonce"))
    assert host.may_be_committed(version(3))
    host.open(HOLDERS, None, incarnation=Incarnation(2, "nonce"))
    assert not host.may_be_committed(version(3))


def test_an_agent_that_was_restarted_repeats_what_it_had_reported() -> None:
    """Section 7: "if the leader restarts, the others repeat theirs"; in the order of versions."""
    host = Host(name="a")
    host.slots(0).adopt(0, version(3))
    host.slots(0).adopt(1, version(2))
    host.slots(1).adopt(0, version(2))
    host.reopen(HOLDERS, version(1), Incarnation(1, "nonce"))
    assert [(report.version, report.owner) for report in host.reports()] == [(version(2), 0), (version(2), 1), (version(3), 0)]


def test_an_agent_that_was_restarted_does_not_report_what_its_incarnation_has_left_behind() -> None:
    """Section 7: a version that was given up must not be committed, and stays until somebody trains."""
    host = Host(name="a")
    for index, iteration in enumerate((1, 2)):
        host.slots(0).adopt(index, version(iteration))
    host.reopen(HOLDERS, version(1), Incarnation(2, "nonce"))
    assert host.reports() == []
    assert host.slots(0).complete_version(version(2)) is not None
    assert host.request(0, version(2, incarnation=2))[0] == Grant(owner=0, slot=1, version=version(2, incarnation=2))


def test_an_incarnation_of_the_past_says_nothing_of_the_next_one_and_cannot_abort_its_copies() -> None:
    """Section 7: "Receivers, commits and manifests refuse older incarnations"; a worker of the past had a new agent go on with its own."""
    host, newer = Host(name="a"), version(9, incarnation=2)
    host.adopt(0, 0, newer)
    host.adopt(1, 0, newer)
    host.reopen(HOLDERS, version(8), Incarnation(1, "nonce"))
    assert host.reports() == host.send_again(0) == host.on_abort(newer) == []
    host.reopen(HOLDERS, version(8), newer.incarnation)
    assert [(report.version, report.owner) for report in host.reports()] == [(newer, 0), (newer, 1)]


def test_what_was_committed_stays_until_all_hosts_have_opened_an_incarnation_that_goes_back() -> None:
    """Section 8: an incarnation that some host never opens has never been; what the others had before is all there is then."""
    host = begun(slots=3)
    committed(host, version(1))
    committed(host, version(2))
    host.seal()
    host.open(HOLDERS, version(1))
    assert all(host.slots(owner).complete_version(version(2)) for owner in HOLDERS)
    host.seal()  # it has failed: the next one chooses
    host.request(0, version(2, incarnation=2))
    assert host.slots(0).complete_version(version(2)) is not None
    host.unseal()
    assert host.receive(1, version(2, incarnation=2), version(1)) is not None
    assert not any(host.slots(owner).complete_version(version(2)) for owner in HOLDERS)


def test_the_committed_slot_is_uploaded_and_a_third_one_takes_its_place() -> None:
    """Section 7: "the slot that is being uploaded leaves the rotation until the manifest is written"."""
    host = begun(slots=3)
    snapshot(host, version(1))
    replicate(host, version(1))
    assert host.on_commit(version(1), freeze=True) == [Upload(owner=0, slot=0, version=version(1))]  # each owner's own copy, once
    for iteration in range(2, 6):
        committed(host, version(iteration))
    assert host.slots(0).complete_version(version(1)) is not None
    host.thawed(version(1))
    committed(host, version(6))
    assert host.slots(0).complete_version(version(1)) is None


def test_an_upload_whose_end_was_not_heard_of_gives_way_to_the_next() -> None:
    """Section 7: which iteration is out of the rotation "is part of its commit, the same on all hosts": never two."""
    host = begun(slots=3)
    committed(host, version(1), freeze=True)
    committed(host, version(2), freeze=True)
    assert [slot.version for slot in host.slots(0).slots.values() if slot.frozen] == [version(2)]
    host.thawed(version(1))  # heard after all
    assert [slot.version for slot in host.slots(0).slots.values() if slot.frozen] == [version(2)]


def test_a_host_without_its_own_copy_of_what_is_to_be_uploaded_says_so() -> None:
    """It has been started anew. The upload would wait for it for ever."""
    host = Host(name="a")
    host.open(HOLDERS, None)
    assert host.on_commit(version(1), freeze=True) == [Lacking(0, version(1))]
    assert host.on_commit(version(1), freeze=False) == []


def test_only_a_complete_version_is_read() -> None:
    """Section 6: recovery reads what was verified on arrival; a version in progress is not there yet."""
    host = begun()
    host.receive(1, version(1), None)
    assert host.hold(1, version(1), "fetch:c") is None
    host.completed(1, version(1))
    assert host.hold(1, version(1), "fetch:c") is not None


def test_a_peer_that_was_left_out_lets_go_of_what_it_reads() -> None:
    """Section 7: the set of holders shrinks; its slowest member must not keep the slots of the others."""
    host = begun()
    host.request(0, version(1))
    assert host.on_exclude(0, "b") == [CancelSend(0, version(1), "b")]
    assert host.on_exclude(1, "a") == []  # its owner's affair


def test_after_the_job_only_the_committed_version_keeps_its_memory() -> None:
    """Section 4: "After a finished job, or Ctrl-C, the agent leaves"; until then a next job may want to resume."""
    host = begun()
    committed(host, version(1))
    committed(host, version(2))
    assert host.finish() == [Free(owner=0, slot=0), Free(owner=1, slot=0)]
    assert host.slots(0).newest == host.slots(1).newest == version(2)


def test_a_shard_that_has_moved_away_is_freed_only_after_the_next_commit() -> None:
    """Section 8: "Ranks move between hosts at a restart"; until the others have a copy, this may be the only one."""
    host = begun()
    committed(host, version(1))
    host.open({0: ("a", "c"), 1: ("b", "c")}, version(1))
    assert host.hold(1, version(1), "fetch:c") is not None
    host.release(1, 0, "fetch:c")
    assert host.slots(1).newest == version(1)
    assert Free(owner=1, slot=0) in host.on_commit(version(2, incarnation=2), freeze=False)
