"""What scripts do around a plain loop: under plain DDP, undisturbed under gemini and killed it ends with the same bits, or it is named."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import itertools
import logging
import math
import os
import random
from collections.abc import Callable, Iterator
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_kit import World
from three_ways import Cell, differing, run_side_by_side
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import gemini_ft
from gemini_ft.errors import ConfigError, ReplicaDivergedError, UnsupportedStateError

pytestmark = pytest.mark.preloaded("torchmetrics")

CASE = Path(__file__).parents[1] / "kit" / "habits_case.py"
LOOPS = ["scaler", "lbfgs", "averages", "adversaries"]
OTHERS = ["unfreezes", "normed", "unzeroed", *["apart"] * (importlib.util.find_spec("accelerate") is not None), "generators"]
LOADERS = ["zipped", "counted", "mapped", "chained", "in_turns", "in_twos", "teed", "accumulates"]
# Of three ranks one, and then two, have no more inputs; and in the next epoch.
UNEVEN = ["1:uneven:0:4", "2:uneven:0:6", "0:uneven:1:2"]
CELLS = {
    "loops": (2, Cell({"trainings": LOOPS}, ["0:4", "1:6"])),
    "other loops": (2, Cell({"trainings": OTHERS}, ["0:4", "1:6"])),
    "loaders": (2, Cell({"trainings": LOADERS}, ["0:4", "1:6"])),
    "uneven": (3, Cell({"trainings": ["uneven"]}, UNEVEN)),
}


@pytest.mark.parametrize("name", CELLS)
def test_habits_of_plain_loops_three_ways(name: str, tmp_path: Path) -> None:
    """Scaled losses, closures, averages, zipped and unfinished epochs, several optimizers and models, generators; and uneven inputs."""
    ranks, cell = CELLS[name]
    folders = run_side_by_side(CASE, tmp_path, {name: cell}, ranks)
    assert all((folders["killed"] / name / f"killed-{kill}").exists() for kill in cell.kills)
    for training in cell.options["trainings"]:
        assert differing({way: folder / name for way, folder in folders.items()}, training, Cell(), ranks) == []


class Bar:
    """A progress bar."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        yield from self.iterable


def _anew(loader: Any) -> Iterator[Any]:
    yield from loader
    yield from DataLoader(loader.dataset, 6)


def _pairs(loader: Any) -> Iterator[Any]:
    for _ in range(2):
        yield from itertools.pairwise(loader)


def _ahead(loader: Any) -> Iterator[Any]:
    """Fetches the next batch while one is used."""
    for _ in range(2):
        batches = iter(loader)
        following = next(batches, None)
        while following is not None:
            batch, following = following, next(batches, None)
            yield batch


def _looked_into(loader: Any) -> Iterator[Any]:
    next(iter(loader))
    yield from loader


def _drawn(loader: Any) -> Iterator[Any]:
    """Its caller's generators are drawn from."""
    yield from loader


HABITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "numbered": (enumerate, "numbers its batches by enumerate"),
    "numbered bar": (lambda loader: enumerate(Bar(loader)), "numbers its batches by enumerate"),
    "numbered on": (lambda loader: enumerate(loader, loader.batches_done), ""),
    "cycle": (lambda loader: itertools.islice(itertools.cycle(loader), 5), "iterates itertools.cycle"),
    "anew": (_anew, "no longer takes its batches from the loaders in `state`"),
    "drawn": (_drawn, "draws from the generator numpy, own, which is in no snapshot"),
    "plain": (iter, ""),
    "chained": (lambda loader: itertools.chain(loader, loader), "goes through a loader several times by itertools.chain"),
    "averages": (iter, "changes keeper.shadow while it trains, which no snapshot has"),
    "copy": (iter, "changes copied while it trains"),
    "teacher in a list": (iter, "changes teachers while it trains"),
    "baseline": (iter, "changes baseline while it trains"),
    "baseline given": (iter, ""),
    "patience": (iter, "changes stopper.bad while it trains"),
    "hidden": (iter, "changes hidden while it trains"),
    "mean of an epoch": (iter, "adds to total, which no snapshot has"),
    "losses": (iter, "adds to losses, which no snapshot has"),
    "memory": (iter, "changes memory while it trains"),
    "global": (iter, "changes COUNT while it trains"),
    "hook": (iter, "changes damp.calls while it trains"),
    "another loss": (iter, "changes loss_of while it trains"),
    "rates": (iter, "changes rates while it trains"),
    "class": (iter, "changes Stopper.made while it trains"),
    "another loader": (iter, "draws from the generator others.generator, which is in no snapshot"),
    "another loader seeded": (iter, ""),
    "range": (lambda loader: zip(range(3), loader), "numbers its batches by enumerate"),  # noqa: B905
    "limited": (lambda loader: itertools.islice(loader, 3), "limits its batches by itertools.islice"),
    "limited on": (lambda loader: itertools.islice(loader, 3 - loader.batches_done), ""),
    "listed": (list, "takes batches of a loader in `state` that later steps use"),
    "pairs": (_pairs, "takes batches of a loader in `state` that later steps use"),
    "ahead": (_ahead, "takes batches of a loader in `state` that later steps use"),
    "one for all": (lambda loader: [next(iter(loader))] * 4, "makes several steps with one"),
    "twice": (lambda loader: (batch for batch in loader for _ in range(2)), "makes several steps with one"),
    "in twos": (lambda loader: zip(*[iter(loader)] * 2), ""),  # noqa: B905
    "looked into": (_looked_into, "is not the first one after resume()"),
    "begun early": (list, "is not the first one after resume()"),
}


class Keeper:
    """Averages of a model's weights, as scripts write it."""

    def __init__(self, model: nn.Module | None) -> None:
        self.shadow = {name: param.detach().clone() for name, param in model.named_parameters()} if model else {}

    def follow(self, model: nn.Module) -> None:
        for name, mean in self.shadow.items():
            self.shadow[name] = mean.lerp(model.get_parameter(name).detach(), 0.1)


COUNT = 0


class Stopper:
    """Early stopping, as scripts write it."""

    made = 0

    def __init__(self) -> None:
        self.best, self.bad = math.inf, 0

    def __call__(self, loss: float) -> bool:
        self.best, self.bad = min(self.best, loss), 0 if loss < self.best else self.bad + 5
        return self.bad > 20


def first_loss(output: torch.Tensor) -> torch.Tensor:
    return output.sum()


def second_loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def count_gradients(model: nn.Linear) -> None:
    calls = [0]

    def damp(grad: torch.Tensor) -> torch.Tensor:
        calls[0] += 7
        return grad / calls[0]

    model.weight.register_hook(damp)


def loop_in_every_way() -> dict[str, list[str]]:
    """What each loop is told, where nothing fails."""
    global COUNT
    listener = BufferingHandler(1000)
    logging.getLogger("gemini_ft").addHandler(listener)
    found = {}
    for name, (batches, _) in HABITS.items():
        listener.flush()
        model = nn.Linear(3, 1)
        if name == "hook":
            count_gradients(model)
        copied, teachers, stopper = copy.deepcopy(model), [copy.deepcopy(model)], Stopper()
        rates = iter([0.1 / (1 + step) for step in range(40)])
        loss_of = first_loss
        baseline, hidden, memory, losses = 0.0, torch.zeros(2), np.zeros((9999, 9)), list[float]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        numpy, own, unused, given = np.random.default_rng(1), random.Random(2), random.Random(3), torch.Generator()
        loader: Any = gemini_ft.resumable(DataLoader(TensorDataset(torch.ones(16, 3)), 4, shuffle=True, generator=torch.Generator()))
        stream, keeper = name.replace(" ", "-"), Keeper(model if name == "averages" else None)
        with gemini_ft.Checkpointer(
            model, optimizer, state={"loader": loader, "given": given}, name=stream, on_late="skip"
        ) as checkpointer:
            others = DataLoader(loader.dataset, 8, shuffle=True, generator=torch.Generator())
            early = iter(loader) if name == "begun early" else None
            checkpointer.resume()
            total = 0.0
            for _ in early or batches(loader):
                loss = loss_of(model(torch.rand(2, 3, generator=given)))
                loss.backward()
                optimizer.step()
                keeper.follow(model)
                match name:
                    case "another loss":
                        loss_of = first_loss if loss_of is second_loss else second_loss
                    case "drawn":
                        numpy.random(), own.random()
                    case "copy":
                        copied.weight.data.mul_(0.9)
                    case "teacher in a list":
                        teachers[0].weight.data.mul_(0.9)
                    case "baseline" | "baseline given":
                        baseline = 0.9 * baseline + 1
                    case "patience":
                        stopper(1.0)
                    case "hidden":
                        hidden = hidden + 1
                    case "mean of an epoch":
                        total += loss.item()
                    case "rates":
                        optimizer.param_groups[0]["lr"] = next(rates)
                    case "losses":
                        losses.append(loss.item())
                    case "memory":
                        memory[:] += 1
                    case "global":
                        COUNT += 1
                        COUNT *= 7
                    case "another loader" | "another loader seeded":
                        if name.endswith("seeded"):
                            others.generator.manual_seed(checkpointer.stats.snapshots + id(loss))
                        list(others)
                    case "class":
                        Stopper.made += 7
                checkpointer.step(**({"baseline": baseline} if name == "baseline given" else {}))
        assert unused.random()
        found[name] = [text for record in listener.buffer if (text := record.getMessage()).startswith("this ")]
    return found


def test_what_a_resume_would_change_is_named_before_anything_fails(tmp_path: Path) -> None:
    with World(tmp_path, 1) as ranks:
        (found,) = ranks.outcome(loop_in_every_way)
    for name, (_, warning) in HABITS.items():
        assert len(found[name]) == bool(warning) or name == "cycle", (name, found[name])
        assert all(warning in text for text in found[name][:1]), (name, found[name])


def train_again(model: nn.Module, name: str = "main") -> int:
    """Trains for two steps behind what there is to resume; returns the steps that were made before."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gemini_ft.Checkpointer(model, optimizer, name=name, on_late="wait") as checkpointer:
        before = checkpointer.resume()
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            checkpointer.step()
    return before


def fail_and_try_again() -> list[int]:
    """Closes a training that has failed in a ``finally``, and begins again in a new model; returns the steps that were made before."""
    before = []
    for _ in range(2):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpointer = gemini_ft.Checkpointer(model, optimizer, name="tries", on_late="wait")
        before.append(checkpointer.resume())
        with contextlib.suppress(MemoryError):
            try:
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                checkpointer.step()
                raise MemoryError
            finally:
                checkpointer.close()
    return before


def several_trainings() -> list[Any]:
    """One after the other: the same model twice, another with a name of its own, two that fail, another without a name."""
    listener = BufferingHandler(1000)
    logging.getLogger("gemini_ft").addHandler(listener)
    gemini_ft.init_process_group("gloo")
    model = nn.Linear(3, 1)
    found: list[Any] = [train_again(DistributedDataParallel(model)), train_again(DistributedDataParallel(model))]
    found += [train_again(nn.Linear(3, 1), "fold-1"), fail_and_try_again()]
    try:
        train_again(nn.Linear(3, 1))
    except ConfigError as error:
        found.append(str(error))
    return [*found, [text for record in listener.buffer if "in this process" in (text := record.getMessage())]]


def test_a_further_training_of_a_script_does_not_go_on_with_the_one_that_has_finished_before_it(tmp_path: Path) -> None:
    with World(tmp_path, 1) as ranks:
        (found,) = ranks.outcome(several_trainings)
    first, second, third, tries, error, said = found
    assert (first, second, third, tries) == (0, 2, 0, [0, 1])
    assert "Checkpointer with name='main' has finished in this process" in error
    assert "in other models; give each training" in error
    assert len(said) == 1
    assert "if it is another training" in said[0]


def step_without_the_other() -> None:
    gemini_ft.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gemini_ft.Checkpointer(model, optimizer) as checkpointer:
        checkpointer.resume()
        with model.join():
            for _ in range(int(os.environ["RANK"])):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                checkpointer.step()


def test_a_rank_without_any_input_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    with World(tmp_path, 2) as ranks:
        error = ranks.outcome(step_without_the_other)[1]
    assert isinstance(error, UnsupportedStateError)
    assert "only 1 of 2 ranks have inputs inside this join()" in str(error)


def one_step_after_each_join(kind: str, epochs: list[list[int]]) -> list[int]:
    """Makes so many updates inside each `join()`, on each rank, and ends the iteration after it; the snapshots by then."""
    gemini_ft.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    found = []
    with gemini_ft.Checkpointer(model, optimizer, name=kind) as checkpointer:
        checkpointer.resume()
        for updates in epochs:
            with model.join():
                for _ in range(updates[int(os.environ["RANK"])]):
                    model(torch.rand(4, 3)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            checkpointer.step()
            checkpointer.flush()  # else the end of the next one would write to the weights while they are copied
            found.append(checkpointer.stats.committed)
    return found


def test_unequal_updates_inside_a_join_are_noticed_without_a_step_inside_it(tmp_path: Path) -> None:
    """Ranks whose optimizer has no state are alike after it, and all of them take each snapshot, even one that has made no update."""
    with World(tmp_path, 2) as ranks:
        for error in ranks.outcome(one_step_after_each_join, "Adam", [[2, 2], [7, 5]]):
            assert isinstance(error, ReplicaDivergedError), error
        assert ranks.outcome(one_step_after_each_join, "SGD", [[2, 2], [3, 0], [0, 1], [2, 2]]) == [[1, 2, 3, 4]] * 2


class OtherJoinable(Joinable):
    """Stands in a `join()` before the model, as an optimizer of torch that shards its state may."""

    def __init__(self) -> None:
        super().__init__()

    def join_hook(self, **_: Any) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


def step_behind_another() -> None:
    gemini_ft.init_process_group("gloo")
    model, other = DistributedDataParallel(nn.Linear(2, 1)), OtherJoinable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gemini_ft.Checkpointer(model, optimizer) as checkpointer:
        checkpointer.resume()
        with Join([other, model]):
            Join.notify_join_context(other)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            checkpointer.step()


def test_a_join_that_the_model_is_not_the_first_of_is_refused(tmp_path: Path) -> None:
    with World(tmp_path, 2) as ranks:
        for error in ranks.outcome(step_behind_another):
            assert isinstance(error, UnsupportedStateError), error
            assert "Join([model, ...])" in str(error)


def test_state_is_something_that_can_be_kept() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"state\['mean'\] is a ModuleList whose state_dict\(\) lacks 0.mean_value, .*as a model"):
        gemini_ft.Checkpointer(model, torch.optim.SGD(model.parameters()), state={"mean": nn.ModuleList([MeanMetric()])})
    with pytest.raises(ConfigError, match=r"state\['best'\] is a float; .* step\(name=value\)"):
        gemini_ft.Checkpointer(model, torch.optim.SGD(model.parameters()), state={"best": 0.5})
