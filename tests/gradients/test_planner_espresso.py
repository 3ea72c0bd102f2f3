"""Espresso (EuroSys 2023): the decision tree counted and carried out, the timeline against a plain one, both algorithms against
plain ones and against all strategies."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

import pytest

from gemini_ft.compression.costs import FREE, Affine
from gemini_ft.compression.espresso import OptionTable, TrialStrategy, choose, offload, plan, predict
from gemini_ft.compression.espresso_options import (
    UNCOMPRESSED,
    Codec,
    ExchangePart,
    Option,
    PlannedCollective,
    Processor,
    Routine,
    TensorCosts,
    alpha_beta,
    loads,
    options,
)
from gemini_ft.compression.timeline import Backward
from gemini_ft.compression.topology import Scope, Topology

GPU, CPU = Processor.GPU, Processor.CPU
ALL = (GPU, CPU)


class TestDecisionTree:
    def test_counts_of_the_paper(self) -> None:
        """Section 3.3: |C| = 4341, of which 174 compress on GPUs only."""
        everything = options(ALL)
        assert len(everything) == len(set(everything)) == 4341
        assert sum(option.processors <= {GPU} for option in everything) == len(options()) == 174

    def test_every_dimension_is_there(self) -> None:
        def dimensions(option: Option) -> tuple[bool, bool, bool]:
            collectives = [each for each in option.operations if isinstance(each, PlannedCollective)]
            outer = [each for each in collectives if each.scope is not Scope.INTRA]
            is_divisible = any(each.step is ExchangePart.FIRST for each in outer)
            return bool(option.processors), any(each.scope is not Scope.FLAT for each in collectives), is_divisible

        assert {dimensions(option) for option in options()} == set(product((False, True), repeat=3))
        assert options()[0] == UNCOMPRESSED
        assert options(flat_only=True) == tuple(option for option in options() if not dimensions(option)[1])

    def test_moved_options_are_options(self) -> None:
        assert {option.on(CPU) for option in options()} == set(options((CPU,)))

    def test_an_option_says_what_it_is(self) -> None:
        texts = [str(option) for option in options(flat_only=True)]
        assert "compress@gpu, all-gather@flat of payloads, decompress@gpu" in texts

    def test_bad_processors(self) -> None:
        with pytest.raises(ValueError, match="once"):
            options(())
        with pytest.raises(ValueError, match="once"):
            options((GPU, GPU))


@dataclass
class Rank:
    """Holds elements ``begin:end`` of the gradient: dense values, or payloads, each of which is a list of values as well."""

    begin: int
    end: int
    dense: list[int] | None
    payloads: list[list[int]]


class Ranks:
    """Carries an option out, word for word as its module says, on lists instead of tensors."""

    def __init__(self, topology: Topology, gradients: list[list[int]]) -> None:
        self.topology = topology
        self.idle: list[dict[int, Rank]] = []  # those that wait for a second step of a rooted exchange
        self.ranks = dict(enumerate(Rank(0, len(gradient), gradient, []) for gradient in gradients))

    def groups(self, scope: Scope) -> list[list[int]]:
        def key(rank: int) -> int:
            per_machine = self.topology.ranks
            return {Scope.FLAT: 0, Scope.INTRA: rank // per_machine, Scope.INTER: rank % per_machine}[scope]

        return [[rank for rank in sorted(self.ranks) if key(rank) == color] for color in sorted({key(rank) for rank in self.ranks})]

    def run(self, operation: Codec | PlannedCollective) -> None:
        if isinstance(operation, Codec):
            for rank in self.ranks.values():
                if operation.compress:
                    assert rank.dense is not None
                    rank.dense, rank.payloads = None, [rank.dense]
                else:
                    rank.dense, rank.payloads = [sum(values) for values in zip(*rank.payloads, strict=True)], []
            return
        for rank in self.ranks.values():
            assert (rank.dense is None) == operation.compressed
        if operation.routine is Routine.BROADCAST:
            self.ranks |= {rank: replace(held) for rank, held in self.idle.pop().items()}
        groups = self.groups(operation.scope)
        idle = {}
        for group in groups:
            before = [self.ranks[rank] for rank in group]
            for place, rank in enumerate(group):
                if operation.step is ExchangePart.FIRST and not operation.sharded and place:
                    idle[rank] = self.ranks.pop(rank)
                else:
                    self.ranks[rank] = self.received(operation, before, place)
        if idle:
            self.idle.append(idle)

    def received(self, operation: PlannedCollective, before: list[Rank], place: int) -> Rank:
        if operation.step is ExchangePart.SECOND:
            parts = before if operation.sharded else before[:1]
            dense = None if operation.compressed else [value for part in parts for value in part.dense or []]
            payloads = [[v for piece in pieces for v in piece] for pieces in zip(*(part.payloads for part in parts), strict=True)]
            return Rank(parts[0].begin, parts[-1].end, dense, payloads)
        begin, end = before[0].begin, before[0].end
        assert all((rank.begin, rank.end) == (begin, end) for rank in before), "only the same elements can be added up"
        low, high = 0, end - begin
        if operation.step is ExchangePart.FIRST and operation.sharded:
            part = (end - begin) // len(before)
            low, high = place * part, (place + 1) * part
        if operation.compressed:
            return Rank(begin + low, begin + high, None, [payload[low:high] for rank in before for payload in rank.payloads])
        total = [sum(values) for values in zip(*(rank.dense or [] for rank in before), strict=True)]
        return Rank(begin + low, begin + high, total[low:high], [])


@pytest.mark.parametrize("topology", [Topology(machines=2, ranks=2), Topology(machines=3, ranks=2), Topology(machines=2, ranks=3)], ids=str)
def test_every_option_adds_up_the_gradients_of_all_ranks(topology: Topology) -> None:
    """And what each operation finds on a rank is what its costs are computed for."""
    dice = random.Random(1)
    world, elements = topology.machines * topology.ranks, 12
    gradients = [[dice.randint(-9, 9) for _ in range(elements)] for _ in range(world)]
    total = [sum(values) for values in zip(*gradients, strict=True)]
    for option in options():
        ranks = Ranks(topology, gradients)
        for operation, load in zip(option.operations, loads(option, topology), strict=True):
            held = next(iter(ranks.ranks.values()))
            assert elements == (held.end - held.begin) * load.splits, option
            assert load.payloads == max(1, len(held.payloads)), option
            if isinstance(operation, PlannedCollective) and operation.scope is Scope.INTER:
                present = set(ranks.ranks) | {rank for idle in ranks.idle[1:] for rank in idle}
                assert load.groups == len([rank for rank in present if rank < topology.ranks]), option
            ranks.run(operation)
        assert [ranks.ranks[rank].dense for rank in range(world)] == [total] * world, option


class TestCosts:
    def test_collectives_by_their_formulas(self) -> None:
        costs = alpha_beta(Topology(machines=2, ranks=4), Affine(alpha=1, beta=10), Affine(alpha=100, beta=1000))
        assert costs[Routine.ALL_REDUCE, Scope.FLAT] == Affine(alpha=14 * 100, beta=2 * 7 / 8 * 1000)
        assert costs[Routine.REDUCE_SCATTER, Scope.INTRA] == Affine(alpha=3, beta=7.5)
        assert costs[Routine.ALL_GATHER, Scope.INTER] == Affine(alpha=100, beta=1000)
        assert costs[Routine.ALL_TO_ALL, Scope.FLAT] == Affine(alpha=700, beta=2 * 1000)  # 4 ranks send a half each
        assert costs[Routine.GATHER, Scope.FLAT] == Affine(alpha=700, beta=4 * 1000)

    def test_two_steps_of_a_ring_are_one(self) -> None:
        costs = alpha_beta(Topology(machines=3, ranks=2), Affine(alpha=1, beta=10), Affine(alpha=2, beta=20))
        for scope, members in ((Scope.FLAT, 6), (Scope.INTRA, 2), (Scope.INTER, 3)):
            two = costs[Routine.REDUCE_SCATTER, scope](600) + costs[Routine.ALL_GATHER, scope](600 / members)
            assert two == pytest.approx(costs[Routine.ALL_REDUCE, scope](600))

    def test_alone_there_is_nothing_to_send(self) -> None:
        assert set(alpha_beta(Topology(machines=1, ranks=1), Affine(alpha=1, beta=10), Affine(alpha=2, beta=20)).values()) == {FREE}

    def test_one_machine_uses_no_link_between_machines(self) -> None:
        costs = alpha_beta(Topology(machines=1, ranks=4), Affine(alpha=1, beta=10), Affine(alpha=1e9, beta=1e9))
        assert costs[Routine.ALL_TO_ALL, Scope.FLAT] == costs[Routine.ALL_TO_ALL, Scope.INTRA] == Affine(alpha=3, beta=7.5)

    def test_an_option_by_hand(self) -> None:
        """Reduce-scatter within machines, compress a quarter, all-gather between 2 machines, decompress two, all-gather."""
        topology = Topology(machines=2, ranks=4)
        network = alpha_beta(topology, Affine(alpha=1, beta=10), Affine(alpha=100, beta=1000))
        costs = TensorCosts(
            topology=topology,
            network=network,
            compress={GPU: Affine(alpha=5, beta=2)},
            decompress={GPU: Affine(alpha=7, beta=3)},
            wire_bytes=lambda elements: elements // 10,
        )
        option = next(o for o in options() if str(o).startswith("reduce-scatter@intra, compress@gpu, all-gather@inter"))
        seconds = [costs.seconds(load, 400) for load in loads(option, topology)]
        assert seconds[:3] == [3 + 7.5 * 1600, 5 + 2 * 400, 100 + 1000 * 4 * 10]
        decompressed_first = next(
            o
            for o in options()
            if str(o) == "reduce-scatter@intra, compress@gpu, all-gather@inter of payloads, decompress@gpu, all-gather@intra"
        )
        assert [costs.seconds(load, 400) for load in loads(decompressed_first, topology)][3:] == [2 * (7 + 3 * 400), 3 + 30 * 400]

    def test_bad_input(self) -> None:
        with pytest.raises(ValueError, match="at least one"):
            Topology(machines=0, ranks=1)
        costs = some_costs(random.Random(0), Topology(machines=1, ranks=2))
        backward = Backward(nbytes=(8,), seconds=(1.0,))
        with pytest.raises(ValueError, match="itemsize"):
            replace(costs, itemsize=0)
        with pytest.raises(ValueError, match="same processors"):
            replace(costs, decompress={})
        with pytest.raises(ValueError, match="whole number"):
            plan(Backward(nbytes=(7,), seconds=(1.0,)), costs)
        with pytest.raises(ValueError, match="measure it"):
            plan(backward, replace(costs, network={}))
        with pytest.raises(ValueError, match="compress@cpu"):
            predict(backward, replace(costs, compress={GPU: FREE}, decompress={GPU: FREE}), [options((CPU,), flat_only=True)[1]])
        with pytest.raises(ValueError, match="one for each"):
            predict(backward, costs, [UNCOMPRESSED] * 2)


def some_costs(dice: random.Random, topology: Topology) -> TensorCosts:
    """Whole numbers of seconds, so that sums are exact in any order."""

    def cost(most: int) -> Affine:
        return Affine(alpha=dice.randint(0, most), beta=dice.randint(0, 2))

    network = {key: cost(20) for key in product(Routine, Scope)}
    return TensorCosts(
        topology=topology,
        network=network,
        compress={GPU: cost(8), CPU: cost(8)},
        decompress={GPU: cost(4), CPU: cost(4)},
        wire_bytes=lambda elements: -(-elements // 3),
        itemsize=4,
    )


def some_backward(dice: random.Random, tensors: int) -> Backward:
    sizes = [4 * dice.randint(0, 9) for _ in range(3)]
    return Backward(
        nbytes=tuple(dice.choice(sizes) for _ in range(tensors)),
        seconds=tuple(dice.randint(0, 30) for _ in range(tensors)),
        forward=dice.randint(0, 5),
    )


def plain_seconds(backward: Backward, costs: TensorCosts, chosen: list[Option]) -> Fraction:
    """The timeline in the words of its module, without what makes it fast."""
    queues: Counter[str] = Counter()
    work: Counter[str] = Counter()
    compute = Fraction(0)
    for nbytes, seconds, option in zip(backward.nbytes, backward.seconds, chosen, strict=True):
        now = queues["gpu first"] = compute = max(compute, queues["gpu first"]) + Fraction(seconds)  # type: ignore[assignment]
        work["gpu"] += Fraction(seconds)  # type: ignore[assignment]
        used = set()
        for place, load in enumerate(loads(option, costs.topology)):
            if isinstance(load.operation, Codec):
                resource, first = load.operation.processor.value, place == 0
            else:
                inside = load.operation.scope is Scope.INTRA or costs.topology.machines == 1
                resource = "inside" if inside else "between"
                first = resource not in used
            used.add(resource)
            queue = f"{resource} {'first' if first else 'later'}"
            took = Fraction(costs.seconds(load, nbytes // costs.itemsize))
            now = queues[queue] = max(now, queues[queue]) + took  # type: ignore[type-var]
            work[resource] += took  # type: ignore[assignment]
    return Fraction(backward.forward) + max(*queues.values(), *work.values())


def exchange_of(backward: Backward, costs: TensorCosts, candidates: tuple[Option, ...]) -> TrialStrategy:
    table = OptionTable(candidates, [option.on(CPU) for option in candidates], costs)
    return TrialStrategy(backward, table, [UNCOMPRESSED] * len(backward))


@pytest.mark.parametrize("topology", [Topology(machines=1, ranks=4), Topology(machines=3, ranks=1), Topology(machines=2, ranks=4)], ids=str)
class TestTimeline:
    def test_equals_the_plain_one(self, topology: Topology) -> None:
        dice = random.Random(2)
        allowed = options(ALL, flat_only=topology.flat_only)
        for _ in range(200):
            backward, costs = some_backward(dice, dice.randint(1, 12)), some_costs(dice, topology)
            chosen = [dice.choice(allowed) for _ in backward.nbytes]
            assert predict(backward, costs, chosen) == plain_seconds(backward, costs, chosen)

    def test_what_changes_are_said_to_give_is_what_they_give(self, topology: Topology) -> None:
        dice = random.Random(3)
        allowed = options(flat_only=topology.flat_only)
        for _ in range(30):
            backward, costs = some_backward(dice, dice.randint(1, 12)), some_costs(dice, topology)
            exchange = exchange_of(backward, costs, allowed)
            for _ in range(20):
                tensor = dice.randrange(len(backward))
                number = dice.randrange(exchange.table.choices)
                said = exchange.seconds_with(tensor)[number]
                exchange.assign(tensor, number)
                assert exchange.seconds() == said == plain_seconds(backward, costs, list(exchange.options))


class TestAlgorithms:
    topology = Topology(machines=2, ranks=2)
    some = tuple(options())[::7]

    def instance(self, dice: random.Random, tensors: int) -> tuple[Backward, TensorCosts]:
        return some_backward(dice, tensors), some_costs(dice, self.topology)

    def test_algorithm_1_is_the_plain_one(self) -> None:
        dice = random.Random(4)
        for _ in range(40):
            backward, costs = self.instance(dice, dice.randint(1, 5))
            exchange = exchange_of(backward, costs, (UNCOMPRESSED, *self.some))
            choose(exchange, backward.nbytes)
            chosen = [UNCOMPRESSED] * len(backward)
            for tensor in sorted(range(len(backward)), key=lambda index: (backward.nbytes[index], index), reverse=True):

                def key(option: Option, tensor: int = tensor, chosen: list[Option] = chosen) -> tuple[Fraction, float, int]:
                    seconds = plain_seconds(backward, costs, [*chosen[:tensor], option, *chosen[tensor + 1 :]])  # noqa: B023
                    elements = backward.nbytes[tensor] // 4  # noqa: B023
                    work = sum(costs.seconds(load, elements) for load in loads(option, self.topology))  # noqa: B023
                    return seconds, work, exchange.table.number[option]  # noqa: B023

                best = min(exchange.table.options[: exchange.table.choices], key=key)
                if key(best)[0] < plain_seconds(backward, costs, chosen):
                    chosen[tensor] = best
            assert list(exchange.options) == chosen

    def test_tensors_before_a_bubble_are_safe_to_skip(self) -> None:
        dice = random.Random(5)
        skipped = 0
        for _ in range(400):
            backward, costs = self.instance(dice, dice.randint(1, 10))
            one, other = (exchange_of(backward, costs, (UNCOMPRESSED, *self.some)) for _ in range(2))
            skipped += one.last_bubble()
            choose(one, backward.nbytes, skip=True)
            choose(other, backward.nbytes, skip=False)
            assert one.options == other.options
        assert skipped

    def test_a_single_tensor_takes_the_best_option(self) -> None:
        dice = random.Random(6)
        for _ in range(100):
            backward, costs = self.instance(dice, 1)
            gpu_only = replace(costs, compress={GPU: costs.compress[GPU]}, decompress={GPU: costs.decompress[GPU]})
            assert plan(backward, gpu_only).seconds == min(plain_seconds(backward, costs, [option]) for option in options())

    def test_offloading_is_the_best_of_all_counts(self) -> None:
        """Theorem 1: of all numbers of tensors of each group, the first of them."""
        dice = random.Random(7)
        improved = 0
        for _ in range(150):
            backward, costs = self.instance(dice, dice.randint(1, 7))
            exchange = exchange_of(backward, costs, (UNCOMPRESSED, *self.some))
            choose(exchange, backward.nbytes)
            chosen = list(exchange.options)
            before = exchange.seconds()
            alike: dict[tuple[int, Option], list[int]] = {}
            for tensor, option in enumerate(chosen):
                if GPU in option.processors:
                    alike.setdefault((backward.nbytes[tensor], option), []).append(tensor)
            best = before
            for counts in product(*(range(len(group) + 1) for group in alike.values())):
                moved = {tensor for count, group in zip(counts, alike.values(), strict=True) for tensor in group[:count]}
                strategy = [option.on(CPU) if tensor in moved else option for tensor, option in enumerate(chosen)]
                best = min(best, plain_seconds(backward, costs, strategy))  # type: ignore[assignment]
            offload(exchange, backward.nbytes, exhaustive=10**6)
            assert exchange.seconds() == best
            improved += best < before
        assert improved

    def test_one_group_at_a_time_is_never_slower_and_ends_where_no_single_group_can_do_better(self) -> None:
        dice = random.Random(8)
        for _ in range(100):
            backward, costs = self.instance(dice, 10)
            exchange, exact = (exchange_of(backward, costs, (UNCOMPRESSED, *self.some)) for _ in range(2))
            for each in (exchange, exact):
                choose(each, backward.nbytes)
            before = exchange.seconds()
            offload(exchange, backward.nbytes, exhaustive=1)
            offload(exact, backward.nbytes, exhaustive=10**6)
            assert exact.seconds() <= exchange.seconds() <= before

    def test_never_slower_than_without_compression(self) -> None:
        dice = random.Random(9)
        for _ in range(40):
            backward, costs = self.instance(dice, 12)
            found = plan(backward, costs)
            assert found.seconds == plain_seconds(backward, costs, list(found.options))
            assert found.seconds <= predict(backward, costs, [UNCOMPRESSED] * 12)

    def test_how_far_from_the_best_of_all_strategies(self) -> None:
        """Algorithm 1 decides once for each tensor: it is not exact. It must not be better either, and seldom worse."""
        dice = random.Random(10)
        exact = 0
        few = (UNCOMPRESSED, *dice.sample(options(), 5))
        for _ in range(60):
            backward, costs = self.instance(dice, 3)
            exchange = exchange_of(backward, costs, few)
            choose(exchange, backward.nbytes)
            best = min(plain_seconds(backward, costs, list(strategy)) for strategy in product(dict.fromkeys(few), repeat=3))
            assert exchange.seconds() >= best
            exact += exchange.seconds() == best
        assert exact > 45

    def test_costs_of_the_cpu_only(self) -> None:
        costs = some_costs(random.Random(11), self.topology)
        only = replace(costs, compress={CPU: FREE}, decompress={CPU: FREE}, wire_bytes=lambda elements: 0)
        found = plan(Backward(nbytes=(4000,), seconds=(1.0,)), only)
        assert found.seconds < predict(Backward(nbytes=(4000,), seconds=(1.0,)), only, [UNCOMPRESSED])
        assert found.options[0].processors == {CPU}

    def test_nothing_costs_anything(self) -> None:
        network = dict.fromkeys(product(Routine, Scope), FREE)
        costs = TensorCosts(
            topology=self.topology, network=network, compress={GPU: FREE}, decompress={GPU: FREE}, wire_bytes=lambda elements: elements
        )
        found = plan(Backward(nbytes=(0, 4), seconds=(0.0, 0.0)), costs)
        assert found.options == (UNCOMPRESSED, UNCOMPRESSED)
        assert found.seconds == 0


def test_planning_needs_no_torch() -> None:
    code = "import sys, gemini_ft.compression.espresso; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
