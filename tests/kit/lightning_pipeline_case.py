"""What the ranks of test_pipeline_lightning.py run: Trainers and Fabric with gradient pipelines, many in one process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from engine_pipeline_case import Net
from local_steps_case import chosen_by_words
from torch.nn import functional

Rules = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class Case:
    """One training: twelve batches of each rank, twice.

    Attributes:
        rules: of the pipeline; None: Lightning's own strategy.
        hook: the user's own hook: "sum" (all-reduce), or "builtin".
        warm: whether a backward pass is made, and its gradients are thrown away, before anything is resumed.
        alone: whether `auto`, by ``quality: loss``, comes to have ranks train alone.
        validates: whether the Trainer validates, beforehand and after each epoch.
        saved: whether Fabric's loop saves every step, and goes on where it was.
        options: of the strategy.
        config: DeepSpeed's configuration: the Trainer's strategy is the one over DeepSpeed.
    """

    rules: Rules = None
    accumulate: int = 1
    precision: str = "32-true"
    hook: str = ""
    fabric: bool = False
    warm: bool = False
    alone: bool = False
    validates: bool = False
    saved: bool = False
    log_every: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None


class Calls:
    """Counts the gradients that a hook of the user's own has seen."""

    def __init__(self) -> None:
        self.elements: list[int] = []

    def hook(self, state: object, bucket: Any) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        self.elements.append(bucket.buffer().numel())
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]


def data() -> Any:
    from torch.utils.data import DataLoader, TensorDataset

    words = torch.randint(0, 12, (96,), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(words), 4, shuffle=True)


def loss_of(net: Any, words: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(net(words).float().squeeze(1), (words % 3).float())


def warm_up(loss: Any, model: Any) -> None:
    """A backward pass as a script makes it that wants its memory allocated before it begins."""
    loss(torch.arange(4) + int(os.environ["RANK"])).backward()
    model.zero_grad()


def make_strategy(case: Case, calls: Calls) -> Any:
    import lightning.pytorch.strategies as theirs
    from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType

    import gemini_ft.lightning

    options = dict(case.options)
    if case.hook:
        options["ddp_comm_hook"] = calls.hook if case.hook == "sum" else DDPCommHookType.ALLREDUCE
    if case.rules is None:
        return theirs.DDPStrategy(**options)
    if case.config is not None:
        return gemini_ft.lightning.GeminiDeepSpeedStrategy(config={**case.config, "gradient_pipeline": case.rules}, **options)
    return gemini_ft.lightning.GeminiStrategy(gradient_pipeline=case.rules, on_late="wait", **options)


def train(case: Case) -> dict[str, Any]:
    """Train to the end."""
    import lightning.pytorch as package
    from lightning.pytorch.loggers.logger import Logger

    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.losses: list[float] = []

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return loss_of(self.net, words)

        def on_fit_start(self) -> None:
            if case.warm:
                warm_up(self.trainer.strategy.model, self.trainer.strategy.model)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = loss_of(self.net, batch[0])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss_of(self.net, batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    class Recorder(Logger):
        name = version = "recorder"

        def __init__(self) -> None:
            super().__init__()
            self.logged: dict[int, dict[str, float]] = {}

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.logged[step or 0] = metrics

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    package.seed_everything(7, verbose=False)
    if case.alone:
        chosen_by_words(1e-9)
    calls, recorder = Calls(), Recorder()
    strategy = make_strategy(case, calls)
    module = Module()
    precision: Any = case.precision
    trainer = package.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        precision=precision,
        logger=recorder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=2,
        log_every_n_steps=case.log_every,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=1.0,
    )
    trainer.fit(module, data(), data() if case.validates else None)
    gradients = getattr(trainer.strategy, "gradients", None)
    return {
        "losses": module.losses,
        "weights": {name: param.detach().float().numpy() for name, param in module.named_parameters()},
        "hook": sum(calls.elements),
        "logged": recorder.logged,
        "steps": gradients.averager.step if gradients else trainer.global_step,
        "summary": gradients.summary() if gradients else {},
        "ratios": gradients.averager.controls.ratios() if gradients else [],
    }


def train_with_fabric(case: Case) -> dict[str, Any]:
    """The same in a loop of the user's own, once through the data."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.ddp import DDPStrategy

    import gemini_ft.lightning

    ours = case.rules is not None
    strategy: Any = gemini_ft.lightning.GeminiFabricStrategy(gradient_pipeline=case.rules, on_late="wait") if ours else DDPStrategy()
    precision: Any = case.precision
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, precision=precision)
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    net = Net()
    wrapped, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 1e-2))
    loader, losses = fabric.setup_dataloaders(data()), list[float]()
    state = {"net": wrapped, "optimizer": optimizer, "loader": loader, "batches": 0}
    if case.warm:
        warm_up(lambda words: loss_of(wrapped, words), wrapped)
    if case.saved:
        fabric.load("gemini://latest", state)
    for (words,) in loader:
        state["batches"] += 1
        accumulating = state["batches"] % case.accumulate != 0
        with fabric.no_backward_sync(wrapped, enabled=accumulating):
            loss = loss_of(wrapped, words)
            losses.append(loss.item())
            fabric.backward(loss / case.accumulate)
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
            if case.saved:
                fabric.save("gemini://latest", state)
    steps = strategy.gradients.averager.step if ours else state["batches"] // case.accumulate
    if case.saved:
        strategy.close()
    ratios = gradients.averager.controls.ratios() if (gradients := getattr(strategy, "gradients", None)) is not None else []
    weights = {name: param.detach().float().numpy() for name, param in net.named_parameters()}
    return {"losses": losses, "weights": weights, "steps": steps, "ratios": ratios}


def every(cases: Mapping[str, Case]) -> dict[str, Any]:
    """What came of each, or with what it was refused."""
    warnings.simplefilter("ignore")  # pytest has made them errors
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    os.environ |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size, "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    found = dict[str, Any]()
    for name, case in cases.items():
        try:
            found[name] = train_with_fabric(case) if case.fabric else train(case)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
