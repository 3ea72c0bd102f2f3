"""What the ranks of test_local_steps.py run: steps that ranks make alone, beside the same in one process."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import elastic_case
import torch
import torch.distributed as dist
from pipeline_case import alike, error_of
from plain_case import Net, start_ranks
from sync_case import join
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DistributedSampler

import gemini_ft
from gemini_ft.compression.sparse import TopK
from gemini_ft.pipeline import host_groups, plan
from gemini_ft.pipeline.qualities import LOCAL, WAYS
from gemini_ft.pipeline.routes import Plain
from gemini_ft.pipeline.rules import Buckets, load_rules
from gemini_ft.pipeline.telemetry import Telemetry
from gemini_ft.pipeline.tuner import Candidate, Candidates
from gemini_ft.testing import digest, first_difference

STEPS = 9
SGD = {"lr": 0.5, "momentum": 0.9, "nesterov": False}
DILOCO = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
TOPK = {"method": "topk", "ratio": 0.3}


class Lookahead(torch.optim.Optimizer):
    """Goes half of the way back to where it was two steps ago (Zhang et al., 2019)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        super().__init__([param for group in inner.param_groups for param in group["params"]], {})
        self.slow = [param.detach().clone() for param in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for slow, param in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.lerp_(param, 0.5)
                param.copy_(slow)


class Clearing(torch.optim.Optimizer):
    """Makes all gradients None after the step of another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__([param for group in inner.param_groups for param in group["params"]], {})

    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        self.zero_grad()


class LookaheadAdamW(torch.optim.AdamW):
    """The same as `Lookahead`, by way of the class of which it is derived."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, 1e-2)
        self.count, self.slow = 0, [param.detach().clone() for param in params]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        self.count += 1
        if self.count % 2 == 0:
            for slow, param in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.lerp_(param, 0.5)
                param.copy_(slow)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, 1e-2)


def around(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Lookahead(adamw(params))


def clearing(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Clearing(adamw(params))


def derived(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    adamw(params)  # once there is one, torch calls hooks in the step() of the base class, too
    return LookaheadAdamW(params)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training of `STEPS` steps: the rule's options, whether in DDP, micro-batches of a step, the parameters' dtype."""

    rule: Mapping[str, Any] = field(default_factory=dict)
    ddp: bool = False
    micro: int = 1
    dtype: torch.dtype = torch.float32
    optimizers: int = 1  # that share the layers
    hook: bool = False  # whether DDP has a hook of the script's own
    again: bool = False  # whether layers are computed again in the backward pass, with a graph of their own
    loads: bool = False  # whether weights are loaded after the synchronizer was made
    freezes: bool = False  # whether the first layer is frozen after five steps
    strays: bool = False  # whether no optimizer has the last bias, which has gradients
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw
    together: int = 1  # ranks of a host, which average their gradients


_OPTIONS: dict[str, dict[str, Any]] = {
    "the plain average": {"rule": {"every": 3}},
    "momentum": {"rule": {"every": 3, "outer": SGD}},
    "DiLoCo": {"rule": {"every": 3, "outer": DILOCO}},
    "each step": {"rule": {"every": 1, "outer": DILOCO}},
    "fragments": {"rule": {"every": 4, "outer": DILOCO, "fragments": 2}},
    "delayed": {"rule": {"every": 4, "outer": DILOCO, "fragments": 2, "delay": 3}},
    "delayed, bfloat16": {"rule": {"every": 3, "outer": DILOCO, "delay": 1}, "dtype": torch.bfloat16},
    "micro-batches": {"rule": {"every": 3, "outer": DILOCO}, "micro": 2},
    "bfloat16": {"rule": {"every": 3, "outer": DILOCO}, "dtype": torch.bfloat16},
    "two optimizers": {"rule": {"every": 3, "outer": DILOCO}, "optimizers": 2},
    "two optimizers, each step": {"rule": {"every": 1, "outer": DILOCO}, "optimizers": 2},
    "a parameter that no optimizer has": {"rule": {"every": 3, "outer": DILOCO}, "strays": True},
    "an optimizer around another": {"rule": {"every": 4, "outer": DILOCO}, "optimizer": around},
    "an optimizer that calls its base class": {"rule": {"every": 4, "outer": DILOCO}, "optimizer": derived},
    "frozen, gradients cleared by an optimizer": {"rule": {"every": 3, "outer": DILOCO}, "freezes": True, "optimizer": clearing},
    "weights that are loaded": {"rule": {"every": 3, "outer": DILOCO}, "loads": True},
    "frozen, compressed": {"rule": {"every": 3, "outer": DILOCO, "compress": {"method": "topk", "ratio": 1.0}}, "freezes": True},
    "frozen": {"rule": {"every": 3, "outer": DILOCO}, "freezes": True},
}
_OF_DDP: dict[str, dict[str, Any]] = {"a hook": {"rule": {"every": 3}, "hook": True}, "again": {"rule": {"every": 3}, "again": True}}
CASES = {f"{what}, DDP=False": Case(**options) for what, options in _OPTIONS.items()} | {
    f"{what}, DDP=True": Case(ddp=True, **options) for what, options in (_OPTIONS | _OF_DDP).items()
}
WITHIN = {
    f"{what}, DDP={ddp}": Case(rule={"every": 3, "outer": DILOCO, "within": "host", **more}, ddp=ddp, together=2, micro=micro)
    for what, more, micro in (("hosts", {}, 1), ("hosts, fragments", {"fragments": 2}, 2))
    for ddp in (False, True)
}


class Again(nn.Module):
    """Layers whose activations are computed again in the backward pass, in a graph of their own."""

    def __init__(self, inner: nn.Sequential) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        given = given.requires_grad_()
        for layer in self.inner:
            given = checkpoint(layer, given, use_reentrant=True)
        return given


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def loss_of(model: nn.Module, step: int, micro: int, rank: int, dtype: torch.dtype) -> Any:
    given = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)).to(dtype)
    return model(given).square().sum()


def in_one_process(case: Case) -> list[nn.Module]:
    """The models of all ranks after `STEPS` steps, with torch's own SGD as the outer optimizer. Written by the papers, not by our code."""
    world, rule = dist.get_world_size(), {"outer": {"lr": 1.0}, "fragments": 1, **case.rule}
    models: list[nn.Module] = [network(case.dtype) for _ in range(world)]
    anchor = network(case.dtype).float()
    if case.loads:
        for model in [*models, anchor]:
            load(model)
    inner = [case.optimizer([*model.parameters()][: -1 if case.strays else None]) for model in models]
    outer = torch.optim.SGD(anchor.parameters(), **rule["outer"])
    last_first = [name for name, _ in anchor.named_parameters()][::-1]
    sizes = [anchor.get_parameter(name).numel() for name in last_first]
    under_way: list[tuple[int, set[str], list[dict[str, torch.Tensor]]]] = []
    fragment = {name: sum(sizes[:place]) * rule["fragments"] // sum(sizes) for place, name in enumerate(last_first)}
    for step in range(STEPS):
        frozen = {name for name in last_first if case.freezes and step >= 5 and name.startswith("0.")}
        for rank, model in enumerate(models):
            inner[rank].zero_grad()
            for micro in range(case.micro):
                loss_of(model, step, micro, rank, case.dtype).backward()
            for name in frozen:
                model.get_parameter(name).grad = None
        for begin in range(0, world, case.together):
            for own in zip(*(model.parameters() for model in models[begin : begin + case.together]), strict=True):
                if case.together > 1:
                    mean = sum(param.grad / case.together for param in own)
                    for param in own:
                        param.grad = mean.clone()
        for each in inner:
            each.step()
        turn, parts = (step + 1) % rule["every"], rule["fragments"]
        due = {name for name in last_first if turn == (fragment[name] + 1) * rule["every"] // parts % rule["every"]}
        for at, names, sent in [each for each in under_way if each[0] == step]:
            _late_step(models, anchor, outer, names, sent)
            under_way.remove((at, names, sent))
        if delay := rule.get("delay", 0):
            under_way += [
                (step + delay, due, [{name: model.get_parameter(name).detach().float().clone() for name in due} for model in models])
            ]
            continue
        _outer_step(models, case.together, anchor, outer, due - frozen if step > 5 else due)  # of the period in which they were frozen
    return models


def load(model: nn.Module) -> None:
    """Gives a model other weights, as a script does that loads a checkpoint."""
    model.load_state_dict({name: 2 * value for name, value in network().state_dict().items()})


@torch.no_grad()
def _outer_step(models: list[nn.Module], together: int, anchor: nn.Module, outer: torch.optim.Optimizer, due: set[str]) -> None:
    outer.zero_grad()
    for name in due:
        start, dtype = anchor.get_parameter(name), models[0].get_parameter(name).dtype
        wide = torch.promote_types(dtype, torch.float32)
        moved = [start.to(dtype).to(wide) - model.get_parameter(name).to(wide) for model in models[::together]]
        start.grad = torch.stack(moved).sum(0) / len(moved)
    outer.step()
    for name in due:
        for model in models:
            model.get_parameter(name).copy_(anchor.get_parameter(name))


@torch.no_grad()
def _late_step(models: list[nn.Module], anchor: nn.Module, outer: torch.optim.Optimizer, due: set[str], sent: list[Any]) -> None:
    """An outer step with what ranks had moved some steps before; what they have moved since stays."""
    outer.zero_grad()
    for name in due:
        start, dtype = anchor.get_parameter(name), models[0].get_parameter(name).dtype
        start.grad = torch.stack([start.to(dtype).float() - each[name] for each in sent]).sum(0) / len(models)
    outer.step()
    for model, each in zip(models, sent, strict=True):
        for name in due:
            param = model.get_parameter(name)
            param.copy_(param.float() + (anchor.get_parameter(name) - each[name]))


def on_each_rank(case: Case) -> nn.Module:
    """This rank's model after `STEPS` steps of its own."""
    model, rank = network(case.dtype), dist.get_rank()
    trained = Again(model) if case.again else model
    wrapped: Any = DistributedDataParallel(trained, find_unused_parameters=case.freezes) if case.ddp else trained
    parts = [[*model.parameters()][: -1 if case.strays else None]] if case.optimizers == 1 else [[*model[at].parameters()] for at in (0, 2)]
    optimizers = [case.optimizer(part) for part in parts]
    hook = (None, allreduce_hook) if case.hook else None
    with closing(gemini_ft.GradientSynchronizer(wrapped, [{"params": "*", **case.rule}], otherwise=hook)) as synchronizer:
        if case.loads:
            load(model)
        for step in range(STEPS):
            if case.freezes and step == 5:
                model[0].requires_grad_(False)
            wrapped.zero_grad()
            for micro in range(case.micro):
                last = micro == case.micro - 1
                with contextlib.nullcontext() if last else wrapped.no_sync() if case.ddp else synchronizer.no_sync():
                    loss_of(wrapped, step, micro, rank, case.dtype).backward()
            if not case.ddp:
                synchronizer.synchronize()
            for param in model.parameters():
                param.grad = param.grad if param.requires_grad else None
            for optimizer in optimizers:
                optimizer.step()
    return model


def emulate_hosts(rank: int) -> None:
    """Has every two ranks be of a host of their own, as far as a gradient pipeline sees."""
    patch.object(host_groups, "host_id", lambda: f"host{rank // 2}").start()


def differences(cases: Mapping[str, Case]) -> dict[str, str | None]:
    """Case -> where this rank's model differs from what one process makes of all ranks' data; None: nowhere, in bits."""
    rank, found = join().rank(), {}
    emulate_hosts(rank)
    for name, case in cases.items():
        expected = in_one_process(case)[rank]
        found[name] = first_difference(on_each_rank(case).state_dict(), expected.state_dict())
    return found


def compressed() -> tuple[bool, bool, list[int]]:
    """Whether ranks differ between two averages, whether they are alike after one, and the bytes of each average, before and after."""
    rank, model = join().rank(), network()
    optimizer, between = torch.optim.AdamW(model.parameters(), 1e-2), list[bool]()
    with closing(gemini_ft.GradientSynchronizer(model, [{"params": "*", "every": 3, "outer": DILOCO, "compress": TOPK}])) as synchronizer:
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, step, 0, rank, torch.float32).backward()
            synchronizer.synchronize()
            optimizer.step()
            between.append(alike(digest(model.state_dict())))
        figures = next(value for name, value in synchronizer.summary().items() if name.startswith("1:"))
    return any(between[:2] + between[3:5]), between[2] and between[5], [int(figures["bytes_before"]), int(figures["bytes_after"])]


def hosts_that_compress() -> dict[str, bool]:
    """Compression -> whether all ranks are alike after the averages of two hosts, and those of a host between them."""
    rank, found = join().rank(), {}
    emulate_hosts(rank)
    for compress in ("bf16", TOPK):
        model = network()
        optimizer, own = torch.optim.AdamW(model.parameters(), 1e-2), list[bool]()
        rule = {"params": "*", "every": 3, "outer": DILOCO, "within": "host", "compress": compress}
        with closing(gemini_ft.GradientSynchronizer(model, [rule])) as synchronizer:
            for step in range(6):
                optimizer.zero_grad()
                loss_of(model, step, 0, rank, torch.float32).backward()
                synchronizer.synchronize()
                optimizer.step()
                digests: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(digests, digest(model.state_dict()))
                own.append(digests[0] == digests[1] and digests[2] == digests[3] and (digests[0] == digests[2]) == (step % 3 == 2))
        found[str(compress)] = all(own)
    return found


def hosts_of_unequal_size() -> str:
    """Returns the error where the last of three ranks is a host of its own."""
    emulate_hosts(join().rank())
    rules = [{"params": "*", "every": 3, "within": "host"}]
    return error_of(lambda: gemini_ft.GradientSynchronizer(network(), rules).close())


def _after(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
    def later(*given: Any) -> Any:
        time.sleep(seconds)
        return call(*given)

    return later


def roll_back_under_way() -> bool:
    """Whether a state that is loaded while an average is under way gives the bits of the first time; rank 1 compresses slowly."""
    rank, model = join().rank(), network()
    if rank == 1:
        patch.object(TopK, "compress", _after(0.1, TopK.compress)).start()
    optimizer, ends = torch.optim.AdamW(model.parameters(), 1e-2), list[str]()
    rule = {"params": "*", "every": 4, "delay": 2, "outer": DILOCO, "compress": TOPK, "fusion": "layer-wise"}
    with closing(gemini_ft.GradientSynchronizer(model, [rule])) as synchronizer:
        parts: tuple[Any, ...] = (model, optimizer, synchronizer)

        def train(steps: range) -> None:
            for step in steps:
                optimizer.zero_grad()
                loss_of(model, step, 0, rank, torch.float32).backward()
                synchronizer.synchronize()
                optimizer.step()

        train(range(6))
        state = copy.deepcopy([part.state_dict() for part in parts])
        for _ in range(2):
            train(range(6, 8))  # after which one is under way
            ends.append(digest(model.state_dict()))
            for part, value in zip(parts, copy.deepcopy(state), strict=True):
                part.load_state_dict(value)
        train(range(6, 11))
    return ends[0] == ends[1]


def failing(within: bool) -> str:
    """Returns what this rank is told when the last one fails: in its host's average, or right after it has begun a delayed one of all."""
    rank, model = join().rank(), network()
    if within:
        emulate_hosts(rank)
    if rank == dist.get_world_size() - 1:
        patch.object(Plain if within else TopK, "average" if within else "compress", side_effect=ValueError("no memory left")).start()
        # It is called before the beginning counts as over: the failure is told until then.
        patch.object(Telemetry, "add", _after(0.3, Telemetry.add)).start()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rule = {"params": "*", "every": 3, **({"within": "host"} if within else {"delay": 2, "compress": TOPK})}
    synchronizer = gemini_ft.GradientSynchronizer(model, [rule])

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, number, 0, rank, torch.float32).backward()
        synchronizer.synchronize()
        optimizer.step()

    said = next((text for number in range(2 if within else 6) if (text := error_of(partial(step, number)))), "")
    dist.barrier()
    synchronizer.close()
    return said


def refusals() -> list[str]:
    """Returns the errors where others average between two averages, or ranks are not all there; and where they may come to train alone."""
    join()
    model = network()
    with closing(gemini_ft.GradientSynchronizer(model, [{"params": "*", "every": 2}])) as synchronizer:
        loss_of(model, 0, 0, 0, torch.float32).backward()
        synchronizer.synchronize()
        sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        said = [error_of(sharded.step), error_of(Lookahead(sharded).step)]
    wrapped = DistributedDataParallel(network())
    with closing(gemini_ft.GradientSynchronizer(wrapped, [{"params": "*", "every": 2}])), wrapped.join():
        said.append(error_of(loss_of(wrapped, 0, 0, 0, torch.float32).backward))
    ahead = network()
    with closing(gemini_ft.GradientSynchronizer(ahead, [{"params": "*", "every": 100}])) as synchronizer:

        def again() -> float:
            loss = loss_of(ahead, 0, 0, 0, torch.float32)
            loss.backward()
            synchronizer.synchronize()
            return float(loss)

        once = partial(torch.optim.LBFGS, max_iter=1)
        said += [error_of(partial(kind(ahead.parameters()).step, again)) for kind in (once, Searching, torch.optim.LBFGS)]
    later = network()
    with closing(gemini_ft.GradientSynchronizer(later, [{"params": "*", "fusion": "auto", "quality": "loss"}])):
        sharded = ZeroRedundancyOptimizer(later.parameters(), torch.optim.SGD, lr=0.1)
        said += [error_of(partial(each.step, float)) for each in (sharded, torch.optim.LBFGS(later.parameters()))]
    return said


class Searching(torch.optim.SGD):
    """Evaluates the loss several times in a step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


def apart() -> list[str]:
    """Returns the errors where ranks begin with other weights, or one of them leaves an update out."""
    rank, said = join().rank(), []
    for begins_apart in (True, False):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        with closing(gemini_ft.GradientSynchronizer(model, [{"params": "*", "every": 2}])) as synchronizer:
            if begins_apart:
                nn.init.constant_(model.get_parameter("0.bias"), rank)

            def step(number: int, model: nn.Module = model, synchronizer: Any = synchronizer, optimizer: Any = optimizer) -> None:
                loss_of(model, number, 0, rank, torch.float32).backward()
                synchronizer.synchronize()
                if begins_apart or number != 1 or rank != 1:  # noqa: B023
                    optimizer.step()

            said.append(next((text for number in range(7) if (text := error_of(partial(step, number)))), ""))
    return said


def preset(name: str) -> list[Any]:
    """The rules of a file in configs/, with a short period."""
    return [rule.pack() | {"every": 4} for rule in load_rules(Path(__file__).parents[2] / "configs" / f"pipeline_{name}.yaml")]


METHODS: dict[str, list[Any]] = {
    "LocalSGD": [{"params": "*", "every": 4}],
    "DiLoCo": preset("diloco"),
    "SparseLoCo": preset("sparseloco"),
    "ring8": [{"params": "*", "sync": "ring8"}],
    "ring8, e5m2": [{"params": "*", "sync": {"scheme": "ring8", "words": "e5m2"}, "fusion": "layer-wise"}],
}


def train(out: str, delay: int = 0, method: str | None = None, **more: Any) -> int:
    """Trains to the end, with two periods or by one of `METHODS`; loss, weights and anchors go to ``<out>.<rank>``."""
    rank, _ = start_ranks()
    emulate_hosts(rank)
    torch.manual_seed(0)
    net = Net(16)
    torch.manual_seed(rank)
    optimizers = [torch.optim.AdamW(part, lr=0.01) for part in (net.first.parameters(), [*net.norm.parameters(), *net.last.parameters()])]
    rules = [
        {"params": "last.*", "every": 3, "compress": TOPK, **more},
        {"params": "*", "every": 4, "outer": DILOCO, "fragments": 2, "compress": TOPK, "delay": delay, **more},
    ]
    gradients = gemini_ft.GradientSynchronizer(net, rules if method is None else METHODS[method])
    checkpointer = gemini_ft.Checkpointer(net, optimizers, replicated=method is None, on_late="wait")
    start = checkpointer.resume()
    with open(f"{out}.{rank}", "a", buffering=1) as trace:
        for iteration in range(start, 16):
            net.zero_grad()
            loss = net(torch.randn(8, 8)).square().mean()
            loss.backward()
            gradients.synchronize()
            for optimizer in optimizers:
                optimizer.step()
            weights, anchors = dict(net.named_parameters()), gradients.state_dict().get("outer", {}).get("anchors", {})
            trace.write(f"{iteration} {loss.item().hex()} {digest(weights)} {digest(anchors)}\n")
            checkpointer.step()
    checkpointer.close()
    gradients.close()
    return start


CHOOSES = {"params": "*", "fusion": "auto", "quality": "loss"}


def chosen_by_words(words: float) -> None:
    """Leaves `auto` one way to average, whose bits depend on no plan, and has words alone decide whether ranks train alone."""

    def of(self: Candidates, number: int) -> list[Candidate]:
        return [next(each for each in whole(self, number) if [group.way for group in each.groups] == ["plain"])]

    whole = Candidates.of
    patch.object(Candidates, "of", of).start()
    patch.dict(WAYS, {LOCAL: replace(WAYS[LOCAL], words=words)}).start()


@dataclass
class Chosen:
    """A training by `CHOOSES`; ``states``: of model, optimizer and synchronizer, by the step after which they were."""

    ddp: bool
    states: dict[int, list[Any]] = field(default_factory=dict)
    rule: Mapping[str, Any] = field(default_factory=lambda: CHOOSES)
    profile_steps: int = 2
    pauses: Sequence[float] = ()  # seconds of each forward pass, beside what it computes

    def __post_init__(self) -> None:
        self.model = network()
        if self.pauses:
            pauses = itertools.cycle(self.pauses)
            self.model.register_forward_pre_hook(lambda *_: time.sleep(next(pauses)))
        self.wrapped: Any = DistributedDataParallel(self.model) if self.ddp else self.model
        self.optimizer = adamw([*self.model.parameters()])
        self.synchronizer = gemini_ft.GradientSynchronizer(self.wrapped, [self.rule], profile_steps=self.profile_steps)

    def load(self, state: list[Any]) -> None:
        parts: tuple[Any, ...] = (self.model, self.optimizer, self.synchronizer)
        for part, value in zip(parts, copy.deepcopy(state), strict=False):
            part.load_state_dict(value)

    def train(self, begin: int, end: int = 64) -> str:
        for step in range(begin, end):
            self.optimizer.zero_grad()
            loss_of(self.wrapped, step, 0, dist.get_rank(), torch.float32).backward()
            if not self.ddp:
                self.synchronizer.synchronize()
            self.optimizer.step()
            self.states[step] = copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict(), self.synchronizer.state_dict()])
        return digest(self.states[end - 1][:2])

    @property
    def alone_since(self) -> int | None:
        return next((step for step, (_, _, state) in self.states.items() if "outer" in state), None)


def goes_apart(ddp: bool) -> list[bool]:
    """Whether ranks that have come to train alone do so in the bits of DiLoCo, and go on from each state in the bits of this time."""
    join()
    chosen_by_words(1e-9)
    chosen, found = Chosen(ddp), list[bool]()
    with closing(chosen.synchronizer):
        expected = chosen.train(0)
        since = chosen.alone_since
        assert since is not None
        states = dict(chosen.states)
        by_hand = Chosen(ddp, rule={"params": "*", **WAYS[LOCAL].rule})
        with closing(by_hand.synchronizer):
            first = since if ddp else since + 1  # DDP's next backward pass notices that a step is over
            by_hand.load(states[first - 1][:2])
            found.append(by_hand.train(first) == expected)
        for step in (1, since - 1, since, since + 1, since + 30):
            other = Chosen(ddp)
            with closing(other.synchronizer):
                other.load(states[step])
                found.append(other.train(step + 1) == expected)
        for step in (since - 1, since + 30):  # back to where gradients were averaged, and to another step alone
            chosen.load(states[step])
            found.append(chosen.train(step + 1) == expected)
    mixed = Chosen(ddp)
    with closing(mixed.synchronizer):  # ranks whose states are of both kinds are told, and go on with those of one
        said = error_of(partial(mixed.load, states[(1, since + 1)[dist.get_rank()]]))
        found.append("StateError" in said or "RecoveryError" in said)
        mixed.load(states[since + 30])
        found.append(mixed.train(since + 31) == expected)
    return [*found, not alike(digest(states[40][0])), alike(digest(states[first + 24][0]))]


def begins_after_the_last_gradient(rule: Mapping[str, Any]) -> bool:
    """Whether nothing is averaged in a first step, whose tensors each travel alone, before all its gradients are there."""
    join()
    patch.object(plan, "DEFAULT_FUSION", Buckets(bucket=1)).start()
    chosen, seen = Chosen(False, rule=rule), list[str]()

    def all_reduce(*arguments: Any, **more: Any) -> Any:
        seen.append("average")
        return whole(*arguments, **more)

    whole = dist.all_reduce
    for param in chosen.model.parameters():
        hooked: Any = param
        hooked.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    with closing(chosen.synchronizer), patch.object(dist, "all_reduce", all_reduce):
        chosen.train(0, 1)
    return seen.index("average") >= seen.count("gradient") - 1  # the synchronizer's own hook of the last one comes before


def predictions(ddp: bool) -> list[float]:
    """Seconds predicted of a step alone, where a watched step is shorter than the others, and resumed after each watched step."""
    join()
    chosen_by_words(1e9)

    def tried(state: list[Any]) -> Any:
        return state[2]["tuner"]["trials"]

    def predicted(pauses: Sequence[float], state: Any = None, begin: int = 0) -> tuple[float, list[Any]]:
        chosen = Chosen(ddp, profile_steps=4, pauses=pauses)
        with closing(chosen.synchronizer):
            if state is not None:
                chosen.load(state)
            chosen.train(begin, 7)
        states = [*chosen.states.values()]
        return tried(next(filter(tried, states)))[0]["apart"], [*itertools.takewhile(lambda state: not tried(state), states)]

    uneven, _ = predicted([0.02, 0.02, 0.001, 0.02])
    even, watched = predicted([0.02])
    return [uneven, even, *(predicted([0.02], state, step + 1)[0] for step, state in enumerate(watched))]


def stays_together() -> tuple[bool, bool]:
    """Whether ranks are alike in each step and the choice is over, where training alone takes too many words."""
    join()
    chosen_by_words(1e9)
    chosen = Chosen(False)
    with closing(chosen.synchronizer):
        chosen.train(0, 20)
        return all(alike(digest(state[0])) for state in chosen.states.values()), chosen.synchronizer.settled and chosen.alone_since is None


def train_to_a_loss(out: str) -> int:
    """Trains with `CHOOSES`, which has ranks train alone after a few steps; loss and weights go to ``<out>.<rank>``."""
    rank, _ = start_ranks()
    chosen_by_words(1e-9)
    chosen = Chosen(False)
    checkpointer = gemini_ft.Checkpointer(chosen.model, chosen.optimizer, replicated=True, on_late="wait")
    start = checkpointer.resume()
    with open(f"{out}.{rank}", "a", buffering=1) as trace:
        for iteration in range(start, 40):
            said = chosen.train(iteration, iteration + 1)
            trace.write(f"{iteration} {said} {chosen.alone_since is not None}\n")
            checkpointer.step()
    checkpointer.close()
    chosen.synchronizer.close()
    return start


ELASTIC = {"every": 3, "outer": DILOCO}


def train_elastic(until: int) -> dict[str, Any]:
    """Trains until a step, with as many ranks as there are; samples are dealt out to them."""
    gemini_ft.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = elastic_case.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gradients = gemini_ft.GradientSynchronizer(model, [{"params": "*", **ELASTIC}])
    loader = gemini_ft.resumable(elastic_case.loader_of(elastic_case.Case(), rank, world))
    checkpointer = gemini_ft.Checkpointer(model, optimizer, state={"loader": loader}, elastic="batch", interval=1)
    checkpointer.accumulation = 2
    start = step = checkpointer.resume()
    for epoch in range(checkpointer.scalars.get("epoch", 0), 2):
        loader.sampler.set_epoch(epoch)
        for number, (_, batch) in enumerate(loader, loader.batches_done + 1):
            is_last = number % checkpointer.accumulation == 0
            with contextlib.nullcontext() if is_last else gradients.no_sync():
                (model(batch).square().mean() / checkpointer.accumulation).backward()
            if not is_last:
                continue
            gradients.synchronize()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            checkpointer.step(epoch=epoch)
            if step == until:
                checkpointer.flush()
                gradients.close()
                return {"start": start, "weights": elastic_weights(model)}
    raise AssertionError("the epochs ended first")


def elastic_weights(model: nn.Module) -> list[float]:
    return [value for param in model.parameters() for value in param.flatten().tolist()]


def elastic_in_one_process() -> list[float]:
    """The weights after 12 steps of 3, 2 and 3 ranks, four each."""
    data, size, micro = elastic_case.Numbers(), elastic_case.GLOBAL, elastic_case.BATCH
    torch.manual_seed(0)
    models: list[nn.Module] = [elastic_case.Net()]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    inner = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    anchor = copy.deepcopy(models[0])
    outer = torch.optim.SGD(anchor.parameters(), DILOCO["lr"], momentum=DILOCO["momentum"], nesterov=True)
    for step in range(12):
        if step == 4:
            del models[2], inner[2]
        if step == 8:
            models.append(copy.deepcopy(models[0]))
            inner.append(torch.optim.AdamW(models[2].parameters(), lr=1e-2))
            inner[2].load_state_dict(copy.deepcopy(inner[0].state_dict()))
        order = DistributedSampler[Any](data, 1, 0, seed=5)
        order.set_epoch(step // 6)
        world = len(models)
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            own = list(order)[rank::world][step % 6 * size // world :][: size // world]
            optimizer.zero_grad()
            for first in range(0, len(own), micro):
                batch = torch.stack([data[index][1] for index in own[first : first + micro]])
                (model(batch).square().mean() * micro / len(own)).backward()
            optimizer.step()
        if step % 3 == 2:
            _outer_step(models, 1, anchor, outer, {name for name, _ in anchor.named_parameters()})
    return elastic_weights(models[0])
