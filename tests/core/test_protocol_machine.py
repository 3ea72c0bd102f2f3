"""The commit and recovery protocol under random interleavings (gemini_ft.core.slots, protocol, ledger, recovery).

What must never happen, whatever order messages, copies, commits, crashes and restarts come in:

- a mixed iteration: every complete slot, manifest and resumed shard holds the bytes of one version, all of them;
- a lost committed iteration, while a host that had a copy of it lives for every shard;
- a slot granted for writing while somebody reads it, or somebody else writes to it;
- a commit without the bytes at every holder that counts;
- a standstill: once everything is delivered, commits advance, replicas come back, uploads end.

The invariants are those of GEMINI (SOSP'23), section 5.1, and of docs/design.md, section 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from miniature.host import LeaderLink, Node
from miniature.job import Job
from miniature.worker import Uploading

picks = st.integers(0, 63)
seeds = st.integers(0, 2**32 - 1)


class Machine(RuleBasedStateMachine):
    """Drives a job; hypothesis chooses what happens next."""

    job: Job

    @initialize(
        hosts=st.integers(1, 5),
        replicas=st.integers(1, 3),
        ranks=st.integers(1, 2),
        every=st.sampled_from([None, 1, 2, 3]),
        fan_in=st.sampled_from([64, 1, 2]),
    )
    def start(self, hosts: int, replicas: int, ranks: int, every: int | None, fan_in: int) -> None:
        """Above the fan-in, hosts report to collectors: one of them, or two with five hosts."""
        self.job = Job(hosts, ranks, replicas, every, fan_in)
        self.job.restart(Random(0))
        self.job.settle(Random(0))

    # -- ordinary life

    @rule(pick=picks)
    def happen(self, pick: int) -> None:
        """One event: a frame arrives, a chunk is copied, sent, uploaded, ..."""
        if events := self.job.events():
            events[pick % len(events)][1]()

    @rule(seed=seeds, steps=st.integers(1, 200), asleep=st.sampled_from([0.0, 0.2, 0.6]))
    def go_on(self, seed: int, steps: int, asleep: float) -> None:
        """A stretch of everything that goes on side by side, training included; some take no part in it."""
        rng = Random(seed)
        sleepers = {who for who, _ in self.job.events() if rng.random() < asleep}
        for _ in range(steps):
            possible = [event for who, event in self.job.events() if who not in sleepers]
            possible += [worker.train for worker in self.job.trainers() if worker not in sleepers]
            if possible:
                rng.choice(possible)()
                self.job.verify()

    @rule(seed=seeds, iterations=st.integers(1, 5), events=st.integers(0, 60))
    def train(self, seed: int, iterations: int, events: int) -> None:
        """A few iterations, with so many events in each."""
        for iteration in range(iterations):
            for worker in self.job.trainers():
                worker.train()
            self.go_on(seed + iteration, events, 0.0)

    @rule(pick=picks)
    def be_late(self, pick: int) -> None:
        """A rank gives its snapshot up: the next update is due, or something wrote during the copy."""
        if workers := self.job.workers():
            workers[pick % len(workers)].skip()

    @rule()
    def change_layout(self) -> None:
        if len(self.job.layout_changes) < 5:
            self.job.change_layout()

    @rule()
    def wait(self) -> None:
        self.job.wait()

    @rule(seed=seeds)
    def read(self, seed: int) -> None:
        self.job.read(Random(seed))

    # -- faults

    @rule(pick=picks, seed=seeds)
    def break_connection(self, pick: int, seed: int) -> None:
        """The dialling end notices at once, the other one when it has read what had arrived."""
        if links := self.job.links():
            links[pick % len(links)].close_near(Random(seed))

    @rule(pick=picks, hangs=st.booleans())
    def hang(self, pick: int, hangs: bool) -> None:
        """Nothing passes from one host's replication to another's any more, and nobody is told; or it passes again."""
        self.job.hung.clear()
        if hangs and (pairs := sorted({link.names for link in self.job.links() if link.role == "replicate"})):
            self.job.hung.add(pairs[pick % len(pairs)])

    @rule(pick=picks)
    def stop_agent(self, pick: int) -> None:
        """An agent stands still, the leader's perhaps, in whatever goes on; its connections stay, and its workers train on."""
        if nodes := [node for node in self.job.nodes.values() if node.alive]:
            self.job.stopped.add(nodes[pick % len(nodes)])

    @rule(pick=picks, replaced=st.booleans())
    def end_of_a_stop(self, pick: int, replaced: bool) -> None:
        """It goes on, and hears all that has come meanwhile; or somebody has noticed, and another takes its place."""
        if stopped := [node for node in self.job.nodes.values() if node in self.job.stopped]:
            node = stopped[pick % len(stopped)]
            self.job.stopped.discard(node)
            if replaced and any(worker.alive for worker in node.current()):
                node.restart_agent()

    @rule(picks=st.lists(picks, min_size=1, max_size=3))
    def miss_the_leader(self, picks: list[int]) -> None:
        """Hosts take the leader for lost, rightly or not. One alone changes nothing but its connection."""
        links = [node.leader for node in self.job.nodes.values() if node.alive and node.leader is not None]
        for pick in picks if links and self.job.phase == "running" else ():
            links[pick % len(links)].give_up()

    @rule(lies=st.integers(1, 3))
    def lie(self, lies: int) -> None:
        """Something between two hosts exchanges chunks, each with its checksum."""
        self.job.lies = lies

    @rule(pick=picks, what=st.sampled_from(["upload", "agent", "worker", "host"]), seed=seeds, patience=st.integers(0, 100))
    def fail(self, pick: int, what: str, seed: int, patience: int) -> None:
        """Something dies. After a worker's or a host's death the job starts again, sooner or later."""
        nodes = [node for node in self.job.nodes.values() if node.alive]
        candidates: list[Callable[[], None]] = {
            "upload": [upload.fail for node in nodes for upload in node.uploads],
            "agent": [node.restart_agent for node in nodes if any(worker.alive for worker in node.current())],
            "worker": [worker.die for worker in self.job.workers()],
            "host": [partial(self.job.crash, node) for node in nodes[1:]],
        }[what]
        if candidates:
            candidates[pick % len(candidates)]()
        if patience and what in ("worker", "host"):
            self.restart_job(seed, patience, 0.0, False)

    @rule(seed=seeds, patience=st.integers(0, 100), surviving=st.sampled_from([0.0, 0.3, 1.0]), refuse=st.booleans())
    def restart_job(self, seed: int, patience: int, surviving: float, refuse: bool) -> None:
        """A new rendezvous, with so many events before the next disturbance. Workers that survive do not know of it."""
        rng = Random(seed)
        self.job.restart(rng, surviving, refuse)
        while self.job.phase != "running" and patience > 0 and (events := self.job.events()):
            rng.choice(events)[1]()
            self.job.verify()
            patience -= 1

    # -- the truth

    @invariant()
    def nothing_is_mixed_or_lost(self) -> None:
        if hasattr(self, "job"):
            self.job.verify()

    def teardown(self) -> None:
        if hasattr(self, "job") and sys.exc_info()[1] is None:
            self.job.drain(Random(1), hang=self.job.size % 2 == 0)


def test_a_choice_that_lacks_what_a_worker_hands_back_meanwhile_is_made_anew() -> None:
    """A restarted agent gives its inventory; only then does it read what a worker had handed back, which has died since."""
    rng = Random(1)  # with which both hosts take part in every attempt
    job = Job(hosts=2, ranks_per_host=1, replicas=1, every=None)
    job.restart(rng)
    job.settle(rng)
    for worker in job.trainers():
        worker.train()
    job.settle(rng)
    (committed,) = job.truth.committed
    node, other = job.nodes.values()
    node.restart_agent()
    job.restart(rng)
    job.gather(node)
    (hand_back,) = [event for who, event in job.events() if who == (node.workers[0], "agent")]
    hand_back()
    assert job.phase == "broken"
    job.restart(rng)
    assert set(job.crew) == {node, other}
    for each in (node, other):
        job.gather(each)
    assert job.session is not None
    assert job.session.resumed == committed
    job.drain(rng, hang=False)


def test_what_a_worker_told_an_agent_that_hung_is_not_waited_for() -> None:
    """Rank 1 gives its first snapshot up, and its agent is replaced before it has read that; the other's copy is not committed for ever."""
    rng = Random(1)
    job = Job(hosts=2, ranks_per_host=1, replicas=2, every=None)
    job.restart(rng)
    job.settle(rng)
    first, second = sorted(job.workers(), key=lambda worker: worker.rank)
    first.train()
    second.train()
    job.stopped.add(second.node)
    job.settle(rng)
    second.skip()
    job.stopped.clear()
    second.node.restart_agent()
    job.settle(rng)
    first.train()
    job.settle(rng)
    assert first.state == "ready", "its second snapshot waits for the end of its first"


@pytest.mark.parametrize("writes_after_its_time", [False, True])
def test_a_manifest_that_a_stopped_leader_was_about_to_write_names_what_is_there(writes_after_its_time: bool) -> None:
    """Another leads meanwhile, and has told the hosts that the upload is over without a checkpoint."""
    rng = Random(1)
    job = Job(hosts=3, ranks_per_host=1, replicas=2, every=1)
    job.restart(rng)
    job.settle(rng)
    leader = next(node for node in job.crew if node.ledger is not None)
    for _ in range(2):  # digests are due from the second iteration on
        for worker in job.trainers():
            worker.train()
        while events := [event for who, event in job.events() if who is not leader]:
            rng.choice(events)()
    assert leader.manifest is not None
    version = leader.manifest.version
    job.stopped.add(leader)
    while events := [event for who, event in job.events() if not isinstance(who, Uploading)]:
        rng.choice(events)()
    others = [node for node in job.crew if node is not leader]
    assert all((node.uploading, node.epoch >= 1) == (None, True) for node in others), [(node.uploading, node.epoch) for node in others]
    job.stopped.clear()
    if not writes_after_its_time:  # else it may write before it hears of the other one
        leader.follow(max(node.epoch for node in others))
        assert [each.version for each in job.storage.under_way] == [version]
    job.settle(rng)
    assert version in job.storage.manifests
    job.drain(rng, hang=False)


class Tree:
    """A job of four hosts with two ranks each: the leader, a collector, and two that can report to either."""

    def __init__(self) -> None:
        self.rng = Random(1)
        self.job = Job(hosts=4, ranks_per_host=2, replicas=1, every=None, fan_in=1)
        self.job.restart(self.rng)
        self.job.settle(self.rng)
        self.leader, self.collector, self.one, self.other = (node for node in self.job.crew)
        self.held_back = list[object]()  # whatever happens, except for these
        self.turn(self.other, self.leader)

    def happen(self) -> None:
        while events := [event for who, event in self.job.events() if who not in self.held_back]:
            self.rng.choice(events)()
            self.job.verify()

    def turn(self, node: Node, up: Node) -> LeaderLink:
        """A host reports to another one from now on."""
        link = node.leader
        assert link is not None
        if link.connection is not None:
            link.connection.close_near()
        link.dial(up.name)
        self.happen()
        assert link.connection is not None
        assert link.connection.names == (node.name, up.name)
        return link

    def train(self, *nodes: Node) -> None:
        for node in nodes:
            for worker in node.current():
                worker.train()
        self.happen()

    def restart_agent(self, node: Node) -> None:
        """Another agent, to which one of two workers has handed its memory back; the other does not for the time being."""
        node.restart_agent()
        first, second = node.workers
        self.held_back += [(second, "agent"), second]
        (hand_back,) = [event for who, event in self.job.events() if who == (first, "agent")]
        hand_back()

    def end(self, committed: int) -> None:
        """Nothing is held back any more, and all that was trained is committed."""
        self.held_back.clear()
        self.happen()
        assert len(self.job.truth.committed) == committed
        self.job.drain(self.rng, hang=False)


def test_what_a_stopped_collector_still_has_of_an_agent_that_is_gone_does_not_count() -> None:
    """The next agent of that host, which has turned to the leader, would be told that its copies agree, and lacks one."""
    tree = Tree()
    tree.turn(tree.one, tree.collector)
    tree.job.stopped.add(tree.collector)
    tree.train(tree.one)
    tree.restart_agent(tree.one)
    tree.turn(tree.one, tree.leader)
    tree.train(tree.leader, tree.other, tree.collector)
    tree.job.stopped.clear()
    tree.happen()
    assert not tree.job.truth.committed
    tree.end(committed=1)


def test_what_the_leader_has_told_an_agent_that_is_gone_is_not_passed_down_to_the_next() -> None:
    """It has greeted the collector, which the leader does not know yet; what comes down meanwhile is for the agent before it."""
    tree = Tree()
    up = tree.turn(tree.collector, tree.leader).connection
    tree.held_back.append((up, "backward"))
    tree.turn(tree.one, tree.collector)
    tree.train(tree.leader, tree.collector, tree.one)
    tree.restart_agent(tree.one)
    tree.held_back.append((up, "forward"))
    tree.turn(tree.one, tree.collector)
    tree.train(tree.other)
    assert len(tree.job.truth.committed) == 1
    tree.held_back.remove((up, "backward"))
    tree.happen()
    tree.end(committed=1)


def test_a_host_that_greets_is_told_nothing_before_the_leader_has_heard_it() -> None:
    """A message to all hosts reaches only those whose copies the leader knows of at that moment."""
    tree = Tree()
    tree.train(tree.leader, tree.collector, tree.one)
    tree.restart_agent(tree.one)
    assert tree.one.leader is not None
    tree.one.leader.dial(tree.leader.name)
    tree.held_back.append((tree.one.leader.connection, "forward"))
    tree.train(tree.other)
    assert len(tree.job.truth.committed) == 1
    tree.end(committed=1)


@pytest.mark.timeout(1200)  # what has been found is made as short as can be, which takes minutes
def test_random_interleavings() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=120, stateful_step_count=40))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tenth", range(10))
def test_many_more_interleavings(tenth: int) -> None:
    """5,000 in all, of up to 100 steps each."""
    run_state_machine_as_test(Machine, settings=settings(max_examples=500, stateful_step_count=100))
