"""A restarted DistributedDataParallel sums gradients in the same order as if it had gone on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gemini_ft.ddp import ddp_state, restore_buckets, restore_sync


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make() -> DistributedDataParallel:
    # More than a megabyte, so that there are two buckets from the second step on.
    return DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 300), nn.Linear(300, 3000)))


def step(model: DistributedDataParallel) -> None:
    model(torch.randn(4, 8)).sum().backward()


def sizes(model: DistributedDataParallel) -> str:
    """Bytes of the buckets the next backward will use."""
    data = model._get_ddp_logging_data()
    return str(data.get("rebuilt_bucket_sizes") or data["bucket_sizes"])


def test_nothing_to_keep_before_the_first_backward() -> None:
    assert ddp_state(make()) == {"buckets": [], "sync": True}


def test_looking_changes_nothing() -> None:
    looked_at, left_alone = make(), make()
    for model in (looked_at, left_alone):
        step(model)
    state = ddp_state(looked_at)
    assert sorted(index for bucket in state["buckets"] for index in bucket) == list(range(8))
    for model in (looked_at, left_alone):
        step(model)
        step(model)
    assert sizes(looked_at) == sizes(left_alone)
    assert ddp_state(looked_at) == ddp_state(left_alone) == state


def test_the_first_step_after_a_restart_uses_the_buckets_of_before() -> None:
    before = make()
    step(before)
    state = ddp_state(before)
    after = make()
    first = sizes(after)
    restore_buckets(after, state)
    assert sizes(after) == sizes(before) != first
    assert ddp_state(after) == state  # also when the next failure comes before the next backward
    step(after)
    assert ddp_state(after) == state


def test_gradients_come_once_after_a_restart() -> None:
    before = make()
    step(before)
    after = make()
    restore_buckets(after, ddp_state(before))
    twin = make()
    twin.load_state_dict(after.state_dict())
    batch = torch.randn(4, 8)
    for model in (after, twin):
        model(batch).sum().backward()
    for one, other in zip(after.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_a_communication_hook_stays() -> None:
    seen: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
        seen.append(bucket.index())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    before = make()
    step(before)
    after = make()
    after.register_comm_hook(None, hook)
    restore_buckets(after, ddp_state(before))
    step(after)
    assert seen == [0, 1]


def test_whether_the_next_forward_broadcasts_buffers() -> None:
    before = make()
    with before.no_sync():
        step(before)
    after = make()
    assert after.require_forward_param_sync
    restore_sync(after, ddp_state(before))
    assert not after.require_forward_param_sync
