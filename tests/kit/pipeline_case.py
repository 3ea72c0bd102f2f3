"""What ranks do in the tests of gradient pipelines: many cases in one process per rank.

Gradients are given, not computed: the loss is the sum of the parameters times them.
"""

from __future__ import annotations

import itertools
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from compression_kit import OPTIONS, SHAPES, bits, gradients, method, same
from sync_case import join
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gemini_ft.compression.collective import reduce
from gemini_ft.compression.costs import Affine
from gemini_ft.compression.espresso_options import Processor
from gemini_ft.compression.espresso_options import options as every_option
from gemini_ft.compression.methods import METHODS, create
from gemini_ft.pipeline import GradientSynchronizer, tuner
from gemini_ft.pipeline.body import RankComparison
from gemini_ft.pipeline.lanes import Work
from gemini_ft.pipeline.plan import Group
from gemini_ft.pipeline.route_table import option_way
from gemini_ft.pipeline.tuner import Candidates

Given = Mapping[str, Tensor]


class Leaves(nn.Module):
    """Parameters whose gradients are what the forward pass is given."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, given: Given) -> Tensor:
        return torch.stack([(self.get_parameter(name) * gradient).sum() for name, gradient in given.items()]).sum()


def found(model: nn.Module) -> dict[str, Tensor]:
    """The gradients there are."""
    return {name.removeprefix("module."): param.grad for name, param in model.named_parameters() if param.grad is not None}


def rule(**options: Any) -> list[dict[str, Any]]:
    """One for all parameters, unless it says otherwise."""
    return [{"params": "*", **options}]


def compress(name: str) -> dict[str, Any]:
    return {"method": name, **OPTIONS.get(name, {})}


class Loop:
    """A training loop over given gradients, plain or with DDP."""

    def __init__(self, pipeline: Any, ddp: bool = False, model: nn.Module | None = None, **options: Any) -> None:
        own = model if model is not None else Leaves()
        unused: dict[str, Any] = {"find_unused_parameters": True} if ddp and options.pop("find_unused_parameters", False) else {}
        self.model = DistributedDataParallel(own, bucket_cap_mb=0.002, **unused) if ddp else own
        self.ddp, self.synchronizer = ddp, GradientSynchronizer(self.model, pipeline, **options)

    def step(self, given: Given) -> dict[str, Tensor]:
        """One step from no gradients at all."""
        self.model.zero_grad()
        self.model(given).backward()
        if not self.ddp:
            self.synchronizer.synchronize()
        return found(self.model)

    def close(self) -> None:
        self.synchronizer.close()


def own(step: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    """This rank's gradients of a step."""
    return gradients(1000 * step + dist.get_rank(), shapes)


def exact(given: Given) -> dict[str, Tensor]:
    """The average of all ranks in float64."""
    return {name: _sum(gradient) / dist.get_world_size() for name, gradient in given.items()}


def _sum(gradient: Tensor) -> Tensor:
    total = gradient.double()
    dist.all_reduce(total)
    return total


def close(one: Given, other: Given, bound: float = 1e-6) -> bool:
    """Whether all are equal up to ``bound`` of the largest element of each."""
    return one.keys() == other.keys() and all(
        float((one[name].double() - other[name].double()).abs().max()) <= bound * float(other[name].abs().max()) for name in one
    )


def alike(value: Any) -> bool:
    """Whether all ranks have the same."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    return all(each == everybody[0] for each in everybody)


def hexed(means: Given) -> str:
    return "".join(bits(mean).hex() for mean in means.values())


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def several(*cases: tuple[Callable[..., Any], tuple[Any, ...]]) -> list[Any]:
    """Functions with their arguments, one after another in the same processes; what each returned, or how it ended."""
    found: list[Any] = []
    for function, arguments in cases:
        try:
            found.append(function(*arguments))
        except Exception:
            found.append(traceback.format_exc())
    return found


# -- every method


FUSIONS: list[Any] = ["layer-wise", {"bucket": 2000}, {"groups": 2}, "cupcake"]


def every_method(ddp: bool, whole: bool) -> list[str]:
    """Each with its own options and default memory, against averaging by hand; what is wrong.

    Args:
        ddp: the model is wrapped.
        whole: every method meets every way of fusing, and not only one, with which another one begins on a wrapped model.
    """
    join()
    wrong = []
    in_turn = [(name, FUSIONS[(number + 2 * ddp) % len(FUSIONS)]) for number, name in enumerate(METHODS)]
    for name, fusion in itertools.product(METHODS, FUSIONS) if whole else in_turn:
        by_hand = method(name)
        with closing(Loop(rule(compress=compress(name), fusion=fusion), ddp, profile_steps=2)) as loop:
            for step in range(4):
                given = own(step)
                means, expected = loop.step(given), reduce(by_hand, given, step)
                # More than two ranks' casts are added by the backend, in an order and with roundings of its own.
                added = name in ("fp16", "bf16") and dist.get_world_size() > 2
                if not (_nearly(means, expected, given) if added else same(means, expected)):
                    wrong.append(f"{name}, {fusion}, step {step}: not what averaging by hand gives")
                if not alike(hexed(means)):
                    wrong.append(f"{name}, {fusion}, step {step}: ranks differ")
            if fusion == "cupcake" and "cupcake" not in loop.synchronizer.averager.plan.fusion[0]:
                wrong.append(f"{name}: not planned")
            if fusion != "cupcake" and not alike(loop.synchronizer.averager.plan.pack()):
                wrong.append(f"{name}, {fusion}: plans differ")
    return wrong


def _nearly(means: Given, expected: Given, given: Given) -> bool:
    """Whether all differ by some roundings of bfloat16 at most: of the gradients, of the sums and of the means."""
    sizes = exact({name: gradient.abs() for name, gradient in given.items()})
    return all(bool(((means[name] - mean).abs() <= 2.0**-6 * sizes[name]).all()) for name, mean in expected.items())


def default_methods() -> list[str]:
    """Each by its bare name in the rule, as `create` makes it by its bare name."""
    join()
    wrong = []
    for name in METHODS:
        needed: dict[str, Any] = {"count": 50} if name == "hard_threshold" else {}
        by_hand = create(name, **needed)
        with closing(Loop(rule(compress={"method": name, **needed}))) as loop:
            for step in range(2):
                given = own(step)
                if not same(loop.step(given), reduce(by_hand, given, step)):
                    wrong.append(f"{name}, step {step}")
    return wrong


def two_phases() -> list[str]:
    """The same for aggregation by owners of parts, and without error feedback, and with one that leaks."""
    join()
    wrong = []
    for options in ({"two_phase": True}, {"feedback": 0}, {"feedback": 0.5}):
        by_hand = create("topk", ratio=0.1, **options)
        with closing(Loop(rule(compress={"method": "topk", "ratio": 0.1, **options}, fusion={"groups": 2}))) as loop:
            for step in range(3):
                given = own(step)
                if not same(loop.step(given), reduce(by_hand, given, step)):
                    wrong.append(f"{options}, step {step}")
    return wrong


# -- no rule, sparse schemes


def without_rules() -> list[str]:
    """No rule is what DDP does."""
    join()
    wrong = []
    exactly = dist.get_world_size() == 2  # of more than two, the order of addition depends on where in a buffer an element lies
    plain_ddp = DistributedDataParallel(Leaves())
    with closing(Loop([])) as plain, closing(Loop(None, ddp=True)) as ddp:
        for step in range(3):
            given = own(step)
            plain_ddp.zero_grad()
            plain_ddp(given).backward()
            expected = found(plain_ddp)
            for loop in (plain, ddp):
                means = loop.step(given)
                if not (same(means, expected) if exactly else close(means, expected)):
                    wrong.append(f"{'DDP' if loop.ddp else 'plain'}, step {step}")
    return wrong


class Words(nn.Module):
    """An embedding, dense or sparse, of which each rank touches other rows, and a layer behind it."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 4, sparse=sparse)
        self.head = nn.Linear(4, 3)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.linspace(-1, 1, param.numel()).view(param.shape))

    def forward(self, words: Tensor) -> Tensor:
        total: Tensor = self.head(self.embed(words)).square().sum()
        return total


def _words(step: int) -> Tensor:
    return torch.randint(0, 20 + 10 * dist.get_rank(), (15,), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def sparse_schemes() -> list[str]:
    """Sparse schemes on both kinds of embeddings, plain and in DDP, are dense all-reduce."""
    join()
    local = 2 if dist.get_world_size() % 2 == 0 else 1
    syncs: list[Any] = ["dense", "zen", "agsparse", "omnireduce", "auto", {"scheme": "hierarchical", "local_size": local}]
    return [text for sync in syncs for text in _embedded(sync, 8 if sync == "auto" else 3)]


def _embedded(sync: Any, steps: int, bound: float = 1e-6) -> list[str]:
    """Averages sparse and dense gradients of embeddings by a scheme, with and without DDP; returns a text for each wrong mean."""
    wrong = []
    for sparse, ddp in itertools.product((True, False), (True, False)):
        model = Words(sparse)
        other = Words(False)
        with closing(Loop([{"params": "embed*", "sync": sync}], ddp, model)) as loop:
            for step in range(steps):
                other.zero_grad()
                other(_words(step)).backward()
                expected = exact(found(other))
                means = {name: mean.to_dense() for name, mean in loop.step(_words(step)).items()}  # type: ignore[arg-type]
                if not close(means, expected, bound):
                    wrong.append(f"{sync}, sparse={sparse}, DDP={ddp}, step {step}: other sums")
                grad = model.embed.weight.grad
                if grad is None or grad.is_sparse != sparse:
                    wrong.append(f"{sync}, sparse={sparse}, DDP={ddp}: another layout")
                if not alike(hexed(means)):
                    wrong.append(f"{sync}, sparse={sparse}, DDP={ddp}, step {step}: ranks differ")
    return wrong


def through_switch(scheme: str, place: str) -> list[dict[str, Any]]:
    return [{"params": "*", "sync": _at(scheme, place), "fusion": {"groups": 2}}]


def _at(scheme: str, place: str) -> dict[str, Any]:
    return {"scheme": scheme, "switch": place, "patience": 20.0}


def switched(scheme: str, place: str) -> list[str]:
    """Whole gradients in buckets through a switch, and other parameters without it."""
    join()
    wrong = []
    for ddp in (False, True):
        with closing(Loop(through_switch(scheme, place), ddp)) as loop:
            for step in range(3):
                means = loop.step(own(step))
                if not close(means, exact(own(step)), 1e-5):
                    wrong.append(f"ddp={ddp}, step {step}: not the mean")
                if not alike(hexed(means)):
                    wrong.append(f"ddp={ddp}, step {step}: ranks differ")
    return wrong


def streamed(place: str) -> list[str]:
    """Embeddings of both kinds go through a switch in blocks, and other parameters without it."""
    join()
    return _embedded(_at("omnireduce-streaming", place), 3, 1e-5)


def truncated() -> list[str]:
    """Whole gradients in buckets over a ring that truncates, and others without."""
    join()
    wrong = []
    for ddp in (False, True):
        with closing(Loop([{"params": ["conv", "odd"], "sync": "inceptionn-ring", "fusion": {"groups": 1}}], ddp)) as trial:
            for step in range(2):
                means, expected = trial.step(own(step)), exact(own(step))
                off = {name: float((means[name] - expected[name]).abs().max()) for name in means}
                if not 2.0**-16 < max(off["conv"], off["odd"]) < dist.get_world_size() * 2.0**-10 + 1e-5:
                    wrong.append(f"ddp={ddp}, step {step}: off by {off}")
                if not close({**means, "conv": expected["conv"], "odd": expected["odd"]}, expected):
                    wrong.append(f"ddp={ddp}, step {step}: other parameters were truncated too")
                if not alike(hexed(means)):
                    wrong.append(f"ddp={ddp}, step {step}: ranks differ")
    return wrong


def no_rule_for_sparse() -> list[str]:
    """A sparse gradient without a rule is averaged too, and one that is left out on one rank."""
    join()
    model, other = Words(True), Words(False)
    with closing(Loop([], model=model, find_unused_parameters=True)) as loop:
        loop.step(_words(0))  # type: ignore[arg-type]
        other(_words(0)).backward()
        wrong = [] if close({n: g.to_dense() for n, g in found(model).items()}, exact(found(other))) else ["not the average"]
        model.zero_grad()
        if dist.get_rank() == 0:
            model(_words(1)).backward()
        loop.synchronizer.synchronize()
        grad = model.embed.weight.grad
        assert grad is not None
        if not (grad.is_sparse and grad.to_dense().any() and alike(hexed({"": grad.to_dense()}))):
            wrong.append("left out by some")
    return wrong


def picked_by_sparsifiers() -> list[str]:
    """What sparsifiers have picked comes to the same by a sparse scheme as by an all-gather, to one rounding per addition."""
    join()
    wrong = []
    bound = dist.get_world_size() * torch.finfo(torch.float32).eps
    for name, scheme in itertools.product(("topk", "threshold", "sidco_e", "dgc"), ("zen", "agsparse", "omnireduce", "auto")):
        fusion = {"groups": 2}
        with (
            closing(Loop(rule(compress=compress(name), fusion=fusion))) as gathered,
            closing(Loop(rule(compress=compress(name), fusion=fusion, sync=scheme))) as summed,
        ):
            for step in range(4):
                means = summed.step(own(step))
                if not close(means, gathered.step(own(step)), bound):
                    wrong.append(f"{name}, {scheme}, step {step}: other sums")
                if not alike(hexed(means)):
                    wrong.append(f"{name}, {scheme}, step {step}: ranks differ")
    return wrong


# -- micro batches, unused and frozen parameters


def accumulation() -> list[str]:
    """Three micro batches in one step; one parameter is used only in the first of them, one only in the first of rank 0."""
    rank = join().rank()
    wrong = []
    for ddp in (False, True):
        by_hand = method("topk")
        with closing(Loop(rule(compress=compress("topk"), fusion={"groups": 2}), ddp, find_unused_parameters=True)) as loop:
            for step in range(3):
                micro = [own(10 * step + number) for number in range(3)]
                for number, given in enumerate(micro):
                    if number and not ddp:  # DDP would take the parameter as unused in its last pass
                        del given["odd"]
                    if (number or rank) and not ddp:
                        del given["conv"]
                total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
                for given in micro:
                    for name, gradient in given.items():
                        total[name] = total[name] + gradient
                loop.model.zero_grad()
                pausing: Any = loop.model if ddp else loop.synchronizer
                with pausing.no_sync():
                    for given in micro[:-1]:
                        loop.model(given).backward()
                loop.model(micro[-1]).backward()
                if not ddp:
                    loop.synchronizer.synchronize()
                if not same(found(loop.model), reduce(by_hand, total, step)):
                    wrong.append(f"DDP={ddp}, step {step}")
    return wrong


def unused() -> list[str]:
    """Parameters without a gradient: on one rank, on all; residuals of those that nobody has used stay what they were."""
    rank = join().rank()
    wrong = []
    for fusion, none in itertools.product((*FUSIONS[:3], "cupcake"), (True, False)):
        by_hand = method("topk")
        with closing(Loop(rule(compress=compress("topk"), fusion=fusion), find_unused_parameters=True, profile_steps=3)) as loop:
            for step in range(6):
                given = own(step)
                if rank:
                    given["odd"].zero_()  # what rank 1 has is nothing
                if step % 2:
                    del given["conv"], given["scalar"]
                loop.model.zero_grad(set_to_none=none)
                loop.model({name: each for name, each in given.items() if name != "odd" or rank == 0}).backward()
                loop.synchronizer.synchronize()
                means = found(loop.model)
                left = {} if none or not step else {name: torch.zeros(shape) for name, shape in SHAPES.items() if name not in given}
                if not same(means, left | reduce(by_hand, given, step)):
                    wrong.append(f"{fusion}, None={none}, step {step}: {sorted(means)}")
    return wrong


def unused_refused() -> list[str]:
    """Without the option: what ranks are told, then a step that goes well, then nothing at all was used."""
    rank = join().rank()
    with closing(Loop(rule(compress=compress("topk")))) as loop:
        partly = {name: each for name, each in own(0).items() if rank or name not in ("odd", "conv")}
        said = [error_of(lambda: loop.step(partly))]
        means = loop.step(own(1))
        said.append("fine" if alike(hexed(means)) and len(means) == len(SHAPES) else "broken")
        said.append(error_of(loop.synchronizer.synchronize))
    return said


def unused_ddp() -> list[str]:
    """DDP's own find_unused_parameters goes on working."""
    rank = join().rank()
    wrong = []
    by_hand = method("topk")
    with closing(Loop(rule(compress=compress("topk")), ddp=True, find_unused_parameters=True)) as loop:
        for step in range(3):
            given = own(step)
            if rank:
                given["odd"].zero_()
            loop.model.zero_grad()
            loop.model({name: each for name, each in given.items() if name != "odd" or rank == 0}).backward()
            if not same(found(loop.model), reduce(by_hand, given, step)):
                wrong.append(f"step {step}")
    return wrong


def kinds_of_parameters() -> list[str]:
    """Frozen, tied, of 16 bits, not contiguous; plain and in DDP."""
    join()
    wrong = []
    given: list[dict[str, Any]] = [{}, {"compress": compress("topk")}, {"compress": "bf16"}]
    for ddp, options in itertools.product((False, True), given):
        wrong += [f"{what}, DDP={ddp}, {options}" for what in _kinds(ddp, options)]
    return wrong


def _kinds(ddp: bool, options: dict[str, Any]) -> Iterable[str]:
    frozen, tied = Leaves(), Leaves()
    frozen.get_parameter("conv").requires_grad_(False)
    frozen.register_parameter("more", nn.Parameter(torch.zeros(3), requires_grad=False))
    tied.register_parameter("again", tied.get_parameter("embed"))
    narrow = Leaves(dtype=torch.bfloat16)
    channels = Leaves()
    channels.conv = nn.Parameter(torch.zeros(SHAPES["conv"]).to(memory_format=torch.channels_last))
    for what, model in (("frozen", frozen), ("tied", tied), ("bfloat16", narrow), ("channels last", channels)):
        means = create("topk", **OPTIONS["topk"]) if options.get("compress") == compress("topk") else create("bf16")
        with closing(Loop(rule(**options), ddp, model)) as loop:
            for step in range(2):
                given = own(step)
                if what == "frozen":
                    del given["conv"]
                if what == "bfloat16":
                    given = {name: each.bfloat16() for name, each in given.items()}
                got = dict(loop.step({**given, "again": given["embed"]} if what == "tied" else given))
                if what == "tied":
                    given["embed"] = given["embed"] * 2
                expected = reduce(means, given, step) if options else exact(given)
                ordered = {name: got[name] for name in given}
                if not (same(ordered, expected) if options else close(ordered, expected, 1e-2 if what == "bfloat16" else 1e-6)):
                    yield f"{what}, step {step}: another average"
                if len(got) != len(given):
                    yield f"{what}: {sorted(got)}"
                conv = model.get_parameter("conv")
                if conv.grad is not None and conv.grad.stride() != conv.stride():
                    yield f"{what}: strides changed"


# -- mixed precision, clipping


def mixed_precision() -> list[str]:
    """The scale changes from step to step, and one gradient of one rank is infinite: that rank keeps the residual it had."""
    rank = join().rank()
    wrong = []
    for name in ("topk", "dgc", "powersgd", "onebit", "efsignsgd"):
        by_hand = method(name)
        model = Leaves()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with closing(Loop(rule(compress=compress(name), fusion={"groups": 2}), model=model, scaler=scaler)) as loop:
            for step in range(5):
                given = own(step)
                if step == 2 and rank == 1:
                    given["odd"][3, 4] = torch.inf
                scale = scaler.get_scale()
                before = loop.synchronizer.averager.routes.state_dict() if step == 2 else {}
                kept = hexed(_of(before, "odd"))
                weights = hexed(dict(model.named_parameters()))
                model.zero_grad()
                scaler.scale(model(given)).backward()
                loop.synchronizer.synchronize()
                scaler.unscale_(optimizer)
                means, expected = found(model), reduce(by_hand, given, step)
                if step == 2:
                    if bool(means.pop("odd").isfinite().all()) or not same(means, {n: e for n, e in expected.items() if n != "odd"}):
                        wrong.append(f"{name}: an infinity was not seen, or others were")
                    if rank == 1 and hexed(_of(loop.synchronizer.averager.routes.state_dict(), "odd")) != kept:
                        wrong.append(f"{name}: a residual was lost")
                elif not same(means, expected):
                    wrong.append(f"{name}, step {step}: not what averaging by hand gives")
                scaler.step(optimizer)
                scaler.update()
                skipped = hexed(dict(model.named_parameters())) == weights
                if skipped != (step == 2) or scaler.get_scale() != (scale / 2 if step == 2 else scale * 2):
                    wrong.append(f"{name}, step {step}: scale {scale} to {scaler.get_scale()}, skipped {skipped}")
                if not alike(hexed(dict(model.named_parameters()))):
                    wrong.append(f"{name}, step {step}: ranks differ")
    return wrong


def _of(state: Any, name: str, path: str = "") -> dict[str, Tensor]:
    """All tensors of a state that belong to one parameter, copied."""
    if isinstance(state, Mapping):
        return {key: each for part, inner in state.items() for key, each in _of(inner, name, f"{path}/{part}").items()}
    return {path: state.clone()} if isinstance(state, Tensor) and path.endswith(f"/{name}") else {}


def clipping() -> list[str]:
    """After synchronize all ranks clip the same average."""
    join()
    with closing(Loop(rule(compress="bf16"))) as loop:
        means = {name: mean.clone() for name, mean in loop.step(own(0)).items()}
        norm = torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
        expected = torch.nn.utils.get_total_norm(means.values())
        clipped = torch.nn.utils.get_total_norm(found(loop.model).values())
    wrong = [] if torch.equal(norm, expected) else [f"norm {norm}, expected {expected}"]
    wrong += [] if abs(float(clipped) - 0.5) < 1e-5 else [f"clipped to {clipped}"]
    return wrong + ([] if alike(float(norm).hex()) else ["ranks differ"])


# -- plans


def planned(fusion: str, ddp: bool, snapshots: bool) -> list[str]:
    """A planned fusion: all ranks agree, training goes on, and it settles."""
    join()
    wrong = []
    shapes = {f"t{number:02}": (30, 40 + number) for number in range(12)}
    pipeline = [{"params": "t0*", "compress": compress("topk"), "fusion": fusion, **({"quality": "any"} if fusion == "auto" else {})}]
    with closing(Loop(pipeline, ddp, Leaves(shapes), profile_steps=3)) as loop:
        labels: list[str] = []
        for step in range(1000):
            if loop.synchronizer.settled and labels[-3:] == 3 * labels[-1:]:
                break
            means = loop.step(own(step, shapes))
            if snapshots:
                loop.synchronizer.state_dict()
            labels.append(loop.synchronizer.averager.plan.fusion[0])
            if not alike(hexed(means)):
                wrong.append(f"step {step}: ranks differ")
            if not alike(loop.synchronizer.averager.plan.pack()):
                wrong.append(f"step {step}: plans differ")
        if sorted(name for group in loop.synchronizer.averager.plan.groups for name in group.names) != sorted(shapes):
            wrong.append("a tensor is lost")
        if not loop.synchronizer.state_dict()["tuner"]["settled"] or len(set(labels[-3:])) != 1:
            wrong.append(f"not settled: {labels}")
        if loop.synchronizer.averager.plan.predicted.keys() != {0}:
            wrong.append(f"predictions {loop.synchronizer.averager.plan.predicted}")
    return wrong


def moved_to_processors() -> list[str]:
    """Espresso with two processors to compress on, as beside a GPU that is busy, and links so slow that compressing pays."""
    join()
    wrong = []
    shapes = {f"t{number:02}": (200, 300) for number in range(6)}
    with closing(Loop(rule(compress=compress("topk"), fusion="espresso"), model=Leaves(shapes))) as loop:
        averager = loop.synchronizer.averager
        ready = {tensor.name: 0.1 * (1 + number) for number, tensor in enumerate(averager.tensors)}
        found = Candidates(averager, torch.device("cpu"), averager.tensors, 1e-3, ready)
        slow, both = Affine(alpha=1e-3, beta=1e-6), (Processor.GPU, Processor.CPU)
        with patch.object(tuner, "processors", lambda _: both), patch.object(found, "links", lambda *_: (slow, slow)):
            (espresso,) = found.of(0)
        chosen = [every_option(both)[int(group.way.removeprefix("option "))] for group in espresso.groups]
        if not any(Processor.CPU in option.processors for option in chosen):
            wrong.append(f"nothing on the CPU: {espresso}")
        averager.plan = replace(averager.plan, groups=espresso.groups)
        means = loop.step(own(0, shapes))
    with closing(Loop(rule(compress=compress("topk"), fusion="layer-wise"), model=Leaves(shapes))) as loop:
        groups = [Group(each.rule, each.names, option_way(o.on(Processor.GPU))) for each, o in zip(espresso.groups, chosen, strict=True)]
        loop.synchronizer.averager.plan = replace(loop.synchronizer.averager.plan, groups=tuple(groups))
        if not alike(hexed(means)) or not same(means, loop.step(own(0, shapes))):
            wrong.append("other bits than without the CPU")
    return wrong


# -- state


PIPELINES: dict[str, Any] = {
    "topk by zen": rule(compress=compress("topk"), sync="zen", fusion={"groups": 2}),
    "powersgd": [{"params": ["embed", "odd"], "compress": compress("powersgd")}, *rule(compress="bf16")],
    "dgc": rule(compress=compress("dgc"), fusion={"bucket": 2000}),
    "onebit, two phases": rule(compress={"method": "onebit", "two_phase": True}, fusion="layer-wise"),
    "qsgd": rule(compress="qsgd"),
    "signum, cupcake": rule(compress="signum", fusion="cupcake"),
    "sidco": rule(compress=compress("sidco_e"), fusion="layer-wise"),
}


def interrupted(folder: str, first: int, last: int, place: str = "") -> dict[str, list[str]]:
    """Steps from ``first`` on of all pipelines, from what is in the folder if that is not 0; the state afterwards is left there.

    With the ``place`` of a switch they are those that go through it.
    """
    join()
    pipelines = {scheme: through_switch(scheme, place) for scheme in ("switchml", "fpisa")} if place else PIPELINES
    file = Path(folder, f"{dist.get_rank()}.pt")
    states: dict[str, Any] = torch.load(file, weights_only=True) if first else {}
    results = {}
    for (name, pipeline), ddp in itertools.product(pipelines.items(), (False, True)):
        key = f"{name}, DDP={ddp}"
        with closing(Loop(pipeline, ddp, profile_steps=2)) as loop:
            if first:
                loop.synchronizer.load_state_dict(states[key])
            results[key] = [hexed(loop.step(own(step))) for step in range(first, last)]
            states[key] = loop.synchronizer.state_dict()
        if not alike(results[key]):
            results[key].append("ranks differ")
    torch.save(states, file)
    return results


def foreign_states() -> list[str]:
    """What is said to states of other parameters, rules and methods."""
    join()
    with closing(Loop(rule(compress="topk"))) as loop:
        state = loop.synchronizer.state_dict()
        others = [Loop(rule(compress="topk"), model=Leaves({"embed": (3, 3)})), Loop(rule(compress="qsgd"))]
        said = [error_of(partial(other.synchronizer.load_state_dict, state)) for other in others]
        for other in others:
            other.close()
    return said


# -- what goes wrong


def twice() -> list[str]:
    """A second backward pass without synchronize; synchronize under DDP."""
    join()
    with closing(Loop(rule())) as loop, closing(Loop(rule(), ddp=True)) as ddp:
        loop.model(own(0)).backward()
        return [error_of(lambda: loop.model(own(1)).backward()), error_of(ddp.synchronizer.synchronize)]


def disagreements() -> list[str]:
    """What each rank is told where ranks were given different things."""
    rank = join().rank()
    odd = rank == dist.get_world_size() - 1
    topk = rule(compress="topk")
    cases: list[tuple[Any, nn.Module, dict[str, Any]]] = [
        (rule(compress="qsgd" if odd else "topk"), Leaves(), {}),
        (rule(compress={"method": "topk", "ratio": 0.5 if odd else 0.1}), Leaves(), {}),
        (topk, Leaves({"embed": (3, 4 + odd)}), {}),
        (topk, Leaves({"embed": (3, 4), **({"more": (3,)} if odd else {})}), {}),
        (topk, Leaves(dtype=torch.float64 if odd else torch.float32), {}),
        (rule(compress="nonsense" if odd else "topk"), Leaves(), {}),
        (rule(compress="nonsense"), Leaves(), {}),
        (topk, Leaves(), {"find_unused_parameters": odd}),
        ([{"params": "embed"}], Leaves({"conv" if odd else "embed": (2, 2)}), {}),
        (rule(sync={"scheme": "hierarchical", "local_size": 2}), Leaves(), {}),
    ]
    said = [error_of(partial(GradientSynchronizer, case[1], case[0], **case[2])) for case in cases]
    with closing(Loop(topk)) as loop:
        said.append(str(alike(hexed(loop.step(own(0))))))
    return said


class Broken(RuntimeError):
    """Raised by a compressor; of the type that errors of a collective have, too."""


def failing(how: str, *cases: tuple[bool, bool]) -> list[list[str]]:
    """Makes rank 0 fail in the third step, with or without DDP and compression.

    Args:
        how: "raises" or "killed": while it compresses or lays out; "killed between steps": after it, before it has said where it is;
            "killed while planning": after it, when the others begin to plan.
        *cases: whether with DDP, and whether with compression.

    Returns:
        For each case what this rank was told in that step, in the one after, and if rank 0 is killed when it loads a state then.
    """
    rank = join().rank()
    said = []
    for ddp, is_compressed in cases:
        fusion = "cupcake" if how == "killed while planning" else "layer-wise"
        loop = Loop(rule(fusion=fusion, **({"compress": compress("topk")} if is_compressed else {})), ddp, profile_steps=3)
        for step in range(2):
            loop.step(own(step))
        if rank == 0:
            _break(loop, how, is_compressed)
        loop.synchronizer.summary()
        state = loop.synchronizer.state_dict()
        said.append([error_of(partial(loop.step, own(step))) for step in (2, 3)])
        if how != "raises":
            said[-1].append(error_of(partial(loop.synchronizer.load_state_dict, state)))
        _until_all_have_failed(rank, len(said))
    return said


def _break(loop: Loop, how: str, is_compressed: bool) -> None:
    averager, fail = loop.synchronizer.averager, _raise if how == "raises" else _die
    if how == "killed while planning":
        setattr(tuner, "Candidates", fail)  # noqa: B010 - for types it is a class
        return
    route: Any = averager.routes.of(averager.plan.groups[2])
    if how == "killed between steps":
        setattr(RankComparison, "begin", fail)  # noqa: B010 - for types it is a method
        loop.step(own(2))
    elif is_compressed:
        route.reducer.inner.compress = fail
    else:
        route.average = partial(_fails, fail)


def _until_all_have_failed(rank: int, case: int) -> None:
    """The rank that fails first lives on until the others have failed too: it is not its end that tells them."""
    store = _whole().get_group_store()
    store.set(f"failed {case} {rank}", "")
    if rank == 0:
        store.wait([f"failed {case} {other}" for other in range(dist.get_world_size())], timedelta(seconds=20))


def _whole() -> dist.ProcessGroup:
    """The default group."""
    group = dist.group.WORLD
    assert group is not None
    return group


def _raise(*_: Any) -> Any:
    raise Broken("no memory left")


def _die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _fails(fail: Callable[[], None], *_: Any) -> Work:
    """Fails where a route computes, which is not where it is called."""
    fail()
    yield from ()
    return {}


# -- groups, telemetry, other hooks


def one_rank_groups() -> list[str]:
    """In a group of one rank nothing is averaged, whatever the default group is."""
    rank = join().rank()
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    wrong = []
    for name in ("topk", "powersgd", "signsgd", "bf16"):
        with closing(Loop(rule(compress=compress(name)), group=groups[rank])) as loop:
            if not same(loop.step(own(0)), reduce(method(name), own(0), 0, groups[rank])):
                wrong.append(name)
    return wrong


def telemetry() -> list[str]:
    """Bytes are those of the formulas, and under DDP the last step is seen at once."""
    join()
    wrong = []
    pipeline = [{"params": "embed", "compress": {"method": "topk", "ratio": 0.1}}, {"params": ["odd", "conv"], "sync": "zen"}]
    sizes = {name: 4 * torch.Size(shape).numel() for name, shape in SHAPES.items()}
    for ddp in (False, True):
        with closing(Loop(pipeline, ddp)) as loop:
            for number in range(3):
                loop.step(own(number))
                step = loop.synchronizer.last_step
                assert step is not None
                compressed, sparse, rest = (step.rules[key] for key in sorted(step.rules))
                if (step.number, len(step.rules)) != (number, 3):
                    wrong.append(f"DDP={ddp}: step {step.number}, {sorted(step.rules)}")
                if (compressed.dense_bytes, compressed.sent_bytes, compressed.density) != (sizes["embed"], 8 * 96, None):
                    wrong.append(f"DDP={ddp}: {compressed}")
                if (sparse.dense_bytes, sparse.density) != (sizes["odd"] + sizes["conv"], 1.0):
                    wrong.append(f"DDP={ddp}: {sparse}")
                if rest.sent_bytes != rest.dense_bytes or rest.dense_bytes != sizes["norm"] + sizes["scalar"] + sizes["zero_d"]:
                    wrong.append(f"DDP={ddp}: {rest}")
                if not (0 <= step.overlap <= 1 and min(compressed.encode, compressed.communicate, compressed.decode) > 0):
                    wrong.append(f"DDP={ddp}: {step}")
                if loop.synchronizer.summary()["step"]["number"] != number:
                    wrong.append(f"DDP={ddp}: {loop.synchronizer.summary()}")
    return wrong


def beside_another_hook() -> list[str]:
    """Buckets of which no rule matches anything go to the hook that was there; in mixed ones the rest is averaged too."""
    join()
    asked: list[int] = []

    def hook(state: list[int], bucket: Any) -> torch.futures.Future[Tensor]:
        state.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        done: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
        return done

    wrong = []
    for pipeline in (rule(params="embed", compress="bf16"), rule(params="norm", compress="bf16")):
        asked.clear()
        by_hand = create("bf16")
        with closing(Loop(pipeline, ddp=True, otherwise=(asked, hook))) as loop:
            for step in range(4):
                given = own(step)
                means, expected = loop.step(given), exact(given)
                name = pipeline[0]["params"]
                [(_, ours)] = reduce(by_hand, {name: given[name]}, step).items()
                if not same({name: means.pop(name)}, {name: ours}):
                    wrong.append(f"{name}, step {step}: not by its rule")
                del expected[name]
                if not close(means, expected):
                    wrong.append(f"{name}, step {step}: others are not the average")
                if loop.synchronizer.last_step is None or loop.synchronizer.last_step.number != step:
                    wrong.append(f"{name}, step {step}: not counted")
        if not asked:
            wrong.append(f"{pipeline}: the other hook was not asked")
    return wrong
