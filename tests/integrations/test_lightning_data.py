"""Loaders of every kind, made and woken whenever a script likes, and callbacks: killed or not, a fit ends with the bits of plain DDP.

The suite has the cells that differ most, in one job each way; the whole table is a soak.
"""

from __future__ import annotations

import functools
import itertools
import logging
import random
from collections.abc import Callable
from multiprocessing import Array, RawValue, Value
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from test_lightning_hooks import CRASH, Boom, Case, fit, table, weights
from test_lightning_zoo import Buffer, Shuffled
from three_ways import WAYS, Cell, differing, run
from torch.utils.data import DataLoader

from gemini_ft.errors import UnsupportedStateError
from gemini_ft.state.remembered import Attributes

__all__ = ["fit"]  # the fixture
CASE = Path(__file__).parents[1] / "kit" / "loaders_case.py"
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.preloaded("lightning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]


def every(epochs: int, **options: Any) -> dict[str, Any]:
    return {"trainer": {"reload_dataloaders_every_n_epochs": epochs} | options}


PERSISTENT = {"workers": "persistent"}
CALLBACKS = {"callbacks": ["best", "often", "all", "patient", "inheriting"]}
SUITE = {
    "asks-for-steps": Cell({"early": "steps@configure_optimizers"} | every(2), ["1:0:3", "0:2:2"]),
    "reloads-a-drawing-one": Cell({"kind": "drawing"} | PERSISTENT | every(1, max_epochs=2), ["1:1:1"]),
    "cursor-here": Cell({"kind": "stateful-cursor", "trainer": {"limit_train_batches": 4, "max_epochs": 2}}, ["0:0:3", "0:1:0"]),
    "one-loader-with-a-sampler": Cell(
        {"one_loader": True, "kind": "stateful-table", "workers": "2", "trainer": {"max_epochs": 2}}, ["0:0:2"]
    ),
    "one-cursor": Cell(
        {"kind": "stateful-cursor", "one_loader": True, "trainer": {"max_epochs": 2, "limit_train_batches": 3}}, ["1:1:1:end"]
    ),
    "shared-epoch": Cell({"kind": "stream"} | PERSISTENT, ["0:0:2", "1:1:1"]),
    "one-loader": Cell({"one_loader": True, "kind": "stream"} | PERSISTENT | {"trainer": {"num_sanity_val_steps": 2}}, ["0:1:1"]),
    "callbacks": Cell(CALLBACKS, ["0:1:2:end"]),
    "fills-places": Cell({"kind": "caching", "trainer": {"max_epochs": 2}}, ["0:1:2"]),
    "validations": Cell({"validation": ["shuffled", "noise", "private", "iterator", "private-there"]} | PERSISTENT, ["1:1:2"]),
}
EARLY = {
    "reloads": Cell(every(2), ["0:1:3"]),
    "cursor": Cell({"kind": "stateful-cursor", "workers": "2"}, ["1:1:1"]),
    "fills-places-persistent": Cell({"kind": "caching", "trainer": {"max_epochs": 2}} | PERSISTENT, ["1:0:3"]),
    "steps-in-setup": Cell({"early": "steps@setup"} | PERSISTENT, ["0:0:3"]),
    "steps-in-the-sanity-check": Cell({"early": "steps@on_sanity_check_start"}, ["1:1:2"]),
    "batch-before-the-fit": Cell({"early": "batch@on_fit_start", "kind": "stream"}, ["1:1:3"]),
    "batches-beside-the-loop": Cell({"early": "batch@on_train_batch_end"}, ["0:1:3"]),
    "batches-beside-a-cursor": Cell({"early": "batch@on_train_batch_end", "kind": "stateful-cursor"}, ["0:1:3"]),
    "validation": Cell({"early": "validation@configure_optimizers"} | every(2, max_epochs=5) | PERSISTENT, ["0:3:2"]),
    "iterator": Cell({"early": "steps@configure_optimizers", "kind": "iterator", "trainer": {"limit_train_batches": 4}}, ["0:1:2"]),
    "one-loader-of-a-table": Cell(
        {"one_loader": True} | PERSISTENT | {"trainer": {"limit_val_batches": 1.0, "num_sanity_val_steps": 0}}, ["1:1:2"]
    ),
    "limited": Cell({"trainer": {"limit_train_batches": 3}} | PERSISTENT, ["0:1:1"]),
    "validations-killed-often": Cell(
        {"validation": ["shuffled", "noise", "private"]} | PERSISTENT | {"trainer": {"val_check_interval": 2}}, ["0:0:3", "1:1:1"]
    ),
    "validations-of-one-dataset": Cell({"kind": "drawing", "one_dataset": True}, ["0:0:3", "1:1:2"]),
    "callbacks-killed-often": Cell(CALLBACKS, ["0:0:2", "1:1:0", "0:1:3:end", "0:1:4:end", "0:2:1"]),
}
KINDS, WORKERS = ["table", "stream", "stateful-table", "stateful-stream", "stateful-cursor"], ["0", "2", "persistent"]


def of_table(kind: str, workers: str) -> dict[str, Cell]:
    """Reloaded or not, accumulating or not; killed in two epochs that follow each other."""
    cells = {}
    for first, (reload, accumulate) in enumerate(itertools.product((0, 2), (1, 3))):
        options = {"kind": kind, "workers": workers} | every(reload, accumulate_grad_batches=accumulate)
        kills = [f"0:{first % 2}:3", f"1:{first % 2 + 1}:1"]
        cells[f"{kind}-{workers}-reload-{reload}-accumulate-{accumulate}"] = Cell(options, kills)
    return cells


def slice_of_tables(seed: int) -> dict[str, Cell]:
    """A cell for each way to load, of tables of different kinds."""
    rng = random.Random(seed)
    return dict(rng.choice([*of_table(kind, workers).items()]) for kind, workers in zip(rng.sample(KINDS, 3), WORKERS, strict=True))


def drawn(seed: int) -> dict[str, Cell]:
    """Five cells of whatever goes together, in which ranks are killed once or more often."""
    rng, cells = random.Random(seed), {}
    for number in range(5):
        kind = rng.choice([*KINDS, "stream", "drawing", "iterator"])
        epochs = rng.choice([3, 4])
        trainer = {
            "max_epochs": epochs,
            "reload_dataloaders_every_n_epochs": rng.choice([0, 0, 1, 2, 3]),
            "accumulate_grad_batches": rng.choice([1, 1, 2, 3]),
            "limit_train_batches": rng.choice([3, 4] if kind == "iterator" else [1.0, 1.0, 3, 4]),
            "limit_val_batches": rng.choice([1, 2, 1.0]),
            "num_sanity_val_steps": rng.choice([0, 1, 2]),
            "val_check_interval": rng.choice([1.0, 1.0, 2]),
            "check_val_every_n_epoch": rng.choice([1, 1, 2]),
        }
        options: dict[str, Any] = {"kind": kind, "workers": rng.choice(WORKERS), "trainer": trainer}
        sharing = "one_dataset" if kind == "drawing" and options["workers"] == "0" else "one_loader"
        if rng.random() < 0.2 and kind != "iterator":
            trainer |= {"val_check_interval": 1.0}
            options[sharing] = True
        elif rng.random() < 0.8:
            options["validation"] = rng.sample(["table", "shuffled", "noise", "private", "private-there"], rng.choice([1, 2]))
            if isinstance(trainer["limit_val_batches"], int) and rng.random() < 0.3:
                options["validation"].append("iterator")
        if rng.random() < 0.2:
            options["early"] = rng.choice(["steps@setup", "steps@configure_optimizers", "batch@on_train_batch_end"])
        moments = sorted({(rng.randrange(epochs), rng.randrange(3)) for _ in range(rng.choice([1, 2, 3]))})
        cells[f"seed-{seed}-{number}"] = Cell(options, [f"{rng.randrange(2)}:{epoch}:{batch}" for epoch, batch in moments])
    return cells


SUITE |= slice_of_tables(11)
JOBS: dict[str, Callable[[], dict[str, Cell]]] = {"suite": lambda: SUITE, "early": lambda: EARLY}
JOBS |= {f"{kind}-{workers}": functools.partial(of_table, kind, workers) for kind in KINDS for workers in WORKERS}
JOBS |= {f"seed-{seed}": functools.partial(drawn, seed) for seed in range(8)}


def parts(job: str, way: str) -> list[dict[str, Cell]]:
    """The scripts that train the cells of a job one way: where ranks are killed few cells each, since a restart goes through all before."""
    cells = [*JOBS[job]().items()]
    size = 2 if WAYS[way][2] else 6
    return [dict(cells[first : first + size]) for first in range(0, len(cells), size)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, str], Path]:
    """The folder of a cell of a job and a way; the first that asks for it has its part of the job run that way, and sees how that ends."""

    @functools.cache
    def folder_of_part(job: str, way: str, number: int) -> Path:
        folder = tmp_path_factory.mktemp(f"{job}-{way}-{number}")
        run(CASE, way, folder=folder, cells=parts(job, way)[number], timeout=240)
        return folder

    def folder_of(job: str, way: str, name: str) -> Path:
        return folder_of_part(job, way, next(number for number, cells in enumerate(parts(job, way)) if name in cells))

    return folder_of


@pytest.mark.parametrize(("way", "name"), [(way, next(iter(cells))) for way in WAYS for cells in parts("suite", way)])
def test_all_cells_run_to_their_end(way: str, name: str, folder_of: Callable[[str, str, str], Path]) -> None:
    folder_of("suite", way, name)


CELLS = [pytest.param(job, name, marks=[pytest.mark.soak] * (job != "suite")) for job, cells in JOBS.items() for name in cells()]


@pytest.mark.parametrize(("job", "name"), CELLS)
def test_ends_as_plain_ddp_does(job: str, name: str, folder_of: Callable[[str, str, str], Path]) -> None:
    if "stateful" in JOBS[job]()[name].options.get("kind", ""):
        pytest.importorskip("torchdata", reason="needs torchdata: pip install torchdata")
    assert differing({way: folder_of(job, way, name) for way in WAYS}, name, JOBS[job]()[name]) == []


@pytest.mark.parametrize("way", ["undisturbed", "killed"])
@pytest.mark.parametrize(
    ("job", "name"), [("suite", "fills-places"), pytest.param("early", "fills-places-persistent", marks=pytest.mark.soak)]
)
def test_a_cache_is_not_named(way: str, job: str, name: str, folder_of: Callable[[str, str, str], Path]) -> None:
    assert "other elements" not in (folder_of(job, way, name) / "output").read_text()


class InAnotherOrder(Case):
    """Trains on files that are shuffled in place."""

    def train_dataloader(self) -> Any:
        return DataLoader(Shuffled(), 4, collate_fn=lambda rows: torch.stack(rows) * torch.ones(4) / 100)


def test_what_is_shuffled_in_place_is_named_once_in_a_job(fit: Callable[..., Case], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        with pytest.raises(Boom):
            fit(InAnotherOrder, None, "gemini", CRASH)
        fit(InAnotherOrder, None, "gemini")
    said = [text for record in caplog.records if "other elements" in (text := record.getMessage())]
    assert [text.partition(" than ")[0] for text in said] == ["the loader of a Shuffled has other elements in dataset.files"]


class Hasty(Case):
    """Asks for its loaders before there is a process group."""

    def configure_callbacks(self) -> list[Callback]:
        assert self.trainer.estimated_stepping_batches
        return []


def test_loaders_of_configure_callbacks_are_refused(fit: Callable[..., Case]) -> None:
    with pytest.raises(
        UnsupportedStateError, match=r"loaders were made before .* ask for them, or for estimated_stepping_batches, in setup"
    ):
        fit(Hasty, table, "gemini")


class Validated(Case):
    """Validates on other data."""

    def __init__(self, data: Any, **workers: Any) -> None:
        super().__init__()
        self.validation = DataLoader(data, 4, **workers)

    def val_dataloader(self) -> Any:
        return self.validation

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None: ...


def test_what_a_validation_loses_is_named_once_in_a_job(fit: Callable[..., Case], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        with pytest.raises(Boom):
            fit(lambda: Validated(Buffer()), table, "gemini", CRASH)
        fit(lambda: Validated(Buffer()), table, "gemini")
    said = [text for record in caplog.records if "the validation's loader" in (text := record.getMessage())]
    assert len(said) == 1
    assert said[0].startswith("the validation's loader of a Buffer changes dataset.buffer, which no snapshot can have")


def test_what_a_validation_loses_in_workers_that_live_on_is_refused(fit: Callable[..., Case]) -> None:
    with pytest.raises(UnsupportedStateError, match=r"changes dataset\.buffer in worker processes that live on"):
        fit(lambda: Validated(Buffer(), num_workers=1, persistent_workers=True), table, "gemini")


class Level(Callback):
    """Saves what loaders are made of."""

    def __init__(self) -> None:
        self.level = 1.0

    def on_train_batch_end(self, *_: Any) -> None:
        self.level *= 1.1

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level = state["level"]


class MadeAnew(Case):
    """Makes other data in each epoch, of what a callback saves, of the rate and of the schedule, and shows itself to it."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]

    def train_dataloader(self) -> Any:
        trainer: Any = self.trainer
        level = trainer.callbacks[0].level + trainer.optimizers[0].param_groups[0]["lr"]
        return DataLoader((torch.arange(96.0).view(24, 4) / 96 * level + trainer.lr_scheduler_configs[0].scheduler.last_epoch / 100), 4)  # type: ignore[arg-type]


def test_loaders_are_made_of_what_callbacks_and_optimizers_were_like_then(fit: Callable[..., Case]) -> None:
    options = {"callbacks": [Level], "reload_dataloaders_every_n_epochs": 1}
    plain = fit(MadeAnew, None, "ddp", **options)
    with pytest.raises(Boom):
        fit(MadeAnew, None, "gemini", CRASH, **options)
    resumed = fit(MadeAnew, None, "gemini", **options)
    assert (0, 5) < min(resumed.diary) <= CRASH
    assert resumed.diary == {step: value for step, value in plain.diary.items() if step >= min(resumed.diary)}
    assert weights(resumed) == weights(plain)
    assert resumed.trainer.optimizers[0].param_groups[0]["lr"] == plain.trainer.optimizers[0].param_groups[0]["lr"]


class Sharing:
    """Tells its workers something in memory that they share."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(2, dtype=torch.long).share_memory_()
        self.part = self.tensor[0]
        self.value, self.raw, self.array = Value("i", 1), RawValue("i", 2), Array("i", [3, 4])

    def tell(self, number: int) -> None:
        self.tensor.fill_(number)
        self.value.value = self.raw.value = number
        self.array[:] = [number, number]

    def told(self) -> list[Any]:
        return [self.tensor.tolist(), self.part.item(), self.value.value, self.raw.value, self.array[:]]


def test_shared_memory_is_written_where_it_is() -> None:
    sharing = Sharing()
    attributes, before = Attributes({"data": sharing}), vars(sharing).copy()
    sharing.tell(7)
    kept, lost = attributes.changes()
    assert not lost
    sharing.tell(9)
    attributes.give_back({}, shared=False)
    assert sharing.told()[0] == [9, 9]
    attributes.give_back(kept)
    assert sharing.told() == [[7, 7], 7, 7, 7, [7, 7]]
    assert all(vars(sharing)[name] is before[name] for name in ("tensor", "value", "raw", "array"))
    assert not Attributes({"data": sharing}, shared=False).changes().kept


def test_a_function_that_came_later_stays() -> None:
    """Lightning gives loaders a worker_init_fn; no snapshot says so, and a fresh process has had it given again."""
    loader = DataLoader([0])  # type: ignore[arg-type]
    attributes = Attributes({"data": loader})
    loader.worker_init_fn = function = functools.partial(print, "seeds worker")
    assert attributes.changes() == ({}, [])
    attributes.give_back({})
    assert loader.worker_init_fn is function
