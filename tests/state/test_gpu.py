"""What only a CUDA device can show: the order of streams, pinned slots, and optimizers that write from kernels.

Every case trains, is abandoned in the middle, resumes in a fresh model from the agent's memory, and must end with the
bytes of the undisturbed run.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gemini_ft import Checkpointer, accelerator
from gemini_ft.agent import lifecycle
from gemini_ft.config import TrafficConfig
from gemini_ft.state.copy_plan import MappedSlot, map_slots
from gemini_ft.state.rng import rng_state, set_rng_state
from gemini_ft.worker import reservation
from gemini_ft.worker.collectives import observe
from gemini_ft.worker.courier import Courier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),  # torch.compile's own
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
]

STEPS, FAILURE = 12, 7


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"gpu-{uuid.uuid4().hex[:8]}"
    yield name
    lifecycle.leave(name)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 2048), nn.BatchNorm1d(2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 512)).cuda()


def _train(model: nn.Module, optimizer: Any, first: int, last: int, after: Callable[[], None], scaler: Any = None) -> None:
    for _ in range(first, last):
        inputs = torch.randn(256, 512, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16, enabled=scaler is not None):
            loss = model(inputs).square().mean()
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        after()


def _bytes(model: nn.Module, optimizer: Any) -> list[bytes]:
    tensors = [*model.state_dict().values()]
    tensors += [value for state in optimizer.state.values() for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
    return [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def _undisturbed(build: Callable[[nn.Module], Any], wrap: Callable[[nn.Module], nn.Module], scaled: bool) -> list[bytes]:
    model = _model()
    trained = wrap(model)
    optimizer = build(model)
    torch.manual_seed(1)
    _train(trained, optimizer, 0, STEPS, lambda: None, torch.amp.GradScaler("cuda") if scaled else None)
    return _bytes(model, optimizer)


def _survived(run_id: str, build: Callable[[nn.Module], Any], wrap: Callable[[nn.Module], nn.Module], scaled: bool) -> list[bytes]:
    for last in (FAILURE, STEPS):
        model = _model()
        trained = wrap(model)
        optimizer = build(model)
        scaler = torch.amp.GradScaler("cuda") if scaled else None
        state = {"scaler": scaler} if scaler is not None else {}
        checkpointer = Checkpointer(model, optimizer, state=state, run_id=run_id, replicas=1, on_late="wait")
        torch.manual_seed(1)
        first = checkpointer.resume()
        assert first == (0 if last == FAILURE else FAILURE)
        _train(trained, optimizer, first, last, checkpointer.step, scaler)
        checkpointer.close(finished=last == STEPS) if last == STEPS else _abandon(checkpointer)
    return _bytes(model, optimizer)


def _abandon(checkpointer: Checkpointer) -> None:
    """Leave as a crash would, but with the last snapshot copied."""
    with checkpointer.mutate():
        checkpointer.close(finished=False)


def _adam(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


@pytest.mark.parametrize("kind", ["foreach", "fused", "capturable"])
def test_kernels_that_write_the_state_wait_for_its_copy(run_id: str, kind: str) -> None:
    build = _adam(**{kind: True})
    assert _survived(run_id, build, lambda m: m, False) == _undisturbed(build, lambda m: m, False)


def test_grad_scaler(run_id: str) -> None:
    build = _adam(foreach=True)
    assert _survived(run_id, build, lambda m: m, True) == _undisturbed(build, lambda m: m, True)


def test_torch_compile(run_id: str) -> None:
    build = _adam(foreach=True)
    compiled = torch.compile
    assert _survived(run_id, build, compiled, False) == _undisturbed(build, compiled, False)


def test_memory_in_segments_that_grow(run_id: str) -> None:
    """Addresses of PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True are of virtual memory, which the driver maps piece by piece."""
    configure: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    configure("expandable_segments:True")
    try:
        build = _adam(fused=True)
        assert _survived(run_id, build, lambda m: m, False) == _undisturbed(build, lambda m: m, False)
    finally:
        configure("expandable_segments:False")


def test_an_optimizer_that_is_compiled(run_id: str) -> None:
    def build(model: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device="cuda"), foreach=True, capturable=True)
        optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
        return optimizer

    assert _survived(run_id, build, lambda m: m, False) == _undisturbed(build, lambda m: m, False)


def _captured(model: nn.Module, optimizer: Any, inputs: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A whole step in a graph, after some that are made to warm up."""

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(inputs).square().mean().backward()
        optimizer.step()

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        step()
    return graph


def test_a_whole_step_that_is_captured(run_id: str) -> None:
    def run(last: int, checkpointed: bool) -> list[bytes]:
        model, inputs = _model(), torch.zeros(256, 512, device="cuda")
        optimizer, start = _adam(capturable=True, foreach=True)(model), 0
        graph = _captured(model, optimizer, inputs)
        torch.manual_seed(1)
        if checkpointed:
            checkpointer = Checkpointer(model, optimizer, run_id=run_id, replicas=1, on_late="wait")
            start = checkpointer.resume()
            assert start == (FAILURE if last == STEPS else 0)
        for _ in range(start, last):
            inputs.normal_()
            if checkpointed:
                checkpointer.wait_before_update()
            graph.replay()
            if checkpointed:
                checkpointer.step()
        if checkpointed:
            _abandon(checkpointer) if last == FAILURE else checkpointer.close()
        return _bytes(model, optimizer)

    undisturbed = run(STEPS, False)
    run(FAILURE, True)
    assert run(STEPS, True) == undisturbed


def test_a_thread_of_ours_asks_events_while_a_graph_is_captured() -> None:
    """In CUDA's strictest mode, which is torch's default: the capture goes on, and the thread is answered."""
    device, side, graph = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    tensor, asked = torch.ones(4, device="cuda"), itertools.count()
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # cycles
    event = accelerator.event_on(accelerator.stream_of(device), device)
    begun = threading.Event()

    def ask() -> int:
        accelerator.enter(device)
        while not event.query():
            next(asked)
            begun.set()
            time.sleep(0.001)
        return next(asked)

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        assert begun.wait(60)
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="global")
            tensor.mul_(2)
            time.sleep(0.05)
            graph.capture_end()
        assert answer.result(60) > 10
    graph.replay()
    torch.cuda.synchronize()
    assert tensor.tolist() == [2.0] * 4


def test_cuda_random_state_is_restored() -> None:
    torch.manual_seed(3)
    torch.randn(5, device="cuda")
    state = rng_state()
    expected = torch.randn(5, device="cuda")
    torch.randn(100, device="cuda")
    set_rng_state(state)
    assert torch.equal(torch.randn(5, device="cuda"), expected)


def test_slots_are_pinned_pages_of_the_agent(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[MappedSlot] = []

    def map_and_note(*arguments: Any) -> list[MappedSlot]:
        slots = map_slots(*arguments)
        mapped.extend(slots)
        return slots

    monkeypatch.setattr(reservation, "map_slots", map_and_note)
    model = _model()
    optimizer = _adam()(model)
    checkpointer = Checkpointer(model, optimizer, run_id=run_id, replicas=1)
    checkpointer.resume()
    _train(model, optimizer, 0, 2, checkpointer.step)
    with checkpointer.mutate():
        assert mapped
        assert all(slot.tensor.is_pinned() for slot in mapped)
    checkpointer.close()


def test_an_agent_that_dies_with_copies_in_flight_takes_no_memory_from_under_them(run_id: str) -> None:
    """The device is held back, so that every copy of a snapshot is still queued when the agent dies; the slots go after them."""
    build, steps = _adam(fused=True), itertools.count(1)
    model = _model()
    optimizer = build(model)
    checkpointer = Checkpointer(model, optimizer, run_id=run_id, replicas=1, on_late="wait")
    torch.manual_seed(1)
    checkpointer.resume()

    def after() -> None:
        dies = next(steps) == FAILURE
        if dies:
            torch.cuda._sleep(10**9)  # cycles
        checkpointer.step()
        if dies:
            os.kill(json.loads(lifecycle.status(run_id) or "")["pid"], signal.SIGKILL)

    _train(model, optimizer, 0, STEPS, after)
    checkpointer.flush()
    assert checkpointer.stats.committed == STEPS
    checkpointer.close()
    assert _bytes(model, optimizer) == _undisturbed(build, lambda m: m, False)


def test_update_waits_on_the_device_and_not_on_the_host(run_id: str) -> None:
    """The snapshot of a step holds the values from before the next update, although the host never waited for the copy."""
    model = nn.Linear(4096, 4096, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    checkpointer = Checkpointer(model, optimizer, run_id=run_id, replicas=1, on_late="wait", verify=False)
    checkpointer.resume()
    for value in range(1, 6):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, -1.0)
        optimizer.step()
        expected = next(model.parameters()).detach().clone()
        checkpointer.step(value=value)
    with checkpointer.mutate():
        for parameter in model.parameters():
            parameter.data.zero_()
    checkpointer.close(finished=False)
    again = Checkpointer(model, optimizer, run_id=run_id, replicas=1)
    assert again.resume() == 5
    assert torch.equal(next(model.parameters()), expected)
    again.close()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this rank only, on NCCL for tensors of the device and gloo for others."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_collective_is_in_flight_until_it_is_over(alone: None, backend: str) -> None:
    group = dist.new_group(backend=backend)
    with observe() as observer:
        tensor = torch.ones(2**24, device="cuda")
        for _ in range(8):
            dist.all_reduce(tensor, group=group)
        torch.cuda.synchronize()
        until = time.monotonic() + 10
        while observer.page.read().in_flight and time.monotonic() < until:
            time.sleep(0.001)
        step = observer.step_over()
        assert observer.page.read().in_flight == 0
        assert [each.name for each in step.collectives] == ["allreduce_"] * 8


def test_a_courier_takes_its_buffer_of_the_device_and_nothing_else(alone: None) -> None:
    before = torch.cuda.memory_allocated()
    traffic = TrafficConfig.model_validate({"transport": "collective", "buffer_bytes": 2**22, "sub_buffers": 4})
    courier = Courier(traffic, 10, lambda message: None, dict, dict)
    assert torch.cuda.memory_allocated() - before == 2**22
    courier.close()
