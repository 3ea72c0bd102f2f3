"""What the ranks of test_pipeline_deepspeed.py run: engines with gradient pipelines, many in one process."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")

WORDS = 60
BF16 = {"bf16": {"enabled": True}}
BF16_OPTIMIZER = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}

ALONE = {"params": "*", "every": 2, "outer": {}}

Rules = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class Case:
    """One training; ``config`` and ``zero`` are merged into DeepSpeed's configuration.

    Attributes:
        through: who gives the engine its pipeline: our "initialize", "attach", or DeepSpeed's own initialize, as "wrapped" by `gemini run`.
        stray: after the second step a backward pass is made that no step follows, and the pipeline's state from before it is loaded.
    """

    stage: int
    rules: Rules = None
    accumulate: int = 1
    steps: int = 4
    sparse: bool = False  # the embedding makes sparse tensors
    idle: bool = False  # one rank does without the embedding
    scale: float = 1.0  # of the loss, every other step
    through: str = "initialize"
    stray: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)


class Net(nn.Module):
    """Few of the embedding's rows are used at a time."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8, sparse=sparse)
        self.body = nn.Linear(8, 40)
        self.last = nn.Linear(40, 1)

    def forward(self, words: torch.Tensor, use_words: bool = True) -> torch.Tensor:
        hidden = self.embed(words) if use_words else torch.ones(len(words), 8, dtype=self.last.weight.dtype)
        out: torch.Tensor = self.last(torch.tanh(self.body(hidden)))
        return out


def network(sparse: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(sparse)


def loss_of(model: Any, step: int, micro: int, rank: int, use_words: bool = True) -> torch.Tensor:
    words = torch.randint(0, 12, (8,), generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))
    found: torch.Tensor = (model(words, use_words=use_words).float().squeeze(1) - (words % 3)).square().mean()
    return found


def configuration(case: Case) -> dict[str, Any]:
    zero = {"stage": case.stage, "reduce_bucket_size": 300, "allgather_bucket_size": 100_000, "stage3_param_persistence_threshold": 64}
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": case.accumulate,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0 if case.sparse else 1.0,
        "zero_optimization": {**zero, **case.zero},
        "zero_allow_untested_optimizer": True,
        **case.config,
    }
    return config if case.rules is None else config | {"gradient_pipeline": [dict(rule) for rule in case.rules]}


def start(case: Case) -> Any:
    import deepspeed

    import gemini_ft.deepspeed
    from gemini_ft.launch import autoprotect

    net = network(case.sparse)
    params = list(net.parameters())
    optimizer = torch.optim.SGD(params, 0.05) if case.sparse else torch.optim.AdamW(params, 1e-2)
    theirs = deepspeed.initialize
    if case.through == "wrapped":
        autoprotect.install()
    initialize = gemini_ft.deepspeed.initialize if case.through == "initialize" else deepspeed.initialize
    engine, *_ = initialize(model=net, optimizer=optimizer, config=configuration(case))
    deepspeed.initialize = theirs
    return gemini_ft.deepspeed.attach(engine) if case.through == "attach" else engine


def steps(case: Case, engine: Any, last: int) -> list[float]:
    """Losses of this rank, of every micro-batch up to a step."""
    rank, losses = dist.get_rank(), list[float]()
    for step in range(engine.global_steps, last):
        if case.scale != 1.0:
            engine.optimizer.loss_scaler.cur_scale = case.scale if step % 2 else 1.0
        for micro in range(case.accumulate):
            loss = loss_of(engine, step, micro, rank, use_words=not (case.idle and rank == 1))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    return losses


def roll_back(engine: Any) -> None:
    """A backward pass that no step follows, and back to where the gradient pipeline was before it."""
    state = copy.deepcopy(engine.gradients.state_dict())
    words = torch.randint(0, 12, (8,), generator=torch.Generator().manual_seed(dist.get_rank()))
    engine.backward(engine(words).float().square().mean())
    engine.gradients.load_state_dict(state)
    engine.zero_grad()
    if hasattr(engine.optimizer, "zero_grad"):
        engine.optimizer.zero_grad()


def end(engine: Any) -> None:
    """Threads and hooks have gone before the next engine comes."""
    engine.destroy()
    gc.collect()


def run(case: Case) -> dict[str, Any]:
    """Train to the end."""
    from deepspeed_case import whole_weights

    from gemini_ft.deepspeed.protection import bound_collectives
    from gemini_ft.pipeline.route_table import time_limit

    engine = start(case)
    losses, limits = list[float](), list[float]()
    if case.stray:
        losses = steps(case, engine, 2)
        roll_back(engine)
        bound_collectives(engine, 77.0)
        limits = [time_limit(group).total_seconds() for group in engine.gradients.groups]
    losses += steps(case, engine, case.steps)
    weights = {name: tensor.float().numpy() for name, tensor in whole_weights(engine).items()}
    gradients = vars(engine).get("gradients")
    found = {"losses": losses, "weights": weights, "summary": gradients.summary() if gradients else {}, "limits": limits}
    if gradients:
        found["step"] = gradients.averager.step
        found["plan"] = gradients.averager.plan.fusion
        found["ratios"] = gradients.averager.controls.ratios()
    if gradients and gradients.lets_ranks_differ and case.stage:
        found["refused"] = refused_alone(engine)
    end(engine)
    found["threads"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("gradients-")]
    return found


def refused_alone(engine: Any) -> dict[str, str]:
    """Returns the errors of saving, loading and moving an engine whose ranks train alone; the last two: after its pipeline has ended."""
    from pipeline_case import error_of

    found = {
        "saved": error_of(lambda: engine.save_checkpoint("nowhere")),
        "loaded": error_of(lambda: engine.load_checkpoint("nowhere")),
        "weights loaded": error_of(lambda: engine.load_checkpoint("nowhere", load_optimizer_states=False)),
        "moved": error_of(engine.offload_states),
    }
    engine.gradients.close()
    return found | {
        "saved at the end": error_of(lambda: engine.save_checkpoint("nowhere")),
        "loaded at the end": error_of(lambda: engine.load_checkpoint("nowhere")),
    }


def skipped(case: Case) -> str:
    """Returns the error that ends this rank's training; the second step's loss is infinite on rank 1."""
    from pipeline_case import error_of

    import gemini_ft

    gemini_ft.init_process_group("gloo")
    engine = start(case)
    steps(case, engine, 1)

    def go_on() -> None:
        for step in range(1, 4):
            loss = loss_of(engine, step, 0, dist.get_rank())
            engine.backward(loss * float("inf") if step == dist.get_rank() == 1 else loss)
            engine.step()

    return error_of(go_on)


def under_lightning(case: Case, folder: str) -> dict[str, str]:
    """Returns the errors of a Trainer's fit with a ModelCheckpoint and without one."""
    import lightning.pytorch as package
    from pipeline_case import error_of

    import gemini_ft.lightning

    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}

    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return loss_of(self.net, int(batch), 0, 0)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    def fit(has_files: bool) -> None:
        config = {name: value for name, value in configuration(case).items() if name in ("zero_optimization", "gradient_pipeline")}
        package.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=gemini_ft.lightning.GeminiDeepSpeedStrategy(config=config | {"zero_allow_untested_optimizer": True}),
            enable_checkpointing=has_files,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=1,
            default_root_dir=folder,
        ).fit(Module(), torch.utils.data.DataLoader(range(2)))  # type: ignore[arg-type]

    return {"ModelCheckpoint": error_of(lambda: fit(True)), "none": error_of(lambda: fit(False))}


def every(cases: Mapping[str, Case]) -> dict[str, dict[str, Any]]:
    """`run` for each."""
    import gemini_ft

    gemini_ft.init_process_group("gloo")
    start(Case(3)).destroy()  # DeepSpeed changes torch's linear for it, and leaves it changed: whatever comes first, all cases see the same
    gc.collect()
    gc.freeze()  # what is there from now on is looked through in milliseconds
    return {name: run(case) for name, case in cases.items()}


def in_one_process(case: Case, world: int) -> nn.Module:
    """The model after the average that ends a training, by torch's optimizers: a rank's masters lie end to end."""
    models, anchor = [network() for _ in range(world)], network()
    if "bf16" in case.config:
        models, anchor = [model.bfloat16() for model in models], anchor.bfloat16().float()
    shapes = [param.shape for param in anchor.parameters()]
    sizes = [shape.numel() for shape in shapes]
    room = torch.zeros(sum(sizes) % 2)
    masters, inner = list[list[torch.Tensor]](), list[torch.optim.Optimizer]()
    for _ in models:
        whole = torch.cat([*(param.detach().flatten() for param in anchor.parameters()), room])
        masters.append([part.view(shape) for part, shape in zip(torch.split(whole[: sum(sizes)], sizes), shapes, strict=True)])
        inner.append(torch.optim.AdamW([nn.Parameter(whole)], 1e-2))
    outer = torch.optim.SGD(anchor.parameters(), 0.7, momentum=0.9, nesterov=True)
    for step in range(case.steps):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            model.zero_grad()
            for micro in range(case.accumulate):
                torch.autograd.backward(loss_of(model, step, micro, rank) / case.accumulate)
            gradients = [param.grad.flatten() for param in model.parameters() if param.grad is not None]
            optimizer.param_groups[0]["params"][0].grad = torch.cat([*gradients, room.to(gradients[0].dtype)]).float()
            optimizer.step()
        with torch.no_grad():
            if step % 2:
                for start, *own in zip(anchor.parameters(), *masters, strict=True):
                    start.grad = torch.stack([start - param for param in own]).sum(0) / len(own)
                outer.step()
            for model, parts in zip(models, masters, strict=True):
                for weight, param, start in zip(model.parameters(), parts, anchor.parameters(), strict=True):
                    weight.copy_(param.copy_(start) if step % 2 else param)
    return models[0]


def refusals(cases: Mapping[str, Case]) -> dict[str, str]:
    """What each is refused with, on one rank; empty: it is accepted."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import gemini_ft
    import gemini_ft.deepspeed

    gemini_ft.init_process_group("gloo")
    found = {}
    for name, case in cases.items():
        try:
            if name == "pipeline":
                net = PipelineModule(layers=[nn.Linear(8, 1)], num_stages=1, loss_fn=nn.functional.mse_loss)
                optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
                gemini_ft.deepspeed.initialize(model=net, optimizer=optimizer, config=configuration(case))
            elif name == "complex":
                net = Net()
                net.register_parameter("turn", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
                gemini_ft.deepspeed.initialize(model=net, optimizer=torch.optim.SGD(net.parameters()), config=configuration(case))
            elif name == "local steps of Adagrad":
                first, *rest = (net := Net()).parameters()
                optimizer = torch.optim.Adagrad([{"params": [first]}, {"params": rest}])
                gemini_ft.deepspeed.initialize(model=net, optimizer=optimizer, config=configuration(case))
            elif name == "no optimizer":
                engine, *_ = deepspeed.initialize(model=Net(), config=configuration(case))
                gemini_ft.deepspeed.attach(engine)
            else:
                start(case)
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
