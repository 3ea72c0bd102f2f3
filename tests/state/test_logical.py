"""Logical ranks refuse by name all that they could not carry; one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, TensorDataset

import gemini_ft
from gemini_ft.errors import ConfigError, GeminiError, LayoutMismatchError, StateError, UnsupportedStateError
from gemini_ft.state import logical
from gemini_ft.state.logical import LogicalRanks
from gemini_ft.state.logical_sums import carried_by, reduce_in_order

DATA = TensorDataset(torch.arange(24.0).reshape(12, 2))


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Net(nn.Linear):
    """One with a buffer and an attribute."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.register_buffer("seen", torch.zeros(1))
        self.calls = 0


class Extra(Net):
    def get_extra_state(self) -> int:
        return self.calls


class Augmented(Dataset[Any]):
    """A dataset with a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return 12


def checkpointer_of(model: nn.Module | None = None, optimizers: Any = None, **options: Any) -> gemini_ft.Checkpointer:
    model = model if model is not None else Net()
    optimizers = optimizers if optimizers is not None else torch.optim.SGD(model.parameters(), lr=0.1)
    return gemini_ft.Checkpointer(model, optimizers, **{"elastic": "exact", **options})


def ranks_of(model: nn.Module, count: int = 2, loader_of: Any = None) -> LogicalRanks:
    return checkpointer_of(model).logical_ranks(count, loader_of)


def loader_of(number: int, count: int = 2, data: Any = DATA, **options: Any) -> Any:
    sampler = DistributedSampler(data, count, number, shuffle=False)
    return gemini_ft.resumable(DataLoader(data, 2, sampler=sampler, **options))


def of_ddp() -> nn.Module:
    return DistributedDataParallel(Net())


def of_dtensors() -> nn.Module:
    model = Net()
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(1, 2), DeviceMesh("cpu", [0, 1]), [Replicate()]))
    return model


def on_two_devices() -> nn.Module:
    return nn.Sequential(Net(), nn.Linear(1, 1, device="meta"))


def compiled_in_place() -> nn.Module:
    model = Net()
    model.compile(backend="eager")
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "DDP": (of_ddp, "a model in DistributedDataParallel"),
    "inner DDP": (lambda: nn.Sequential(of_ddp()), "a model in DistributedDataParallel"),
    "compiled": (lambda: torch.compile(Net(), backend="eager"), r"a model that torch\.compile has wrapped"),
    "compiled in place": (compiled_in_place, r"a model that torch\.compile has wrapped"),
    "DTensors": (of_dtensors, "sharded parameters"),
    "two devices": (on_two_devices, "no parameters, or on several devices"),
    "extra state": (Extra, "a module with extra state"),
    "sums over workers": (lambda: nn.Sequential(nn.Linear(2, 1), nn.SyncBatchNorm(1)), "SyncBatchNorm, whose sums follow from the workers"),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", MODELS)
def test_models_that_logical_ranks_cannot_carry_are_refused(name: str) -> None:
    make, told = MODELS[name]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=f"this job has .*{told}.*elastic.md#bit-for-bit"):
        LogicalRanks(2, {"model": model}, [optimizer], {})


def stranger() -> LogicalRanks:
    return checkpointer_of(Net(), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)).logical_ranks(2)


def without_parameters() -> LogicalRanks:
    return LogicalRanks(2, {"model": nn.ReLU()}, [], {})


SETTINGS: dict[str, tuple[Callable[[pytest.MonkeyPatch], Any], Callable[[], Any], str]] = {
    "a parameter beside the model": (lambda patch: None, stranger, "parameters of an optimizer that are in no model"),
    "no parameters": (lambda patch: None, without_parameters, "no parameters, or on several devices"),
    "kernels that differ": (
        lambda patch: torch.use_deterministic_algorithms(False),
        lambda: ranks_of(Net()),
        r"kernels that may differ \(call torch\.use_deterministic_algorithms\(True\)\)",
    ),
    "a warning only": (
        lambda patch: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: ranks_of(Net()),
        "kernels that may differ",
    ),
    "kernels that are measured": (
        lambda patch: patch.setattr(torch.backends.cudnn, "benchmark", True),
        lambda: ranks_of(Net()),
        "kernels that are chosen by measuring",
    ),
    "model-parallel layers": (
        lambda patch: patch.setattr(logical, "rng_trackers", lambda: {"megatron": SimpleNamespace(get_states=lambda: {"a": 1})}),
        lambda: ranks_of(Net()),
        "generators of model-parallel layers",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_under_which_bits_would_differ_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, make, told = SETTINGS[name]
    prepare(monkeypatch)
    with pytest.raises(ConfigError, match=f"this job has {told}"):
        make()


@pytest.mark.usefixtures("group")
def test_fewer_logical_ranks_than_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"logical_ranks\(1\) for 2 workers; give at least as many"):
        ranks_of(Net(), count=1)
    with pytest.raises(ConfigError, match=r"logical_ranks\(0\)"):
        ranks_of(Net(), count=0)


LOADERS: dict[str, tuple[Callable[[int], Any], str]] = {
    "a plain one": (lambda number: DataLoader(DATA), r"loader_of\(0\) is a DataLoader .*gemini_ft.resumable"),
    "another kind": (lambda number: torch.optim.SGD(Net().parameters()), r"loader_of\(0\) gave a SGD; give gemini_ft.resumable\(loader\)"),
    "the worker's number": (
        partial(loader_of, count=1),
        r"rank 0 of 1; give DistributedSampler\(data, 2, number\)",
    ),
    "one rank's for all": (lambda number: loader_of(0), r"loader_of\(1\) gave a DistributedSampler of rank 0 of 2"),
    "processes": (partial(loader_of, num_workers=1), r"num_workers=1; logical ranks take 0"),
    "a dataset that draws": (partial(loader_of, data=Augmented()), r"share generators of their data \(dataset.generator\)"),
    "a generator for all": (partial(loader_of, generator=torch.Generator()), r"share generators of their data \(generator\)"),
    "batches of the worker's number": (
        lambda number: gemini_ft.resumable(DataLoader(DATA, batch_sampler=BatchSampler(DistributedSampler(DATA, 1, 0), 2, False))),
        r"rank 0 of 1; give DistributedSampler\(data, 2, number\)",
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_that_no_logical_rank_could_go_on_with_are_refused(name: str) -> None:
    make, told = LOADERS[name]
    with pytest.raises(ConfigError, match=told):
        ranks_of(Net(), loader_of=make)


def test_a_dataset_that_draws_is_taken_where_each_logical_rank_has_one() -> None:
    assert len(ranks_of(Net(), loader_of=lambda number: loader_of(number, data=Augmented())).loaders) == 2


OPTIONS: dict[str, tuple[Mapping[str, Any], str]] = {
    "elastic: batch": ({"elastic": "batch"}, "logical_ranks.. is for elastic='exact'"),
    "none": ({"elastic": None}, "logical_ranks.. is for elastic='exact'"),
    "replicated": ({"replicated": False}, "for plain models, without gradients=, rebuild= or replicated=False"),
    "rebuild": ({"rebuild": lambda changes: None}, "for plain models, without gradients=, rebuild= or replicated=False"),
    "gradients": (
        {"gradients": SimpleNamespace(state_dict=dict, load_state_dict=print, summary=dict)},
        "for plain models, without gradients=, rebuild= or replicated=False",
    ),
    "replay": ({"verify": "replay"}, "a step of logical ranks cannot be computed again; choose verify=True"),
    "a loader of the worker": ({"state": {"loader": loader_of(0)}}, r"give loader_of in place of state=\['loader'\]"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_logical_ranks_do_not_go_with_are_refused(name: str) -> None:
    options, told = OPTIONS[name]
    with pytest.raises(ConfigError, match=told):
        checkpointer_of(**options).logical_ranks(2)


def test_logical_ranks_are_made_once_and_of_the_models_given_by_then() -> None:
    checkpointer = checkpointer_of()
    checkpointer.logical_ranks(2)
    with pytest.raises(ConfigError, match=r"called once, before resume\(\)"):
        checkpointer.logical_ranks(2)
    with pytest.raises(ConfigError, match="those that were given before logical_ranks"):
        checkpointer.bind(Net(), ())


def nested(model: Net, ranks: LogicalRanks) -> None:
    first, second = ranks
    with first, second:
        pass


def reduces_inside(model: Net, ranks: LogicalRanks) -> None:
    with next(iter(ranks)):
        ranks.reduce()


def steps_inside(model: Net, ranks: LogicalRanks) -> None:
    with next(iter(ranks)):
        ranks.state_dict()


def steps_early(model: Net, ranks: LogicalRanks) -> None:
    for rank in ranks:
        with rank:
            model(torch.ones(2)).sum().backward()
    ranks.state_dict()


def writes_before(model: Net, ranks: LogicalRanks) -> None:
    model.seen += 1
    with next(iter(ranks)):
        pass


def writes_after(model: Net, ranks: LogicalRanks) -> None:
    model.seen = torch.ones(1)
    ranks.state_dict()


def counts(model: Net, ranks: LogicalRanks) -> None:
    with next(iter(ranks)):
        model.calls += 1


def grows(model: Net, ranks: LogicalRanks) -> None:
    first, second = ranks
    with first:
        model.seen = torch.zeros(3)
    with second:
        pass


def updates(model: Net, ranks: LogicalRanks) -> None:
    with next(iter(ranks)), torch.no_grad():
        model.weight.mul_(0.5)


def replaces(model: Net, ranks: LogicalRanks) -> None:
    model.weight = nn.Parameter(torch.ones(1, 2))
    ranks.reduce()


def computes_outside(model: Net, ranks: LogicalRanks) -> None:
    ranks.reduce()
    model(torch.ones(2)).sum().backward()
    with next(iter(ranks)):
        pass


def reduces_what_is_outside(model: Net, ranks: LogicalRanks) -> None:
    model(torch.ones(2)).sum().backward()
    ranks.reduce()


def leaves_sparse_gradients(model: Net, ranks: LogicalRanks) -> None:
    with next(iter(ranks)):
        model.weight.grad = torch.zeros(1, 2).to_sparse()


def asks_for_batches(model: Net, ranks: LogicalRanks) -> None:
    next(ranks.batches(0))


LOOPS: dict[str, tuple[Callable[[Net, LogicalRanks], None], type[GeminiError], str]] = {
    "nested": (nested, StateError, "with rank inside of `with rank:` of the logical rank 0"),
    "reduce inside": (reduces_inside, StateError, r"reduce\(\) inside of `with rank:`"),
    "step inside": (steps_inside, StateError, r"step\(\) inside of `with rank:`"),
    "step before reduce": (steps_early, StateError, r"gradients of the logical ranks \[0, 1\] wait; call ranks.reduce\(\)"),
    "buffer written before": (writes_before, UnsupportedStateError, "model.seen was written outside of the logical ranks"),
    "buffer written after": (writes_after, UnsupportedStateError, "model.seen was written outside of the logical ranks"),
    "attribute": (counts, UnsupportedStateError, "model.calls changed inside a logical rank"),
    "buffer of another shape": (grows, LayoutMismatchError, "the buffers model.seen differ in shape or dtype"),
    "parameter": (updates, UnsupportedStateError, "model.weight changed inside a logical rank.* write it outside"),
    "another parameter": (replaces, StateError, r"other parameters than when logical_ranks\(\) was called"),
    "gradient outside": (computes_outside, StateError, "a gradient that no logical rank has made"),
    "gradient outside, reduced": (reduces_what_is_outside, StateError, "a gradient that no logical rank has made"),
    "sparse gradients": (leaves_sparse_gradients, UnsupportedStateError, "these are sparse; give sparse=False"),
    "no loaders": (asks_for_batches, ConfigError, r"given no loaders; give logical_ranks\(2, loader_of\)"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_whose_bits_would_follow_from_the_worker_are_refused(name: str) -> None:
    do, kind, told = LOOPS[name]
    model = Net()
    with pytest.raises(kind, match=told):
        do(model, ranks_of(model))


def test_gradients_that_are_not_zeroed_are_made_anew() -> None:
    """Clipped or not, by each `reduce`; and a second pass of a logical rank adds to its first."""
    model = Net()
    ranks = ranks_of(model)
    for times in (1, 2):
        for rank in [rank for rank in ranks for _ in range(times)]:
            with rank:
                model(torch.ones(2) * (rank.number + 1)).sum().backward()
        ranks.reduce()
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[1.5 * times] * 2]
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def test_an_epoch_ends_on_all_logical_ranks_at_once() -> None:
    def uneven(number: int) -> Any:
        return gemini_ft.resumable(DataLoader(TensorDataset(torch.arange(2.0 + number))))

    turns = ranks_of(Net(), loader_of=uneven).batches(0)
    assert [[rank.number for rank, _ in next(turns)] for _ in range(2)] == [[0, 1], [0, 1]]
    with pytest.raises(StateError, match=r"of the logical ranks here only \[1\] have batches left"):
        next(turns)


def test_an_accelerator_that_comes_into_use_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ranks_of(Net())
    monkeypatch.setattr(logical.accelerator, "in_use", lambda: SimpleNamespace(current_device=int, get_rng_state_all=list))
    with pytest.raises(StateError, match="came into use after logical_ranks"), next(iter(ranks)):
        pass


def test_a_snapshot_of_other_logical_ranks_loaders_or_hardware_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = ranks_of(Net(), loader_of=loader_of).state_dict()
    with pytest.raises(LayoutMismatchError, match="do not both have loaders"):
        ranks_of(Net()).load([saved])
    with pytest.raises(LayoutMismatchError, match="the number of logical ranks: 3 here, and 2"):
        ranks_of(Net(), 3, partial(loader_of, count=3)).load([saved])
    same = ranks_of(Net(), loader_of=loader_of)
    same.load([saved])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with pytest.raises(LayoutMismatchError, match=r"the hardware: .*'threads': 77.*OMP_NUM_THREADS"):
        same.load([saved])


def test_workers_that_begin_with_other_models_are_refused() -> None:
    """Nothing sends the first worker's model to the others, as DDP does."""
    ours, theirs = (ranks_of(Net()).facts(has_begun=False) for _ in range(2))
    ranks = ranks_of(Net())
    ranks.compare(ours, [ours, ours])
    with pytest.raises(LayoutMismatchError, match=r"the model before the first step: .*a seed before the model is made"):
        ranks.compare(ours, [ours, theirs])


def test_options_without_logical_ranks_are_refused_before_the_job_joins() -> None:
    with pytest.raises(ConfigError, match=r"for plain loops with checkpointer.logical_ranks\(\), and for Lightning.* leave it out here"):
        checkpointer_of().resume()


@pytest.mark.parametrize(("workers", "count"), [(1, 4), (2, 4), (3, 4), (4, 4), (3, 8), (5, 7)])
def test_each_logical_rank_is_carried_once_and_in_order(workers: int, count: int) -> None:
    carried = [carried_by(worker, workers, count) for worker in range(workers)]
    assert [number for each in carried for number in each] == list(range(count))
    assert {len(each) for each in carried} <= {count // workers, -(-count // workers)}


def test_gradients_are_summed_from_the_first_logical_rank_to_the_last() -> None:
    params = [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(1)]
    grads = [[torch.full((3,), value), None, None] for value in (1e8, 1.0, -1e8, 1.0)]
    grads[2][1] = torch.tensor([1.0, 3.0], dtype=torch.float64)
    first, second, third = reduce_in_order(params, grads, 4, {})
    assert first is not None
    assert first.tolist() == [0.25] * 3  # ((1e8 + 1) - 1e8) + 1 in float32
    assert second is not None
    assert second.tolist() == [0.25, 0.75]
    assert third is None


def test_what_is_the_jobs_is_refused_where_a_logical_rank_changes_it() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (first, *_) = checkpointer_of(model, optimizer).logical_ranks(2)
    with pytest.raises(UnsupportedStateError, match="the options of the optimizers changed inside a logical rank"), first:
        optimizer.param_groups[0]["lr"] = 0.2


@pytest.mark.parametrize("name", ["generator", "_generator"])
def test_each_logical_rank_has_its_own_state_of_a_modules_generator(name: str) -> None:
    model = Net()
    setattr(model, name, np.random.default_rng(0))
    drawn = []
    for rank in ranks_of(model):
        with rank:
            drawn.append(getattr(model, name).random())
    assert drawn[0] == drawn[1] == np.random.default_rng(0).random()
