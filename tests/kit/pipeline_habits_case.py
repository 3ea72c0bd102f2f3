"""The habits of people's scripts around gradient pipelines, each beside plain DDP; every function returns a list of what is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from pipeline_case import alike, compress, error_of, hexed, rule
from session_case import Recorded
from sync_case import join
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gemini_ft.pipeline import GradientSynchronizer
from gemini_ft.sync.schemes import SCHEMES
from gemini_ft.testing import first_difference

LOSSY = rule(compress={"method": "topk", "ratio": 0.1})
EXACT: list[Any] = [[], rule(sync="zen"), rule(compress="none")]


def _net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def _loss(model: Callable[[Tensor], Tensor], step: int) -> Any:
    given = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    return model(given).square().sum()


def _grads(model: nn.Module) -> dict[str, Tensor]:
    return {str(number): param.grad.clone() for number, param in enumerate(model.parameters()) if param.grad is not None}


def _same(one: nn.Module, other: nn.Module) -> bool:
    return first_difference(_grads(one), _grads(other)) is None


def _clamp(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.clamp_(-0.01, 0.01)


def _take(param: Tensor) -> None:
    param.grad = None


def changed_before_synchronize() -> list[str]:
    """Clips, divides, edits in a later hook, or sets to zero what is under way; all are told, and all are right in no_sync()."""
    join()

    def halve(model: nn.Module) -> None:
        for param in model.parameters():
            assert param.grad is not None
            param.grad = param.grad / 2

    changes: dict[str, Callable[[nn.Module], Any]] = {
        "clipped": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        "replaced": halve,
        "zeroed": lambda model: model.zero_grad(set_to_none=False),
        "dropped": lambda model: model.zero_grad(),
    }
    wrong = []
    for (what, change), pipeline in itertools.product(changes.items(), (*EXACT, LOSSY)):
        model = _net()
        with closing(GradientSynchronizer(model, pipeline)) as synchronizer:
            _loss(model, 0).backward()
            change(model)
            said = error_of(synchronizer.synchronize)
            if "was changed between the backward pass and synchronize(), while it was being averaged" not in said:
                wrong.append(f"{what}, {pipeline}: {said or 'not told'}")
            if what in ("dropped", "zeroed"):
                continue
            model.zero_grad()
            with synchronizer.no_sync():
                _loss(model, 1).backward()
            change(model)
            own = _grads(model)
            synchronizer.synchronize()
            for name, mean in _grads(model).items():
                dist.all_reduce(own[name].div_(2))
                if pipeline != LOSSY and not torch.equal(own[name], mean):
                    wrong.append(f"{what} in no_sync(), {pipeline}: other averages")
    model = _net()
    with closing(GradientSynchronizer(model, [])) as synchronizer:
        model[0].bias.register_post_accumulate_grad_hook(_clamp)
        _loss(model, 0).backward()
        wrong += [] if "the gradient of 0.bias was changed" in error_of(synchronizer.synchronize) else ["edited in a later hook"]
    model = _net()
    with closing(GradientSynchronizer(model, [])) as synchronizer:
        _loss(model, 0).backward()
        synchronizer.averager.wait()  # before the next one writes to them
        twice = [error_of(_loss(model, 0).backward), error_of(synchronizer.synchronize)]
        wrong += [] if "is ready a second time" in twice[0] and not twice[1] else [f"a second backward pass: {twice}"]
    model = _net()
    model[0].bias.register_post_accumulate_grad_hook(_take)
    with closing(GradientSynchronizer(model, [])):
        wrong += [] if "a hook has taken the gradient of 0.bias" in error_of(_loss(model, 0).backward) else ["taken by an earlier hook"]
    return wrong


class _Fused(nn.Module):
    """One product for several layers; its backward pass gives each a part of one gradient, or all the same one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.w = (nn.Linear(6, 4, bias=False) for _ in range(4))

    def forward(self, given: Tensor) -> Tensor:
        same = self.v.weight.view(-1) + self.w.weight.view(-1)
        return nn.functional.linear(given, torch.cat([self.q.weight, self.k.weight, same.view(4, 6)]))


def _in_one_buffer(model: nn.Module) -> Tensor:
    """Gives all parameters gradients that are parts of one tensor."""
    sizes = [param.numel() for param in model.parameters()]
    flat = torch.zeros(sum(sizes))
    for param, part in zip(model.parameters(), flat.split_with_sizes(sizes), strict=True):
        param.grad = part.view_as(param)
    return flat


def gradients_that_share_memory() -> list[str]:
    """Averages parts of one tensor, which count their writes together: of a fused product, and of a buffer that the script has made."""
    join()
    wrong = []
    for (make, in_buffer), pipeline in itertools.product(((_Fused, False), (_net, True)), ([], rule(sync="zen"))):
        model, plain = make(), DistributedDataParallel(make())
        with closing(GradientSynchronizer(model, pipeline)) as synchronizer:
            flat = _in_one_buffer(model) if in_buffer else None
            for step in range(2):
                plain.zero_grad()
                model.zero_grad() if flat is None else flat.zero_()
                for each in (plain, model):
                    _loss(each, step).backward()
                said = error_of(synchronizer.synchronize)
                wrong += [] if not said and _same(model, plain) else [f"{make.__name__}, {pipeline}: {said or 'other averages'}"]
    model = _net()
    with closing(GradientSynchronizer(model, [], find_unused_parameters=True)) as synchronizer:
        _in_one_buffer(model)
        (_loss(model, 0) if dist.get_rank() else model[2].bias.sum()).backward()  # the rest is written by synchronize() alone
        own = _grads(model)
        said = error_of(synchronizer.synchronize)
        for grad in own.values():
            dist.all_reduce(grad.div_(2))
        wrong += [] if not said and first_difference(own, _grads(model)) is None else [f"unused: {said or 'other averages'}"]
    return wrong


def with_a_graph() -> list[str]:
    """Averages gradients that have a graph, as optimizers of second order ask for; DDP itself does so for one step only."""
    join()
    wrong = []
    for pipeline in (*EXACT, LOSSY):
        model, plain = _net(), DistributedDataParallel(_net())
        with closing(GradientSynchronizer(model, pipeline)) as synchronizer:
            for step in range(3):
                for each in (model, plain):
                    each.zero_grad()
                    _loss(each, step).backward(create_graph=each is model)
                synchronizer.synchronize()
                if not (alike(hexed(_grads(model))) if pipeline == LOSSY else _same(model, plain)):
                    wrong.append(f"{pipeline}, step {step}")
    return wrong


def averaged_by_others() -> list[str]:
    """Everything else that averages the same gradients: a DDP around, inside, or instead of the model, and a second synchronizer."""
    join()
    wrong = []

    def expect(what: str, call: Callable[[], Any], text: str) -> None:
        if text not in (said := error_of(call)):
            wrong.append(f"{what}: {said or 'not told'}")

    inner = _net()
    with closing(GradientSynchronizer(inner, LOSSY)):
        wrapped = DistributedDataParallel(inner)
        expect("wrapped later", lambda: _loss(wrapped, 0), "that the gradient pipeline does not belong to")
        _loss(inner, 0)
        with torch.no_grad():
            _loss(wrapped, 0)
        expect("a second one", lambda: GradientSynchronizer(inner, []), "averaged by another GradientSynchronizer already")
    wrapped = DistributedDataParallel(_net())
    with closing(GradientSynchronizer(wrapped.module, LOSSY)):
        expect("the inner one", lambda: _loss(wrapped, 0), "that the gradient pipeline does not belong to")
    wrapped, plain = DistributedDataParallel(_net()), DistributedDataParallel(_net())
    with closing(GradientSynchronizer(wrapped.module, [])) as synchronizer:
        with wrapped.no_sync():  # averages nothing
            said = error_of(lambda: _loss(wrapped, 0).backward())
        said = said or error_of(synchronizer.synchronize)
    _loss(plain, 0).backward()
    wrong += [] if not said and _same(plain, wrapped) else [f"in no_sync() of DDP: {said or 'other averages'}"]
    with closing(GradientSynchronizer(wrapped, LOSSY)):
        _loss(wrapped, 0).backward()
        again = DistributedDataParallel(wrapped.module)
        expect("wrapped anew", lambda: _loss(again, 0), "that the gradient pipeline does not belong to")
    with closing(GradientSynchronizer(again, LOSSY)):
        _loss(again, 0).backward()
    both = nn.Sequential(DistributedDataParallel(_net()), nn.Linear(2, 2))
    expect("inside", lambda: GradientSynchronizer(both, LOSSY), "0 inside the model is a DistributedDataParallel")
    return wrong


def compiled_ddp() -> list[str]:
    """Takes a compiled DDP model for the DDP model that it is."""
    join()
    plain, wrapped = DistributedDataParallel(_net()), DistributedDataParallel(_net())
    with closing(GradientSynchronizer(wrapped, LOSSY)):
        _loss(wrapped, 0).backward()
    compiled: Any = torch.compile(plain, backend="eager")
    with closing(GradientSynchronizer(compiled, LOSSY)) as synchronizer:
        _loss(compiled, 0).backward()
        told = "leave synchronize() out" in error_of(synchronizer.synchronize)
    return ([] if _same(plain, wrapped) else ["other averages"]) + ([] if told else ["synchronize() is not refused"])


def within_a_part_of_the_ranks() -> list[str]:
    """Averages a DDP model of a part of the ranks among these."""
    rank = join().rank()
    group = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    plain, wrapped = (DistributedDataParallel(_net(), process_group=group) for _ in range(2))
    with closing(GradientSynchronizer(wrapped, [])):
        for each in (plain, wrapped):
            _loss(each, 0).backward()
    said = error_of(lambda: GradientSynchronizer(DistributedDataParallel(_net()), [], group=group))
    return ([] if _same(plain, wrapped) else ["other averages"]) + ([] if "leave group out" in said else [said or "not told"])


def options_of_ddp() -> list[str]:
    """DDP's own options and no_sync(), gradients that stay, leftovers, and inputs that are uneven."""
    join()
    wrong = []
    view, static, unused = [{name: True} for name in ("gradient_as_bucket_view", "static_graph", "find_unused_parameters")]
    for options, pipeline in itertools.product((view, static, {**static, **view}, {**unused, **view}), EXACT):
        ddp: Any = DistributedDataParallel  # all of these options are flags
        plain, wrapped = (ddp(_net(), **options) for _ in range(2))
        with closing(GradientSynchronizer(wrapped, pipeline)) as synchronizer:
            for step in range(4):
                for each in (plain, wrapped):
                    each.zero_grad(set_to_none=step % 2 == 0)
                    if step == 2:
                        with each.no_sync():
                            _loss(each, 7).backward()
                    _loss(each, step).backward()
                if not _same(plain, wrapped):
                    wrong.append(f"{options}, {pipeline}, step {step}")
            said = error_of(lambda: synchronizer.no_sync().__enter__())
            wrong += [] if "use that of the model" in said else [f"no_sync() under DDP: {said}"]
    plain, wrapped = (DistributedDataParallel(_net()) for _ in range(2))
    with closing(GradientSynchronizer(wrapped, [])):
        for each in (plain, wrapped):
            with each.join():
                for step in range(2 + dist.get_rank()):
                    each.zero_grad()
                    _loss(each, step).backward()
        wrong += [] if _same(plain, wrapped) else ["uneven inputs"]
        with wrapped.join(divide_by_initial_world_size=False):
            said = error_of(_loss(wrapped, 0).backward)
        is_told = "leave that option out; DDP forgets a join() that is over in `with ddp_model.join(enable=False)" in said
        wrong += [] if is_told else [f"divided by those that are left: {said or 'not told'}"]
    plain, wrapped = (DistributedDataParallel(_net()) for _ in range(2))
    with wrapped.join(divide_by_initial_world_size=False):
        _loss(wrapped, 0).backward()
    wrapped.zero_grad()
    with wrapped.join(enable=False):  # as the error says
        pass
    with closing(GradientSynchronizer(wrapped, [])):
        for each in (plain, wrapped):
            _loss(each, 1).backward()
    wrong += [] if _same(plain, wrapped) else ["after a join that divided by those that are left"]
    return wrong


def parameters_that_come_later() -> list[str]:
    """Names a parameter that is unfrozen, added or replaced after the synchronizer was made, whose gradients would stay apart."""
    join()

    def replace(model: nn.Sequential) -> None:
        model[2] = nn.Linear(5, 2)

    later: dict[str, tuple[str, Callable[[nn.Sequential], Any]]] = {
        "unfrozen": ("0.weight", lambda model: model[0].requires_grad_(True)),
        "added": ("3.weight", lambda model: model.append(nn.Linear(2, 2))),
        "replaced": ("2.weight", replace),
    }
    wrong = []
    for what, (name, change) in later.items():
        model = _net()
        model[0].requires_grad_(what != "unfrozen")
        with closing(GradientSynchronizer(model, [], find_unused_parameters=True)) as synchronizer:
            _loss(model, 0).backward()
            synchronizer.synchronize()
            change(model)
            _loss(model, 1).backward()
            said = error_of(synchronizer.synchronize)
            if f"the gradient of {name} is not averaged: the parameter was frozen, or not there" not in said:
                wrong.append(f"{what}: {said or 'not told'}")
    return wrong


def zeros_that_are_left() -> list[str]:
    """Leaves a parameter's residual alone while it is frozen, and its gradient zero, as DDP does, whatever zero_grad() is told."""
    join()
    found = []
    for set_to_none in (True, False):
        model = _net()
        with closing(GradientSynchronizer(model, LOSSY, find_unused_parameters=True)) as synchronizer:
            for step in range(4):
                model.zero_grad(set_to_none=set_to_none)
                model[0].requires_grad_(step != 1)
                _loss(model, step).backward()
                synchronizer.synchronize()
                left = model[0].weight.grad
                if step == 1 and left is not None and left.any():
                    return ["a frozen parameter gets a gradient"]
            found.append(hexed(_grads(model)))
    return [] if found[0] == found[1] else ["other averages than with gradients set to None"]


class _Pair(nn.Module):
    """Two nets that are trained in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([_net(), _net()])

    def forward(self, number: int, given: Tensor) -> Tensor:
        net: Tensor = self.nets[number](given)
        return net


def optimizers_that_take_turns() -> list[str]:
    """Names gradients that the other optimizer has stepped with, as in most GANs, and nothing where all gradients were made None."""
    join()
    wrong = []
    for zeroes_all in (True, False):
        pair = _Pair()
        model = DistributedDataParallel(pair, find_unused_parameters=True)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in pair.nets]
        told = Recorded()
        with closing(GradientSynchronizer(model, LOSSY)):
            for step in range(6):
                (model if zeroes_all else optimizers[step % 2]).zero_grad()
                _loss(partial(model, step % 2), step).backward()
                optimizers[step % 2].step()
        if len([text for text in told.texts if "is what an earlier step has left" in text]) != (not zeroes_all):
            wrong.append(f"all made None: {zeroes_all}, told: {told.texts}")
    return wrong


def in_any_memory_format() -> list[str]:
    """Averages transposed and channels-last parameters under DDP by the matrices that they are, as without DDP."""
    join()
    wrong = []
    for name in ("powersgd", "topk", "atomo"):
        found = []
        for ddp in (False, True):
            torch.manual_seed(0)
            model: Any = nn.Sequential(nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(6, 12, bias=False))
            model.to(memory_format=torch.channels_last)
            model[2].weight = nn.Parameter(torch.randn(6, 12).t())
            wrapped: Any = DistributedDataParallel(model) if ddp else model
            with closing(GradientSynchronizer(wrapped, rule(compress=compress(name), fusion="layer-wise"))) as synchronizer:
                given = torch.randn(2, 8, 3, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
                wrapped(given).square().sum().backward()
                if not ddp:
                    synchronizer.synchronize()
            found.append(hexed(_grads(model)))
        wrong += [] if found[0] == found[1] else [name]
    return wrong


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def default_dtypes() -> list[str]:
    """Averages the same bits whatever dtype torch makes new tensors in."""
    join()
    wrong = []
    methods = ("dgc", "powersgd", "terngrad", "threshold", "signum")
    ways: list[Any] = [*({"sync": name} for name in SCHEMES), *({"compress": compress(name)} for name in methods)]
    for way in ways:
        found = []
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            model = _net()
            with _default(dtype), closing(GradientSynchronizer(model, rule(**way))) as synchronizer:
                for step in range(2):
                    model.zero_grad()
                    given = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float32)
                    (model(given) * (1 + step)).square().sum().backward()
                    synchronizer.synchronize()
            found.append(hexed(_grads(model)))
        wrong += [] if len(set(found)) == 1 else [str(way)]
    return wrong


HABITS = [
    changed_before_synchronize,
    gradients_that_share_memory,
    with_a_graph,
    averaged_by_others,
    compiled_ddp,
    within_a_part_of_the_ranks,
    options_of_ddp,
    parameters_that_come_later,
    zeros_that_are_left,
    optimizers_that_take_turns,
    in_any_memory_format,
    default_dtypes,
]
