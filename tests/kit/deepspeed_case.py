"""What the ranks of test_deepspeed*.py run: small models under every stage of DeepSpeed."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plain_case import side_by_side
from torch import nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")

GLOBAL_BATCH = 12  # of jobs that are resized


@dataclass(frozen=True)
class Case:
    """One training job; ``config`` and ``zero`` are merged into DeepSpeed's configuration, ``options`` into our section."""

    stage: int = 0
    bf16: bool = False
    accumulate: int = 1
    steps: int = 10
    groups: int = 1
    frozen: bool = False
    optimizer: str = "torch"  # torch.optim.AdamW, or a type for the configuration's optimizer section
    schedule: bool = True
    pause: float = 0.0  # seconds per step
    config: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


class Net(nn.Module):
    """Buffers that differ between ranks, dropout, and a part that may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 24)
        self.norm = nn.BatchNorm1d(24)
        self.drop = nn.Dropout(0.2)
        self.body = nn.Linear(24, 24)
        self.last = nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.embed(x)))
        out: torch.Tensor = self.last(self.drop(torch.relu(self.body(hidden))))
        return out


class Smooth(nn.Module):
    """Nothing that differs between ranks; odd sizes, so that every cut needs padding."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 23)
        self.stem.requires_grad_(False)
        self.first = nn.Linear(23, 17)
        self.scale = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(17, 1)
        self.offset: torch.Tensor
        self.register_buffer("offset", torch.full((3,), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.first(self.stem(x)) * self.scale)) + self.offset.sum()
        return out


def configuration(case: Case, micro_batch: int = 4) -> dict[str, Any]:
    zero = {"stage": case.stage, "reduce_bucket_size": 5000, "allgather_bucket_size": 100000, "stage3_param_persistence_threshold": 64}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": case.accumulate,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "zero_optimization": {**zero, **case.zero},
        "zero_allow_untested_optimizer": True,
        "gemini": {"on_late": "wait", **case.options},
    }
    if case.bf16:
        config |= {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}}
    if case.optimizer != "torch":
        config["optimizer"] = {"type": case.optimizer, "params": {"lr": 1e-2}}
    merged = config | dict(case.config)
    return {key: value for key, value in merged.items() if value is not None}


def start(case: Case, net: nn.Module, micro_batch: int = 4, **named: Any) -> Any:
    """A protected engine; what else is ``named`` goes to ``deepspeed.initialize``."""
    import gemini_ft.deepspeed

    params = [param for param in net.parameters() if param.requires_grad]
    parts = [{"params": params[i :: case.groups], "lr": 1e-2 / (i + 1)} for i in range(case.groups)]
    named |= {"optimizer": torch.optim.AdamW(parts, lr=1e-2)} if case.optimizer == "torch" else {"model_parameters": parts}
    if case.schedule:
        named["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    engine, *_ = gemini_ft.deepspeed.initialize(model=net, config=configuration(case, micro_batch), **named)
    return engine


def result_of(engine: Any, first: int) -> dict[str, Any]:
    """What a rank says at its end; it has left the run then."""
    from gemini_ft.testing import digest

    live = state_of(engine)
    restored = engine.gemini.checkpointer.stats.restored
    engine.gemini.close()
    dist.barrier()
    return {"start": first, "state": digest({**live, "rng": torch.get_rng_state()}), "restored": restored}


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """What training depends on; padding, which ZeRO leaves as it finds it, is left out."""
    from gemini_ft.deepspeed.partitions import present_cut
    from gemini_ft.deepspeed.state import EngineState

    cut, found = present_cut(engine), dict[str, torch.Tensor]()
    for item in EngineState(engine).survey():
        master = item.name if item.name in cut.shapes else item.name.rpartition(".")[0]
        if cut.shapes.get(master) == tuple(item.tensor.shape):
            flat = item.tensor.detach().flatten()
            for piece in cut.of(master):
                length = piece.stop - piece.start
                found[f"{item.name}:{piece.param}"] = flat[piece.offset : piece.offset + length]
        else:
            found[item.name] = item.tensor
    return found


def train(case: Case, out: str) -> dict[str, Any]:
    """Train to the end; every micro-batch's loss goes to the file ``<out>.<rank>``, in hex."""
    import gemini_ft

    gemini_ft.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Net()
    if case.frozen:
        net.embed.requires_grad_(False)
    torch.manual_seed(rank)
    engine = start(case, net)
    first, dtype = engine.global_steps, torch.bfloat16 if case.bf16 else torch.float32
    with open(f"{out}.{rank}", "a", buffering=1) as trace:
        for step in range(first, case.steps):
            if step == 2:  # once: a process that goes on later does not do it again
                engine.module.drop.p = 0.5
            for micro in range(case.accumulate):
                loss = engine(torch.randn(4, 8).to(dtype)).float().square().mean()
                trace.write(f"{step * case.accumulate + micro} {loss.item().hex()} {engine.get_lr()[0].hex()}\n")
                engine.backward(loss)
                engine.step()
            time.sleep(case.pause)
    return result_of(engine, first)


def train_average(case: Case, out: str) -> dict[str, Any]:
    """As `train`, with an average of the weights in a buffer, which the script moves behind ``engine.step()``, without a pause."""
    import gemini_ft

    gemini_ft.init_process_group("gloo")
    torch.manual_seed(0)
    net = Smooth()
    net.register_buffer("average", torch.zeros_like(net.last.weight))
    engine = start(case, net)
    first = engine.global_steps
    with open(f"{out}.{dist.get_rank()}", "a", buffering=1) as trace:
        for step in range(first, case.steps):
            loss = engine(torch.randn(4, 8)).square().mean() + engine.module.average.sum() * 0
            engine.backward(loss)
            engine.step()
            engine.module.average.lerp_(engine.module.last.weight.detach(), 0.3)
            trace.write(f"{step} {loss.item().hex()} {engine.module.average.sum().item().hex()}\n")
    return result_of(engine, first)


def train_pipeline(case: Case, out: str) -> dict[str, Any]:
    """Two stages of a pipeline; the loss of every step goes to the file ``<out>.<rank>``, in hex."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import gemini_ft
    import gemini_ft.deepspeed

    gemini_ft.init_process_group("gloo")
    rank = dist.get_rank()
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1)]
    net = PipelineModule(layers=layers, num_stages=2, loss_fn=lambda out, y: (out - y).square().mean())
    torch.manual_seed(rank)
    params = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    engine, *_ = gemini_ft.deepspeed.initialize(model=net, optimizer=optimizer, config=configuration(case))
    first = engine.global_steps

    def batches(step: int) -> Any:
        generator = torch.Generator().manual_seed(step)
        while True:
            x = torch.randn(4, 8, generator=generator)
            yield x, x.sum(1, keepdim=True)

    with open(f"{out}.{rank}", "a", buffering=1) as trace:
        for step in range(first, case.steps):
            loss = engine.train_batch(data_iter=batches(step))
            trace.write(f"{step} {loss.item().hex()}\n")
    return result_of(engine, first)


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples with noise that the loader's workers draw."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return index + torch.randn(8), torch.tensor([float(index)])


def train_data(case: Case, out: str) -> Any:
    """Trains on the loader that DeepSpeed makes, over and over, and on one of its own, by epochs. A digest of the final weights."""
    from deepspeed.utils import RepeatingLoader

    import gemini_ft
    from gemini_ft.testing import digest

    multiprocessing.set_start_method("fork", force=True)  # of loaders' workers, as in a script
    gemini_ft.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Smooth()
    net.register_buffer("average", torch.zeros(8))
    torch.manual_seed(rank)
    engine = start(case, net, training_data=Noisy())
    theirs = iter(RepeatingLoader(engine.training_dataloader))
    own: Any = torch.utils.data.DataLoader(torch.utils.data.Subset(Noisy(), range(24)), batch_size=4, shuffle=True)
    schedule = torch.optim.lr_scheduler.StepLR(engine.basic_optimizer, 3, 0.7)  # moved by the script, after the step
    kept = vars(engine).get("gemini")
    if kept:
        own = gemini_ft.resumable(own)
        kept.keep(own=own, schedule=schedule)
    with open(f"{out}.{rank}", "a", buffering=1) as trace:
        for epoch in range(kept.client_state.get("epoch", 0) if kept else 0, 2):
            for x, y in own:
                more, _ = next(theirs)
                loss = (engine(torch.cat([x, more])) - torch.cat([y, y])).square().mean() + engine.module.average.sum() * 0
                trace.write(f"{engine.micro_steps} {loss.item().hex()} {schedule.get_last_lr()}\n")
                engine.backward(loss)
                if kept:
                    kept.client_state["epoch"] = epoch
                engine.step()
                schedule.step()
                engine.module.average.add_(x.mean(0))  # so that snapshots are taken when the next batch has been drawn
    weights = torch.cat([param.detach().flatten() for param in net.parameters()])
    engine.destroy()
    return digest({"weights": weights})


def train_on_a_loader_of_its_own() -> list[str]:
    """Returns the warnings of a script that makes a DataLoader and gives it to nothing."""
    from session_case import Recorded

    import gemini_ft

    gemini_ft.init_process_group("gloo")
    told = Recorded()
    engine = start(Case(0), Smooth())
    for x, _ in torch.utils.data.DataLoader(Noisy(), 24):
        engine.backward(engine(x).square().mean())
        engine.step()
    engine.gemini.close()
    return told.texts


def train_pipeline_data(case: Case, out: str) -> Any:
    """Trains a pipeline on the data that the engine was given. A digest of the rank's final weights."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import gemini_ft
    from gemini_ft.testing import digest

    multiprocessing.set_start_method("fork", force=True)  # of loaders' workers, as in a script
    gemini_ft.init_process_group("gloo")
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 1)]
    net = PipelineModule(layers=layers, num_stages=2, loss_fn=lambda out, y: (out - y).square().mean())
    torch.manual_seed(dist.get_rank())
    engine = start(case, net, training_data=Noisy())
    with open(f"{out}.{dist.get_rank()}", "a", buffering=1) as trace:
        trace.writelines(f"{step} {engine.train_batch().item().hex()}\n" for step in range(engine.global_steps, case.steps))
    weights = torch.cat([param.detach().flatten() for param in net.parameters()])
    engine.destroy()
    return digest({"weights": weights})


def train_resized(case: Case, out: str, until: int, universal: str = "") -> dict[str, Any]:
    """Train until a step, and leave the run unfinished; the same data whatever the world size.

    Args:
        case: the job.
        out: losses, averaged over the ranks, go to the file ``<out>.<rank>``; whole weights, at the end, to ``<out>.weights``.
        until: optimizer step.
        universal: folder of DeepSpeed's own checkpoints: load the universal one if there is one, and save at the end.
    """
    import gemini_ft

    gemini_ft.init_process_group("gloo")
    torch.manual_seed(0)
    there = bool(universal) and os.path.exists(f"{universal}/latest_universal")
    if there:
        case = Case(**{**vars(case), "config": {**case.config, "checkpoint": {"load_universal": True}}})
    engine = start(case, Smooth(), GLOBAL_BATCH // dist.get_world_size())
    if there:
        engine.load_checkpoint(universal)
    first = engine.global_steps
    _train_smooth(case, engine, out, until)
    if universal:
        engine.save_checkpoint(universal, tag=f"step{until}")
    stats = engine.gemini.checkpointer.stats
    while stats.committed != until:
        time.sleep(0.01)
    engine.gemini.close(finished=False)
    weights = whole_weights(engine)
    if dist.get_rank() == 0:
        torch.save(weights, f"{out}.weights")
    dist.barrier()
    return {"start": first, "restored": stats.restored}


def continue_plainly(case: Case, out: str, folder: str, until: int) -> int:
    """Go on from a folder of DeepSpeed's own format, without this package, and from weights that are not those of `train_resized`."""
    import gemini_ft

    gemini_ft.init_process_group("gloo")
    torch.manual_seed(99)
    engine = start(Case(**{**vars(case), "config": {**case.config, "gemini": None}}), Smooth(), GLOBAL_BATCH // dist.get_world_size())
    engine.load_checkpoint(folder)
    first = int(engine.global_steps)
    _train_smooth(case, engine, out, until)
    dist.barrier()
    return first


def _train_smooth(case: Case, engine: Any, out: str, until: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    with open(f"{out}.{rank}", "a", buffering=1) as trace:
        for step in range(engine.global_steps, until):
            batch = torch.randn(GLOBAL_BATCH, 8, generator=torch.Generator().manual_seed(step))
            loss = engine(batch[rank * GLOBAL_BATCH // world :][: GLOBAL_BATCH // world].to(dtype)).float().square().mean()
            engine.backward(loss)
            engine.step()
            mean = loss.detach().double()
            dist.all_reduce(mean)
            trace.write(f"{step} {(mean / world).item().hex()} {engine.get_lr()[0].hex()}\n")


def whole_weights(engine: Any) -> dict[str, torch.Tensor]:
    """The module's state dict, gathered. Collective."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=None):
        return {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}


def with_gradients(case: Case, attached: bool = True) -> dict[str, Any]:
    """Train to the end, and leave the run unfinished; what was loaded into the state of the gradients."""
    import deepspeed
    from gradient_case import Toy
    from session_case import Recorded

    import gemini_ft
    import gemini_ft.deepspeed
    from gemini_ft.testing import first_difference

    gemini_ft.init_process_group("gloo")
    torch.manual_seed(0)
    net = Smooth()
    told, toy = Recorded(), Toy()
    config = {key: value for key, value in configuration(case).items() if key != "gemini"}
    params = [param for param in net.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(params, lr=1e-2), config=config)
    if attached:
        engine.__dict__["gradients"] = toy
    else:
        vars(net)["gradients"] = toy  # engines pass on what their modules have
    gemini_ft.deepspeed.attach(engine, {"on_late": "wait"})
    mine = {"residual": torch.full((3,), float(dist.get_rank())), "rank": dist.get_rank()}
    loaded = first_difference(toy.state, mine) is None
    toy.state = mine
    _train_smooth(case, engine, os.devnull, case.steps)
    engine.gemini.checkpointer.flush()
    engine.gemini.close(finished=False)
    dist.barrier()
    return {"resumed": engine.gemini.resumed or 0, "loaded": loaded, "told": told.texts}


def refusals(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What each configuration is refused with, on one rank; empty: it is accepted."""
    import deepspeed

    import gemini_ft
    import gemini_ft.deepspeed

    gemini_ft.init_process_group("gloo")
    found = {}
    for name, changes in cases.items():
        optimizer = {} if changes.get("optimizer") == "none" else {"optimizer": torch.optim.AdamW((net := Smooth()).parameters(), lr=1e-3)}
        net = Smooth() if not optimizer else net
        config = configuration(Case(1, config={key: value for key, value in changes.items() if value != "none"}))
        try:
            if "attach" in name:
                engine, *_ = deepspeed.initialize(model=net, config=config, **optimizer)
                gemini_ft.deepspeed.attach(engine)
            else:
                engine, *_ = gemini_ft.deepspeed.initialize(model=net, config=config, **optimizer)
            if "twice" in name:
                gemini_ft.deepspeed.attach(engine, config["gemini"])
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def hang(case: Case, out: str) -> dict[str, Any]:
    """As `train`, and how long a collective of the engine may take, in seconds."""
    found = train(case, out)
    from deepspeed.utils import groups

    backend = groups._get_data_parallel_group()._get_backend(torch.device("cpu"))
    return found | {"timeout": backend.options._timeout.total_seconds()}


def destroyed_in_finally(case: Case, out: str, fail: bool) -> int:
    """Train, and fail after the step before the last if asked to; the engine is destroyed in any case. The first step."""
    import gemini_ft

    gemini_ft.init_process_group("gloo")
    torch.manual_seed(0)
    engine = start(case, Smooth())
    first = int(engine.global_steps)
    try:
        for step in range(first, case.steps):
            if fail and step == case.steps - 1:
                while engine.gemini.checkpointer.stats.committed != step:
                    time.sleep(0.01)
                raise RuntimeError("out of memory")
            engine.backward(engine(torch.ones(4, 8)).square().mean())
            engine.step()
    finally:
        engine.destroy()
    return first


KILLED = "step=3:rank=0:sigkill; step=6:rank=1:sigkill:moment=in_copy"


def check(folder: Path, case: Case, world: int = 2, faults: str = KILLED, job: Callable[[Case, str], Any] = train) -> list[Any]:
    """Run a case with faults and without, at once; compare every bit, and return what the ranks of the last attempt said."""
    results, expected = side_by_side(folder, partial(job, case), faults, world)
    assert [said["state"] for said in results] == [said["state"] for said in expected]
    assert results[0]["start"] > 0
    return results
