"""Jobs drawn from parts, captured at a random step, thrown away, built anew and restored: what follows is equal, or was refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from capture_kit import SAM, Taken, give, take
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_kit import SAMPLES, Noisy, OwnEpochs, check_going_on
from test_optimizer_zoo import Averaging
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver
from torch.nn.utils import prune
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from gemini_ft.errors import LayoutMismatchError, UnsupportedStateError
from gemini_ft.state import codec
from gemini_ft.state.base import PlainState
from gemini_ft.state.rebuilding import Changes
from gemini_ft.testing import digest

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, CLASSES = 4, 6


class Cache(nn.Module):
    """A buffer that is registered in the first forward, one that grows, and a number that counts."""

    seen: torch.Tensor
    first: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "first"):
            self.register_buffer("first", x.detach().mean(0), persistent=False)
        self.seen = torch.cat([self.seen, x.detach().mean().view(1)])[-5:]
        self.calls += 1
        return x + self.first + self.seen.sum() * 1e-2 + self.calls * 1e-3


PARTS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.BatchNorm1d(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "cache": Cache,
    "lazy": lambda: nn.LazyLinear(WIDTH),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "observer": lambda: FakeQuantize(
        MovingAveragePerChannelMinMaxObserver, -128, 127, dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=1
    ),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.3),
    "sam": lambda p: SAM(p, torch.optim.Adam, lr=0.02),
    "averaging": Averaging,
}
EVENTS = (
    "unfreeze",
    "freeze",
    "prune",
    "prune bias",
    "prune again",
    "group",
    "eval",
    "number",
    "learning rate",
    "add layer",
    "replace layer",
)
REFUSED = {"add layer", "replace layer"}  # only the script can build these


@dataclass(frozen=True)
class Job:
    parts: tuple[str, ...]
    optimizers: tuple[str, ...]
    accumulate: tuple[int, ...]  # steps of the loop for each step of an optimizer
    events: dict[int, str] = field(default_factory=dict)  # step -> what the loop does then
    set_to_none: bool = True


jobs = st.builds(
    Job,
    parts=st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=4).map(tuple),
    optimizers=st.lists(st.sampled_from(sorted(OPTIMIZERS)), min_size=1, max_size=2).map(tuple),
    accumulate=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    events=st.dictionaries(st.integers(0, 7), st.sampled_from(EVENTS), max_size=3),
    set_to_none=st.booleans(),
)


class Run:
    """One process of a job: built from nothing, as its script does."""

    def __init__(self, job: Job, seed: int) -> None:
        torch.manual_seed(seed)
        self.job = job
        self.embed = nn.Embedding(CLASSES, WIDTH, max_norm=1.0)
        self.body = nn.Sequential(*(PARTS[part]() for part in job.parts), nn.Linear(WIDTH, 2))
        self.model = nn.ModuleDict({"embed": self.embed, "body": self.body})
        with torch.no_grad():
            if "lazy" in job.parts:
                self.body.eval()(torch.zeros(3, WIDTH))
                self.body.train()
        params = [p for p in self.model.parameters() if p.requires_grad]
        count = len(job.optimizers)
        self.optimizers = [OPTIMIZERS[name](params[i::count]) for i, name in enumerate(job.optimizers)]
        self.state = PlainState.of({"model": self.model}, self.optimizers, None)
        self.state.watch()
        self.log: list[str] = []

    def step(self, step: int) -> None:
        if event := self.job.events.get(step):
            self._happen(event)
        x = torch.randint(CLASSES, (5,), generator=torch.Generator().manual_seed(step))

        def loss() -> torch.Tensor:
            return self.body(self.embed(x)).square().mean()

        loss().backward()
        for optimizer, every in zip(self.optimizers, self.job.accumulate, strict=False):
            if (step + 1) % every == 0:
                optimizer.step(loss) if isinstance(optimizer, SAM) else optimizer.step()
                optimizer.zero_grad(set_to_none=self.job.set_to_none)
        self.log.append(loss().item().hex())

    def _happen(self, event: str) -> None:
        first, last = self.body[0], self.body[-1]
        match event:
            case "unfreeze":
                self.body.requires_grad_(True)
            case "freeze":
                last.requires_grad_(False)
            case "prune":
                if not prune.is_pruned(last):
                    prune.l1_unstructured(last, "weight", amount=2)
            case "prune bias":
                if not hasattr(last, "bias_mask"):  # there are two elements
                    prune.random_unstructured(last, "bias", amount=1)
            case "prune again":
                prune.l1_unstructured(last, "weight", amount=1)
            case "group":
                known = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
                takes = not isinstance(self.optimizers[0], SAM)  # the options of the optimizer inside are not among its own
                if takes and (new := [p for p in self.model.parameters() if id(p) not in known]):
                    self.optimizers[0].add_param_group({"params": new, "lr": 0.01})
            case "eval":
                first.eval()
            case "number":
                first.p = 0.7
            case "learning rate":
                self.optimizers[-1].param_groups[0]["lr"] *= 0.5
            case "add layer":
                self.body.append(nn.Linear(2, 2))
            case "replace layer":
                self.body[-1] = nn.Linear(last.in_features, 2)

    def bits(self) -> str:
        grads = {name: p.grad for name, p in self.model.named_parameters()}
        order = [name for name, _ in self.model.named_parameters()]
        return digest(
            {"order": order, "model": self.model.state_dict(), "loss": self.log, "grads": {k: v for k, v in grads.items() if v is not None}}
        )


def outcome(job: Job, at: int) -> str:
    """Run a job to its end, undisturbed and thrown away after step ``at``."""
    run = Run(job, 0)
    taken: Taken | None = None
    for step in range(10):
        torch.manual_seed(step)
        run.step(step)
        if step == at:
            try:
                taken = take(run.state)
            except UnsupportedStateError:
                assert REFUSED & {event for when, event in job.events.items() if when <= at}, "refused without a reason"
                return "refused"
            run.log.clear()
    assert taken is not None
    again = Run(job, 0)
    give(taken, again.state)
    for step in range(at + 1, 10):
        torch.manual_seed(step)
        again.step(step)
    assert again.bits() == run.bits()
    return "equal"


@settings(max_examples=20, deadline=None)
@given(jobs, st.integers(0, 8))
def test_whatever_a_job_consists_of(job: Job, at: int) -> None:
    outcome(job, at)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=2000, deadline=None)
@given(jobs, st.integers(0, 8))
def test_whatever_a_job_consists_of_at_length(job: Job, at: int) -> None:
    outcome(job, at)


@pytest.mark.parametrize("event", EVENTS)
def test_everything_that_can_happen(event: str) -> None:
    job = Job(("frozen", "cache", "norm"), ("adam", "sgd"), (1, 3), {2: event})
    assert outcome(job, 4) == ("refused" if event in REFUSED else "equal")


def test_what_only_the_script_can_build_is_built_by_it() -> None:
    """A layer is added and the optimizer replaced; the fresh process does the same, from the description."""

    def grow(run: Run) -> None:
        run.body.append(nn.Linear(2, 3))
        run.optimizers[:] = [torch.optim.SGD(run.model.parameters(), lr=0.05, momentum=0.9)]
        run.state = PlainState.of({"model": run.model}, run.optimizers, None, can_rebuild=True, before=run.state)

    job = Job(("linear",), ("adam",), (1, 1))
    run, again = Run(job, 0), Run(job, 0)
    for process in (run, again):
        process.state = PlainState.of({"model": process.model}, process.optimizers, None, can_rebuild=True)
    run.step(0)
    grow(run)
    run.step(1)
    taken = take(run.state)
    changes = Changes(**codec.decode(taken.extras)["changes"])
    assert changes.classes == {"optim0": ["Adam", "SGD"]}
    assert changes.tensors["model.body.2.weight"] == [None, ["parameter", [3, 2], "float32", True]]
    with pytest.raises(LayoutMismatchError, match=r"there is no module model\.body\.2 now"):
        give(taken, Run(job, 0).state)
    grow(again)  # as the user's rebuild= does
    give(taken, again.state)
    run.log.clear()
    for process in (run, again):
        process.step(2)
    assert again.bits() == run.bits()
    assert "changes" in codec.decode(take(again.state).extras)  # the next fresh process has to follow as well


@pytest.mark.parametrize("pruned", [("prune", "prune again"), ("prune", "prune bias")])
def test_pruning_goes_on_right_after_a_resume(pruned: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at what the last forward pass has used, which no tensor of the snapshot has, and leaves the parameters in another order."""
    monkeypatch.setattr("gemini_ft.state.values.SMALL", 8)
    assert outcome(Job(("linear",), ("sgd",), (1,), {2: pruned[0], 3: pruned[1], 5: "prune again"}), 4) == "equal"


def test_gradients_of_the_optimizer_that_waits_are_kept() -> None:
    assert outcome(Job(("linear",), ("sgd", "adam"), (1, 2)), 4) == "equal"


def test_another_script_is_not_taken_for_a_change() -> None:
    run = Run(Job(("cache",), ("adam",), (1, 1)), 0)
    run.step(0)
    taken = take(run.state)
    wider = Run(Job(("cache", "norm"), ("adam",), (1, 1)), 0)
    with pytest.raises(LayoutMismatchError):
        give(taken, wider.state)


# --- data


TRAITS = ("noisy", "counts", "mixes", "told", "torch generator", "numpy generator", "python generator", "history", "lazy", "large")
UNKEPT = {"lazy", "large"}  # a generator that comes later, a buffer: loaded again within an epoch, else refused


class Drawn(Noisy):
    """Samples that depend on all that its traits say."""

    def __init__(self, traits: frozenset[str]) -> None:
        self.traits, self.count, self.epoch, self.history = traits, 0, 0, [0.0]
        self.before = torch.zeros(4, dtype=torch.float64)
        self.buffer: list[float] = []
        self.lazy: np.random.Generator | None = None
        if "torch generator" in traits:
            self.torch = torch.Generator().manual_seed(1)
        if "numpy generator" in traits:
            self.numpy = np.random.default_rng(2)
        if "python generator" in traits:
            self.python = random.Random(3)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch if "told" in self.traits else 0

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index) if "noisy" in self.traits else torch.full((4,), float(index), dtype=torch.float64)
        sample = sample + 100 * self.epoch + sum(self.own(index))
        if "mixes" in self.traits:
            sample = self.before = 0.7 * sample + 0.3 * self.before
        return sample

    def own(self, index: int) -> Iterator[float]:
        if "counts" in self.traits:
            self.count += 1
            yield self.count
        if "history" in self.traits:
            self.history = [*self.history, self.history[-1] / 2 + index][-3:]
            yield sum(self.history)
        if "torch generator" in self.traits:
            yield torch.rand((), generator=self.torch).item()
        if "numpy generator" in self.traits:
            yield self.numpy.random()
        if "python generator" in self.traits:
            yield self.python.random()
        if "lazy" in self.traits:
            self.lazy = self.lazy if self.lazy is not None else np.random.default_rng(4)
            yield self.lazy.random()
        if "large" in self.traits:
            self.buffer = [*self.buffer, *[float(index)] * 40][-100:]
            yield sum(self.buffer)


class DrawnStream(IterableDataset[torch.Tensor]):
    """The same, without lengths and indices."""

    def __init__(self, traits: frozenset[str]) -> None:
        self.inner = Drawn(traits)

    def set_epoch(self, epoch: int) -> None:
        self.inner.set_epoch(epoch)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.inner[index] for index in range(SAMPLES))


ORDERS: dict[str, Callable[[], Sampler[int] | None]] = {
    "in order": lambda: None,
    "shuffled": lambda: RandomSampler(range(SAMPLES)),
    "own generator": lambda: RandomSampler(range(SAMPLES), replacement=True, generator=torch.Generator().manual_seed(5)),
    "subset": lambda: SubsetRandomSampler(range(2, 21)),
    "weighted": lambda: WeightedRandomSampler([1.0 + index for index in range(SAMPLES)], 20),
    "own epochs": OwnEpochs,
}


@dataclass(frozen=True)
class Data:
    """A loader, drawn at random."""

    traits: frozenset[str]
    order: str | None  # None: an iterable dataset
    batch: int
    drop_last: bool
    workers: int = 0

    def make(self) -> DataLoader[torch.Tensor]:
        options: dict[str, Any] = {"batch_size": self.batch, "drop_last": self.drop_last, "num_workers": self.workers}
        if self.order is None:
            return DataLoader(DrawnStream(self.traits), **options)
        dataset: Dataset[torch.Tensor] = Drawn(self.traits)
        return DataLoader(dataset, sampler=ORDERS[self.order](), **options)

    def outcome(self, stop: tuple[int, int]) -> str:
        try:
            check_going_on(self.make, stop, in_advance=self.order is None)
        except UnsupportedStateError:
            assert self.traits & UNKEPT, "refused without a reason"
            return "refused"
        return "equal"


def data(workers: st.SearchStrategy[int]) -> st.SearchStrategy[Data]:
    def is_promised(one: Data) -> bool:
        """An iterable in this process that draws from its generators is the user's (docs/lightning.md)."""
        return not (one.order is None and one.workers == 0 and "noisy" in one.traits)

    traits, orders = st.frozensets(st.sampled_from(TRAITS), max_size=4), st.sampled_from([*ORDERS, None])
    return st.builds(Data, traits, orders, st.integers(2, 6), st.booleans(), workers).filter(is_promised)


stops = st.tuples(st.integers(0, 2), st.integers(0, 3))


@settings(max_examples=20, deadline=None)
@given(data(st.just(0)), stops)
def test_whatever_data_consist_of(one: Data, stop: tuple[int, int]) -> None:
    one.outcome(stop)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=2000, deadline=None)
@given(data(st.just(0)), stops)
def test_whatever_data_consist_of_at_length(one: Data, stop: tuple[int, int]) -> None:
    one.outcome(stop)


@pytest.mark.soak
@settings(max_examples=60, deadline=None)
@given(data(st.just(2)), stops)
def test_whatever_data_consist_of_in_workers(one: Data, stop: tuple[int, int]) -> None:
    one.outcome(stop)
