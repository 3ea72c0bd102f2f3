"""Which version is resumed, for any inventories: never a mixture, always the newest that is whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.config import GeminiConfig
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import RecoveryError, WorldSizeError
from gemini_ft.faults.inject import Orders
from gemini_ft.recovery.plan import RecoveryPlan, describe, plan_recovery, require
from gemini_ft.wire.worker_messages import HostInfo, Inventory, SlotInfo, Verified, Verify, Welcome
from gemini_ft.worker import resume_choice
from gemini_ft.worker.introductions import Introduction, introduced
from gemini_ft.worker.resume_choice import Chooser

WORLD = 3
VERSIONS = [Version(Incarnation(number, nonce), iteration) for number, nonce in ((1, "a"), (2, "b"), (2, "c")) for iteration in (4, 5)]


def slot(
    owner: int,
    version: Version,
    world: int = WORLD,
    layout: str = "l",
    age: float = 1.0,
    root: str = "r",
    committed: bool = False,
) -> SlotInfo:
    sizes = {"world_size": world, "data_bytes": 8, "extras_bytes": 1}
    return SlotInfo(owner=owner, version=version, layout_hash=layout, age=age, root=root, committed=committed, **sizes)


def hold(**hosts: list[SlotInfo]) -> dict[str, list[SlotInfo]]:
    return hosts


def everywhere(version: Version, *hosts: str) -> dict[str, list[SlotInfo]]:
    return {host: [slot(owner, version) for owner in range(WORLD)] for host in hosts}


V1, V2 = VERSIONS[0], VERSIONS[1]

slots = st.builds(
    slot,
    st.integers(0, WORLD - 1),
    st.sampled_from(VERSIONS),
    st.sampled_from([WORLD, WORLD, WORLD, 2]),
    st.sampled_from(["l", "l", "l", "m"]),
)
inventories = st.lists(st.lists(slots, max_size=8), max_size=4).map(lambda each: {f"h{n}": held for n, held in enumerate(each)})
stored_versions = st.none() | st.sampled_from(VERSIONS)
refusals = st.lists(st.sampled_from(VERSIONS), max_size=2)


def is_whole(holdings: dict[str, list[SlotInfo]], version: Version) -> bool:
    """By hand: every owner has a copy, all of one layout and of this size."""
    held = [info for each in holdings.values() for info in each if info.version == version]
    complete = {info.owner for info in held} == set(range(WORLD))
    return complete and {info.world_size for info in held} == {WORLD} and len({info.layout_hash for info in held}) == 1


def test_ranks_tell_of_each_version_the_age_of_its_newest_copy() -> None:
    """It is the one that a plan has; the others would be as many as there are copies."""
    held = [slot(owner, version, age=age) for version, ages in ((V1, (3.0, 1.0, 2.0)), (V2, (0.5,))) for owner, age in enumerate(ages)]
    facts: dict[str, Any] = {
        "run": "r",
        "welcome": Welcome.model_construct(),
        "configured_secret": "",
        "config": "{}",
        "orders": Orders(""),
    }
    (about,) = introduced(lambda: Introduction(inventory=Inventory(slots=held), **facts), 60.0)
    assert about.ages == {V1: 1.0, V2: 0.5}
    plan = plan_recovery(hold(a=held), WORLD)
    assert (plan.version, plan.age) == (V1, about.ages[V1])


@given(inventories, stored_versions, refusals)
def test_the_newest_whole_version_wins(holdings: dict[str, list[SlotInfo]], stored: Version | None, refused: list[Version]) -> None:
    whole = {version for version in VERSIONS if version not in refused and is_whole(holdings, version)}
    stored = None if stored in refused else stored  # the caller does not offer what is refused
    try:
        plan = plan_recovery(holdings, WORLD, stored, WORLD if stored else None, refused)
    except WorldSizeError:
        seen = {info.world_size for each in holdings.values() for info in each if info.version not in refused}
        assert not whole
        assert stored is None
        assert WORLD not in seen
        return
    best = max(whole, default=None)
    if best is not None and (stored is None or best >= stored):
        assert (plan.kind, plan.version) == ("memory", best)
        assert plan.sources.keys() == set(range(WORLD))
        has = {host: {(info.owner, info.version) for info in each} for host, each in holdings.items()}
        for owner, hosts in plan.sources.items():
            assert hosts
            assert all((owner, best) in has[host] for host in hosts)
    elif stored is not None:
        assert (plan.kind, plan.version, plan.sources) == ("storage", stored, {})
    else:
        assert (plan.kind, plan.version) == ("nothing", None)


@given(inventories, st.permutations(range(4)))
def test_the_order_of_hosts_does_not_matter(holdings: dict[str, list[SlotInfo]], order: list[int]) -> None:
    def planned(each: dict[str, list[SlotInfo]]) -> RecoveryPlan | str:
        try:
            return plan_recovery(each, WORLD)
        except WorldSizeError as error:
            return str(error)

    assert planned(holdings) == planned({f"h{n}": holdings[f"h{n}"] for n in order if n < len(holdings)})


class TestChoice:
    def test_two_halves_of_two_versions_are_nothing(self) -> None:
        plan = plan_recovery(hold(a=[slot(0, V1), slot(1, V2)], b=[slot(1, V1), slot(2, V2)]), WORLD)
        assert plan == RecoveryPlan(kind="nothing", incomplete={4: [2], 5: [0]})

    def test_a_newer_incarnation_wins_over_a_higher_iteration(self) -> None:
        older, newer = Version(Incarnation(1, "a"), 90), Version(Incarnation(2, "b"), 50)
        assert plan_recovery(everywhere(older, "a") | everywhere(newer, "b"), WORLD).version == newer

    def test_all_copies_are_sources(self) -> None:
        assert plan_recovery(everywhere(V1, "b", "a"), WORLD).sources == dict.fromkeys(range(WORLD), ("a", "b"))

    def test_shards_of_two_layouts_do_not_make_a_version(self) -> None:
        holdings = hold(a=[slot(0, V1), slot(1, V1)], b=[slot(2, V1, layout="m")])
        assert plan_recovery(holdings, WORLD).kind == "nothing"

    def test_a_version_that_was_given_up_is_passed_over(self) -> None:
        holdings = everywhere(V2, "a") | everywhere(V1, "b")
        assert plan_recovery(holdings, WORLD, refused=[V2]).version == V1

    def test_memory_is_preferred_to_the_same_version_in_storage(self) -> None:
        assert plan_recovery(everywhere(V1, "a"), WORLD, V1, WORLD).kind == "memory"
        assert plan_recovery(everywhere(V1, "a"), WORLD, V2, WORLD).kind == "storage"

    def test_steps_that_only_some_shards_have_are_counted_as_lost(self) -> None:
        plan = plan_recovery(hold(a=[slot(0, Version(Incarnation(1, "a"), 1234))]), WORLD, Version(Incarnation(1, "a"), 1000), WORLD)
        assert (plan.lost, plan.incomplete) == (234, {1234: [1, 2]})

    def test_steps_that_were_given_up_count_as_lost_too(self) -> None:
        """As after a divergence, where all that is in memory is refused (docs/design.md, section 8)."""
        version, stored = Version(Incarnation(1, "a"), 1999), Version(Incarnation(1, "a"), 1000)
        plan = plan_recovery(everywhere(version, "a"), WORLD, stored, WORLD, refused=[version])
        assert (plan.lost, plan.incomplete) == (999, {})
        assert describe(plan) == "no copies in memory that can be resumed: falling back to storage, iteration 1000, 999 steps lost"


class TestWorldSize:
    def test_another_size_in_memory_is_refused_with_both_and_the_way_out(self) -> None:
        text = r"the snapshot in memory was made by 2 ranks, this job has 3\. Start 2 ranks to resume it, or set resume='never'"
        with pytest.raises(WorldSizeError, match=text):
            plan_recovery(hold(a=[slot(0, V1, world=2), slot(1, V1, world=2)]), WORLD)

    def test_another_size_in_storage_is_refused_too(self) -> None:
        with pytest.raises(WorldSizeError, match="the checkpoint in storage was made by 8 ranks, this job has 3"):
            plan_recovery({}, WORLD, V1, 8)

    def test_copies_of_another_size_do_not_hide_those_of_this_one(self) -> None:
        holdings = everywhere(V1, "a") | hold(b=[slot(0, V2, world=2), slot(1, V2, world=2)])
        assert plan_recovery(holdings, WORLD).version == V1


class TestWords:
    """Loudly different: an operator must see at a glance which of these it is."""

    def test_a_first_start(self) -> None:
        assert describe(plan_recovery({}, WORLD)) == "nothing to resume yet: starting from the beginning"

    def test_a_resume_from_memory(self) -> None:
        assert describe(plan_recovery(everywhere(V1, "a"), WORLD)) == "resuming at iteration 4 from memory (1.0 s old)"

    def test_a_fall_back(self) -> None:
        plan = plan_recovery(hold(a=[slot(0, V2)]), WORLD, V1, WORLD)
        assert describe(plan) == "copies in memory exist but no common iteration: falling back to storage, iteration 4, 1 steps lost"
        assert describe(plan_recovery({}, WORLD, V1, WORLD)) == "no copies in memory: falling back to storage, iteration 4"

    def test_a_loss(self) -> None:
        text = describe(plan_recovery(hold(a=[slot(0, V2), slot(1, V2)], b=[slot(2, V1)]), WORLD))
        assert text.startswith(
            "copies of iteration 5 exist, but none of the shards of ranks [2], and no checkpoint in storage: starting from"
        )

    def test_require_refuses_a_beginning_and_nothing_else(self) -> None:
        require(plan_recovery(everywhere(V1, "a"), WORLD))
        require(plan_recovery({}, WORLD, V1, WORLD))
        with pytest.raises(
            RecoveryError, match=r"resume='require', but nothing to resume yet.*Set resume='auto' to allow that, or check run_id"
        ):
            require(plan_recovery({}, WORLD))


class TestRoots:
    """A version is whole when every shard has a copy that is what was committed."""

    def test_a_copy_with_another_root_than_the_committed_one_is_left_out(self) -> None:
        sound = [slot(owner, V1, root=f"root {owner}", committed=True) for owner in range(WORLD)]
        other = [slot(1, V1, root="another")]
        plan = plan_recovery(hold(a=other, b=sound), WORLD)
        assert (plan.version, plan.sources[1]) == (V1, ("b",))
        assert plan.roots == {owner: f"root {owner}" for owner in range(WORLD)}

    def test_where_nobody_knows_of_the_commit_copies_must_agree(self) -> None:
        sound = [slot(owner, V2) for owner in range(WORLD)]
        older = [slot(owner, V1) for owner in range(WORLD)]
        assert plan_recovery(hold(a=sound, b=[*sound, *older]), WORLD).version == V2
        assert plan_recovery(hold(a=[*sound[:-1], slot(WORLD - 1, V2, root="another")], b=[*sound, *older]), WORLD).version == V1


def _introduced(host: str, held: list[SlotInfo]) -> Introduction:
    info = HostInfo.model_construct(host=host, known=None)
    lines: dict[str, Any] = {"lineage": [], "overtaken": [], "aside": []}
    welcome = Welcome.model_construct(info=info, resumed=None, attempts=0, incarnation=None, **lines)
    ages = {info.version: info.age for info in held}
    facts: dict[str, Any] = {"configured_secret": "", "config": "{}", "orders": Orders("")}
    return Introduction(run="r", welcome=welcome, inventory=Inventory(slots=held), ages=ages, **facts)


@pytest.mark.parametrize(
    ("sound", "resumed", "asked"),
    [
        ({V1: [{0, 1}, {0, 1}], V2: [{0, 1}, {0}]}, V2, [V2]),
        ({V1: [{0, 1}, {0, 1}], V2: [{0, 1}, {0, 1}]}, V1, [V2, V1]),
        ({V1: [{0, 1}, {0, 1}], V2: [{0}, {0}]}, V1, [V2, V1]),
    ],
    ids=["one is damaged", "neither is", "both are"],
)
def test_a_newer_version_of_which_two_copies_differ_is_checked_before_it_is_passed_over(
    sound: dict[Version, list[set[int]]], resumed: Version, asked: list[Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been committed by a leader that none of these hosts hears."""
    held = [slot(owner, version, 2, committed=version == V1) for version in (V1, V2) for owner in range(2)]
    hosts, questions = {"a": held, "b": [*held[:-1], slot(1, V2, 2, root="another")]}, list[Version]()

    def ask(question: Verify, *_: Any, **__: Any) -> Any:
        questions.append(question.version)
        places = sound[question.version]
        return [Verified(version=question.version, sound=sorted(places[(len(questions) - 1) % 2]))]

    monkeypatch.setattr(resume_choice, "exchange_or_raise", lambda say, _: [say() for _ in hosts])
    everyone = [_introduced(host, slots) for host, slots in hosts.items()]
    client: Any = SimpleNamespace(call=ask)
    plan = Chooser(GeminiConfig(), client, everyone, "main", None, rank=0, resizable=False).choose().plan
    assert (plan.version, questions[::2]) == (resumed, asked)
    assert plan.sources == {0: ("a", "b"), 1: ("a",) if resumed == V2 else ("a", "b")}
