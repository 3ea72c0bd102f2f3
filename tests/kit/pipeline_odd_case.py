"""The functions that ranks run in the tests of gradient pipelines on odd models: dtypes, rollbacks, errors, copies."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from compression_kit import SHAPES
from pipeline_case import Leaves, Loop, alike, compress, error_of, hexed, own, rule
from plain_case import start_ranks
from sync_case import join
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

import gemini_ft
from gemini_ft.pipeline import GradientSynchronizer
from gemini_ft.pipeline.body import RankComparison
from gemini_ft.sync import auto
from gemini_ft.testing import digest

DTYPES = ("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128")
REFUSED = ("float8_e4m3fn", "float8_e5m2")
ODD_SHAPES: dict[str, tuple[int, ...]] = {"matrix": (6, 3), "line": (7,), "zero_d": (), "no_rows": (0, 4), "no_columns": (4, 0)}


class Given(Function):
    """An autograd function that returns zero and whose gradient is given, because arithmetic does not exist for all dtypes."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


class OfAnyDtype(Leaves):
    """A model whose parameters have one dtype, beside one parameter of float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(ODD_SHAPES, dtype)
        self.plain = torch.nn.Parameter(torch.zeros(5))

    def forward(self, given: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([Given.apply(self.get_parameter(name), gradient) for name, gradient in given.items()]).sum()  # type: ignore[no-untyped-call]


def _own(model: nn.Module, step: int) -> dict[str, Tensor]:
    """Gradients of small whole numbers, whose averages every dtype represents exactly; each rank has different ones."""
    stream = torch.Generator().manual_seed(10 * step + dist.get_rank())
    given = {}
    for name, param in model.named_parameters():
        whole = torch.randint(-8, 9, (*param.shape, 2), generator=stream).double()
        given[name] = (torch.view_as_complex(whole) if param.is_complex() else whole[..., 0]).to(param.dtype)
    return given


def _average(gradient: Tensor) -> Tensor:
    exact = torch.view_as_real(gradient.to(torch.complex128)).contiguous()
    dist.all_reduce(exact)
    return torch.view_as_complex(exact / dist.get_world_size())


def every_dtype(name: str) -> list[str]:
    """Averages parameters of a dtype under rules, without one, and planned, with and without DDP; returns a list of errors."""
    join()
    wrong = []
    pipelines: list[Any] = [[], [{"params": "plain", "compress": "bf16"}], rule(sync="zen"), rule(sync="dense", fusion="cupcake")]
    for pipeline, ddp in itertools.product(pipelines, (True, False)):
        what = f"{pipeline}, DDP={ddp}"
        with closing(Loop(pipeline, ddp, OfAnyDtype(getattr(torch, name)), profile_steps=2)) as loop:
            for step in range(4):
                given = _own(getattr(loop.model, "module", loop.model), step)
                means = loop.step(given)
                if {key: mean.dtype for key, mean in means.items()} != {key: each.dtype for key, each in given.items()}:
                    wrong.append(f"{what}, step {step}: {sorted(means)} have other dtypes")
                wide = {key: mean.to(torch.complex128) for key, mean in means.items()}
                wrong += [f"{what}, step {step}: {key}" for key in wide if not torch.equal(wide[key], _average(given[key]))]
                if not alike({key: mean.tolist() for key, mean in wide.items()}):
                    wrong.append(f"{what}, step {step}: ranks differ")
    return wrong


# -- rollbacks


Program = Sequence[tuple[Any, ...]]
"""The instructions that one method's loop follows, each a name and its arguments:

("step",)               makes the next step, and compares its averages with those of the undisturbed run
("save",)               keeps a copy of the synchronizer's state
("read", rank)          lets that rank alone read the synchronizer's figures
("load", number)        goes back to a kept state; the first one is of before the first step
("stray", rank, number) runs a backward pass that is no part of the training, lets that rank read the figures (-1: none), then loads
"""
MOST = 8  # steps of the undisturbed run
SMALL = {name: shape for name, shape in SHAPES.items() if name != "conv"}


def rolled_back(programs: Mapping[str, tuple[bool, Program]]) -> list[str]:
    """Runs each method's program, with and without DDP, beside an undisturbed run; returns a list of differences."""
    join()
    wrong = []
    for name, (ddp, program) in programs.items():
        pipeline = rule(compress=compress(name), fusion={"groups": 2})
        with closing(Loop(pipeline, ddp, Leaves(SMALL))) as whole:
            expected = [hexed(whole.step(own(step, SMALL))) for step in range(MOST)]
        with closing(Loop(pipeline, ddp, Leaves(SMALL))) as loop:
            wrong += [f"{name}, DDP={ddp}: {what}" for what in _followed(loop, program, expected)]
    return wrong


def _followed(loop: Loop, program: Program, expected: Sequence[str]) -> list[str]:
    wrong, step = [], 0
    saved = [(step, copy.deepcopy(loop.synchronizer.state_dict()))]
    for number, (kind, *given) in enumerate(program):
        if kind == "step" and step < len(expected):
            if hexed(loop.step(own(step, SMALL))) != expected[step]:
                wrong.append(f"step {step}, {number} of {program}: other bits")
            step += 1
        elif kind == "save":
            saved.append((step, copy.deepcopy(loop.synchronizer.state_dict())))
        elif kind == "read" and given[0] == dist.get_rank():
            assert loop.synchronizer.last_step is None or loop.synchronizer.summary()
        elif kind in ("load", "stray"):
            if kind == "stray":
                loop.model(own(100 + number, SMALL)).backward()
                if given.pop(0) == dist.get_rank():
                    assert loop.synchronizer.last_step is None or loop.synchronizer.summary()
            step, state = saved[given[0] % len(saved)]
            loop.synchronizer.load_state_dict(state)
    return wrong


def stray_and_drifting() -> list[list[str]]:
    """Lets counters differ between ranks, as a bug or a call on one rank alone would.

    Returns:
        Without and with DDP, the errors of this rank: of a snapshot, of the next step, and of a fresh pipeline that loads the snapshot.
    """
    rank = join().rank()
    said = []
    for ddp in (False, True):
        with closing(Loop(rule(compress=compress("randomk")), ddp, Leaves(SMALL))) as loop:
            loop.step(own(0, SMALL))
            loop.synchronizer.summary()
            loop.synchronizer.averager.rounds += rank
            loop.step(own(1, SMALL))
            said.append([error_of(loop.synchronizer.state_dict), error_of(lambda: loop.step(own(2, SMALL)))])
            state = loop.synchronizer.state_dict()
        with closing(Loop(rule(compress=compress("randomk")), ddp, Leaves(SMALL))) as fresh:
            said[-1].append(error_of(partial(fresh.synchronizer.load_state_dict, state)))
            state["averager"]["rounds"] = 0
            state["tuner"]["count"] = rank
            said[-1].append(error_of(partial(fresh.synchronizer.load_state_dict, state)))
    return said


def saved_alone() -> list[bool]:
    """Has rank 0 save its state while the others have not yet said where they are, without and with DDP."""
    rank, store = join().rank(), dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    saved = []
    for ddp in (False, True):
        begin, key = RankComparison.begin, f"saved, DDP={ddp}"

        def late(drift: RankComparison, begin: Callable[[RankComparison], None] = begin, key: str = key) -> None:
            store.wait([key])
            begin(drift)

        with (
            patch.object(RankComparison, "begin", late if rank else begin),
            closing(Loop(rule(compress=compress("topk")), ddp, Leaves(SMALL))) as loop,
        ):
            loop.step(own(0, SMALL))
            if not rank:
                saved.append(bool(loop.synchronizer.state_dict()))
                store.set(key, "")
            loop.step(own(1, SMALL))
    return saved


# -- models that are not only trained


class TwoLayers(nn.Module):
    """A model with attributes other than parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 2)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, given: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.norm(self.first(given))))
        return out


def _batch(step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def copied_and_compiled() -> list[str]:
    """Copies, pickles, exports and compiles models with a synchronizer, which must go on averaging; returns a list of errors."""
    join()
    wrong = []
    for ddp in (False, True):
        torch.manual_seed(0)
        model: Any = TwoLayers()
        model = DistributedDataParallel(model) if ddp else model
        with closing(GradientSynchronizer(model, rule(compress="bf16"))) as synchronizer:
            compiled = torch.compile(model, backend="eager", fullgraph=not ddp)
            for step, call in enumerate((model, compiled, model, compiled)):
                model.zero_grad()
                call(_batch(step)).square().sum().backward()
                if not ddp:
                    synchronizer.synchronize()
                if not alike([param.grad.tolist() for param in model.parameters()]):
                    wrong.append(f"DDP={ddp}, step {step}: ranks differ")
            if synchronizer.last_step is None or synchronizer.last_step.number != 3:
                wrong.append(f"DDP={ddp}: {synchronizer.last_step}")
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            for what, other in (("copy", copy.deepcopy(model)), ("file", torch.load(file, weights_only=False))):
                other.zero_grad()
                other(_batch(9)).square().sum().backward()
                step = synchronizer.averager.step
                if step != 4 or alike([param.grad.tolist() for param in other.parameters()]) != ddp:
                    wrong.append(f"DDP={ddp}: a {what} is averaged by the wrong one, step {step}")
            own = getattr(model, "module", model)
            exported = torch.export.export(own.eval(), (_batch(0),)).module()
            if not torch.equal(exported(_batch(1)), own(_batch(1))):
                wrong.append("another model was exported")
    return wrong


class Functional(nn.Module):
    """A model with a parameter whose gradient is sparse, which cannot be known before the first backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 80).view(20, 4))
        self.rest = nn.Parameter(torch.ones(4))

    def forward(self, words: Tensor) -> Tensor:
        return (nn.functional.embedding(words, self.table, sparse=True) * self.rest).square().sum()


def functional_embedding() -> list[str]:
    """Averages sparse gradients without a rule and under sparse and planned rules; returns differences, and the error with compression."""
    join()
    wrong = []
    pipelines: tuple[Any, ...] = ([], rule(sync="zen"), rule(sync="auto"), rule(fusion="cupcake"), rule(params="rest", compress="bf16"))
    for pipeline in pipelines:
        model = Functional()
        with closing(Loop(pipeline, model=model, profile_steps=2)) as loop:
            for step in range(4):
                words = torch.randint(0, 20, (6,), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
                means = loop.step(words)  # type: ignore[arg-type]
                expected = Functional()
                (gradient, _) = torch.autograd.grad(expected(words), (expected.table, expected.rest))
                whole = gradient.to_dense().double()
                dist.all_reduce(whole)
                grad = means["table"]
                if not grad.is_sparse or not torch.allclose(grad.to_dense().double(), whole / dist.get_world_size(), rtol=1e-5):
                    wrong.append(f"{pipeline}, step {step}: {grad}")
    with closing(Loop(rule(compress="topk"), model=Functional())) as loop:
        said = error_of(lambda: loop.step(torch.arange(3)))  # type: ignore[arg-type]
        if "ConfigError: the gradient of table is a sparse tensor, which cannot be compressed" not in said:
            wrong.append(said)
    return wrong


def empty_gradients() -> list[str]:
    """Averages parameters without elements in every sparse scheme, alone and among others; returns a list of differences."""
    join()
    wrong = []
    shapes = {"no_rows": (0, 4), "some": (6, 4), "no_columns": (5, 0), "nothing": (0,)}
    for scheme, ddp in itertools.product(
        ("zen", "agsparse", "ssar-recursive-doubling", "omnireduce", "sparse-ps", "auto", "dense"), (False, True)
    ):
        with closing(Loop(rule(sync=scheme), ddp, Leaves(shapes))) as loop:
            for step in range(3):
                means = loop.step(own(step, shapes))
                if {name: tuple(mean.shape) for name, mean in means.items()} != shapes or not alike(hexed({"": means["some"]})):
                    wrong.append(f"{scheme}, DDP={ddp}, step {step}")
    return wrong


def used_twice_under_checkpointing() -> list[str]:
    """Uses a module twice under reentrant checkpointing; returns the error, and whether the way out that it names works."""
    join()
    found = []
    for reentrant in (True, False):
        layer = nn.Linear(3, 3)
        with closing(GradientSynchronizer(layer, [])) as synchronizer:
            given = torch.ones(2, 3, requires_grad=True)
            for _ in range(2):
                given = torch.utils.checkpoint.checkpoint(layer, given, use_reentrant=reentrant)
            found.append(error_of(given.sum().backward))
            synchronizer.synchronize()
    return found


# -- checkpoints, and gradients that are thrown away


def found_by_itself(out: str) -> int:
    """Trains a DDP model to the end with a Checkpointer that finds the synchronizer by itself, after one backward pass to warm up."""
    rank, _ = start_ranks()
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoLayers())
    synchronizer = GradientSynchronizer(model, rule(compress={"method": "randomk", "ratio": 0.2}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    checkpointer = gemini_ft.Checkpointer(model, optimizer, on_late="wait")
    model(_batch(1000)).square().sum().backward()
    if rank == 0:
        assert synchronizer.summary()
    start = checkpointer.resume()
    with open(f"{out}.{rank}", "a", buffering=1) as trace:
        for iteration in range(start, MOST):
            optimizer.zero_grad()
            model(_batch(iteration)).square().sum().backward()
            optimizer.step()
            trace.write(f"{iteration} {digest(model.state_dict())} {digest(synchronizer.state_dict())}\n")
            checkpointer.step()
    checkpointer.flush()
    with closing(GradientSynchronizer(TwoLayers(), [])):  # of another model
        checkpointer.step()
    checkpointer.close()
    return start


def drifted_and_saved(folder: str) -> int:
    """Trains to the end; in the first process ranks drift apart just before the fifth snapshot is made. Returns where it resumed."""
    rank, _ = start_ranks()
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoLayers())
    synchronizer = GradientSynchronizer(model, rule(compress=compress("randomk")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    checkpointer = gemini_ft.Checkpointer(model, optimizer, on_late="wait")
    start, mark = checkpointer.resume(), Path(folder, f"drifted.{rank}")
    for iteration in range(start, MOST):
        optimizer.zero_grad()
        model(_batch(iteration)).square().sum().backward()
        optimizer.step()
        drifts = iteration == 4 and not mark.exists()
        if drifts:
            mark.touch()
            synchronizer.averager.rounds += rank
        checkpointer.step()
        if drifts:
            checkpointer.flush()
    checkpointer.close()
    return start


def made_too_late(after: int) -> str:
    """Makes a synchronizer after so many snapshots; returns the errors of all steps."""
    start_ranks()
    model = TwoLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    checkpointer = gemini_ft.Checkpointer(model, optimizer, replicated=True)
    checkpointer.resume()
    said = []
    for step in range(after + 1):
        if step == after:
            synchronizer = GradientSynchronizer(model, [])
        model(torch.ones(4, 6)).square().sum().backward()
        optimizer.step()
        said.append(error_of(checkpointer.step))
    synchronizer.close()
    checkpointer.close()
    return "; ".join(said)


def made_before_fabric_loads() -> tuple[str, bool]:
    """Makes a synchronizer before Fabric loads; returns the error of the first snapshot, and whether the snapshot has its state."""
    from lightning.fabric import Fabric

    import gemini_ft.lightning

    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    strategy = gemini_ft.lightning.GeminiFabricStrategy()
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    inner = TwoLayers()
    model, optimizer = fabric.setup(inner, torch.optim.SGD(inner.parameters(), lr=0.05))
    synchronizer = GradientSynchronizer(model, [])
    state = {"model": model, "optimizer": optimizer}
    fabric.load("gemini://latest", state)
    fabric.backward(model(torch.ones(4, 6)).square().sum())
    optimizer.step()
    said = error_of(lambda: fabric.save("gemini://latest", state))
    strategy.checkpointer.flush()
    is_attached = error_of(lambda: strategy.checkpointer.attach_gradients(synchronizer)) == ""  # it is there already
    synchronizer.close()
    strategy.close()
    return said, is_attached


def forgotten() -> list[str]:
    """Forgets what methods keep, by name or all of it; returns whether the next average is that of a fresh method, in the same memory."""
    join()
    wrong = []
    for name, ddp in itertools.product(("topk", "dgc", "signum", "powersgd", "onebit+two_phase"), (False, True)):
        bare, _, two_phase = name.partition("+")
        options = compress(bare) | ({"two_phase": True} if two_phase else {})
        with closing(Loop(rule(compress=options), ddp, Leaves(SMALL))) as loop:
            wrong += [f"{name}, DDP={ddp}: {what}" for what in _forgotten(loop)]
            after = hexed(loop.step(own(1, SMALL)))
        with closing(Loop(rule(compress=options), ddp, Leaves(SMALL))) as fresh:
            if bare in ("topk", "onebit") and hexed(fresh.step(own(1, SMALL))) != after:
                wrong.append(f"{name}, DDP={ddp}: not as a fresh one")
    return wrong


def _forgotten(loop: Loop) -> Iterator[str]:
    synchronizer = loop.synchronizer
    loop.step(own(0, SMALL))
    before = kept(synchronizer)
    synchronizer.forget([loop.model.get_parameter("module.odd" if loop.ddp else "odd")])
    after = kept(synchronizer)
    ours = [key for key in before if "odd" in key]
    if not any(before[key].any() for key in ours) or any(after[key].any() for key in ours):
        yield "of one"
    if any(not torch.equal(value, after[key]) for key, value in before.items() if key not in ours):
        yield "of others too"
    synchronizer.forget()
    if any(value.any() for value in kept(synchronizer).values()):
        yield "not all"
    if "ConfigError: nonsense is not averaged by this gradient pipeline" not in error_of(lambda: synchronizer.forget(["nonsense"])):
        yield "another name was accepted"


def kept(synchronizer: GradientSynchronizer) -> dict[str, Tensor]:
    """Copies of the residuals and momenta that methods keep."""
    found: dict[str, Tensor] = {}

    def walk(path: str, state: Any) -> None:
        if isinstance(state, Mapping):
            for key, value in state.items():
                walk(f"{path}/{key}", value)
        elif isinstance(state, Tensor) and "factors" not in path:
            found[path] = state.clone()

    walk("", synchronizer.state_dict()["averager"]["routes"])
    return found


class Adversaries(nn.Module):
    """A model that consists of a generator and its discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(4, 6), nn.Linear(6, 30)


def adversaries(discarding: bool) -> dict[str, Any]:
    """Returns the relative error of the sum of a discriminator's averages, while gradients of the generator's steps are thrown away."""
    join()
    torch.manual_seed(0)
    both = Adversaries()
    pipeline = rule(compress={"method": "topk", "ratio": 0.01})
    of_generator = GradientSynchronizer(both.generator, pipeline)
    of_discriminator = GradientSynchronizer(both.discriminator, pipeline)
    sums: dict[str, Tensor] = {}
    for step in range(200):
        generated = both.generator(_batch(2 * step)[:, :4])
        with of_discriminator.discarding() if discarding else contextlib.nullcontext():
            (both.discriminator(generated) * 20).square().sum().backward()
            of_generator.synchronize()
            if not discarding:
                of_discriminator.synchronize()
        both.zero_grad()
        real = _batch(2 * step + 1) / 5
        with of_generator.discarding():
            both.discriminator(real).square().sum().backward()
        exact = both.discriminator.weight.grad.double()  # type: ignore[union-attr]
        of_discriminator.synchronize()
        for key, value in (("exact", _average(exact).real), ("sent", both.discriminator.weight.grad.double())):  # type: ignore[union-attr]
            sums[key] = sums.get(key, 0) + value
        both.zero_grad()
    left = of_discriminator.averager.step
    of_generator.close()
    of_discriminator.close()
    return {"error": float((sums["sent"] - sums["exact"]).norm() / sums["exact"].norm()), "steps": left}


def discarded_in_part() -> list[str]:
    """Trains a model, with a synchronizer or DDP, of which one part is discarded; returns differences of the rest and of that part."""
    rank = join().rank()
    wrong = []
    for ddp in (False, True):
        with closing(Loop(rule(compress=compress("topk")), ddp, Leaves(SMALL))) as loop:
            loop.step(own(0, SMALL))
            before = kept(loop.synchronizer)
            with loop.synchronizer.discarding(["odd"]):
                means = {name: mean.clone() for name, mean in loop.step(own(1, SMALL)).items()}
            if not torch.equal(means.pop("odd"), own(1, SMALL)["odd"]) or not alike(hexed(means)):
                wrong.append(f"DDP={ddp}, rank {rank}: averaged")
            if any(not torch.equal(value, before[key]) for key, value in kept(loop.synchronizer).items() if "odd" in key):
                wrong.append(f"DDP={ddp}: what is kept has changed")
            if not alike(hexed(loop.step(own(2, SMALL)))) or loop.synchronizer.last_step.number != 2:  # type: ignore[union-attr]
                wrong.append(f"DDP={ddp}: the next step")
    return wrong


# -- trials


def trials(folder: str, first: int, last: int) -> list[str]:
    """Steps of `sync: auto` on ranks whose clocks are counters; with a number other than 0 it resumes from the folder."""
    join()
    file = Path(folder, f"{dist.get_rank()}.pt")
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)), monotonic=time.monotonic)
    shapes = {"table": (50, 4), "more": (30, 2)}
    pinned: list[Any] = [
        patch.object(auto, "time", clock),
        patch.object(auto, "candidates", lambda names, *_: [name for name in names if name in ("zen", "dense", "ssar-recursive-doubling")]),
    ]
    with contextlib.ExitStack() as stack, closing(Loop(rule(sync="auto"), False, Leaves(shapes))) as loop:
        for each in pinned:
            stack.enter_context(each)
        if first:
            loop.synchronizer.load_state_dict(torch.load(file, weights_only=True))
        means = [hexed(loop.step(own(step, shapes))) for step in range(first, last)]
        route: Any = loop.synchronizer.averager.routes.of(loop.synchronizer.averager.plan.groups[0])
        chosen = [plan.chosen for scheme in route.schemes.values() for plan in scheme.plans.values()]
        torch.save(loop.synchronizer.state_dict(), file)
    return [*means, str(chosen)]
