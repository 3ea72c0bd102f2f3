"""Measures what compression costs in accuracy: a byte-level language model, four workers, each method with and without its error feedback.

Every worker has its own batches of the Python standard library's source text; all four run beside each other in one process, by
the code that runs on a process group. `python benchmarks/compression_convergence.py --write` renews the table in docs/compression.md.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import common

sys.path.append(str(common.HERE.parent / "tests" / "kit"))  # exchange_kit, which runs all ranks in one process
from exchange_kit import simulate

from gemini_ft.compression.base import Bundle, Exchange, Reducer, Turn
from gemini_ft.compression.methods import create

WORLD = 4
CONTEXT = 12  # bytes
BATCH = 32  # per worker
STEPS = 1200
PAGE = Path(__file__).parent.parent / "docs" / "compression.md"


@dataclass(frozen=True)
class Run:
    """One row: a method, its options, and what the optimizer must do for it."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rate: float = 0.2  # learning rate
    momentum: float = 0.9
    bare: Mapping[str, Any] | None = field(default_factory=lambda: {"feedback": 0})  # options of the row without error feedback

    @property
    def label(self) -> str:
        chosen = ", ".join(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in self.options.items())
        return f"{self.method} ({chosen})" if chosen else self.method


# Signs have no scale: the rate of a sign method. One bit and momentum of the optimizer do not go together: ten times the rate without.
# DGC's momentum is inside.
RUNS = [
    Run("none", bare=None),
    Run("fp16", bare=None),
    Run("bf16", bare=None),
    Run("topk", {"ratio": 0.01}),
    Run("randomk", {"ratio": 0.1}, rate=1.0, momentum=0.0),
    Run("threshold", {"value": 0.01}),
    Run("hard_threshold", {"count": 1100}),
    Run("sampled_threshold", {"ratio": 0.01}),
    Run("dgc", {"ratio": 0.01, "warmup_steps": 200}, momentum=0.0, bare=None),
    Run("sidco_e", {"ratio": 0.01}),
    Run("sidco_p", {"ratio": 0.01}),
    Run("sidco_gp", {"ratio": 0.01}),
    Run("adaq", {"ratio": 0.01}, rate=1.0, momentum=0.0),
    Run("signsgd", rate=0.001, momentum=0.0, bare=None),
    Run("signum", rate=0.002, momentum=0.0, bare=None),
    Run("efsignsgd", rate=1.0, momentum=0.0),
    Run("efsignsgd", {"two_phase": True}, rate=1.0, momentum=0.0),
    Run("onebit", rate=1.0, momentum=0.0),
    Run("qsgd", {"levels": 127}, bare=None),
    Run("qsgd", {"levels": 7}, bare=None),
    Run("terngrad", bare=None),
    Run("natural", bare=None),
    Run("natural8", bare=None),
    Run("int8", bare=None),
    Run("dynamic8"),
    Run("threelc"),
    Run("sketch"),
    Run("inceptionn", {"bound": 10}),
    Run("inceptionn", {"bound": 6}),
    Run("powersgd", {"rank": 1}, bare={"error_feedback": False}),
    Run("powersgd", {"rank": 4}, bare={"error_feedback": False}),
    Run("atomo", {"atoms": 4}, rate=0.5, momentum=0.0, bare=None),
]


class Model(nn.Module):
    """The next byte from the last twelve: embedding, one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 24)
        self.hidden, self.out = nn.Linear(CONTEXT * 24, 192), nn.Linear(192, 256)

    def forward(self, context: Tensor) -> Tensor:
        hidden: Tensor = self.hidden(self.embed(context).flatten(1)).relu()
        logits: Tensor = self.out(hidden)
        return logits


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes held out, uint8, from other files."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held = b"".join(file.read_bytes() for file in files[::10])[:200_000]
    seen = b"".join(file.read_bytes() for number, file in enumerate(files) if number % 10)[:2_000_000]
    return torch.frombuffer(bytearray(seen), dtype=torch.uint8), torch.frombuffer(bytearray(held), dtype=torch.uint8)


def batch(text: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    windows = text[at.unsqueeze(1) + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, -1]


def train(make: Callable[[], Reducer], rate: float, momentum: float, steps: int = STEPS) -> tuple[float, float, float]:
    """Accuracy and loss (nats) on the held-out text, and compressed bytes in proportion to float32's."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50, 1.0 - step / steps))
    workers = Workers([make() for _ in range(WORLD)])
    for step in range(steps):
        workers.step(model, optimizer, step)
        schedule.step()
    return *_evaluate(model), workers.nbytes / (4 * steps * sum(parameter.numel() for parameter in model.parameters()))


def together(name: str, options: Mapping[str, Any], steps: int) -> Model:
    """The model after so many steps at a constant rate."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    workers = Workers([create(name, **options) for _ in range(WORLD)])
    for step in range(steps):
        workers.step(model, optimizer, step)
    return model


class Workers:
    """All workers of a job, one after the other; their replicas are equal, so there is one."""

    def __init__(self, methods: list[Reducer]) -> None:
        self._methods = methods
        self._sources = [torch.Generator().manual_seed(rank) for rank in range(len(methods))]
        self.nbytes = 0  # that the first has handed to collectives

    def step(self, model: Model, optimizer: torch.optim.Optimizer, step: int) -> None:
        exchanges = []
        for rank, (method, source) in enumerate(zip(self._methods, self._sources, strict=True)):
            turn = Turn(step=step, rank=rank, world=len(self._methods), lr=optimizer.param_groups[0]["lr"])
            exchange = method.exchange(Bundle.of(gradients(model, source), method.align), turn)
            exchanges.append(exchange if rank else self._counted(exchange))
        means = simulate(exchanges)[0].tensors()
        for name, parameter in model.named_parameters():
            parameter.grad = means[name]
        optimizer.step()

    def _counted(self, exchange: Exchange) -> Exchange:
        request = next(exchange)
        while True:
            self.nbytes += request.tensor.nbytes
            try:
                request = exchange.send((yield request))
            except StopIteration as done:
                bundle: Bundle = done.value
                return bundle


def gradients(model: Model, source: torch.Generator) -> dict[str, Tensor]:
    """The gradients of one worker's next batch."""
    text, _ = texts()
    context, following = batch(text, torch.randint(len(text) - CONTEXT, (BATCH,), generator=source))
    loss = F.cross_entropy(model(context), following)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@torch.no_grad()
def _evaluate(model: Model) -> tuple[float, float]:
    _, text = texts()
    context, following = batch(text, torch.arange(0, len(text) - CONTEXT, 7))
    logits = model(context)
    return float((logits.argmax(1) == following).float().mean()), float(F.cross_entropy(logits, following))


def measure(run: Run, steps: int) -> list[str]:
    """One row of the table."""
    accuracy, loss, part = train(lambda: create(run.method, **run.options), run.rate, run.momentum, steps)
    bare = "-"
    if run.bare is not None:
        options = {**run.options, **run.bare}
        bare = f"{train(lambda: create(run.method, **options), run.rate, run.momentum, steps)[0]:.3f}"
    return [run.label, f"{run.rate:g}, {run.momentum:g}", f"{100 * part:.3g} %", f"{accuracy:.3f}", f"{loss:.2f}", bare]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", help="only these")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--write", action="store_true", help="put the table into docs/compression.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for run in RUNS:
        if arguments.methods and run.method not in arguments.methods:
            continue
        rows.append(measure(run, arguments.steps))
        print(" | ".join(rows[-1]), flush=True)
    table = common.table(["method", "rate, momentum", "bytes", "accuracy", "loss", "accuracy without error feedback"], rows)
    if arguments.write:
        note = f"Python {platform.python_version()}, torch {torch.__version__}, {arguments.steps} steps."
        text = re.sub(
            r"(<!-- convergence -->\n).*?(<!-- /convergence -->)", rf"\g<1>{note}\n\n{table}\n\g<2>", PAGE.read_text(), flags=re.DOTALL
        )
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
