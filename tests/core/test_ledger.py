"""The leader's book, told as short stories (docs/design.md, sections 3, 7 and 9).

Two ranks on two hosts, each other's peers. Time is an argument: 0.0 unless it is what the story is about. Any order of
reports is tried in test_protocol_machine.py.
"""

from __future__ import annotations

import sys
import tracemalloc
from types import FrameType
from typing import Any

import pytest

from gemini_ft.core.decisions import Abort, Cadence, Commit, Decision, Fatal, Holders, Thaw, WriteManifest
from gemini_ft.core.effects import Completed, Copies, Gathered, Skipped
from gemini_ft.core.gathering import Bundles
from gemini_ft.core.ledger import Ledger
from gemini_ft.core.protocol import MOST_ABORTED, Host
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import PeerError

HOLDERS = {0: ("a", "b"), 1: ("b", "a")}
PAIRS = [(owner, host) for owner, hosts in HOLDERS.items() for host in hosts]
TIMEOUT = 30.0


def version(iteration: int, incarnation: int = 1) -> Version:
    return Version(Incarnation(incarnation, "nonce"), iteration)


def ledger(committed: Version | None = None, cadence: Cadence | None = None) -> Ledger:
    return Ledger(HOLDERS, committed, TIMEOUT, cadence)


def report(book: Ledger, what: Version, *pairs: tuple[int, str], now: float = 0.0, digest: str = "same") -> list[Decision]:
    """The holders say that they have it."""
    return [
        decision
        for owner, host in pairs
        for decision in book.report(Completed(owner=owner, host=host, version=what, layout="layout", digest=digest), now)
    ]


def with_root(book: Ledger, iteration: int, root: str, *pairs: tuple[int, str]) -> list[Decision]:
    """The holders say that their copies come to this root."""
    reports = [
        Completed(owner=owner, host=host, version=version(iteration), layout="layout", digest="same", root=root) for owner, host in pairs
    ]
    return [decision for each in reports for decision in book.report(each, 0.0)]


def uploads(book: Ledger, what: Version, now: float = 0.0) -> bool:
    """Everybody has it. Is it the one to upload?"""
    commit = report(book, what, *PAIRS, now=now)[-1]
    assert isinstance(commit, Commit)
    return commit.freeze


def without_peer(now: float = 0.0) -> Ledger:
    """``b`` has let everybody wait for its replica of rank 0, and was left out."""
    book = ledger()
    report(book, version(1), (0, "a"), (1, "b"), (1, "a"), now=now)
    book.tick(now + TIMEOUT)
    return book


# -- commit


def test_an_iteration_is_committed_when_the_last_holder_has_reported() -> None:
    """Section 7: "when all holders have reported, iteration i is committed, in one visible line"."""
    book = ledger()
    assert report(book, version(1), *PAIRS[:3]) == []
    assert book.committed is None
    assert report(book, version(1), PAIRS[3]) == [Commit(version=version(1), freeze=False)]
    assert book.committed == version(1)


def test_a_report_of_another_iteration_does_not_complete_this_one() -> None:
    """Section 7: "Otherwise an iteration that is computed again after a restart would mix with its earlier copy"."""
    book = ledger(committed=version(1))
    assert report(book, version(3), *PAIRS[:3]) == []
    for older in (version(1), version(2), version(3, incarnation=0)):
        report(book, older, PAIRS[3])
    assert book.committed == version(1)
    assert report(book, version(3), PAIRS[3]) == [Commit(version=version(3), freeze=False)]


def test_a_host_that_holds_no_copy_has_no_voice() -> None:
    """Section 7: what counts is that "all holders have reported"."""
    book = Ledger({0: ("a", "b")}, None, TIMEOUT)
    assert report(book, version(1), (0, "a"), (0, "c"), (7, "a")) == []
    assert report(book, version(1), (0, "b")) == [Commit(version=version(1), freeze=False)]


def test_a_report_of_no_copy_changes_nothing() -> None:
    book = ledger()
    assert with_root(book, 1, "root", *PAIRS[:3]) == []
    for host in ("c", "b"):
        assert book.report(Copies(host=host, version=version(1), layout="layout", digest="same", roots={}), 0.0) == []
    assert with_root(book, 1, "root", PAIRS[3]) == [Commit(version=version(1), freeze=False, roots={0: "root", 1: "root"})]


def test_reports_may_be_repeated_or_late() -> None:
    """Section 7: "Reports may be repeated or late"; old news changes nothing."""
    book = ledger()
    report(book, version(1), *PAIRS[:3], *PAIRS[:3], *PAIRS)
    assert book.committed == version(1)
    assert report(book, version(1), *PAIRS) == []
    assert book.report(Skipped(0, version(1), "late"), 0.0) == []
    assert book.committed == version(1)


def test_a_leader_that_was_restarted_hears_everything_again() -> None:
    """Section 7: "if the leader restarts, the others repeat theirs" - the newest commit first."""
    book = ledger(committed=version(1))
    assert book.rejoin(version(2), 0.0) == [Commit(version=version(2), freeze=False)]  # our host may not know
    assert book.rejoin(version(1), 0.0) == [Commit(version=version(2), freeze=False)]  # that one did not
    assert book.rejoin(version(2), 0.0) == []
    assert report(book, version(3), *PAIRS) == [Commit(version=version(3), freeze=False)]


# -- abort


def test_a_host_that_was_away_hears_again_what_was_aborted_and_may_still_matter() -> None:
    """Section 7: "Reports may be repeated or late": so may decisions, or a rank could wait for a slot for ever."""
    book = ledger(committed=version(1))
    book.report(Skipped(0, version(3), "late"), 0.0)
    book.report(Skipped(0, version(2), "late"), 0.0)
    aborted = [Abort(version(2), "rank 0: late"), Abort(version(3), "rank 0: late")]
    assert book.rejoin(version(1), 0.0) == aborted
    assert book.rejoin(None, 0.0) == [Commit(version=version(1), freeze=False), *aborted]
    assert book.rejoin(version(2), 0.0) == [Commit(version=version(2), freeze=False), aborted[1]]


def test_a_skipped_iteration_is_aborted_once_and_never_committed() -> None:
    """Section 7: what is late "is then skipped and counted"."""
    book = ledger()
    report(book, version(1), *PAIRS[:2])
    assert book.report(Skipped(1, version(1), "late"), 0.0) == [Abort(version(1), "rank 1: late")]
    assert book.report(Skipped(0, version(1), "late"), 0.0) == []
    assert report(book, version(1), PAIRS[1], PAIRS[3]) == []
    assert report(book, version(1), (0, "a")) == [Abort(version(1), "rank 1: late")]  # its host was away: it is told again
    assert report(book, version(2), *PAIRS) == [Commit(version=version(2), freeze=False)]


def test_an_owner_that_has_gone_on_will_not_complete_what_it_left() -> None:
    """Section 7: an iteration is complete everywhere or not at all, and nobody waits for what cannot come."""
    book = ledger()
    assert report(book, version(1), (0, "a"), (0, "b")) == []
    assert report(book, version(2), (0, "a")) == []  # rank 0 has both: rank 1 may still complete 1
    decisions = report(book, version(2), (1, "b"))
    assert decisions == [Abort(version(1), f"rank 1 has gone on to {version(2)} without it")]


@pytest.mark.parametrize("said", ["skips", "copies", "the same"])
def test_a_member_that_speaks_without_end_takes_no_memory_without_end(said: str) -> None:
    """Section 7: it may say that it skips, or has copies of, versions that never come, or say one thing over and over."""
    book = ledger(committed=version(0))
    report(book, version(1), PAIRS[0], PAIRS[1])
    other = Host(name="a", holders=HOLDERS)
    tracemalloc.start()
    for number in range(5000):
        what = version(1 if said == "the same" else 10**6 + number)
        other.on_abort(what)
        if said == "skips":
            assert book.report(Skipped(1, what, "late"), 0.0)
        else:
            report(book, what, (1, "b"))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 2**19
    assert len(book.rejoin(version(0), host="b")) <= MOST_ABORTED, "a host that joins is told of no more"
    if said == "the same":
        assert report(book, version(1), PAIRS[3]) == [Commit(version=version(1), freeze=False)]
    if said == "skips":
        assert report(book, version(10**6), PAIRS[0]), "it was aborted long ago, and is again"
        assert not book.is_under_way


def test_whoever_has_finished_completes_nothing_more() -> None:
    """Section 7: "nobody waits for what cannot come". With uneven inputs other ranks make more steps; what is on its way is not undone."""
    book, gone = ledger(), "rank 0 has ended without it"
    assert report(book, version(1), (0, "a"), (0, "b"), (1, "b")) == []
    assert report(book, version(2), (1, "b")) == []
    assert book.finish(0) == [Abort(version(2), gone)]
    assert book.finish(0) == []
    assert report(book, version(3), (1, "b")) == [Abort(version(3), gone)]
    assert report(book, version(1), (1, "a")) == [Commit(version=version(1), freeze=False)]


def test_ranks_that_disagree_on_the_layout_stop_the_job() -> None:
    """Section 3: "An iteration counts only if all ranks agree on the hash of the layout." """
    book = ledger()
    report(book, version(1), (0, "a"))
    abort, fatal = book.report(Completed(owner=1, host="b", version=version(1), layout="another layout"), 0.0)
    assert isinstance(abort, Abort)
    assert isinstance(fatal, Fatal)
    assert (fatal.error, "ranks [1] have layout another layout" in fatal.text) == ("LayoutMismatchError", True)


def test_replicated_state_that_differs_stops_the_job_and_the_odd_rank_is_named_once_all_are_heard() -> None:
    """Section 3: "if they differ, the restored state would be one that no rank ever had". Nothing is committed after it."""
    book = Ledger({rank: (host,) for rank, host in enumerate("abc")}, None, TIMEOUT)
    for iteration, digest in ((1, "same"), (2, "")):  # they are not compared at each
        (commit,) = report(book, version(iteration), (0, "a"), (1, "b"), (2, "c"), digest=digest)
        assert isinstance(commit, Commit)
        assert commit.compared == bool(digest)
    assert (book.committed, book.agreed) == (version(2), version(1))
    assert report(book, version(3), (1, "b"), digest="other") == []
    assert report(book, version(3), (0, "a"), digest="same") == []  # which of two it is cannot be told
    abort, fatal = report(book, version(3), (2, "c"), digest="same")
    assert isinstance(abort, Abort)
    assert isinstance(fatal, Fatal)
    assert (fatal.error, fatal.ranks, fatal.agreed) == ("ReplicaDivergedError", (1,), version(1))
    assert "the largest group of ranks holds something else than rank 1 (host b)." in fatal.text
    assert report(book, version(4), (0, "a"), (1, "b"), (2, "c")) == []
    assert book.committed == version(2)


@pytest.mark.parametrize("gone", ["skips", "goes on", "has finished"])
def test_ranks_that_differ_are_found_also_where_another_has_no_snapshot_of_that_version(gone: str) -> None:
    """Else the next version would be committed over the difference, and the one that was compared before it overwritten."""
    book = Ledger({rank: (host,) for rank, host in enumerate("abcd")}, None, TIMEOUT)
    report(book, version(1), (0, "a"), (1, "b"), (2, "c"), (3, "d"), digest="same")
    report(book, version(2), (0, "a"), (1, "b"), digest="same")
    assert report(book, version(2), (2, "c"), digest="other") == []
    if gone == "skips":
        abort, fatal = book.report(Skipped(3, version(2), "late"), 0.0)
    else:
        abort, fatal = report(book, version(3), (3, "d")) if gone == "goes on" else book.finish(3)
    assert isinstance(abort, Abort)
    assert isinstance(fatal, Fatal)
    assert (fatal.error, fatal.ranks, fatal.agreed) == ("ReplicaDivergedError", (2,), version(1))
    report(book, version(4), (0, "a"), (1, "b"), (2, "c"), (3, "d"))
    assert book.committed == version(1)


def test_of_two_ranks_that_differ_both_are_named() -> None:
    book = Ledger({rank: (host,) for rank, host in enumerate("ab")}, None, TIMEOUT)
    report(book, version(1), (0, "a"), digest="one")
    fatal = report(book, version(1), (1, "b"), digest="other")[-1]
    assert isinstance(fatal, Fatal)
    assert fatal.ranks == (0, 1)
    assert "it cannot be told which of rank 0 (host a), rank 1 (host b) is wrong" in fatal.text


def test_of_several_sides_the_largest_may_be_less_than_half_of_the_ranks() -> None:
    book = Ledger({rank: (host,) for rank, host in enumerate("abcdefg")}, None, TIMEOUT)
    for rank, host in enumerate("abcdefg"):
        decisions = report(book, version(1), (rank, host), digest="xxxyyzz"[rank])
    (fatal,) = (each for each in decisions if isinstance(each, Fatal))
    assert fatal.ranks == (3, 4, 5, 6)
    assert "the largest group of ranks holds something else than rank 3 (host d), rank 4 (host e), " in fatal.text


# -- the set of holders


def test_after_the_timeout_the_set_of_holders_shrinks_and_commits_go_on() -> None:
    """Section 7: "After `replica_timeout` the set of holders shrinks by an agreed, logged epoch"."""
    book = ledger()
    report(book, version(1), (0, "a"), (1, "a"), now=0.0)
    report(book, version(1), (1, "b"), now=10.0)  # the last owner's own copy: the waiting begins
    assert book.tick(10.0 + TIMEOUT - 1.0) == []
    late = frozenset({(0, "b")})
    assert book.tick(10.0 + TIMEOUT) == [Holders(epoch=1, excluded=late, newly=late), Commit(version=version(1), freeze=False)]
    assert report(book, version(2), (0, "a"), (1, "b"), (1, "a")) == [Commit(version=version(2), freeze=False)]


def test_the_owners_own_copy_is_never_left_out() -> None:
    """Section 7: "never below the owner's own copy"."""
    book = ledger()
    report(book, version(1), (0, "a"), (0, "b"), (1, "a"))  # rank 1's own is missing
    assert book.tick(1000.0 * TIMEOUT) == []
    assert book.committed is None
    assert report(book, version(1), (1, "b"), now=1000.0 * TIMEOUT) == [Commit(version=version(1), freeze=False)]


def test_a_replica_is_not_given_up_while_the_owner_itself_may_be_lost() -> None:
    """Section 7: the committed version "is overwritten only when i is complete everywhere"; the last copy may be gone with its host."""
    book = ledger()
    owner, (home, other) = 0, book.holders[0]
    others = [pair for pair in PAIRS if pair != (owner, other)]
    report(book, version(1), *others, now=10.0)
    assert book.tick(10.0 + TIMEOUT, absent=[home]) == []
    assert book.committed is None
    late = frozenset({(owner, other)})
    assert book.tick(11.0 + TIMEOUT) == [
        Holders(epoch=1, excluded=late, newly=late),
        Commit(version=version(1), freeze=False),
    ]  # it is there after all


def test_the_set_grows_back_when_the_late_one_has_caught_up() -> None:
    """Section 7: "and grows back when the late one has caught up"; from then on it is waited for again."""
    book = without_peer()
    assert report(book, version(1), (0, "b")) == [Holders(epoch=2, excluded=frozenset(), newly=frozenset())]  # it has what is committed
    assert report(book, version(2), *(pair for pair in PAIRS if pair != (0, "b"))) == []
    assert report(book, version(2), (0, "b")) == [Commit(version=version(2), freeze=False)]


def test_a_straggler_with_an_older_copy_has_not_caught_up() -> None:
    """Section 7: it has caught up when it has what is committed, not what was committed once."""
    book = without_peer()
    assert report(book, version(2), (0, "a"), (1, "b"), (1, "a")) == [Commit(version=version(2), freeze=False)]
    assert report(book, version(1), (0, "b")) == []
    assert book.excluded == {(0, "b")}
    assert report(book, version(3), (0, "b")) == []  # whether this is what the owner has is not known yet
    assert report(book, version(3), (0, "a")) == [Holders(epoch=2, excluded=frozenset(), newly=frozenset())]


def test_a_copy_with_another_root_than_its_owners_counts_for_nothing() -> None:
    """Section 7: "the leader commits only copies with the owner's root"; the owner's is the one that was made of the live state."""
    book = ledger()
    assert with_root(book, 1, "damaged", (0, "b")) == []
    assert with_root(book, 1, "right", (0, "a"), (1, "b"), (1, "a")) == []
    holders, commit = book.tick(TIMEOUT)
    assert holders == Holders(epoch=1, excluded=frozenset({(0, "b")}), newly=frozenset({(0, "b")}))
    assert commit == Commit(version=version(1), freeze=False, roots={0: "right", 1: "right"})


def test_a_holder_of_damaged_copies_is_not_waited_for_again_and_again() -> None:
    """It would be let in by every report, and left out again `replica_timeout` later."""
    book = without_peer()
    for iteration in (2, 3):
        assert with_root(book, iteration, "damaged", (0, "b")) == []
        (commit,) = with_root(book, iteration, "right", (0, "a"), (1, "b"), (1, "a"))
        assert isinstance(commit, Commit)
        assert with_root(book, iteration, "damaged", (0, "b")) == []
    assert with_root(book, 3, "right", (0, "b")) == [Holders(epoch=2, excluded=frozenset(), newly=frozenset())]


def test_who_has_not_heard_of_a_commit_hears_its_roots() -> None:
    """Section 7: "the commit carries them"."""
    book = ledger()
    with_root(book, 1, "right", *PAIRS)
    assert book.rejoin(None) == [Commit(version=version(1), freeze=False, roots={0: "right", 1: "right"})]


def test_a_restarted_ledger_learns_the_roots_of_the_commit() -> None:
    """Else a holder that was left out for its damaged copy would count again with that very copy."""
    book = ledger(version(1))
    book.rejoin(version(1), 0.0, {0: "right", 1: "right"})
    book.excluded.add((0, "b"))
    assert with_root(book, 1, "damaged", (0, "b")) == []
    assert with_root(book, 1, "right", (0, "b")) == [Holders(epoch=1, excluded=frozenset(), newly=frozenset())]


def test_a_host_whose_agent_was_restarted_hears_the_roots_again() -> None:
    book = ledger()
    with_root(book, 1, "right", *PAIRS)
    assert book.rejoin(version(1), 0.0, {0: "right", 1: "right"}) == []
    assert book.rejoin(version(1), 0.0, {0: "", 1: "right"}) == [Commit(version=version(1), freeze=False, roots={0: "right", 1: "right"})]


def test_a_host_whose_copies_agreed_does_not_hear_their_roots_again() -> None:
    """A commit that carried all roots to all hosts would grow with the square of the job."""
    book = ledger()
    book.rejoin(None, host="b")
    (commit,) = with_root(book, 1, "right", *PAIRS)
    assert isinstance(commit, Commit)
    assert book.addressed(commit, "b") == Commit(version=version(1), freeze=False, agreed=True)
    assert book.addressed(commit, "a") == commit  # it has not joined: this ledger does not know what its agent remembers


def test_a_host_that_joined_after_its_reports_hears_the_roots() -> None:
    """Its agent may have lost its memory since it made them."""
    book = ledger()
    book.rejoin(None, host="b")
    with_root(book, 1, "right", *PAIRS[:3])
    book.rejoin(None, host="b")
    (commit,) = with_root(book, 1, "right", PAIRS[3])
    assert isinstance(commit, Commit)
    assert book.addressed(commit, "b") == commit
    (commit,) = with_root(book, 2, "right", *PAIRS)
    assert isinstance(commit, Commit)
    assert book.addressed(commit, "b").agreed


def test_a_host_with_a_copy_that_did_not_count_hears_the_roots_of_what_it_holds() -> None:
    book = Ledger({0: ("a", "b"), 1: ("c", "a")}, None, TIMEOUT)
    for host in ("a", "b", "c"):
        book.rejoin(None, host=host)
    with_root(book, 1, "damaged", (0, "b"))
    with_root(book, 1, "right", (0, "a"), (1, "c"), (1, "a"))
    commit = book.tick(TIMEOUT)[-1]
    assert isinstance(commit, Commit)
    assert book.addressed(commit, "b").roots == {0: "right"}
    assert book.addressed(commit, "c").agreed


# -- uploads


def test_when_a_host_leaves_the_next_version_of_which_all_ranks_add_digests_is_uploaded() -> None:
    book = ledger(cadence=Cadence(every_steps=1000))
    assert not uploads(book, version(1))
    assert book.upload_soon(0.0) == [Commit(version=version(1), freeze=False, digest_at=2)]
    report(book, version(2), *PAIRS, digest="")  # it was under way before the ranks heard of it
    assert book.uploading is None
    assert uploads(book, version(3))
    book.upload_over(version(3))
    assert not uploads(book, version(4))
    assert ledger().upload_soon(0.0) == []  # there is no storage


def test_every_so_many_iterations_one_is_uploaded() -> None:
    """Section 7: which iteration is uploaded "is part of its commit, the same on all hosts"."""
    book = ledger(cadence=Cadence(every_steps=3))
    chosen = []
    for iteration in [1, 2, 4, 5, 6, 7]:  # 3 was skipped: 4 goes in its place, and 6 is due all the same
        if uploads(book, version(iteration)):
            chosen.append(iteration)
            book.upload_over(version(iteration))
    assert chosen == [4, 6]


def test_every_so_many_seconds_one_is_uploaded() -> None:
    """Section 9: uploads come "from committed memory", as often as was asked for."""
    book = ledger(cadence=Cadence(every_seconds=60.0, last_time=100.0))
    assert not uploads(book, version(1), now=159.0)
    assert uploads(book, version(2), now=160.0)
    book.upload_over(version(2))
    assert not uploads(book, version(3), now=219.0)
    assert uploads(book, version(4), now=220.0)


def test_ranks_learn_in_time_that_an_upload_needs_their_digests() -> None:
    """Section 3: replicated tensors "are compared by hash across ranks at the start and before every upload"."""
    book = ledger(cadence=Cadence(every_seconds=60.0))
    first = report(book, version(1), *PAIRS, now=60.0, digest="")
    assert first == [Commit(version=version(1), freeze=False, digest_at=2)]  # due, but not compared
    assert report(book, version(2), *PAIRS, now=61.0) == [Commit(version=version(2), freeze=True, digest_at=None)]


def test_a_manifest_names_every_shard_and_is_written_last() -> None:
    """Section 9: a manifest is "written last: a torn upload is never seen as a checkpoint"."""
    book = ledger(cadence=Cadence(every_steps=1))
    assert uploads(book, version(1))
    assert not uploads(book, version(2))  # never two at once
    assert book.uploaded(0, version(1), "record 0") == []
    assert book.uploaded(1, version(2), "of another upload") == []
    assert book.uploaded(1, version(1), "record 1") == [WriteManifest(version(1), {0: "record 0", 1: "record 1"})]
    assert book.uploaded(1, version(1), "record 1") == []  # it is repeated, by a host that has connected again: one writer is enough
    assert book.upload_over(version(1)) == [Thaw(version(1))]
    assert uploads(book, version(3))


def test_a_failed_upload_leaves_no_manifest_and_the_next_one_goes_ahead() -> None:
    """Section 9: "A storage outage is a warning and a metric, not a dead job." """
    book = ledger(cadence=Cadence(every_steps=1))
    uploads(book, version(1))
    book.uploaded(0, version(1), "record 0")
    assert book.upload_over(version(1), "disk full") == [Thaw(version(1), "disk full")]
    assert book.uploaded(1, version(1), "record 1") == []
    assert uploads(book, version(2))
    assert book.uploaded(1, version(2), "record 1") == []  # the records of the failed one do not count


def test_an_upload_that_waits_for_a_shard_of_a_lost_host_is_over() -> None:
    book = ledger(cadence=Cadence(every_steps=1, at_end=True))
    assert uploads(book, version(1))
    assert book.miss(["c"]) == []
    assert book.miss(["b"]) == [Thaw(version(1), "host b, which has rank 1's shard, was lost during the upload")]
    assert uploads(book, version(2))
    book.uploaded(1, version(2), "record 1")
    assert book.miss(["b"]) == [], "it is stored"


def test_the_end_of_a_job_stores_nothing_once_ranks_were_found_to_differ() -> None:
    """The last commit came after the last one that was compared: it may hold what one rank alone computed."""
    book = ledger(cadence=Cadence(every_steps=10, at_end=True))
    report(book, version(1), *PAIRS)
    report(book, version(2), *PAIRS, digest="")
    report(book, version(3), (0, "a"), digest="one")
    report(book, version(3), (1, "b"), digest="other")
    assert book.upload_last() == []
    assert book.unstored == f"ranks differ in what they must hold alike, perhaps in {version(2)} already"


def test_a_version_is_under_way_from_its_first_report_until_it_is_decided() -> None:
    book = ledger()
    assert not book.is_under_way
    report(book, version(1), (0, "a"))
    assert book.is_under_way
    report(book, version(1), *PAIRS)
    assert not book.is_under_way
    report(book, version(2), (0, "a"))
    book.finish(1)
    assert not book.is_under_way, "it is aborted"


# -- copies of many hosts in one message


def gathered(**roots: str) -> Gathered:
    return Gathered(version=version(1), layout="layout", digest="same", roots=roots)


def test_a_copy_that_is_reported_anew_counts_with_its_later_root_even_if_it_was_gathered_before() -> None:
    book = ledger()
    assert book.report(gathered(a="rrss"), 0.0) == []
    assert with_root(book, 1, "xx", (1, "a")) == []
    assert book.report(gathered(b="rrss"), 0.0) == []
    assert book.tick(TIMEOUT) == [
        Holders(epoch=1, excluded=frozenset({(1, "a")}), newly=frozenset({(1, "a")})),
        Commit(version=version(1), freeze=False, digest_at=None, roots={0: "rr", 1: "ss"}),
    ]


@pytest.mark.parametrize("told", [{"a": "rrs"}, {"a": ""}, {"c": "rrss"}])
def test_roots_that_are_not_of_what_a_host_holds_are_refused(told: dict[str, str]) -> None:
    book = ledger()
    with pytest.raises(PeerError, match="are not the roots of the"):
        book.report(gathered(**told), 0.0)
    book.report(gathered(a="rrss"), 0.0)
    assert book.report(gathered(b="rrss"), 0.0) == [Commit(version=version(1), freeze=False, digest_at=None, roots={0: "rr", 1: "ss"})]


# -- cost


def effort(hosts: int, *, late: bool) -> int:
    """Instructions of the interpreter for one host's report, in the middle of a step of so many hosts of eight ranks.

    Args:
        hosts: of which two hold each other's copies.
        late: whether another version is under way, so that reports are counted one by one.
    """
    holders = {owner: (f"h{owner // 8}", f"h{(owner // 8) ^ 1}") for owner in range(8 * hosts)}
    book, count = Ledger(holders, None, TIMEOUT), 0
    if late:
        book.report(Completed(owner=0, host="h1", version=version(2), layout="layout", digest="same", root="f" * 32), 0.0)

    def count_one(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return count_one

    for at in range(hosts // 2 + 1):
        bundles = Bundles(f"h{at}", holders)
        for owner in [owner for owner, both in holders.items() if f"h{at}" in both]:
            bundles.add(Completed(owner=owner, host=f"h{at}", version=version(1), layout="layout", digest="same", root=f"{owner:032x}"))
        (copies,) = bundles.take()
        before = sys.gettrace()
        sys.settrace(count_one if at == hosts // 2 else before)
        try:
            book.report(copies, 0.0)
        finally:
            sys.settrace(before)
    return count


@pytest.mark.parametrize("late", [False, True])
def test_a_report_is_the_same_work_whatever_the_number_of_hosts(late: bool) -> None:
    few, many = (effort(hosts, late=late) for hosts in (8, 256))
    assert 0 < many < 1.5 * few
