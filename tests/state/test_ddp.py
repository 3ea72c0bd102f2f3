"""A restarted DistributedDataParallel sums gradients in the same order as if it had gone on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gemini_ft.errors import LayoutMismatchError, UnsupportedStateError
from gemini_ft.state import codec
from gemini_ft.state.ddp import ddp_state, restore_buckets, restore_sync
from gemini_ft.sync.auto import Auto
from gemini_ft.sync.ddp_hook import HookState
from gemini_ft.sync.ddp_hook import hook as sparse_hook
from gemini_ft.sync.zen import Zen
from gemini_ft.testing import digest

# Where a thread of gloo's is the last to let go of its group, as PowerSGD's callbacks may be, it waits for itself, and the process aborts.
_groups: list[Any] = []


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    _groups.append(dist.group.WORLD)
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
    assert ddp_state(make()) == {"buckets": [], "sync": True, "hooks": []}


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


# Communication hooks


def hooked(hook: Any, state: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 30)))
    model.register_comm_hook(state, hook)
    return model


def train(model: DistributedDataParallel, steps: range) -> str:
    for at in steps:
        model.zero_grad()
        model(torch.randn(8, 40, generator=torch.Generator().manual_seed(at))).square().mean().backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.5 * param.grad
    return digest(model.state_dict())


@pytest.mark.parametrize("options", [{}, {"use_error_feedback": False}, {"warm_start": False}], ids=str)
def test_what_power_sgd_remembers_is_captured(options: dict[str, bool]) -> None:
    hook = powerSGD_hook.powerSGD_hook

    def state() -> Any:
        return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1, **options)

    before = hooked(hook, state())
    train(before, range(5))
    taken, weights = codec.encode(ddp_state(before), b"secret"), {name: value.clone() for name, value in before.state_dict().items()}
    after = hooked(hook, state())
    after.load_state_dict(weights)
    saved = codec.decode(taken, b"secret")
    restore_buckets(after, saved)
    restore_sync(after, saved)
    assert train(after, range(5, 9)) == train(before, range(5, 9))


def test_a_hook_after_which_ranks_differ_is_refused_by_name() -> None:
    state = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=1)
    model = hooked(post_localSGD_hook.post_localSGD_hook, state)
    with pytest.raises(UnsupportedStateError, match=r"^post_localSGD_hook lets the ranks' parameters differ.*replicated=False"):
        ddp_state(model)
    assert ddp_state(model, replicated=False)["hooks"][0][0] == "post_localSGD_hook"


def test_another_hook_is_refused() -> None:
    state = ddp_state(make())
    with pytest.raises(LayoutMismatchError, match=r"communication hooks: \['allreduce_hook'\] now and \[\] in the snapshot"):
        restore_sync(hooked(default_hooks.allreduce_hook, None), state)


@pytest.mark.parametrize("scheme", [None, Zen(), Auto()], ids=["default", "zen", "auto"])
def test_hooks_for_sparse_gradients_can_be_captured(scheme: Any) -> None:
    state = HookState() if scheme is None else HookState(sparse=scheme)
    model = hooked(sparse_hook, state)
    train(model, range(2))
    codec.encode(ddp_state(model), b"secret")
