"""Every option of Espresso's decision tree carried out: sums, bits, bytes, residuals."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compression_kit import Gradients, bits, gradients, same, through_a_file, together
from exchange_kit import simulate
from rank_kit import World
from torch import Tensor

from gemini_ft.compression.base import Bundle, Compressor, Reducer, Turn
from gemini_ft.compression.cast import Identity
from gemini_ft.compression.collective import ScopedGroups, reduce, run, turn
from gemini_ft.compression.espresso_executor import OptionExecutor
from gemini_ft.compression.espresso_options import UNCOMPRESSED, Codec, ExchangePart, Option, PlannedCollective, Processor, loads, options
from gemini_ft.compression.methods import COMPRESSORS, create
from gemini_ft.compression.topology import Scope, Topology

HALF_ULP = 2.0**-24  # of a float32, relative
TOPOLOGIES = [Topology(machines=machines, ranks=ranks) for machines, ranks in ((1, 1), (1, 2), (1, 4), (4, 1), (2, 2), (3, 2), (2, 4))]
SHAPES = {"matrix": (13, 17), "three": (3,), "scalar": (1,), "zero_d": (), "even": (4, 16)}  # smaller than the world, too
WITH = {"topk": {"ratio": 0.2}, "efsignsgd": {}, "qsgd": {}, "randomk": {"ratio": 0.2}}
ALL = (Processor.GPU, Processor.CPU)

every_topology = pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)

Share = Callable[[int, int], list[Option]]


@pytest.fixture(params=["in turn", pytest.param("all", marks=pytest.mark.soak)])
def share(request: pytest.FixtureRequest) -> Share:
    """Returns the options that one case of a test covers: the cases share the options out, and in the soak each case has all."""
    return (lambda number, count: options()[number::count]) if request.param == "in turn" else (lambda number, count: options())


def compressor(name: str) -> Compressor:
    return COMPRESSORS[name](**WITH[name])


def team(name: str, option: Option | Mapping[str, Option], topology: Topology, **more: Any) -> list[OptionExecutor]:
    """An executor for each rank."""
    return [OptionExecutor(compressor(name), option, topology, **more) for _ in range(topology.world)]


def ranks_of(topology: Topology, step: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> list[Gradients]:
    return [gradients(100 * step + rank, shapes) for rank in range(topology.world)]


def mean_error(found: Gradients, ranks: Sequence[Gradients]) -> float:
    """In half units of the last place of the mean magnitude, the worst of all elements."""
    worst = 0.0
    for name, value in found.items():
        exact = sum(rank[name].double() for rank in ranks) / len(ranks)
        size = sum(rank[name].double().abs() for rank in ranks) / len(ranks)
        worst = max(worst, float(((value - exact).abs() / size).max()) / HALF_ULP)
    return worst


# -- sums


@every_topology
def test_every_option_gives_the_mean(topology: Topology, share: Share) -> None:
    """Of n ranks by n - 1 additions and one division in float32: each is half a unit in the last place off, at most."""
    ranks = ranks_of(topology, 0)
    for option in share(TOPOLOGIES.index(topology), len(TOPOLOGIES)):
        executors = [OptionExecutor(Identity(), option, topology) for _ in ranks]
        assert mean_error(together(executors, ranks, 0, topology=topology), ranks) <= topology.world + 1, option


def test_alone_every_option_changes_nothing() -> None:
    given = gradients(0, SHAPES)
    for option in options():
        assert same(reduce(OptionExecutor(Identity(), option, Topology(machines=1, ranks=1)), given, 0), given)


def test_options_of_both_processors_give_the_bits_of_one() -> None:
    dice = random.Random(1)
    for topology in (Topology(machines=2, ranks=2), Topology(machines=3, ranks=2)):
        ranks = ranks_of(topology, 0)
        for option in dice.sample(options(ALL), 60):
            found = together(team("topk", option, topology), ranks, 0, topology=topology)
            assert same(found, together(team("topk", option.on(Processor.GPU), topology), ranks, 0, topology=topology)), option


@pytest.mark.gpu
def test_the_cpu_compresses_what_a_gpu_holds() -> None:
    topology = Topology(machines=2, ranks=2)
    ranks = [{name: value.cuda() for name, value in rank.items()} for rank in ranks_of(topology, 0)]
    for option in random.Random(2).sample(options(ALL), 100):
        executors = [OptionExecutor(Identity(), option, topology) for _ in ranks]
        bundles = [Bundle.of(tensors, each.align) for each, tensors in zip(executors, ranks, strict=True)]
        turns = [Turn(step=0, rank=rank, world=topology.world) for rank in range(topology.world)]
        results = simulate([e.exchange(bundle, at) for e, bundle, at in zip(executors, bundles, turns, strict=True)], topology)
        for result in results:
            assert result.flat.is_cuda
            assert mean_error({name: value.cpu() for name, value in result.tensors().items()}, ranks_of(topology, 0)) <= 5, option


@pytest.mark.parametrize("name", WITH)
def test_all_ranks_hold_the_same_bits(name: str, share: Share) -> None:
    """Also where several machines compress the same values with random rounding; `together` compares."""
    for number, option in enumerate(share([*WITH].index(name), len(WITH))):
        topology = TOPOLOGIES[number % len(TOPOLOGIES)]
        executors = team(name, option, topology)
        for step in range(2):
            together(executors, ranks_of(topology, step), step, topology=topology)


KNOWN = [
    ("none", {}, "all-reduce@flat"),
    ("topk", {}, "compress@gpu, all-gather@flat of payloads, decompress@gpu"),
    ("efsignsgd", {}, "compress@gpu, all-gather@flat of payloads, decompress@gpu"),
    (
        "topk",
        {"two_phase": True},
        "compress@gpu, all-to-all@flat of payloads, decompress@gpu, compress@gpu, all-gather@flat of payloads, decompress@gpu",
    ),
]


@pytest.mark.parametrize(("name", "more", "text"), KNOWN)
def test_options_that_are_methods_give_their_bits(name: str, more: dict[str, Any], text: str) -> None:
    """On 4 ranks, so that dividing a sum early or late makes no difference."""
    topology = Topology(machines=2, ranks=2)
    (option,) = (option for option in options() if str(option) == text)
    executors: list[Reducer] = [OptionExecutor(COMPRESSORS[name](**WITH.get(name, {})), option, topology) for _ in range(4)]
    methods = [create(name, **more, **WITH.get(name, {})) for _ in range(4)]
    for step in range(4):
        ranks = ranks_of(topology, step)
        assert same(together(executors, ranks, step, topology=topology), together(methods, ranks, step))


def test_each_tensor_by_its_own_option() -> None:
    topology, dice = Topology(machines=2, ranks=2), random.Random(3)
    for _ in range(20):
        chosen = {name: dice.choice(options()) for name in SHAPES}
        chosen["even"] = chosen["matrix"]
        mixed, single = team("qsgd", chosen, topology), team("qsgd", chosen, topology)
        for step in range(2):
            ranks = ranks_of(topology, step)
            found = together(mixed, ranks, step, topology=topology)
            for name in SHAPES:
                assert same(together(single, [{name: rank[name]} for rank in ranks], step, topology=topology), {name: found[name]})
        layout = Bundle.of(ranks[0], mixed[0].align).layout
        assert mixed[0].wire_bytes(layout) == sum(
            mixed[0].wire_bytes(Bundle.of({name: ranks[0][name]}, mixed[0].align).layout) for name in SHAPES
        )


def test_sixteen_bits_in_sixteen_bits_out() -> None:
    topology = Topology(machines=2, ranks=2)
    narrow = [{name: value.bfloat16() for name, value in rank.items()} for rank in ranks_of(topology, 0)]
    wide = [{name: value.float() for name, value in rank.items()} for rank in narrow]
    for option in options()[::5]:
        found = together(team("topk", option, topology), narrow, 0, topology=topology)
        expected = together(team("topk", option, topology), wide, 0, topology=topology)
        assert same(found, {name: value.bfloat16() for name, value in expected.items()})


@every_topology
def test_gradients_are_only_read(topology: Topology, share: Share) -> None:
    """A single float32 tensor is lent without a copy, and no collective of one rank makes one."""
    for option in share(TOPOLOGIES.index(topology), len(TOPOLOGIES)):
        executors = team("topk", option, topology)
        for step in range(2):
            ranks = ranks_of(topology, step, {"even": (4, 16)})
            before = [rank["even"].clone() for rank in ranks]
            together(executors, ranks, step, topology=topology)["even"].add_(1)
            assert all(torch.equal(rank["even"], value) for rank, value in zip(ranks, before, strict=True)), option


# -- bytes


@pytest.mark.parametrize("name", ["none", "topk", "qsgd"])
def test_as_many_bytes_as_the_costs_are_computed_for(name: str, share: Share) -> None:
    """Exactly, where parts are equal and a part's payload is that part of the whole's."""
    inner = COMPRESSORS[name](**({"ratio": 0.25} if name == "topk" else {}))
    elements = 24 * inner.align
    topologies = (
        Topology(machines=1, ranks=4),
        Topology(machines=2, ranks=2),
        Topology(machines=3, ranks=2),
        Topology(machines=2, ranks=4),
    )
    for option, topology in ((option, each) for number, each in enumerate(topologies) for option in share(number, len(topologies))):
        executors = [OptionExecutor(inner, option, topology) for _ in range(topology.world)]
        sent: list[list[Tensor]] = [[] for _ in executors]
        ranks = ranks_of(topology, 0, {"w": (elements,)})
        together(executors, ranks, 0, topology=topology, sent=sent)
        expected = []
        for load in loads(option, topology):
            if isinstance(load.operation, PlannedCollective):
                held = elements // load.splits
                layout = Bundle.of({"w": torch.zeros(held)}, inner.align).layout
                expected.append(load.payloads * inner.wire_bytes(layout) if load.operation.compressed else 4 * held)
        found = [[tensor.nbytes for tensor in tensors] for tensors in sent]
        assert found[0] == expected, option
        assert sum(expected) == executors[0].wire_bytes(Bundle.of(ranks[0], inner.align).layout)
        if all(each.sharded for each in option.operations if isinstance(each, PlannedCollective)):
            assert all(each == expected for each in found)
        assert all(set(each) <= {0, *expected} for each in found)


@pytest.mark.parametrize("name", WITH)
def test_as_many_bytes_as_the_formula_says(name: str, share: Share) -> None:
    for number, option in enumerate(share([*WITH].index(name), len(WITH))):
        topology = TOPOLOGIES[number % len(TOPOLOGIES)]
        executors = team(name, option, topology)
        sent: list[list[Tensor]] = [[] for _ in executors]
        ranks = ranks_of(topology, 0)
        together(executors, ranks, 0, topology=topology, sent=sent)
        nbytes = [sum(tensor.nbytes for tensor in tensors) for tensors in sent]
        assert max(nbytes) == nbytes[0] == executors[0].wire_bytes(Bundle.of(ranks[0], executors[0].align).layout), option


# -- residuals and state


def owed(executor: OptionExecutor, option: Option, rank: int, name: str, size: int) -> Tensor:
    """What this rank's residuals miss in the sum of one tensor, float64 (size,); of equal residuals only one machine's counts."""
    topology, repeated, stages, worlds = executor.topology, False, [], []
    for operation in option.operations:
        if isinstance(operation, Codec):
            stages += [repeated] if operation.compress else []
            continue
        if operation.step is ExchangePart.FIRST and operation.sharded:
            worlds.append(topology.members(operation.scope))
        repeated |= operation.scope is Scope.INTER and operation.step is not ExchangePart.FIRST
    total = torch.zeros(size, dtype=torch.float64)
    for key, value in executor.state_dict()["residuals"].items():
        found = re.fullmatch(rf"{name}((?:/\d+)*)(?:#(\d+))?", key)
        if found is None or (stages[int(found[2] or 0)] and rank >= topology.ranks):
            continue
        begin, end = 0, size
        for place, world in zip(map(int, found[1].split("/")[1:]), worlds, strict=False):
            run = -(-(end - begin) // world)
            begin, end = min(end, begin + place * run), min(end, begin + (place + 1) * run)
        total[begin:end] += value
    return total


@pytest.mark.parametrize("name", WITH)
def test_nothing_is_lost_over_many_steps(name: str, share: Share) -> None:
    """What was sent and all residuals make up the gradients. Each step rounds at most 4 n + 8 values, none of them larger than
    what all n ranks hold together."""
    steps = 3
    for number, option in enumerate(option for option in share([*WITH].index(name), len(WITH)) if option.processors):
        topology = (Topology(machines=2, ranks=2), Topology(machines=3, ranks=2), Topology(machines=1, ranks=4))[number % 3]
        executors = team(name, option, topology)
        total = {key: torch.zeros(shape, dtype=torch.float64) for key, shape in SHAPES.items()}
        largest = dict.fromkeys(SHAPES, 0.0)
        for step in range(steps):
            ranks = ranks_of(topology, step)
            means = together(executors, ranks, step, topology=topology)
            for key in SHAPES:
                total[key] += sum(rank[key].double() for rank in ranks) - means[key].double() * topology.world
                held = [abs(value).max() for each in executors for at, value in each.residuals.state_dict().items() if at.startswith(key)]
                largest[key] = max([largest[key], *map(float, held), *(float(rank[key].abs().max()) for rank in ranks)])
        for key, value in total.items():
            left = sum(owed(each, option, rank, key, value.numel()) for rank, each in enumerate(executors))
            bound = steps * (4 * topology.world + 8) * HALF_ULP * 2 * topology.world * largest[key]
            assert (value.flatten() - left).abs().max() <= bound, (option, key)


@pytest.mark.parametrize("name", ["topk", *(pytest.param(name, marks=pytest.mark.soak) for name in ("qsgd", "randomk"))])
def test_a_restored_state_goes_on_as_if_never_interrupted(name: str) -> None:
    for number, option in enumerate(options()[1::4]):
        topology = (Topology(machines=2, ranks=2), Topology(machines=3, ranks=2), Topology(machines=1, ranks=4))[number % 3]
        executors = team(name, option, topology)
        for step in range(2):
            together(executors, ranks_of(topology, step), step, topology=topology)
        restored = team(name, option, topology)
        for old, new in zip(executors, restored, strict=True):
            new.load_state_dict(through_a_file(old.state_dict()))
        for step in range(2, 4):
            ranks = ranks_of(topology, step)
            expected = together(executors, ranks, step, topology=topology)
            halves = [together(restored, [{key: rank[key] for key in half} for rank in ranks], step, topology=topology) for half in HALVES]
            assert same({**halves[0], **halves[1]}, {key: expected[key] for half in HALVES for key in half}), option


HALVES = (("scalar", "matrix"), ("three", "zero_d", "even"))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("name", WITH)
def test_what_is_not_finite_is_seen_by_all_and_spares_the_rest(name: str, poison: float, share: Share) -> None:
    topology = Topology(machines=2, ranks=2)
    for option in share([*WITH].index(name) + (len(WITH) if poison == math.inf else 0), 2 * len(WITH)):
        disturbed, undisturbed = team(name, option, topology), team(name, option, topology)
        for step in range(3):
            ranks = ranks_of(topology, step)
            others = [{key: value for key, value in rank.items() if key != "matrix"} for rank in ranks]
            expected = together(undisturbed, others, step, topology=topology)
            before = {key: value.clone() for key, value in disturbed[1].residuals.state_dict().items()}
            if step == 1:
                ranks[1]["matrix"][3, 5] = poison
            means = together(disturbed, ranks, step, topology=topology)
            assert same(expected, {key: value for key, value in means.items() if key != "matrix"})
            assert bool(torch.isfinite(means["matrix"]).all()) == (step != 1), option
            assert all(bool(torch.isfinite(value).all()) for each in disturbed for value in each.residuals.state_dict().values())
            if step == 1 and isinstance(option.operations[0], Codec):
                assert torch.equal(disturbed[1].residuals.state_dict()["matrix"], before["matrix"])


def test_without_error_feedback_nothing_is_kept() -> None:
    executors = team("topk", options()[5], Topology(machines=2, ranks=2), error_feedback=False)
    together(executors, ranks_of(Topology(machines=2, ranks=2), 0), 0, topology=Topology(machines=2, ranks=2))
    assert executors[0].state_dict() == {"residuals": {}, "options": {}, "inner": {}}


# -- on process groups

LARGE = {**SHAPES, "large": (5, 1001)}  # sums of less than 16 KiB take another way


def run_options(chosen: Sequence[Option]) -> dict[str, Any]:
    """Options on this rank of 2 machines with 2 each; results as hex, and what was refused."""
    dist.init_process_group("gloo")
    groups, rank = ScopedGroups.of(2), dist.get_rank()
    found = []
    for option in chosen:
        executor = OptionExecutor(compressor("qsgd"), option, groups.topology)
        means = reduce(executor, gradients(rank, LARGE), 0, groups)
        found.append("".join(bits(tensor).hex() for tensor in means.values()))
    hierarchical = OptionExecutor(Identity(), options()[-1], Topology(machines=2, ranks=2))
    refused = []
    for among in (dist.group.WORLD, ScopedGroups.of(4)):
        try:
            run(hierarchical.exchange(Bundle.of(gradients(0)), turn(0, among)), among)
        except ValueError as error:
            refused.append(str(error))
    try:
        ScopedGroups.of(3)
    except ValueError as error:
        refused.append(str(error))
    dist.destroy_process_group()
    return {"found": found, "refused": refused}


def test_ranks_on_process_groups(share: Share, tmp_path: Path) -> None:
    """All ranks hold the same bits, those of the ranks beside each other in one process."""
    topology = Topology(machines=2, ranks=2)
    with World(tmp_path, topology.world) as ranks:
        results = ranks.finish(run_options, share(0, 3), restarts=0)
    for number, option in enumerate(share(0, 3)):
        expected = together(team("qsgd", option, topology), [gradients(rank, LARGE) for rank in range(4)], 0, topology=topology)
        text = "".join(bits(tensor).hex() for tensor in expected.values())
        assert all(result["found"][number] == text for result in results), option
    for result in results:
        single, other, uneven = result["refused"]
        assert "on a single group: give ScopedGroups.of(ranks_per_machine, group)" in single
        assert "an exchange among 2 ranks on a group of 4; make ScopedGroups of as many ranks per machine as its topology has" in other
        assert "ranks_per_machine=3: must divide the number of ranks, 4" in uneven


# -- what is refused


@pytest.mark.parametrize("name", ["threshold", "threelc", "inceptionn", "powersgd", "int8", "atomo", "topk"])
def test_payloads_of_other_kinds_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"OptionExecutor\(\w+\): needs a compressor alone, with payloads of one length"):
        OptionExecutor(create(name), UNCOMPRESSED, Topology(machines=1, ranks=2))  # topk: with its error feedback around it


def test_what_does_not_fit_is_refused() -> None:
    bundle = Bundle.of(gradients(0, SHAPES))
    with pytest.raises(ValueError, match="a turn among 3 ranks, options for 2 x 2 ranks"):
        next(OptionExecutor(Identity(), UNCOMPRESSED, Topology(machines=2, ranks=2)).exchange(bundle, Turn(step=0, rank=0, world=3)))
    with pytest.raises(ValueError, match="no option for 'three': there are options for 1 tensors"):
        next(OptionExecutor(Identity(), {"matrix": UNCOMPRESSED}, Topology(machines=1, ranks=1)).exchange(bundle, Turn()))
    team_of_two = team("topk", options()[1], Topology(machines=1, ranks=2))
    together(team_of_two, ranks_of(Topology(machines=1, ranks=2), 0), 0)
    other = OptionExecutor(compressor("topk"), options()[2], Topology(machines=1, ranks=2))
    other.load_state_dict(team_of_two[0].state_dict())
    with pytest.raises(ValueError, match=r"'matrix' has residuals of the option .*: restore the plan together with the state"):
        next(other.exchange(bundle, Turn(step=0, rank=0, world=2)))


def test_ranks_that_disagree_are_refused() -> None:
    def exchanges(topology: Topology, *chosen: Option) -> list[Any]:
        return [
            OptionExecutor(Identity(), option, topology).exchange(
                Bundle.of(gradients(0, SHAPES)), Turn(step=0, rank=rank, world=len(chosen))
            )
            for rank, option in enumerate(chosen)
        ]

    with pytest.raises(ValueError, match=r"no collective has all its ranks; 0: sum \(flat\), 1: all_to_all \(intra\)"):
        simulate(exchanges(Topology(machines=1, ranks=2), UNCOMPRESSED, options()[-1]))
    with pytest.raises(ValueError, match="an exchange among 2 ranks on a group of 4; make ScopedGroups of as many"):
        simulate(exchanges(Topology(machines=2, ranks=2), *[options()[-1]] * 4), Topology(machines=1, ranks=4))
