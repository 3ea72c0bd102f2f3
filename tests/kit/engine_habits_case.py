"""Habits of DeepSpeed scripts; run by test_deepspeed_habits.py on forked ranks, never imported by a script.

``plain`` leaves gemini out. A rank is killed where it has `Record.reached` one of ``kills``, once each.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed_case import Case, configuration, start, state_of
from session_case import Recorded
from three_ways import Record
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

os.environ.setdefault("DS_ACCELERATOR", "cpu")


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute, and in state that belongs to no parameter; the rate follows from both."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.seen = 0

    def step(self, closure: Any = None) -> Any:
        self.seen += 1
        state: Any = self.state
        common = state["common"]
        common["made"] = common.get("made", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 / (self.seen + common["made"])
        return super().step(closure)


class Judge(nn.Module):
    """Drops out by a generator that DeepSpeed tracks, as model-parallel layers do."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), norm, nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import deepspeed

        hidden = torch.relu(self.norm(self.first(x)))
        with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
            hidden = nn.functional.dropout(hidden, 0.3)
        out: torch.Tensor = self.last(hidden)
        return out


def _engine(net: nn.Module, plain: bool, **named: Any) -> Any:
    import deepspeed

    import gemini_ft.deepspeed

    case = Case(1, config={"gemini": None} if plain else {})
    initialize = deepspeed.initialize if plain else gemini_ft.deepspeed.initialize
    engine, *_ = initialize(model=net, config=configuration(case), **named)
    return engine


def _train_on(engine: Any) -> None:
    """Makes three steps, and leaves the run as a process does that is to come again."""
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()
    _flush(engine)
    engine.gemini.close(finished=False)


def _flush(*engines: Any) -> None:
    for engine in engines:
        if "gemini" in vars(engine):
            engine.gemini.checkpointer.flush()


def adversaries(folder: str, kills: list[str], plain: bool, critic: int, deferred: bool) -> list[str]:
    """A GAN whose judge makes ``critic`` steps for each of the maker. The files of ``folder`` have each loss; what was told is returned."""
    import deepspeed

    import gemini_ft

    gemini_ft.init_process_group("gloo")
    record, told = Record(Path(folder), kills), Recorded()
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 8), Judge(nn.BatchNorm1d(16) if deferred else nn.LayerNorm(16))  # the maker's step writes to the one
    torch.manual_seed(dist.get_rank())
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", 9 + dist.get_rank())
    makes = _engine(maker, plain, optimizer=torch.optim.AdamW(maker.parameters(), lr=0.01))  # stepped last, made first
    judges = _engine(judge, plain, optimizer=Counting(judge.parameters(), lr=0.1, momentum=0.9))
    for engine in (makes, judges) if deferred and not plain else ():
        engine.gemini.deferred = True
    for step in range(makes.global_steps, 7):
        if step == 2:
            judges.set_train_batch_size(2 * judges.train_batch_size())  # once
        for turn in range(critic * judges.gradient_accumulation_steps()):
            loss = judges(torch.randn(4, 8)).mean() - judges(makes(torch.randn(4, 4)).detach()).mean()
            judges.backward(loss)
            judges.step()
            record.note(f"{step} judge {turn}", loss)
            _flush(judges)
            record.reached("judge", step, turn)
        loss = judges(makes(torch.randn(4, 4))).mean()
        makes.backward(loss)
        judge.zero_grad()
        makes.step()
        record.note(f"{step} maker", loss)
        for engine in (judges, makes) if deferred and not plain else ():
            engine.gemini.save()
            _flush(engine)
            record.reached("between", step)
        _flush(makes, judges)
        record.reached("maker", step)
    for name, engine in {"makes": makes, "judges": judges}.items():
        record.state(f"end {name}", state_of(engine))
        record.note(f"end {name} counters", engine.global_steps, engine.micro_steps, engine.train_batch_size())
    record.note("end", torch.rand(1), judges.basic_optimizer.seen)
    makes.destroy()
    judges.destroy()
    dist.barrier()
    return told.texts


def rolls_back(folder: str, kills: list[str], plain: bool) -> list[str]:
    """Goes back to a checkpoint of DeepSpeed after its seventh batch, once."""
    import gemini_ft

    gemini_ft.init_process_group("gloo")
    record, told = Record(Path(folder), kills), Recorded()
    torch.manual_seed(0)
    net = nn.Linear(8, 1)
    engine = _engine(net, plain, optimizer=torch.optim.AdamW(net.parameters(), lr=0.01))
    seen = {} if plain else engine.gemini.client_state
    while seen.get("batches", 0) < 10:
        loss = engine(torch.randn(4, 8)).square().mean()
        engine.backward(loss)
        seen["batches"] = number = seen.get("batches", 0) + 1
        engine.step()
        record.note(f"{number}", loss, engine.global_steps)
        if number == 4:
            engine.save_checkpoint(folder)
        if number == 7:
            engine.load_checkpoint(folder)
        _flush(engine)
        record.reached(number)
    record.state("end", state_of(engine))
    engine.destroy()
    dist.barrier()
    return told.texts


def writes_masters(folder: str, kills: list[str], plain: bool, often: bool) -> list[str]:
    """Halves a part of the masters after its third step, or each, and of their moments after its fifth; looks at these before each."""
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
    )

    import gemini_ft

    gemini_ft.init_process_group("gloo")
    record, told = Record(Path(folder), kills), Recorded()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1))
    part: Any = net[1].bias  # so small that no sample of the masters shows it
    torch.manual_seed(dist.get_rank())
    engine = _engine(net, plain, optimizer=torch.optim.AdamW(net.parameters(), lr=0.01))
    for step in range(engine.global_steps, 8):
        if step:
            record.note(f"{step} moment", safe_get_full_optimizer_state(part, "exp_avg"))
        loss = engine(torch.randn(4, 8)).square().mean()
        record.note(f"{step}", loss)
        engine.backward(loss)
        engine.step()
        _flush(engine)
        if often or step == 2:
            safe_set_full_fp32_param(part, safe_get_full_fp32_param(part) / 2)
        if step == 4:
            safe_set_full_optimizer_state(part, safe_get_full_optimizer_state(part, "exp_avg") / 2, "exp_avg")
        record.reached(step)
    record.state("end", state_of(engine))
    engine.destroy()
    dist.barrier()
    return told.texts


def goes_universal(folder: str, kills: list[str], plain: bool, stage: int, bf16: bool) -> None:
    """Trains three steps, converts its checkpoint to a universal one, and begins with that."""
    import deepspeed
    from deepspeed.checkpoint import ds_to_universal

    import gemini_ft
    import gemini_ft.deepspeed

    gemini_ft.init_process_group("gloo")
    record, files = Record(Path(folder), kills), Path(folder, "files")

    def made(net: nn.Module, **more: Any) -> Any:
        config = configuration(Case(stage, bf16=bf16, config=more))
        initialize = deepspeed.initialize if "gemini" in more else gemini_ft.deepspeed.initialize
        return initialize(model=net, config=config, optimizer=torch.optim.AdamW(net.parameters(), lr=0.01))[0]

    def step(engine: Any) -> torch.Tensor:
        loss: torch.Tensor = engine(torch.randn(4, 8, dtype=torch.bfloat16 if bf16 else torch.float32)).float().square().mean()
        engine.backward(loss)
        engine.step()
        return loss

    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.2), nn.Linear(64, 1)) for _ in range(2)]
    if not (files / "universal").exists():
        first = made(nets[0], gemini=None)
        for _ in range(3):
            step(first)
        first.save_checkpoint(str(files), tag="own", client_state={"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}})
        dist.barrier()
        if dist.get_rank() == 0:
            options = {"keep_temp_folder": False, "strict": True, "inject_missing_state": False, "num_extract_workers": 1}
            paths = {"input_folder": str(files / "own"), "output_folder": str(files / "universal"), "num_merge_workers": 1}
            ds_to_universal.main(SimpleNamespace(**options, **paths))
        dist.barrier()
        first.destroy()
    torch.manual_seed(dist.get_rank())
    engine = made(nets[1], checkpoint={"load_universal": True}, **({"gemini": None} if plain else {}))
    if plain or engine.gemini.resumed is None:
        engine.load_checkpoint(str(files), tag="universal")
    while engine.global_steps < 9:
        record.note(f"{engine.global_steps}", step(engine))
        _flush(engine)
        record.reached(engine.global_steps)
    record.state("end", state_of(engine))
    engine.destroy()
    dist.barrier()


def writes_weights(stage: int, bf16: bool, how: str) -> list[str]:
    """Writes weights after its steps, and no masters: "data", "once" in the third, or "swap", which puts them back."""
    import deepspeed

    import gemini_ft

    gemini_ft.init_process_group("gloo")
    told = Recorded()
    net: Any = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1))
    engine = start(Case(stage, bf16=bf16), net)
    for step in range(6):
        engine.backward(engine(torch.randn(4, 8, dtype=net[0].weight.dtype)).float().square().mean())
        engine.step()
        with torch.no_grad(), deepspeed.zero.GatheredParameters(net[1].weight, modifier_rank=0, enabled=stage == 3):
            if how == "data":
                net[1].weight.data.clamp_(-0.01, 0.01)
            elif how == "once" and step == 2:
                net[1].weight.zero_()
            elif how == "swap":
                before = net[1].weight.clone()
                net[1].weight.zero_()
                net[1].weight.copy_(before)
    engine.destroy()
    return told.texts


def left_to_itself(folder: str, fail: bool) -> list[str]:
    """Has an average of the weights, a generator and an evaluation that no snapshot has, and loads its newest checkpoint at the start."""
    import gemini_ft

    gemini_ft.init_process_group("gloo")
    told = Recorded()
    net = nn.Linear(8, 1)
    engine = _engine(net, False, optimizer=torch.optim.AdamW(net.parameters(), lr=0.01))
    average, drawn = copy.deepcopy(net), np.random.RandomState(3)
    first = 0
    if Path(folder, "latest").exists():
        _, client = engine.load_checkpoint(folder)
        first = client["step"]
    for step in range(first, 6):
        engine.backward(engine(torch.randn(4, 8) + drawn.rand()).square().mean())
        engine.step()
        with torch.no_grad():
            average.weight.lerp_(net.weight, 0.1)
        if step == 1:
            engine.save_checkpoint(folder, client_state={"step": step + 1})
        if step == 2:
            engine.eval()
            with torch.no_grad():
                for (x,) in DataLoader(TensorDataset(torch.ones(4, 8))):
                    engine(x)
            engine.train()
        if step == 4 and fail:
            _flush(engine)
            break
    engine.gemini.close(finished=not fail)
    return told.texts


def of_an_older_version(older: bool) -> int:
    """Trains on from wherever the run is; an older version kept less of an engine. The step that was resumed."""
    import gemini_ft
    from gemini_ft.checkpointer import Checkpointer
    from gemini_ft.deepspeed.state import EngineState

    gemini_ft.init_process_group("gloo")
    save, extras = Checkpointer.save, EngineState.extras
    if older:
        Checkpointer.save = lambda self, iteration, extras: save(self, iteration, _but(extras, "others", "tracked"))  # type: ignore[method-assign]
        EngineState.extras = lambda self: _but(extras(self), "attributes", "other", "batch")  # type: ignore[method-assign]
    net = nn.Linear(8, 1)
    engine = _engine(net, False, optimizer=Counting(net.parameters(), lr=0.1))
    first = int(engine.global_steps)
    _train_on(engine)
    return first


class AdamW(torch.optim.SGD):
    """Holds another optimizer of its own name."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.fast = torch.optim.AdamW(self.param_groups)


class Zeta(torch.optim.SGD):
    """Holds another optimizer; and one that has this one's own state alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.parts = [torch.optim.Adam(self.param_groups), torch.optim.SGD(self.param_groups)]
        self.parts[1].state = self.state


def held_ones() -> list[str]:
    """Trains with an optimizer that holds another one, twice. Returns the errors."""
    import gemini_ft

    gemini_ft.init_process_group("gloo")
    found = []
    for kind in (AdamW, Zeta):
        net = nn.Linear(8, 1)
        engine = _engine(net, False, optimizer=kind(net.parameters()))
        try:
            engine.backward(engine(torch.randn(4, 8)).square().mean())
            engine.step()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        engine.gemini.close(finished=False)
    return found


class Odd(torch.optim.SGD):
    """Has attributes that cannot be taken apart, one that is made late, and, behind a change of the script, another optimizer."""

    def __init__(self, params: Any, changed: bool) -> None:
        super().__init__(params, lr=0.1)
        self.seen, self.net, self.view = 0, nn.Linear(1, 1), memoryview(b"view")
        self.drawn = None if changed else np.random.RandomState(3)
        if changed:
            self.fast, self.new = torch.optim.Adam(self.param_groups), 1

    def step(self, closure: Any = None) -> Any:
        self.seen += 1
        assert not hasattr(self, "fast") or self.new
        return super().step(closure)


def with_an_odd_optimizer(changed: bool) -> tuple[int, int, list[str]]:
    """Trains for three steps from wherever the run is. Returns the step that was resumed, what the optimizer has seen, and warnings."""
    import gemini_ft

    gemini_ft.init_process_group("gloo")
    told = Recorded()
    net = nn.Linear(8, 1)
    optimizer = Odd(net.parameters(), changed)
    engine = _engine(net, False, optimizer=optimizer)
    first = int(engine.global_steps)
    _train_on(engine)
    return first, optimizer.seen, told.texts


def walks() -> tuple[int, int]:
    """Returns how often a snapshot goes through an engine's tensors whose optimizer has attributes of its own, and one whose has none."""
    import gemini_ft
    from gemini_ft.deepspeed.state import EngineState

    gemini_ft.init_process_group("gloo")
    counts = []
    for make in (lambda params: Counting(params, lr=0.1), lambda params: torch.optim.AdamW(params, lr=0.1)):
        net = nn.Linear(8, 1)
        state: Any = EngineState(_engine(net, True, optimizer=make(net.parameters())))
        survey, calls = state.survey, list[Any]()
        state.survey = lambda calls=calls, survey=survey: calls.append(None) or survey()
        state.extras()
        counts.append(len(calls))
    return counts[0], counts[1]


def batches(then: int) -> tuple[int, int]:
    """Resumes a state whose batch the training had changed, from ``then`` to twice 6. Returns the micro-batch and the accumulation."""
    import gemini_ft
    from gemini_ft.deepspeed.state import EngineState

    gemini_ft.init_process_group("gloo")
    net = nn.Linear(8, 1)
    engine = _engine(net, True, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    state = EngineState(engine)
    changed = {"then": {"micro": then, "accumulation": 1}, "now": {"micro": 6, "accumulation": 2}}
    state.apply_extras(state.extras() | {"batch": changed})
    return engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()


def ends_well(folder: str, steps: int, at_end: bool) -> int:
    """Trains up to a step, and ends well, with storage that is due at every second step. The step that was resumed."""
    import gemini_ft
    import gemini_ft.deepspeed

    gemini_ft.init_process_group("gloo")
    net = nn.Linear(8, 1)
    store = {"url": f"file://{folder}", "every_steps": 2, "at_end": at_end}
    config = configuration(Case(1, options={"storage": store, "replicas": 1}))
    engine, *_ = gemini_ft.deepspeed.initialize(model=net, config=config, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    first = int(engine.global_steps)
    for _ in range(first, steps):
        engine.backward(engine(torch.ones(4, 8)).square().mean())
        engine.step()
        _flush(engine)
    engine.destroy()
    return first


def _but(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
