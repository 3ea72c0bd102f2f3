"""Capture and restore where ranks hold different parts: FSDP2 and HSDP over gloo, meshes of eight ranks without processes."""

from __future__ import annotations

import datetime
import inspect
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from capture_kit import collect, shard_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.multiprocessing.spawn import start_processes
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from gemini_ft.core.layout import Layout, build_layout, plan_reads, stored_specs
from gemini_ft.errors import LayoutMismatchError, ReplicaDivergedError, UnsupportedStateError
from gemini_ft.state import codec
from gemini_ft.state.copies import copy_into
from gemini_ft.state.loop import LoopWatch
from gemini_ft.state.modules import apply_extras, destinations
from gemini_ft.state.pending import PendingGradients
from gemini_ft.state.replicas import check_replicas, first_difference, replicated_digest, tensor_digests
from gemini_ft.state.tensors import Source

WORLD = 2


def _enter(rank: int, store: str) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=60))
    try:
        for scenario in (_ddp, _fsdp, _hsdp, _divergence):
            scenario(rank)
    finally:
        dist.destroy_process_group()
    # torch 2.13: DTensor's caches keep the groups of meshes alive, destroy_process_group notwithstanding, and their gloo
    # threads race with the end of the interpreter: about one run in ten dies by SIGABRT after all is done.
    os._exit(0)


def test_scenarios_on_two_ranks(tmp_path: Path) -> None:
    """All in one pair of processes: starting them takes longer than what they do."""
    start_processes(_enter, (str(tmp_path / "store"),), nprocs=WORLD, start_method="spawn")  # type: ignore[no-untyped-call]


def exchange(value: Any) -> list[Any]:
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, value)
    return every


class Uneven(nn.Module):
    """First dimensions of 5, 3 and 1: with two ranks one part is larger, or the other one empty."""

    seen: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 1)
        self.own = nn.Parameter(torch.ones(3))  # of the root, which FSDP2 treats differently
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.sum()
        out: torch.Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))) * self.own)
        return out.pow(2).mean()


def build(mesh: DeviceMesh | None, seed: int) -> tuple[Any, Optimizer]:
    """FSDP2 over ``mesh``, or DDP."""
    model: Any = Uneven(seed)
    if mesh is None:
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # the name until torch 2.12
        wrapped = nn.parallel.DistributedDataParallel(model, **{name: False})
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    for layer in (model.first, model.second, model.last, model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()


def own_bytes(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, list[int]]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for index, state in optimizer.state_dict()["state"].items():
        tensors += [(f"{index}.{key}", value) for key, value in state.items()]
    parts = [(name, value.to_local() if isinstance(value, DTensor) else value) for name, value in tensors]
    return sorted((name, part.detach().reshape(-1).view(torch.uint8).tolist()) for name, part in parts)


def take(sources: list[Source], rank: int) -> tuple[Layout, bytes]:
    layout = build_layout([source.spec for source in sources], rank, WORLD)
    return layout, bytes(shard_of(sources, layout).tolist())


def restore(stored: list[tuple[Layout, bytes]], extras: bytes, model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    replicated = isinstance(model, nn.parallel.DistributedDataParallel)
    layouts = {owner: layout for owner, (layout, _) in enumerate(stored)}
    sources = destinations({"model": model}, [optimizer], stored_specs(rank, layouts), rank, WORLD, replicated=replicated)
    tensors = {source.spec.name: source.tensor for source in sources}
    for read in plan_reads([source.spec for source in sources], rank, layouts):
        copy_into(tensors[read.name], read.start, read.stop, stored[read.owner][1][read.offset : read.offset + read.nbytes])
    apply_extras({"model": model}, [optimizer], codec.decode(extras))


def _goes_on(rank: int, mesh: DeviceMesh | None) -> list[Source]:
    model, optimizer = build(mesh, seed=0)
    train(model, optimizer, range(3))
    sources, extras = collect({"model": model}, [optimizer], rank, WORLD, replicated=mesh is None)
    check_replicas(sources, exchange)
    stored, blob = exchange(take(sources, rank)), codec.encode(extras)
    assert len({layout.logical_hash for layout, _ in stored}) == 1
    at_snapshot = own_bytes(model, optimizer)
    train(model, optimizer, range(3, 5))

    other, other_optimizer = build(mesh, seed=9)
    restore(stored, blob, other, other_optimizer, rank)
    assert own_bytes(other, other_optimizer) == at_snapshot
    train(other, other_optimizer, range(3, 5))
    assert own_bytes(other, other_optimizer) == own_bytes(model, optimizer)
    restore(stored, blob, other, other_optimizer, rank)  # into an optimizer that has state
    assert own_bytes(other, other_optimizer) == at_snapshot
    return sources


def _ddp(rank: int) -> None:
    sources = _goes_on(rank, None)
    groups = {source.spec.name: source.spec.group for source in sources}
    assert groups["model.first.weight"] == groups["optim0.model.first.weight.step"] == (0, 1)
    assert groups["model.seen"] == (rank,)


def _fsdp(rank: int) -> None:
    sources = _goes_on(rank, init_device_mesh("cpu", (2,)))
    assert {source.spec.group for source in sources} == {(rank,)}
    model, optimizer = build(init_device_mesh("cpu", (2,)), seed=1)
    with torch.no_grad():
        model(torch.ones(1, 4))  # as in validation
    assert not isinstance(model.own, DTensor), "the root's parameters must be whole here, or this shows nothing"
    found = destinations({"model": model}, [optimizer], [source.spec for source in sources], rank, WORLD, replicated=False)
    assert [source.spec.name for source in found] == [source.spec.name for source in sources]
    assert isinstance(optimizer.state[model.first.weight]["exp_avg"], DTensor)
    shapes = {source.spec.name: source.spec.shape for source in sources}
    assert shapes["model.first.weight"] == ((3, 4), (2, 4))[rank]
    assert shapes["model.last.bias"] == ((1,), (0,))[rank]
    assert shapes["optim0.model.last.bias.exp_avg"] == ((1,), (0,))[rank]


def _hsdp(rank: int) -> None:
    sources = _goes_on(rank, init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    groups = {source.spec.name: source.spec.group for source in sources}
    assert groups["model.first.weight"] == groups["optim0.model.first.weight.exp_avg"] == (0, 1)
    assert groups["model.seen"] == groups["optim0.model.first.weight.step"] == (rank,)


def _divergence(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    sources, _ = collect({"model": model}, [], rank, WORLD, replicated=True)
    if rank:
        model[1].running_mean.add_(1)  # type: ignore[operator]
    check_replicas(sources, exchange)
    assert len(set(exchange(replicated_digest(sources)))) == 1, "buffers are not replicated"
    if rank:
        with torch.no_grad():
            model[0].bias[1] += 1e-6  # type: ignore[index, operator]
    with pytest.raises(
        ReplicaDivergedError, match=r"^model\.0\.bias is \w{16} on ranks \[0\], \w{16} on ranks \[1\]\. Ranks that must"
    ) as caught:
        check_replicas(sources, exchange)
    assert len(set(exchange(str(caught.value)))) == 1
    assert len(set(exchange(replicated_digest(sources)))) == 2
    head = nn.Linear(2, 2)  # of a loss, in no model
    sources, _ = collect({"model": nn.Linear(1, 1)}, [torch.optim.SGD(head.parameters(), lr=0.1)], rank, WORLD, replicated=True)
    nn.init.constant_(head.weight, rank)
    with pytest.raises(ReplicaDivergedError, match="a parameter that an optimizer has and no model"):
        check_replicas(sources, exchange)


# Eight ranks without processes: torch's fake process group answers for the other seven.


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Rank 6 in a mesh of 2 replicas of 4 shards: [[0 1 2 3] [4 5 6 7]]."""
    dist.init_process_group("fake", store=FakeStore(), rank=6, world_size=8)
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


def test_gradients_that_were_added_to_after_a_step_wait(mesh: DeviceMesh) -> None:
    """Autograd adds to a DTensor itself, FSDP to the part inside."""
    model = placed(mesh, Replicate(), Shard(0))
    weight, optimizer = model.weight, torch.optim.SGD(model.parameters(), lr=0.1)
    pending = PendingGradients()
    pending.watch([optimizer])
    for add in (lambda grad: grad.add_(1), lambda grad: grad._local_tensor.add_(1)):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert pending.collect({"weight": weight})["present"] is True
        add(weight.grad)
        assert [*pending.collect({"weight": weight})["waiting"]] == ["weight"]


def test_averages_of_a_sharded_model_are_named(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    placements, model = (Replicate(), Shard(0)), nn.Linear(3, 2)
    for name, parameter in [*model.named_parameters()]:
        model.register_parameter(name, nn.Parameter(DTensor.from_local(parameter.detach(), mesh, placements, run_check=False)))
    averages, watched = [parameter.detach().clone() for parameter in model.parameters()], LoopWatch()
    parameters = [*model.parameters()]
    for _ in range(2):
        for mean, parameter in zip(averages, parameters, strict=True):
            mean.lerp_(parameter.detach(), 0.1)
            parameter.detach().add_(1)
        watched.look([model], {}, [])
    (said,) = (record.getMessage() for record in caplog.records)
    assert "changes averages while it trains" in said


def placed(mesh: DeviceMesh, *placements: Placement) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, placements, run_check=False))
    return model


@pytest.mark.parametrize(
    ("placements", "group", "words"),
    [
        ((Replicate(), Shard(0)), (2, 6), "(8, 3) R S(0) on (2, 4)"),
        ((Shard(1), Replicate()), (4, 5, 6, 7), "(2, 6) S(1) R on (2, 4)"),
        ((Replicate(), Replicate()), (0, 1, 2, 3, 4, 5, 6, 7), "(2, 3) R R on (2, 4)"),
        ((Shard(0), Shard(1)), (6,), "(4, 12) S(0) S(1) on (2, 4)"),
    ],
    ids=str,
)
def test_groups_come_from_placements(mesh: DeviceMesh, placements: tuple[Placement, ...], group: tuple[int, ...], words: str) -> None:
    (source,), _ = collect({"model": placed(mesh, *placements)}, [], 6, 8, replicated=True)
    assert (source.spec.group, source.spec.shape, source.spec.logical) == (group, (2, 3), words)


def test_partial_sums_are_refused_by_name(mesh: DeviceMesh) -> None:
    with pytest.raises(UnsupportedStateError, match=r"^model\.weight has the placement P\(?.*only Shard and Replicate say who holds"):
        collect({"model": placed(mesh, Partial(), Shard(0))}, [], 6, 8, replicated=False)


def test_state_that_is_placed_unlike_its_parameter_is_refused_by_name(mesh: DeviceMesh) -> None:
    model = placed(mesh, Replicate(), Shard(0))
    optimizer = torch.optim.SGD(model.parameters())
    weight: Any = model.weight
    optimizer.state[weight] = {"row": DTensor.from_local(torch.ones(2, 3), mesh, (Shard(0), Replicate()), run_check=False)}
    with pytest.raises(UnsupportedStateError, match=r"^optim0\.model\.weight\.row is a DTensor placed otherwise \(\(4, 3\) S\(0\) R on"):
        collect({"model": model}, [optimizer], 6, 8, replicated=False)


def test_plain_state_of_a_sharded_parameter_is_per_rank(mesh: DeviceMesh) -> None:
    model = placed(mesh, Replicate(), Replicate())
    optimizer = torch.optim.SGD(model.parameters())
    weight: Any = model.weight
    optimizer.state[weight] = {"step": torch.zeros(())}
    sources, _ = collect({"model": model}, [optimizer], 6, 8, replicated=True)
    assert sources[1].spec.group == (6,)


def test_state_in_extras_may_not_be_sharded(mesh: DeviceMesh) -> None:
    model = placed(mesh, Replicate(), Shard(0))
    optimizer = torch.optim.SGD(model.parameters())
    weight: Any = model.weight
    optimizer.state[weight] = {"history": [weight.detach()]}
    with pytest.raises(UnsupportedStateError, match=r"^optim0\.model\.weight\['history'\]\[0\] is a DTensor .*; only plain dense tensors"):
        collect({"model": model}, [optimizer], 6, 8, replicated=False)


def test_state_of_another_sharding_is_refused(mesh: DeviceMesh) -> None:
    model = placed(mesh, Replicate(), Shard(0))
    optimizer = torch.optim.SGD(model.parameters())
    weight: Any = model.weight
    optimizer.state[weight] = {"momentum": torch.zeros_like(weight)}
    sources, _ = collect({"model": model}, [optimizer], 6, 8, replicated=False)
    other = placed(mesh, Shard(0), Replicate())
    fresh = torch.optim.SGD(other.parameters())
    with pytest.raises(
        LayoutMismatchError, match=r"momentum was \(8, 3\) R S\(0\) on \(2, 4\) in the snapshot; .* resharding is not supported"
    ):
        destinations({"model": other}, [fresh], [source.spec for source in sources], 6, 8, replicated=False)


def test_only_ranks_of_a_group_are_compared(mesh: DeviceMesh) -> None:
    (source,), _ = collect({"model": placed(mesh, Replicate(), Shard(0))}, [], 6, 8, replicated=False)
    mine = tensor_digests([source])
    assert replicated_digest([source]) == replicated_digest([]), "no digest of the whole job could be right for a part of it"
    assert list(mine) == [((2, 6), "model.weight")]
    others: list[dict[Any, str]] = [{((rank % 4, rank % 4 + 4), "model.weight"): f"part {rank % 4}"} for rank in range(8)]
    others[2] = others[6] = mine
    assert first_difference(others) is None
    others[7] = {((3, 7), "model.weight"): "something else"}
    assert first_difference(others) == "model.weight is part 3 on ranks [3], something else on ranks [7]"
    others[7] = {}
    assert first_difference(others) == "model.weight is part 3 on ranks [3], absent on ranks [7]"
