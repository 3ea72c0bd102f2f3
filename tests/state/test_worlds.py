"""Samples of an epoch are dealt out anew whenever the number of ranks changes; no processes."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from elastic_case import Case, Numbers, loader_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import gemini_ft
from gemini_ft.core.layout import Layout, TensorSpec, build_layout
from gemini_ft.errors import ConfigError, StateError, UnsupportedStateError, WorldSizeError
from gemini_ft.launch import notes
from gemini_ft.lightning.trainer_loops import carry_over, refuse_batches, refuse_end
from gemini_ft.loaders.stripes import why_undivided
from gemini_ft.state import iterators
from gemini_ft.state.base import PlainState
from gemini_ft.state.iterators import Resumption
from gemini_ft.state.worlds import Resize, carried_accumulation, check_schedulers, check_step, refuse_data


@pytest.fixture(autouse=True)
def unresized() -> Iterator[None]:
    yield
    iterators.resumption = Resumption()


@pytest.fixture
def steps_told(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Tells loaders how many steps the loop has made."""
    return lambda step: monkeypatch.setattr(notes, "step", step)


class Job:
    """The loaders of all ranks of one job, as its ranks would have them, whatever their number."""

    def __init__(self, samples: int, batch: int, micro_batches: int, drop_last: bool, workers: int = 0) -> None:
        self._workers = workers
        self.samples, self._batch, self._micro_batches, self.drops_last = samples, batch, micro_batches, drop_last
        self._positions: list[dict[str, Any]] = []
        self.used: list[int] = []  # in this epoch

    def run(self, world: int, epoch: int, steps: int) -> bool:
        """Makes so many steps of an epoch with so many ranks; whether it has come to its end."""
        loaders = [self._loader(rank, world) for rank in range(world)]
        for rank, loader in enumerate(loaders):
            if self._positions:
                then = len(self._positions)
                iterators.resumption = Resumption(resize=Resize(then=then, now=world, rank=rank) if then != world else None)
                loader.load_state_dict(self._positions[rank % then])
            loader.sampler.set_epoch(epoch)
        accumulation = self._micro_batches // world
        taken = [iter(loader) for loader in loaders]
        for _ in range(steps):
            for _ in range(accumulation):
                batches = [next(each, None) for each in taken]
                assert len({batch is None for batch in batches}) == 1, "ranks have different numbers of batches"
                if batches[0] is None:
                    self._positions = []
                    return True
                self.used += [int(index) for batch in batches for index in batch]
                self._positions = [loader.state_dict() for loader in loaders]
            check_step(loaders, accumulation)
        return False

    def _loader(self, rank: int, world: int) -> Any:
        data = list(range(self.samples))
        sampler = DistributedSampler(data, world, rank, seed=11, drop_last=self.drops_last)  # type: ignore[arg-type]
        return gemini_ft.resumable(DataLoader(data, self._batch, sampler=sampler, num_workers=self._workers))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(12))
def test_each_sample_of_an_epoch_once(seed: int) -> None:
    """Beside the tail: a DistributedSampler repeats the first samples of an epoch, or leaves out its last, until all ranks have as many."""
    draw = random.Random(seed)
    job = Job(draw.randrange(30, 70), draw.choice([1, 2]), 6, draw.random() < 0.3)
    for epoch in range(2):
        job.used, last = [], []
        while not job.run(world := draw.choice([1, 2, 3, 6]), epoch, draw.randrange(1, 4)):
            last = [world]
        # Ranks that come after the last whole step of an epoch may have nothing left to take.
        totals = {job.samples // each * each if job.drops_last else -(-job.samples // each) * each for each in (*last, world)}
        sampler = DistributedSampler(range(job.samples), 1, 0, seed=11)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        order = list(sampler)
        assert len(job.used) in totals
        assert Counter(job.used) == Counter((order + order)[: len(job.used)])


def test_with_worker_processes() -> None:
    job = Job(24, 2, 6, drop_last=False, workers=2)
    assert not job.run(2, 0, 1), "three batches of each rank: in the middle of a round of the workers"
    assert job.run(1, 0, 9)
    assert sorted(job.used) == list(range(24))


def test_a_position_that_is_loaded_again_begins_a_step() -> None:
    loader = gemini_ft.resumable(loader_of(Case(), 0, 1))
    batches, then = iter(loader), dict[str, Any]()
    for _ in range(3):
        next(batches)
        check_step([loader], 1)
        then = then or loader.state_dict()
    loader.load_state_dict(then)
    next(iter(loader))
    check_step([loader], 1)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # by torchdata 0.11
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("shuffled", "RandomSampler as its sampler"),
        ("persistent", "persistent_workers=False"),
        ("iterated", "no DataLoader of a map-style dataset"),
        ("batched", "has a list as its batch sampler"),
        ("wrapped", "has a DistributedSamplerWrapper as its sampler"),
        ("weighted", "has a WeightedRandomSampler as its sampler"),
        ("of some", "has a SubsetRandomSampler as its sampler"),
        ("stateful", "no DataLoader of a map-style dataset without a state of its own"),
        ("prepared", "no DataLoader of a map-style dataset without a state of its own"),
    ],
)
def test_other_loaders_are_refused_by_name(kind: str, why: str) -> None:
    loader = gemini_ft.resumable(loader_of(Case(kind=kind), 0, 2))
    batches = iter(loader)
    next(batches)
    with pytest.raises(UnsupportedStateError, match=f"elastic='batch'.* loader .*{why}.*leave elastic out"):
        refuse_data({"loader": loader}, [], 0, 2)


def test_data_from_elsewhere_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedStateError, match="come from no loader"):
        refuse_data({}, [], 0, 2)
    loader = gemini_ft.resumable(loader_of(Case(), 0, 2))
    batches = iter(loader)
    next(batches)
    refuse_data({"loader": loader}, [], 0, 2)
    with pytest.raises(UnsupportedStateError, match="for rank 0 of 2, and this is rank 1 of 3"):
        refuse_data({"loader": loader}, [], 1, 3)
    with pytest.raises(UnsupportedStateError, match="a DataLoader of a Table is not in state="):
        refuse_data({"loader": loader}, ["Table"], 0, 2)


def test_a_batch_sampler_of_the_users_own_is_refused() -> None:
    class Bucketed(BatchSampler):
        pass

    sampler = DistributedSampler(Numbers(), 2, 0)
    loader = gemini_ft.resumable(DataLoader(Numbers(), batch_sampler=Bucketed(sampler, 2, False)))
    next(iter(loader))
    assert "Bucketed" in why_undivided(loader, "skip", 0, 2)


def test_a_step_of_other_micro_batches_is_refused() -> None:
    loader = gemini_ft.resumable(loader_of(Case(), 0, 2))
    batches = iter(loader)
    next(batches)
    with pytest.raises(StateError, match="after 1 more batches, at batch 1 of the epoch, where each step is to take 2"):
        check_step([loader], 2)
    next(batches)
    check_step([loader, object()], 2)
    for _ in batches:
        pass
    check_step([loader], 5)


def test_a_step_of_twice_as_many_micro_batches_is_refused() -> None:
    """Those of an epoch's end may be fewer, and a loop that is resumed counts from where it goes on."""
    loader = gemini_ft.resumable(loader_of(Case(), 0, 2))
    batches = iter(loader)
    next(batches)
    check_step([loader], 1)
    next(batches)
    position = loader.state_dict()
    next(batches)
    with pytest.raises(StateError, match="after 2 more batches, at batch 3 of the epoch, where each step is to take 1"):
        check_step([loader], 1)
    resumed = gemini_ft.resumable(loader_of(Case(), 0, 2))
    resumed.load_state_dict(position)
    for taken, _ in enumerate(resumed, 3):
        if taken % 5 == 2:
            check_step([resumed], 5)
        if taken == 18:
            check_step([resumed], 5)
            with pytest.raises(StateError, match="after 0 more batches, at batch 18"):
                check_step([resumed], 5)
    for _ in resumed:
        check_step([resumed], 1)


def test_a_global_batch_that_does_not_divide_is_refused_with_the_numbers_that_do() -> None:
    assert carried_accumulation({"accumulation": 2}, 1, Resize(then=3, now=2, rank=0)) == 3
    with pytest.raises(WorldSizeError, match=r"2 micro-batches of a step on each of 3 ranks .* among 4; .* with 1, 2, 3 or 6 ranks"):
        carried_accumulation({"accumulation": 2}, 1, Resize(then=3, now=4, rank=0))
    assert carried_accumulation({}, 5, Resize(then=3, now=3, rank=0)) == 5
    with pytest.raises(WorldSizeError, match="made by 3 ranks without elastic='batch', this job has 2; start 3 ranks"):
        carried_accumulation({}, 5, Resize(then=3, now=2, rank=0))


def test_a_batch_size_that_follows_from_the_number_of_ranks_is_refused() -> None:
    """As of scripts that divide the global batch themselves: micro-batches would do so a second time."""
    sampler = DistributedSampler(Numbers(), 2, 0)
    loader = gemini_ft.resumable(DataLoader(Numbers(), 4, sampler=sampler))
    batches = iter(loader)
    next(batches)
    iterators.resumption = Resumption(resize=Resize(then=2, now=1, rank=0))
    alone = gemini_ft.resumable(DataLoader(Numbers(), 8, sampler=DistributedSampler(Numbers(), 1, 0)))
    with pytest.raises(WorldSizeError, match=r"had batches of 4 on each of 2 ranks, and has batches of 8 on 1.* give the same batch size"):
        alone.load_state_dict(loader.state_dict())


def test_where_nobody_asks_for_the_accumulation_it_is_refused() -> None:
    """As by callers that have no place for it."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="for plain loops, Fabric, Lightning's and transformers' Trainer"):
        gemini_ft.Checkpointer(model, torch.optim.SGD(model.parameters()), elastic="batch").open()


def test_a_trainer_that_counts_batches_of_its_own_is_refused() -> None:
    module = SimpleNamespace(automatic_optimization=True)
    combined = SimpleNamespace(flattened=[object()])
    usual = {
        "callbacks": [],
        "fit_loop": SimpleNamespace(_combined_loader=combined, _data_fetcher=type("_PrefetchDataFetcher", (), {})()),
        "lightning_module": module,
        "limit_train_batches": 1.0,
        "overfit_batches": 0,
        "val_check_interval": 1.0,
        "check_val_every_n_epoch": 1,
        "reload_dataloaders_every_n_epochs": 0,
        "strategy": SimpleNamespace(lr_scheduler_configs=[SimpleNamespace(interval="step", frequency=1)]),
    }
    refuse_batches(SimpleNamespace(**usual))
    often = SimpleNamespace(lr_scheduler_configs=[SimpleNamespace(interval="step", frequency=3)])
    each: list[dict[str, Any]] = [
        {"limit_train_batches": 5},
        {"limit_train_batches": 1},
        {"val_check_interval": 0.5},
        {"val_check_interval": 1},
        {"check_val_every_n_epoch": None},
        {"overfit_batches": 1},
        {"strategy": often},
        {"fit_loop": SimpleNamespace(_combined_loader=combined, _data_fetcher=object())},  # training_step(dataloader_iter)
    ]
    for changes in each:
        with pytest.raises(ConfigError, match=r"number of batches changes with the number of ranks, which .* cannot follow"):
            refuse_batches(SimpleNamespace(**usual | changes))


def test_counts_of_batches_follow_another_number_of_ranks_alone() -> None:
    """A script that gives another accumulate_grad_batches is given the snapshot's, as without elastic."""

    def snapshot() -> dict[str, Any]:
        progress = {"current": {"ready": 6, "processed": 6}, "total": {"ready": 42, "processed": 42}}
        loops = {"accumulate_grad_batches": 2, "cycles": (6, [])}
        return {"loops": loops, "checkpoint": {"loops": {"fit_loop": {"epoch_loop.batch_progress": progress}}}}

    trainer, found = SimpleNamespace(accumulate_grad_batches=4), snapshot()
    assert carry_over(trainer, found, None) == trainer.accumulate_grad_batches == 2
    assert found == snapshot()
    assert carry_over(trainer, found, Resize(then=3, now=2, rank=0)) == trainer.accumulate_grad_batches == 3
    progress = found["checkpoint"]["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    assert (progress["current"]["ready"], progress["total"]["processed"]) == (9, 63)
    assert found["loops"] == {"accumulate_grad_batches": 3, "cycles": (9, [])}
    with pytest.raises(WorldSizeError, match="3 micro-batches of a step on each of 3 ranks"):
        carry_over(trainer, found, Resize(then=3, now=2, rank=0))


class Drawing(Numbers):
    """Samples with noise of a generator of the dataset's own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand((), generator=self.generator)


def test_ranks_that_take_over_one_rank_draw_apart() -> None:
    """From numpy's generator too, which takes 32 bits of a seed; and a new rank keeps the generators of its own dataset."""

    def loader(rank: int, world: int) -> Any:
        data = Drawing()
        return gemini_ft.resumable(DataLoader(data, 2, sampler=DistributedSampler(data, world, rank)))

    alone = loader(0, 1)
    batches = iter(alone)
    for _ in range(6):
        next(batches)
    positions = []
    for rank in range(3):
        iterators.resumption = Resumption(resize=Resize(then=1, now=3, rank=rank))
        loaders = loader(rank, 3)
        loaders.load_state_dict(alone.state_dict())
        positions.append(loaders.state_dict())
    numpy_states = {str(position["begin"]["random"][2]) for position in positions}
    assert len(numpy_states) == 3
    for name in ("begin", "now", "sampler"):
        kept = [any("dataset" in path for path in position[name]["generators"]) for position in positions]
        assert kept == [True, False, False], name


def test_a_plain_parameter_that_no_rank_shares_is_refused() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    assert not PlainState.of(model, optimizer, replicated=True).why_fixed(2)
    why = PlainState.of(model, optimizer, replicated=None).why_fixed(2)
    assert why == "a parameter that neither DistributedDataParallel nor fully_shard holds (model.weight)"


@pytest.fixture
def four() -> Iterator[None]:
    """Rank 0 of four, without processes: torch's fake process group answers for the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def cut(ranks: Any = (0, 1, 2, 3), placements: Sequence[Placement] = (Shard(0),)) -> torch.nn.Module:
    """A model of one weight, of which each rank has a part of two rows."""
    model, mesh = torch.nn.Module(), DeviceMesh("cpu", torch.tensor(ranks))
    model.weight = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, placements, run_check=False))
    return model


class Tallying(torch.optim.SGD):
    """No optimizer of torch's."""


@pytest.mark.parametrize(
    ("ranks", "placements", "why"),
    [
        ([0, 1, 2, 3], [Shard(0)], ""),
        ([[0, 1], [2, 3]], [Replicate(), Shard(0)], ""),
        ([1, 0, 2, 3], [Shard(0)], "a parameter on a mesh without all ranks in their order (model.weight)"),
        ([0, 1], [Shard(0)], "a parameter on a mesh without all ranks in their order (model.weight)"),
        ([[0, 1], [2, 3]], [_StridedShard(0, split_factor=2), Shard(0)], "cut along the same one (_StridedShard), as tensor parallelism"),
    ],
)
@pytest.mark.usefixtures("four")
def test_meshes_that_other_ranks_could_not_make_are_refused(ranks: Any, placements: list[Placement], why: str) -> None:
    model = cut(ranks, placements)
    found = PlainState.of(model, torch.optim.SGD(model.parameters()), replicated=None).why_fixed(4)
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.usefixtures("four")
def test_sharded_parameters_beside_local_steps_are_refused() -> None:
    model = cut()
    state = PlainState.of(model, torch.optim.SGD(model.parameters()), replicated=False)
    assert state.why_fixed(4, has_local_steps=True) == "a sharded parameter beside local steps (model.weight)"
    assert not PlainState.of(torch.nn.Linear(2, 1), (), replicated=False).why_fixed(4, has_local_steps=True)


@pytest.mark.usefixtures("four")
def test_state_that_is_not_sharded_as_its_parameter_is_refused_as_soon_as_it_is_there() -> None:
    model = cut()
    weight = model.weight
    assert isinstance(weight, torch.Tensor)
    torchs, other = torch.optim.SGD([weight]), Tallying([weight])
    state, others = (PlainState.of(model, each, replicated=None) for each in (torchs, other))
    assert state.why_fixed(4) == others.why_fixed(4) == ""
    for each in (torchs, other):
        each.state[weight] = {"momentum_buffer": torch.zeros_like(weight)}
    assert state.why_fixed(4) == others.why_fixed(4) == ""
    for each in (torchs, other):
        each.state[weight]["step"] = 1.0
    assert not state.why_fixed(4)
    assert others.why_fixed(4) == "state of Tallying that is not sharded as its parameter is (optim0.model.weight.step)"
    torchs.state[weight]["rows"] = torch.ones(2)
    assert state.why_fixed(4) == "state of SGD that is not sharded as its parameter is (optim0.model.weight.rows)"
    del other.state[weight]["step"]
    assert not others.why_fixed(4)
    other.tally = 1  # type: ignore[attr-defined]
    assert others.why_fixed(4) == "a Tallying that keeps state of sharded parameters in attributes"


@pytest.mark.parametrize(
    ("rows", "extras", "why"),
    [
        ((2,), {}, "optim0.model.weight.tally: state of sharded parameters that is not sharded as they are"),
        ((), {}, "optim0.model.weight.tally: state"),
        (None, {"optimizers": [{"state": {"optim0.model.weight": {"n": 1.0}}}]}, "optim0.model.weight.n: state"),
        (None, {"pending": {"waiting": ["model.weight"]}}, "model.weight: gradients that wait for an optimizer"),
        (None, {"changes": {"tensors": {"model.weight": {}}}}, "model.weight: gradients that wait for an optimizer, and tensors that have"),
    ],
)
@pytest.mark.usefixtures("four")
def test_parts_that_one_rank_kept_are_refused_before_anything_is_read(rows: Any, extras: dict[str, Any], why: str) -> None:
    model = cut()
    state = PlainState.of(model, Tallying(model.parameters()), replicated=None)
    layout = of_one_rank({"model.weight": (8, 3)} | ({} if rows is None else {"optim0.model.weight.tally": rows}))
    with pytest.raises(WorldSizeError, match=rf"^{re.escape(why)}.*start 1 ranks"):
        state.resized({0: layout}, {0: extras}, 0, 4)


@pytest.mark.usefixtures("four")
def test_numbers_of_torchs_optimizers_are_taken_over() -> None:
    model = cut()
    state = PlainState.of(model, torch.optim.Adam(model.parameters()), replicated=None)
    layout = of_one_rank({"model.weight": (8, 3), "optim0.model.weight.exp_avg": (8, 3), "optim0.model.weight.step": ()})
    numbers = {"optimizers": [{"state": {"optim0.model.weight": {"count": 1}}}]}
    reads, tensors, _ = state.resized({0: layout}, {0: numbers}, 0, 4)
    assert {read.name: read.nbytes for read in reads} == {name: 4 * tensors[name].numel() for name in tensors}
    assert [tuple(tensors[name].shape) for name in sorted(tensors)] == [(2, 3), (2, 3), ()]


def of_one_rank(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """The layout of the shard of a rank that was alone; tensors of two dimensions were DTensors."""
    return build_layout(
        [
            TensorSpec(name=name, dtype="float32", shape=shape, group=(0,), logical=f"{shape} S(0) on (1,)" if len(shape) > 1 else "")
            for name, shape in shapes.items()
        ],
        0,
        1,
    )


def test_a_validation_in_an_epoch_begins_anew_whatever_its_sampler(steps_told: Callable[[int], None]) -> None:
    """It is no position in the training: another number of ranks need not share it out, to its end or not."""

    def loader() -> Any:
        return gemini_ft.resumable(DataLoader(list(range(5)), 2))  # type: ignore[arg-type]

    for taken in (1, 3):
        validation = loader()
        steps_told(7)
        batches = iter(validation)
        for _ in range(taken):
            next(batches)
        del batches
        assert "batches" in validation.state_dict()
        resumed = loader()
        iterators.resumption = Resumption(resize=Resize(then=3, now=2, rank=1))
        resumed.load_state_dict(validation.state_dict())
        assert len(list(resumed)) == 3


class OfDeepSpeed:
    """Counts as the schedulers of DeepSpeed do, which are none of torch's."""

    last_batch_iteration = -1

    def step(self) -> None:
        self.last_batch_iteration += 1


@pytest.mark.parametrize("kind", ["plain", "chained", "deepspeed"])
def test_a_scheduler_that_counts_micro_batches_is_refused(kind: str) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)])
    plain = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    each_step: Any = {"plain": plain, "chained": torch.optim.lr_scheduler.ChainedScheduler([plain]), "deepspeed": OfDeepSpeed()}[kind]
    given = {"scheduler": each_step, "average": object()}
    optimizer.step()
    counts = check_schedulers(given, {})
    for _ in range(2):
        each_step.step()
        counts = check_schedulers(given, counts)
    each_step.step()
    each_step.step()
    with pytest.raises(StateError, match=r"state\['scheduler'\] was stepped 2 times for one step of the optimizer"):
        check_schedulers(given, counts)


def test_an_epoch_whose_last_step_other_ranks_leave_out_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """With 72 samples in batches of 4 and drop_last=True, two ranks have 9 batches each, 2 to a step; four have 4 each, 1 to a step."""
    loop = SimpleNamespace(batch_progress=SimpleNamespace(current=SimpleNamespace(ready=4)))
    trainer = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=loop), num_training_batches=5)
    trainer.accumulate_grad_batches, trainer.is_global_zero = 1, True
    refuse_end(trainer, Resize(then=2, now=4, rank=0), 9)
    assert not caplog.messages
    trainer.num_training_batches = 4
    with pytest.raises(WorldSizeError, match=r"4 ranks have 4 batches each .* all of which 2 ranks had used .* Start 2 ranks"):
        refuse_end(trainer, Resize(then=2, now=4, rank=0), 9)
    assert "an epoch had 5 steps on 2 ranks and has 4 on 4" in caplog.text
