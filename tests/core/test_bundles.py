"""The reports of a host on their way to the leader, in as few messages as can be (docs/design.md, section 7)."""

from __future__ import annotations

from gemini_ft.core.effects import Completed, Copies
from gemini_ft.core.gathering import Bundles
from gemini_ft.core.versions import Incarnation, Version

HOLDERS = {0: ("a", "b"), 1: ("a", "b"), 2: ("b", "c"), 3: ("c", "a")}  # "b" holds the shards of ranks 0, 1 and 2


def version(iteration: int) -> Version:
    return Version(Incarnation(1, "n"), iteration)


def report(bundles: Bundles, iteration: int, *owners: int, digest: str = "") -> list[bool]:
    return [
        bundles.add(Completed(owner=owner, host="b", version=version(iteration), layout="layout", digest=digest, root=f"root {owner}"))
        for owner in owners
    ]


def copies(iteration: int, *owners: int, digest: str = "") -> Copies:
    return Copies(host="b", version=version(iteration), layout="layout", digest=digest, roots={owner: f"root {owner}" for owner in owners})


def test_a_host_has_said_all_when_it_has_every_copy_that_it_is_to_hold() -> None:
    bundles = Bundles("b", HOLDERS)
    assert report(bundles, 1, 2, 0, 1) == [False, False, True]
    assert bundles.take() == [copies(1, 2, 0, 1)]
    assert not bundles.waiting


def test_what_was_sent_before_it_was_complete_is_not_sent_twice() -> None:
    bundles = Bundles("b", HOLDERS)
    report(bundles, 1, 0)
    assert bundles.take() == [copies(1, 0)]
    assert report(bundles, 1, 1, 2) == [False, True]
    assert bundles.take() == [copies(1, 1, 2)]


def test_a_copy_that_does_not_count_is_not_waited_for() -> None:
    """Else every commit would come later by that wait, for as long as its owner's link hangs."""
    bundles = Bundles("b", HOLDERS)
    bundles.exclude({(2, "b"), (0, "c")})
    assert report(bundles, 1, 0, 1) == [False, True]
    bundles.exclude(())
    assert report(bundles, 2, 0, 1) == [False, False]


def test_older_versions_go_first_and_those_with_other_digests_apart() -> None:
    bundles = Bundles("b", HOLDERS)
    report(bundles, 2, 0)
    report(bundles, 2, 1, digest="d")
    report(bundles, 1, 2)
    assert bundles.take() == [copies(1, 2), copies(2, 0), copies(2, 1, digest="d")]


def test_after_a_new_beginning_everything_counts_as_not_said() -> None:
    bundles = Bundles("b", HOLDERS)
    report(bundles, 1, 0, 1)
    bundles.forget()
    assert bundles.take() == []
    assert report(bundles, 1, 2) == [False]
