"""The waits between host and device, and between streams, against a fake accelerator; and each of them, removed on purpose, is missed.

Every scenario says how the real code is used and what must be seen, whatever the order in which the device does its work.
"""

from __future__ import annotations

import importlib
import os
import re
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_kit import connection, eventually
from capture_kit import slot_of
from device_waits import WAITS, source_without
from fake_accelerator import DEVICE, FakeAccelerator, installed

import gemini_ft
import gemini_ft.worker.snapshot
from gemini_ft import accelerator
from gemini_ft.config import TrafficConfig
from gemini_ft.core.diligence import Diligence
from gemini_ft.core.layout import TensorSpec, build_layout
from gemini_ft.core.roots import checksum
from gemini_ft.errors import AgentError
from gemini_ft.state import copy_plan
from gemini_ft.state.copy_plan import MappedSlot
from gemini_ft.state.replicas import begin_digest
from gemini_ft.state.tensors import Source
from gemini_ft.wire.worker_messages import Collect, Copied, Dispatch, GiveUp, Landed, Request
from gemini_ft.worker.snapshot import PendingSnapshot

SEEDS = range(12)
COUNT, CHUNK = 256, 256  # elements, and bytes of a chunk: four of them
PIECE = 4096  # bytes that travel at a time; the smallest there are

Scenario = Callable[[Any, FakeAccelerator], None]


def _snapshotter(module: Any, tell: Callable[[Any], None], recover: Callable[[], None] = lambda: None, waits: bool = True) -> Any:
    return module.Snapshotter(
        0,
        root=lambda job: "",
        client=connection(tell),
        recover=recover,
        on_discard=lambda *_: None,
        raises=False,
        waits=waits,
        timeout=60.0,
        diligence=Diligence(0.0),
    )


def _plan(fake: FakeAccelerator, plans: Any = copy_plan, mutable: bool = False) -> tuple[torch.Tensor, Any, Any]:
    weights = fake.tensor(torch.zeros(COUNT))
    source = Source(TensorSpec(name="weights", dtype="float32", shape=(COUNT,), group=(0,)), weights, mutable)
    layout = build_layout([source.spec], 0, 1)
    return weights, plans.CopyPlan([source], layout, CHUNK), layout


def all_are(value: float, tensor: torch.Tensor) -> bool:
    """Whether all elements have this value. Where a mutant fails, pytest would take seconds to explain how two lists differ."""
    return bool((tensor == value).all())


def snapshot(module: Any, fake: FakeAccelerator, plans: Any = copy_plan, batches: int = 1) -> None:
    """The snapshot has the values of its own step, although the next update is queued while the copy is; nothing is published early."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "LANDING", 4 * COUNT // batches)
        weights, plan, layout = _plan(fake, plans)
    per_event = min(batches, 2)
    told: list[Any] = []

    def tell(message: Any) -> None:
        told.append(message)
        if isinstance(message, Landed):  # what the agent would read now
            landed.append(checksum(slot.view[: message.upto]))

    landed: list[int] = []
    with slot_of(layout) as slot:
        snapshotter = _snapshotter(module, tell)
        snapshotter.plan, snapshotter.slots = plan, {0: slot}
        with fake.held(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "PER_EVENT", per_event)
            weights.fill_(1.0)
            snapshotter.submit(module.PendingSnapshot(iteration=1, extras=b"", digest=None, marks=plan.marks(), ready=plan.ready()))
            snapshotter.granted(1, 0)
            snapshotter.before_update()
            weights.fill_(2.0)
        snapshotter.settle()
        snapshotter.slots = {}
        snapshotter.stop()
        fake.synchronize()
        assert not [message for message in told if isinstance(message, GiveUp)]
        expected = torch.ones(COUNT).view(torch.uint8)
        uptos = [message.upto for message in told if isinstance(message, Landed)]
        assert uptos == [number * 4 * COUNT // batches for number in range(per_event, batches + 1, per_event)]
        assert landed == [checksum(memoryview(expected[:upto].numpy())) for upto in uptos]
        assert isinstance(told[-1], Copied)
        assert torch.equal(slot.tensor, expected)
    assert all_are(2.0, weights.cpu())


def compared(module: Any, fake: FakeAccelerator) -> None:
    """The digest that ranks compare is of the snapshot's own step, and neither the host nor the update waits for it."""
    weights, plan, layout = _plan(fake)
    sources = [replace(source, spec=replace(source.spec, group=(0, 1))) for source in plan.sources]
    told: list[Any] = []
    with slot_of(layout) as slot:
        snapshotter = _snapshotter(gemini_ft.worker.snapshot, told.append)
        snapshotter.plan, snapshotter.slots = plan, {0: slot}
        with fake.held():
            weights.fill_(1.0)
            job = PendingSnapshot(iteration=1, extras=b"", digest=module.begin_digest(sources), marks=plan.marks(), ready=plan.ready())
            snapshotter.submit(job)
            snapshotter.granted(1, 0)
            snapshotter.before_update()
            weights.fill_(2.0)
        snapshotter.settle()
        snapshotter.slots = {}
        snapshotter.stop()
        fake.synchronize()
        expected = module.begin_digest(sources)
        assert told[-1].digest != expected()
        weights.fill_(1.0)
        assert told[-1].digest == module.begin_digest(sources)()


def several_batches(module: Any, fake: FakeAccelerator) -> None:
    """The same, with several batches, and an event after every second one."""
    snapshot(module, fake, batches=4)


def readiness(module: Any, fake: FakeAccelerator) -> None:
    """The copy comes after the update that the training has queued before it."""
    snapshot(gemini_ft.worker.snapshot, fake, plans=module)


def staging(module: Any, fake: FakeAccelerator) -> None:
    """A tensor that may change at any time has been copied, on the device, when the training goes on."""
    weights, plan, _ = _plan(fake, module, mutable=True)
    with fake.held():
        weights.fill_(1.0)
        plan.stage()
        weights.fill_(2.0)
    with slot_of(_plan(fake)[2]) as slot:
        for number, batch in enumerate(plan.batches):
            slot.write(number, batch)
        fake.synchronize()
        assert torch.equal(slot.tensor, torch.ones(COUNT).view(torch.uint8))


def neighbours(module: Any, fake: FakeAccelerator) -> None:
    """Small tensors that lie beside each other in the slot are there, each with the values of its own step, after a few copies."""
    dtypes = [torch.float32, torch.uint8, torch.bfloat16, torch.float32, torch.int64]
    tensors = [fake.tensor(torch.zeros(3, 5, dtype=dtype)) for dtype in dtypes]
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    specs = [TensorSpec(name=f"t{number}", dtype=name, shape=(3, 5), group=(0,)) for number, name in enumerate(names)]
    layout = build_layout(specs, 0, 1)
    sources = [Source(spec, tensor, mutable=number == 2) for number, (spec, tensor) in enumerate(zip(specs, tensors, strict=True))]
    plan = module.CopyPlan(sources, layout, CHUNK)
    assert sum(len(batch.small) for batch in plan.batches) == len(plan.batches)
    side = fake.Stream()
    with slot_of(layout) as slot:
        for value in (1, 2):
            for tensor in tensors:
                tensor.fill_(value)
            plan.stage()
            side.wait_event(plan.ready())
            with fake.stream(side):
                for number, batch in enumerate(plan.batches):
                    slot.write(number, batch)
            fake.current_stream().wait_stream(side)
        fake.synchronize()
        for piece, tensor in zip(layout.pieces, tensors, strict=True):
            assert all_are(2, slot.tensor[piece.offset : piece.offset + piece.nbytes].view(tensor.dtype))


def one_after_the_other(module: Any, fake: FakeAccelerator) -> None:
    """The second snapshot is staged while the first is still being copied, and each has the values of its own step."""
    weights, plan, layout = _plan(fake, mutable=True)
    told: list[Any] = []
    with slot_of(layout) as first, slot_of(layout) as second:
        snapshotter = _snapshotter(module, told.append)
        snapshotter.plan, snapshotter.slots = plan, {0: first, 1: second}
        with fake.held():
            for number in (1, 2):
                weights.fill_(float(number))
                snapshotter.make_way()
                plan.stage()
                snapshotter.submit(
                    module.PendingSnapshot(iteration=number, extras=b"", digest=None, marks=plan.marks(), ready=plan.ready())
                )
                if number == 1:
                    snapshotter.granted(1, 0)
        eventually(lambda: any(isinstance(each, Request) and each.iteration == 2 for each in told))
        snapshotter.granted(2, 1)
        snapshotter.settle()
        snapshotter.slots = {}
        snapshotter.stop()
        fake.synchronize()
        assert not [message for message in told if isinstance(message, GiveUp)]
        for number, slot in ((1, first), (2, second)):
            assert all_are(number, slot.tensor.view(torch.float32))


def events(module: Any, fake: FakeAccelerator) -> None:
    """An event comes after what its stream was given before."""
    tensor = fake.tensor(torch.zeros(COUNT))
    tensor.fill_(3.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "module_of", lambda _: fake)
        module.event_on(fake.current_stream(), DEVICE).synchronize()
    assert all_are(3.0, tensor.elem)


def lateness(module: Any, fake: FakeAccelerator) -> None:
    """How long the state has been final is asked of the device when it has come so far."""
    weights, plan, layout = _plan(fake)
    with slot_of(layout) as slot:
        snapshotter = _snapshotter(module, lambda _: None, waits=False)
        snapshotter.plan, snapshotter.slots = plan, {0: slot}
        weights.fill_(1.0)
        job = module.PendingSnapshot(iteration=1, extras=b"", digest=None, marks=plan.marks(), ready=plan.ready())
        fake.synchronize()
        snapshotter.submit(job)
        eventually(lambda: job.is_seen)
        snapshotter.granted(1, 0)
        snapshotter.settle()
        snapshotter.slots = {}
        snapshotter.stop()
        assert all_are(1.0, slot.tensor.view(torch.float32))


def agent_dies(module: Any, fake: FakeAccelerator) -> None:
    """Slots go when another agent comes: not while copies into them are in the queue."""
    weights, plan, layout = _plan(fake)
    at_recovery: list[bool] = []

    def tell(message: Any) -> None:
        if isinstance(message, Landed):
            raise AgentError("the agent ended")

    with slot_of(layout) as slot:
        snapshotter = _snapshotter(module, tell, lambda: at_recovery.append(all(stream.query() for stream in fake.streams[1:])))
        snapshotter.plan, snapshotter.slots = plan, {0: slot}
        weights.fill_(1.0)
        snapshotter.submit(module.PendingSnapshot(iteration=1, extras=b"", digest=None, marks=plan.marks(), ready=plan.ready()))
        snapshotter.granted(1, 0)
        eventually(lambda: bool(at_recovery))
        snapshotter.slots = {}
        snapshotter.stop()
        fake.synchronize()
    assert at_recovery == [True]


def lanes(module: Any, fake: FakeAccelerator) -> None:
    """Gradients that the backward pass has queued are averaged, and what reads the averages comes after them."""
    gradient, taken = fake.tensor(torch.zeros(COUNT)), {}

    def work() -> Any:
        sent = gradient * 2
        answer = yield module.PendingCollective(run=lambda: sent + 1, nbytes=sent.nbytes)
        return {"weight": answer * 10}

    both = module.Lanes(DEVICE, lambda error, _: error)
    job = module.GroupInFlight(work(), True, taken.update)
    with fake.held():
        gradient.fill_(3.0)
        both.submit(job)
        both.wait(job, lambda: None)
        total = fake.tensor(torch.zeros(COUNT)).add_(taken["weight"])
    both.close()
    assert all_are(70.0, total.cpu())


def turns(module: Any, fake: FakeAccelerator) -> None:
    """What was put in the background comes after what its caller's stream has queued, and is there when its future is."""
    line, stream = module.Line(), fake.Stream()
    tensor = fake.tensor(torch.zeros(COUNT))
    with fake.stream(stream):
        tensor.fill_(3.0)
        result = line.later(lambda: tensor * 2).wait()
    line.end()
    assert all_are(6.0, result.elem)


def measuring(module: Any, fake: FakeAccelerator) -> None:
    """A time is taken when all that was queued is done."""
    tensor = fake.tensor(torch.zeros(COUNT)).fill_(3.0)
    module.now_on(DEVICE)
    assert all_are(3.0, tensor.elem)


class _Wire:
    """Stands for `torch.distributed` on NCCL: transfers on a stream of their own, which a finished `wait` orders and does not await."""

    def __init__(self, fake: FakeAccelerator) -> None:
        self._fake, self._stream = fake, fake.Stream()
        self.sent: list[torch.Tensor] = []
        self.coming = torch.arange(PIECE).to(torch.uint8)
        self.used: list[Any] = []  # streams of its callers

    def get_backend_config(self) -> str:
        return "cuda:nccl"  # `get_backend` says "undefined" of a group that was made without naming one

    def get_rank(self) -> int:
        return 0

    def new_group(self, **_: Any) -> None:
        return None

    def isend(self, piece: Any, *_: Any) -> Any:
        return self._begin(lambda: self.sent.append(piece.elem.clone()))

    def irecv(self, place: Any, *_: Any) -> Any:
        return self._begin(lambda: place.elem.copy_(self.coming))

    def _begin(self, transfer: Callable[[], Any]) -> Any:
        self._stream.wait_stream(self._callers())
        self._stream.put(transfer)
        return types.SimpleNamespace(wait=lambda *_: self._callers().wait_stream(self._stream))

    def _callers(self) -> Any:
        self.used.append(self._fake.current_stream())
        return self.used[-1]


def courier(module: Any, fake: FakeAccelerator) -> None:
    """A slot is free again when the agent hears that its piece has gone; a replica is whole when the agent hears that it came. Neither
    stands in the training's queue, behind work that may wait for another rank, and that for this piece.
    """
    wire, told = _Wire(fake), []
    fd = os.memfd_create("replica")
    os.ftruncate(fd, PIECE)
    slot = MappedSlot(os.dup(fd), 0, PIECE, None)
    traffic = TrafficConfig.model_validate({"transport": "collective", "buffer_bytes": 4 * PIECE, "sub_buffers": 4})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "dist", wire)
        patch.setattr(torch, "empty", lambda size, dtype, device: fake.tensor(torch.zeros(size, dtype=dtype)))
        carrying = module.Courier(traffic, 10.0, told.append, lambda: {0: slot}, lambda: {"replica": fd})
    slot.tensor.fill_(7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "dist", wire)
        carrying.dispatch(Dispatch(tag=1, target=1, slot=0, offset=0, nbytes=PIECE))
        eventually(lambda: len(told) == 1)
        slot.tensor.fill_(9)
        fake.synchronize()
        assert not told[0].error
        assert len(wire.sent) == 1
        assert (wire.sent[0] == 7).all()
        carrying.collect(Collect(tag=2, source=1, key="replica", position=0, nbytes=PIECE))
        eventually(lambda: len(told) == 2)
        assert slot.tensor.equal(wire.coming)
    carrying.close()
    assert not told[1].error
    assert fake.current_stream() not in wire.used
    slot.close()
    os.close(fd)


SCENARIOS: dict[str, tuple[str, Scenario]] = {
    "snapshot": ("gemini_ft.worker.snapshot", snapshot),
    "several batches": ("gemini_ft.worker.snapshot", several_batches),
    "compared": ("gemini_ft.state.replicas", compared),
    "readiness": ("gemini_ft.state.copy_plan", readiness),
    "neighbours": ("gemini_ft.state.copy_plan", neighbours),
    "staging": ("gemini_ft.state.copy_plan", staging),
    "one after the other": ("gemini_ft.worker.snapshot", one_after_the_other),
    "lateness": ("gemini_ft.worker.snapshot", lateness),
    "events": ("gemini_ft.accelerator", events),
    "agent dies": ("gemini_ft.worker.snapshot", agent_dies),
    "lanes": ("gemini_ft.pipeline.lanes", lanes),
    "turns": ("gemini_ft.sync.base", turns),
    "measuring": ("gemini_ft.pipeline.measuring", measuring),
    "courier": ("gemini_ft.worker.courier", courier),
}

# Calls that wait or order.
_WAIT = re.compile(r"\.(?:wait_event|wait_stream|synchronize|record_event)\(|\bmodule\.stream\(")


def _module(name: str, wait: str = "", instead: str = "") -> Any:
    """A module of the package, or a mutant of it that lacks one wait."""
    real = importlib.import_module(name)
    if not wait:
        return real
    mutant = types.ModuleType(name)
    mutant.__package__, mutant.__spec__ = real.__package__, real.__spec__
    exec(compile(source_without(real, wait, instead), real.__file__, "exec"), mutant.__dict__)
    return mutant


@pytest.mark.parametrize("name", SCENARIOS)
def test_whatever_the_order_of_the_device(name: str) -> None:
    module, scenario = SCENARIOS[name]
    for seed in SEEDS:
        with installed(seed) as fake:
            scenario(_module(module), fake)


@pytest.mark.parametrize(("name", "wait", "instead"), WAITS, ids=[f"{name}: {wait.strip()}" for name, wait, _ in WAITS])
def test_a_wait_that_is_missing_is_found(name: str, wait: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fake_accelerator.PATIENCE", 1.0)  # for mutants that wait in vain
    module, scenario = SCENARIOS[name]
    mutant = _module(module, wait, instead)
    for seed in range(8 * len(SEEDS)):  # until the first that shows it
        with installed(seed) as fake:
            try:
                scenario(mutant, fake)
            except (AssertionError, ValueError, AgentError):
                return
    pytest.fail(f"without {wait} everything goes on as before: nothing needs it, or the fake accelerator is too kind")


def test_what_the_host_waits_for_may_be_queued_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(0) as fake:
        event, stream = fake.Event(), fake.Stream()
        event.is_over = False  # as while a thread records it
        with ThreadPoolExecutor() as pool:
            waiter = pool.submit(event.synchronize)
            stream.record_event(event)
            waiter.result(60)
        event.is_over = False
        monkeypatch.setattr("fake_accelerator.PATIENCE", 0.1)
        with pytest.raises(AssertionError, match="nothing in the queues"):
            event.synchronize()


def test_every_wait_of_the_package_is_among_them() -> None:
    """`synchronize` of the pipeline's synchronizer is another thing: it ends an iteration's averaging."""
    found: dict[str, int] = {}
    roots = [Path(path) for path in gemini_ft.__path__]
    files = [
        *roots[0].rglob("*.py"),
        *(file for root in roots[1:] for folder in ("sync", "compression") for file in (root / folder).glob("*.py")),
    ]
    for file in files:
        waits = _WAIT.findall(file.read_text())
        if waits and file.name != "synchronizer.py":
            found[file.stem] = len(waits)
    told: dict[str, int] = {}
    for name, wait, _ in WAITS:
        if _WAIT.search(wait):
            stem = SCENARIOS[name][0].rpartition(".")[2]
            told[stem] = told.get(stem, 0) + 1
    assert told == found


class _Devices:
    """What the package's threads ask of CUDA's runtime and driver, and the device that is each caller's own meanwhile."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current, self.asked = threading.local(), list[tuple[str, int]]()
        patch.setattr(torch.cuda, "_exchange_device", self._exchange)
        patch.setattr(torch.cuda, "_maybe_exchange_device", self._exchange)
        patch.setattr(torch.cuda, "set_device", lambda device: self._exchange(device.index))
        patch.setattr(torch.cuda, "cudart", lambda: self)
        patch.setattr(torch.cuda, "check_error", lambda _: None)

    def _exchange(self, index: int) -> int:
        before, self.current.index = getattr(self.current, "index", 0), index
        return before

    def _note(self, name: str) -> None:
        self.asked.append((name, getattr(self.current, "index", 0)))

    def cudaHostRegister(self, *_: Any) -> None:
        self._note("register")

    def cudaHostUnregister(self, _: int) -> None:
        self._note("unregister")

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:
        self._note(f"captures: {mode._obj.value}")


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> _Devices:
    made = _Devices(monkeypatch)
    monkeypatch.setattr(accelerator.ctypes, "CDLL", lambda name: made if name == "libcuda.so.1" else pytest.fail(name))
    return made


def test_slots_are_pinned_for_their_device_by_a_thread_that_has_used_none(devices: _Devices) -> None:
    """Each worker that is not on device 0 would take hundreds of megabytes there, when an agent dies before its first snapshot."""

    def slot() -> None:
        fd = os.memfd_create("slot")
        os.ftruncate(fd, PIECE)
        MappedSlot(fd, 0, PIECE, torch.device("cuda", 1)).close()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(slot).result()
        assert devices.asked == [("register", 1), ("unregister", 1)]
        assert pool.submit(lambda: devices.current.index).result() == 0


def test_a_thread_that_uses_a_device_leaves_captures_of_others_alone(devices: _Devices) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(accelerator.enter, torch.device("cuda", 1)).result()
    assert devices.asked == [("captures: 1", 1)]


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "signs of zeros, in pairs": lambda values: values[1:8:2].neg_(),
    "other places": lambda values: values[8:12].copy_(values[12:16].clone()),
    "one bit": lambda values: values[15].add_(5e-7),
}


@pytest.mark.parametrize("change", CHANGES)
def test_digests_of_a_device_tell_states_apart(change: str) -> None:
    values = torch.cat([torch.zeros(8), torch.arange(8).float()])
    changed = values.clone()
    CHANGES[change](changed)
    spec = TensorSpec(name="weights", dtype="float32", shape=(16,), group=(0, 1))
    with installed(0) as fake:
        digests = {begin_digest([Source(spec, fake.tensor(each), False)])() for each in (values, values.clone(), changed)}
    assert len(digests) == 2


def test_a_digest_does_not_depend_on_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "holds", lambda tensor: True)
    specs = [
        TensorSpec(name="a", dtype="float32", shape=(3, 2**20), group=(0, 1)),
        TensorSpec(name="b", dtype="float32", shape=(2**11, 2**11 + 1), group=(0, 1)),
    ]
    values = [torch.rand(spec.shape) for spec in specs]
    for turned in ([values[0], values[1].t().contiguous().t()], [values[0].t().contiguous().t(), values[1]]):
        first, second = (
            begin_digest([Source(spec, tensor, False) for spec, tensor in zip(specs, tensors, strict=True)])()
            for tensors in (values, turned)
        )
        assert first == second


def test_neighbours_of_a_tail_that_begins_in_mid_row_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "holds", lambda tensor: True)
    specs = [
        TensorSpec(name="a", dtype="bfloat16", shape=(319, 315), group=(0, 1, 2)),
        TensorSpec(name="b", dtype="float32", shape=(8,), group=(1,)),
    ]
    matrix = torch.arange(315 * 319).bfloat16().view(315, 319).t()
    sources = [Source(specs[0], matrix, False), Source(specs[1], torch.arange(8.0), False)]
    layout = build_layout(specs, 1, 3)
    plan = copy_plan.CopyPlan(sources, layout, CHUNK)
    with slot_of(layout) as slot:
        for number, batch in enumerate(plan.batches):
            slot.write(number, batch)
        for piece, source in zip(layout.pieces, sources, strict=True):
            found = slot.tensor[piece.offset : piece.offset + piece.nbytes].view(source.tensor.dtype)
            assert torch.equal(found, source.tensor.flatten()[piece.start : piece.stop])
