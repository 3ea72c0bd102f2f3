"""`verify: replay` in one process: what is computed again leaves no trace in the training, and only a wrong rank is named."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from gemini_ft.errors import ReplayError
from gemini_ft.state.rng import GivenGenerator
from gemini_ft.state.tensors import every_optimizer
from gemini_ft.testing import digest
from gemini_ft.worker.replay import Replay

RANKS = 4


class GradientWriter(SGD):
    """Mixes the momentum into the gradient itself, and counts its steps in two odd places."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        self.steps += 1
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1  # type: ignore[index]
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                moment.lerp_(param.grad, 0.1)
                param.grad.lerp_(moment, 0.9)
                param.sub_(param.grad, alpha=1e-2 * self.steps)


class SlowWeights(Optimizer):
    """Pulls the weights to an average of theirs after every second step of the optimizer that it holds."""

    def __init__(self, base: Optimizer) -> None:
        self.base_optimizer = base
        self.steps = 0
        super().__init__(base.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        loss = self.base_optimizer.step(closure)
        self.steps += 1
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                slow = self.state[param].setdefault("slow", param.detach().clone())
                if self.steps % 2 == 0:
                    slow.lerp_(param, 0.5)
                    param.copy_(slow)
        return loss


class EightWide(nn.Linear):
    """A layer of the checked model."""

    def __init__(self) -> None:
        super().__init__(8, 8)


class CountsCalls(nn.Module):
    """Has a count, a hidden state and a buffer that each call replaces, and lists, a tensor and a buffer that it writes."""

    running: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.count, self.hidden = 0, torch.zeros(8)
        self.means, self.total = list[float](), torch.zeros(8)
        self.register_buffer("running", torch.zeros(8))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.calls.add_(1)
        out: torch.Tensor = self.layer(x) * (1 + 1 / self.count) + self.running + self.hidden + self.total
        self.means.append(out.mean().item())
        self.total.add_(len(self.means))
        self.hidden = out.detach().mean(0)
        self.running = self.running * 0.9 + out.detach().mean(0) * 0.1
        return out


class Tracker:
    """Generators that layers draw from, as Megatron's tracker has them."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {"drops": torch.Generator(), "masks": torch.Generator().get_state()}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states


class DrawsFromAll(nn.Module):
    """Draws from a generator of its own, from one that was given to be kept, and from tracked ones."""

    def __init__(self, given: GivenGenerator, tracker: Tracker) -> None:
        super().__init__()
        self.layer, self.own, self.given, self.tracker = EightWide(), torch.Generator(), given, tracker

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.Generator()
        mask.set_state(self.tracker.states["masks"])
        for generator in (self.own, self.given.generator, self.tracker.states["drops"], mask):
            x = x + torch.randn(8, generator=generator)
        self.tracker.states["masks"] = mask.get_state()
        out: torch.Tensor = self.layer(x)
        return out


class DrawsFromArgument(EightWide):
    """Draws from the generator that it is called with."""

    def forward(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x + torch.randn(8, generator=generator))


def clamping(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        for param in optimizer.param_groups[0]["params"]:
            param.clamp_(-0.2, 0.2)


def clamped(params: Any) -> Optimizer:
    optimizer = Adam(params, lr=1e-2)
    optimizer.register_step_post_hook(clamping)
    return optimizer


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda params: Adam(params, lr=1e-2),
    "foreach": lambda params: AdamW(params, lr=1e-2, foreach=True),
    "fused": lambda params: Adam(params, lr=1e-2, fused=True),
    "momentum": lambda params: SGD(params, lr=1e-2, momentum=0.9),
    "clamped": clamped,
    "writes gradients": lambda params: GradientWriter(params, lr=1e-2),
    "slow weights": lambda params: SlowWeights(Adam(params, lr=1e-2)),
}


def raises(found: list[list[str]]) -> None:
    raise ReplayError(str(found))


def alone() -> Replay:
    """The checks of a job of one rank."""
    return Replay(lambda mine: [mine], list, raises)


def trained(
    make: Callable[[Any], Optimizer],
    replay: Replay | None,
    kind: Callable[[], nn.Module] = EightWide,
    *,
    scaled: bool = False,
    closure: bool = False,
) -> dict[str, Any]:
    """Five steps, each of them checked where there is a ``replay``: all that has come out."""
    torch.manual_seed(0)
    model = nn.Sequential(kind(), nn.Dropout(0.2), nn.BatchNorm1d(8))
    optimizer = make([*model.parameters()])
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
    for _ in range(5):
        if replay is not None:
            replay.arm({"model": model}, every_optimizer([optimizer]).values())

        def forward() -> Any:
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            scaler.scale(loss).backward()
            return loss

        if closure:
            optimizer.step(forward)
        else:
            forward()
            scaler.step(optimizer)
            scaler.update()
        if replay is not None:
            assert replay.is_over
            replay.disarm()
    first: Any = model[0]
    optimizers = {name: one.state_dict() for name, one in every_optimizer([optimizer]).items()}
    counts = [getattr(first, "count", 0), *(getattr(one, "steps", 0) for one in every_optimizer([optimizer]).values())]
    gradients = [param.grad for param in model.parameters()]
    return {
        "weights": digest(model.state_dict()),
        "optimizers": digest(optimizers),
        "gradients": digest(gradients),
        "rest": digest(
            {
                "kept": [getattr(first, name, 0) for name in ("hidden", "means", "total")],
                "rng": torch.get_rng_state(),
                "scaler": scaler.state_dict(),
            }
        ),
        "counts": counts,
    }


@pytest.mark.parametrize("way", ["plain", "scaled", "closure"])
@pytest.mark.parametrize("kind", MAKERS)
def test_checks_change_nothing_that_the_training_computes(kind: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"scaled": way == "scaled", "closure": way == "closure"}
    with caplog.at_level(logging.WARNING):
        checked = trained(MAKERS[kind], alone(), **options)
    assert checked == trained(MAKERS[kind], None, **options)
    assert not [record for record in caplog.records if record.name == "gemini_ft"], caplog.text


@pytest.mark.parametrize("kind", ["adam", "fused"])
def test_what_calls_leave_in_modules_is_there_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    assert trained(MAKERS[kind], alone(), CountsCalls) == trained(MAKERS[kind], None, CountsCalls)
    assert not [record for record in caplog.records if record.name == "gemini_ft"], caplog.text


def test_generators_of_modules_given_ones_and_tracked_ones_go_on_as_without_checks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def outcome(replay: Replay | None) -> list[Any]:
        given, tracker, module = GivenGenerator(torch.Generator()), Tracker(), ModuleType("random")
        vars(module)["get_cuda_rng_tracker"] = lambda: tracker
        monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel.random", module)
        result = trained(MAKERS["adam"], replay, partial(DrawsFromAll, given, tracker))
        return [result, digest([given.generator.get_state(), tracker.states["drops"].get_state(), tracker.states["masks"]])]

    assert outcome(alone()) == outcome(None)
    assert not [record for record in caplog.records if record.name == "gemini_ft"], caplog.text


def test_a_generator_among_the_arguments_goes_on_as_without_checks() -> None:
    def outcome(replay: Replay | None) -> list[int]:
        generator, model = torch.Generator(), DrawsFromArgument()
        optimizer = Adam(model.parameters(), lr=1e-2)
        if replay is not None:
            replay.arm({"model": model}, [optimizer])
        model(torch.ones(4, 8), generator).square().mean().backward()
        optimizer.step()
        return generator.get_state().tolist()

    assert outcome(alone()) == outcome(None)


def test_a_hook_that_comes_after_the_call_and_scales_the_gradient_of_its_output_is_no_difference(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, replay = EightWide(), alone()
    optimizer = Adam(model.parameters(), lr=1e-2)
    replay.arm({"model": model}, [optimizer])
    out = model(torch.randn(4, 8))
    out.register_hook(lambda grad: grad / 2)
    out.square().mean().backward()
    optimizer.step()
    assert not [record for record in caplog.records if record.name == "gemini_ft"], caplog.text


class GivesParts(EightWide):
    """Gives its result, a view of it, and what was computed from it."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = super().forward(x)
        return {"hidden": hidden, "parts": hidden.split(4, dim=1), "out": torch.relu(hidden)}


def test_outputs_that_come_from_one_another_and_hooks_of_the_script_are_no_difference(caplog: pytest.LogCaptureFixture) -> None:
    """A pre-hook that changes arguments is called again with what the script gave, and not with what it had made of that."""
    model, replay = GivesParts(), alone()
    model.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    optimizer = Adam(model.parameters(), lr=1e-2)
    replay.arm({"model": model}, [optimizer])
    found = model(torch.randn(4, 8))
    (found["hidden"].square().mean() + found["parts"][1].sum() + found["out"].mean()).backward()
    optimizer.step()
    assert replay.is_over
    assert not [record for record in caplog.records if record.name == "gemini_ft"], caplog.text


def test_what_one_hook_of_a_call_disarms_another_one_does_not_record() -> None:
    model, replay = nn.Sequential(EightWide()), alone()
    model.register_forward_pre_hook(lambda *_: replay.disarm())
    optimizer = Adam(model.parameters(), lr=1e-2)
    replay.arm({"model": model}, [optimizer])
    model(torch.randn(4, 8))
    assert not model[0].weight._backward_hooks


def together() -> list[Replay]:
    """The checks of four ranks, each in a thread of its own."""
    met, place = threading.Barrier(RANKS, timeout=10), dict[int, Any]()

    def exchange_of(rank: int) -> Callable[[Any], list[Any]]:
        def exchange(mine: Any) -> list[Any]:
            place[rank] = mine
            met.wait()
            found = [place[other] for other in range(RANKS)]
            met.wait()
            return found

        return exchange

    return [Replay(exchange_of(rank), list, raises) for rank in range(RANKS)]


def on_all(work: Callable[[int], None]) -> list[str]:
    """Returns the text of each rank's error, empty where it has none."""

    def one(rank: int) -> str:
        try:
            work(rank)
        except ReplayError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(RANKS) as pool:
        return [*pool.map(one, range(RANKS))]


def judged(*checks: list[list[str]]) -> list[list[str]]:
    """By check, what each rank raises; given, by check and rank, the digests that come out one after the other."""
    replays = together()

    def judge(rank: int, check: list[list[str]]) -> None:
        digests = iter(check[rank])
        replays[rank].judge({"w": next(digests)}, lambda: {"w": next(digests)})

    return [on_all(partial(judge, check=check)) for check in checks]


SAME, NEW, WRONG_ONCE = ["a", "a", "a"], ["a", "b", "c"], ["b", "a", "a"]


def test_what_most_ranks_cannot_repeat_is_left_out_by_all_alike(caplog: pytest.LogCaptureFixture) -> None:
    said = judged([NEW] * 4, [SAME, NEW, NEW, NEW], [NEW] * 4, [NEW, SAME, SAME, SAME])
    assert said == [[""] * 4] * 4
    assert caplog.text.count("no longer compared") == RANKS


def test_what_comes_out_otherwise_on_most_ranks_names_nobody() -> None:
    assert judged([WRONG_ONCE, WRONG_ONCE, SAME, WRONG_ONCE], [SAME, WRONG_ONCE, SAME, SAME]) == [[""] * 4] * 2


def test_what_one_rank_never_repeats_is_left_out_and_names_nobody(caplog: pytest.LogCaptureFixture) -> None:
    assert judged(*[[SAME, SAME, NEW, SAME]] * 3) == [[""] * 4] * 3
    assert caplog.text.count("no longer compared") == RANKS


def test_a_rank_that_was_wrong_once_is_named_on_all_ranks() -> None:
    assert judged([SAME] * 4, [SAME, SAME, WRONG_ONCE, SAME]) == [[""] * 4, ["[[], [], ['w'], []]"] * 4]


def test_an_update_that_comes_out_otherwise_on_one_rank_is_named() -> None:
    replays = together()

    def flip(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        optimizer.param_groups[0]["params"][0].data[0, 0] += 1

    def work(rank: int) -> None:
        model = nn.Linear(8, 8)
        optimizer = Adam(model.parameters(), lr=1e-2)
        replays[rank].arm({"model": model}, [optimizer])
        if rank == 1:
            optimizer.register_step_pre_hook(flip)
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()

    assert on_all(work) == ["[[], ['model.weight'], [], []]"] * RANKS


class FailsAgain(nn.Linear):
    """Cannot be called twice before an update, as there is no memory for it."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.calls: list[list[int]] = [[]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0].append(0)
        if len(self.calls[0]) % 2 == 0:
            raise torch.OutOfMemoryError("no memory")
        return super().forward(x)


@pytest.mark.parametrize("meets", [False, True])
def test_a_rank_fails_where_others_wait_for_what_it_cannot_compute_again(meets: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(FailsAgain(), nn.SyncBatchNorm(8) if meets else nn.BatchNorm1d(8))
    optimizer = SGD(model.parameters(), lr=1e-2)
    replay = alone()
    replay.arm({"model": model}, [optimizer])
    model(torch.randn(4, 8)).square().mean().backward()
    if meets:
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    else:
        optimizer.step()
        assert "cannot be computed again: OutOfMemoryError" in caplog.text
