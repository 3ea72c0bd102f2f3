"""One fit in one process: what is resumed and what is not, checkpoint files beside snapshots, and Fabric's paths."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradient_case import Toy
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import gemini_ft
import gemini_ft.lightning
from gemini_ft.agent import lifecycle
from gemini_ft.errors import ConfigError, LayoutMismatchError, StateError
from gemini_ft.launch.notes import notes_of_workers
from gemini_ft.lightning.trainer_loops import in_mid_epoch
from gemini_ft.state import codec
from gemini_ft.testing import first_difference

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning"),
]
STEPS = 6


class Boom(Exception):
    """The crash of these tests."""


class Steps(list[int]):
    """Steps of this process alone: a plain list would be restored."""


class Model(LightningModule):
    """Remembers which steps it made, and does as it is told at one of them."""

    def __init__(self, width: int = 4, at: int = -1, do: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.net = nn.Linear(4, width)
        self.at, self.do = at, do
        self.steps = Steps()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.at and self.do is not None:
            self.do()
        self.steps.append(self.global_step)
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.1)


def crash() -> None:
    raise Boom


def tell_to_end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def run_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A run of its own; its agent, and what Lightning does to the process, are gone afterwards."""
    run = f"fit-{os.getpid()}-{tmp_path.name}"
    environment = dict(os.environ)
    monkeypatch.setenv("GEMINI_RUN_ID", run)
    monkeypatch.setenv("GEMINI_ON_LATE", "wait")
    monkeypatch.setenv("GEMINI_LINGER", "60")
    yield run
    watched = any(thread.name == "gemini-agent-client" for thread in threading.enumerate())
    assert not watched, "a Checkpointer is left open: in five minutes its agent takes this process for hung, and kills it"
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    lifecycle.job_finished(run, stores=False)


@pytest.fixture
def fit(run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Model]:
    """Train as a script does that has just been started."""

    def start(options: dict[str, Any] | None = None, ckpt_path: Path | None = None, strategy: Any = "gemini") -> Model:
        monkeypatch.setattr("gemini_ft.worker.attempt.named", Counter())
        torch.manual_seed(1)
        model = Model(**options or {})
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=1,
            max_steps=STEPS,
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[ModelCheckpoint(tmp_path / "files", every_n_train_steps=1, save_top_k=-1, filename="{step}")],
        )
        whole = {"weights_only": False} if "weights_only" in inspect.signature(Trainer.fit).parameters else {}  # Lightning 2.5 reads all
        trainer.fit(model, DataLoader(torch.arange(40.0).view(10, 4)), ckpt_path=ckpt_path, **whole)
        return model

    return start


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, bool]]:
    """How Checkpointers were closed. The agent acts upon it when the process has gone."""
    calls: list[dict[str, bool]] = []
    close = gemini_ft.Checkpointer.close

    def spy(self: gemini_ft.Checkpointer, **how: bool) -> None:
        calls.append(how)
        close(self, **how)

    monkeypatch.setattr(gemini_ft.Checkpointer, "close", spy)
    return calls


def test_a_crash_is_resumed(fit: Callable[..., Model], closed: list[dict[str, bool]]) -> None:
    with pytest.raises(Boom):
        fit({"at": 4, "do": crash})
    with notes_of_workers() as notes:
        resumed = fit()
        assert notes.total == STEPS  # so that a launcher can report the progress
    assert resumed.steps[0] in (3, 4)
    assert closed == [{"finished": False, "interrupted": False}, {"finished": True, "interrupted": False}]
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), fit(strategy="ddp").parameters(), strict=True))


def test_what_synchronises_gradients_belongs_to_the_strategy(fit: Callable[..., Model]) -> None:
    def strategy(state: dict[str, Any]) -> Any:
        made = gemini_ft.lightning.GeminiStrategy()
        made.gradients = Toy(state)
        return made

    with pytest.raises(Boom):
        fit({"at": 4, "do": crash}, strategy=strategy({"residual": torch.full((3,), 0.1), "steps": 4}))
    with pytest.raises(LayoutMismatchError, match="the snapshot holds the state of a gradient pipeline"):
        fit()
    fit(strategy=(resumed := strategy({})))
    assert first_difference(resumed.gradients.state, {"residual": torch.full((3,), 0.1), "steps": 4}) is None


def test_what_sigterm_has_ended_is_no_success(fit: Callable[..., Model], closed: list[dict[str, bool]]) -> None:
    """Lightning's rank 0 makes all ranks end as it does, and hosts that nobody has told to end must go on without it."""
    with pytest.raises(SystemExit) as end:
        fit({"at": 4, "do": tell_to_end})
    assert end.value.code == 128 + signal.SIGTERM
    assert closed == [{"finished": False, "interrupted": False}]


def test_ctrl_c_is_no_crash(fit: Callable[..., Model], closed: list[dict[str, bool]]) -> None:
    with pytest.raises(SystemExit):
        fit({"at": 4, "do": interrupt})
    assert closed == [{"finished": False, "interrupted": True}]


def test_resume_never(fit: Callable[..., Model], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Boom):
        fit({"at": 4, "do": crash})
    monkeypatch.setenv("GEMINI_RESUME", "never")
    monkeypatch.setenv("GEMINI_TOTAL_STEPS", "0")
    with notes_of_workers() as notes:
        assert fit().steps[0] == 0
        assert notes.total == 0  # no progress is reported


def test_another_model_is_refused(fit: Callable[..., Model]) -> None:
    with pytest.raises(Boom):
        fit({"at": 4, "do": crash})
    with pytest.raises(LayoutMismatchError, match=r"net\.weight"):
        fit({"width": 5})


def test_an_older_file_does_not_win(fit: Callable[..., Model], tmp_path: Path) -> None:
    with pytest.raises(Boom):
        fit({"at": 4, "do": crash})
    assert fit(ckpt_path=tmp_path / "files" / "step=2.ckpt").steps[0] in (3, 4)


def test_a_newer_file_wins(fit: Callable[..., Model], tmp_path: Path) -> None:
    fit(strategy="ddp")
    with pytest.raises(Boom):
        fit({"at": 3, "do": crash})
    model = fit(ckpt_path=tmp_path / "files" / "step=5.ckpt")
    assert model.steps == [5]


def test_files_are_those_of_plain_lightning(fit: Callable[..., Model], tmp_path: Path) -> None:
    fit()
    saved = torch.load(tmp_path / "files" / "step=4.ckpt", weights_only=False)
    assert "combined_loader" not in saved["loops"]["fit_loop"]["state_dict"]
    assert fit(strategy="ddp", ckpt_path=tmp_path / "files" / "step=4.ckpt").steps == [4, 5]


def test_a_module_that_was_never_fitted_is_saved(tmp_path: Path) -> None:
    trainer = Trainer(strategy=gemini_ft.lightning.GeminiStrategy(), accelerator="cpu", devices=1, logger=False, barebones=True)
    module = Model()
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    assert torch.load(tmp_path / "file.ckpt", weights_only=False)["state_dict"].keys() == module.state_dict().keys()


def test_what_lightning_adds_needs_no_pickle(fit: Callable[..., Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it could not be loaded from storage without ``trust_pickle``."""
    blobs: list[bytes] = []
    save = gemini_ft.Checkpointer.save

    def spy(self: gemini_ft.Checkpointer, iteration: int, extras: Any) -> None:
        blobs.append(codec.encode(extras, b"the run's secret"))
        save(self, iteration, extras)

    monkeypatch.setattr(gemini_ft.Checkpointer, "save", spy)
    fit()
    assert codec.decode(blobs[-1], b"another secret", trust_pickle=False)["checkpoint"]["global_step"] == STEPS - 1


def test_hooks_see_the_whole_checkpoint(fit: Callable[..., Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both when a snapshot is taken and when it is resumed; what they add comes back."""
    saved, loaded = list[dict[str, Any]](), list[dict[str, Any]]()

    def on_save(self: Model, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"twin": checkpoint["state_dict"]["net.bias"], "other": torch.ones(2)}
        saved.append(dict(checkpoint))

    monkeypatch.setattr(Model, "on_save_checkpoint", on_save)
    monkeypatch.setattr(Model, "on_load_checkpoint", lambda self, checkpoint: loaded.append(dict(checkpoint)))
    with pytest.raises(Boom):
        fit({"at": 4, "do": crash})
    model = fit()

    assert set(saved[0]["state_dict"]) == {"net.weight", "net.bias"}
    assert saved[0]["optimizer_states"][0]["state"]
    (checkpoint,) = loaded
    assert checkpoint.keys() == saved[0].keys()
    assert checkpoint["mine"]["twin"].data_ptr() == model.net.bias.data_ptr()  # the model's own, not a copy
    assert torch.equal(checkpoint["mine"]["other"], torch.ones(2))


def test_the_copy_is_waited_for_before_every_update(fit: Callable[..., Model]) -> None:
    """``verify`` compares copy and live state just before the update, and stops the job at the first difference."""
    assert fit(strategy=gemini_ft.lightning.GeminiStrategy(verify=True)).steps == list(range(STEPS))


def test_iterations_are_computed_again_without_another_training_step(fit: Callable[..., Model], caplog: pytest.LogCaptureFixture) -> None:
    assert fit(strategy=gemini_ft.lightning.GeminiStrategy(verify="replay", compare_every=1)).steps == list(range(STEPS))
    assert "verify: replay" not in caplog.text  # no result was left out


def test_the_interval_counts_optimizer_steps(fit: Callable[..., Model]) -> None:
    with pytest.raises(Boom):
        fit({"at": 5, "do": crash}, strategy=gemini_ft.lightning.GeminiStrategy(interval=2))
    assert fit(strategy=gemini_ft.lightning.GeminiStrategy(interval=2)).steps[0] in (2, 4)


@pytest.mark.parametrize("is_resuming", [True, False])
def test_loops_that_load_a_snapshot_are_in_the_middle_of_an_epoch_whatever_their_counters_say(is_resuming: bool) -> None:
    """A fit that begins with a file saved with an epoch's last batch counts its epochs so that Lightning takes each for a finished one."""
    fit_loop = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit_loop
    end = in_mid_epoch(fit_loop.trainer, lambda: is_resuming)
    fit_loop.load_state_dict(fit_loop.state_dict())
    assert fit_loop.restarting == fit_loop.epoch_loop.restarting == is_resuming
    end()


# --- Fabric


@pytest.fixture
def fabric(run_id: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[Fabric, dict[str, Any]]]]:
    started = []

    def start() -> tuple[Fabric, dict[str, Any]]:
        monkeypatch.setattr("gemini_ft.worker.attempt.named", Counter())
        fabric = Fabric(strategy="gemini", accelerator="cpu", devices=1)
        started.append(fabric)
        fabric.launch()
        model = nn.Linear(4, 4)
        wrapped, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), 0.1))
        return fabric, {"model": wrapped, "optimizer": optimizer, "generator": torch.Generator(), "step": 0}

    yield start
    for fabric in started:
        fabric.strategy.close()


def train(fabric: Fabric, state: dict[str, Any], steps: int) -> None:
    while state["step"] < steps:
        state["step"] += 1
        fabric.backward(state["model"](torch.rand(2, 4, generator=state["generator"])).square().mean())
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        fabric.save("gemini://latest", state)


def test_fabric_goes_on(fabric: Callable[[], tuple[Fabric, dict[str, Any]]]) -> None:
    first, state = fabric()
    assert first.load("gemini://latest", state) == {}
    reached = {}
    for step in range(1, 6):
        train(first, state, step)
        reached[step] = state["model"].weight.clone(), state["generator"].get_state()
    first.strategy.checkpointer.close(finished=False)  # as a crash does

    second, state = fabric()
    generator = state["generator"]  # which the loop has in a variable, too
    second.load("gemini://latest", state)
    assert state["step"] in (4, 5)
    assert all(map(torch.equal, (state["model"].weight, generator.get_state()), reached[state["step"]]))
    second.strategy.close()


def test_a_validation_of_fabric_that_is_not_in_the_state_goes_on_with_the_orders_of_later_epochs(
    fabric: Callable[[], tuple[Fabric, dict[str, Any]]],
) -> None:
    def start() -> tuple[Fabric, dict[str, Any], Any]:
        made, state = fabric()
        gone = made.setup_dataloaders(DataLoader(range(9), shuffle=True))  # type: ignore[arg-type]
        validation = made.setup_dataloaders(DataLoader(range(9), shuffle=True))  # type: ignore[arg-type]
        del gone
        made.load("gemini://latest", state)
        return made, state, validation

    def order(loader: Any) -> list[int]:
        return [int(batch) for batch in loader]

    first, state, validation = start()
    before = order(validation)
    train(first, state, 1)
    first.strategy.checkpointer.flush()
    expected = order(validation)
    first.strategy.checkpointer.close(finished=False)
    second, state, validation = start()
    assert state["step"] == 1
    assert order(validation) == expected
    assert expected != before
    second.strategy.close()


def test_an_epoch_of_fabric_that_is_not_in_the_state_begins_anew_in_its_own_order(
    fabric: Callable[[], tuple[Fabric, dict[str, Any]]],
) -> None:
    """A loop that leaves out what it has used needs the order of the epoch that is under way."""

    def start() -> tuple[Fabric, dict[str, Any], Any]:
        made, state = fabric()
        data: Any = range(9)
        loader = made.setup_dataloaders(DataLoader(data, sampler=DistributedSampler(data, 1, 0)))
        made.load("gemini://latest", state)
        return made, state, loader

    first, state, loader = start()
    orders = [[int(batch) for batch in loader]]
    under_way = iter(loader)
    orders.append([int(next(under_way))])
    train(first, state, 1)
    first.strategy.checkpointer.flush()
    orders[-1] += map(int, under_way)
    first.strategy.checkpointer.close(finished=False)
    second, state, loader = start()
    assert [[int(batch) for batch in loader]] == orders[1:]
    assert orders[0] != orders[1]
    second.strategy.close()


def test_fabric_says_what_it_cannot_do(fabric: Callable[[], tuple[Fabric, dict[str, Any]]], tmp_path: Path) -> None:
    instance, state = fabric()
    with pytest.raises(ConfigError, match="only the newest state"):
        instance.load("gemini://step-5", state)
    with pytest.raises(ConfigError, match="dictionary that is saved"):
        instance.load("gemini://latest")
    with pytest.raises(ConfigError, match="at least one module"):
        instance.save("gemini://latest", {"step": 1})
    with pytest.raises(ConfigError, match="leave the filter out"):
        instance.save("gemini://latest", state, filter={"model": lambda name, value: True})
    instance.save(tmp_path / "file.ckpt", state)
    assert torch.load(tmp_path / "file.ckpt", weights_only=False)["step"] == 0


def test_fabric_misses_what_was_not_saved(fabric: Callable[[], tuple[Fabric, dict[str, Any]]]) -> None:
    first, state = fabric()
    train(first, state, 3)
    first.strategy.checkpointer.close(finished=False)
    second, state = fabric()
    with pytest.raises(StateError, match=r"has no \['epoch'\]"):
        second.load("gemini://latest", state | {"epoch": 0})


def test_fabric_warns_if_nobody_loads(fabric: Callable[[], tuple[Fabric, dict[str, Any]]], caplog: pytest.LogCaptureFixture) -> None:
    first, state = fabric()
    train(first, state, 3)
    first.strategy.checkpointer.close(finished=False)
    second, state = fabric()
    with caplog.at_level(logging.WARNING):
        train(second, state, 1)
    assert "starting over" in caplog.text
