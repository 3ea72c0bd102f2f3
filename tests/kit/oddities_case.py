"""The training loops that the ranks of test_plain_oddities.py run: their layout, flags and optimizers change while they train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from capture_kit import SAM
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.utils._pytree import tree_map_only

import gemini_ft
from gemini_ft.errors import ReplicaDivergedError, StateError, UnsupportedStateError
from gemini_ft.state.rebuilding import Changes
from gemini_ft.testing import digest

STEPS = 14


class Net(nn.Module):
    """A model with a backbone that is frozen at first, an embedding that writes its weight in forward, and a buffer that grows."""

    seen: torch.Tensor

    def __init__(self, max_norm: float | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, max_norm=max_norm)
        self.backbone = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)
        self.extra: nn.Module = nn.Identity()
        self.scale = 1.0
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(torch.tanh(self.backbone(self.embed(x))))
        if self.training:
            self.seen = torch.cat([self.seen, out.detach().mean().view(1)])[-6:]
        return self.extra(self.head(out + self.seen.sum() * 1e-2)) * self.scale  # type: ignore[no-any-return]


def train(what: str, out: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train to the end; each iteration's loss goes to the file ``<out>.<rank>``, in hex."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        gemini_ft.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net(1.0 if what == "everything" else None)
    model: nn.Module = net
    if what == "sharded":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (net.backbone, net.head, net):
            fully_shard(part, mesh=mesh)
        torch.manual_seed(dist.get_rank())
    elif dist.is_initialized():
        net.backbone.requires_grad_(True)  # DDP sorts its parameters when it is made
        model = wrapper = DistributedDataParallel(net)
        if what == "local":
            state: Any = post_localSGD_hook.PostLocalSGDState(None, None, 1)  # type: ignore[no-untyped-call]
            wrapper.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        else:
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
            wrapper.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizers: list[Any] = [torch.optim.Adam(net.parameters(), lr=0.02)]
    if model is net:
        sharp = SAM([*net.embed.parameters(), *net.norm.parameters()], torch.optim.Adam, lr=0.02)
        optimizers = [sharp, torch.optim.SGD(net.head.parameters(), 0.1, 0.9)]

    def rebuild(changes: Changes) -> None:
        if "model.extra.weight" in changes.tensors:
            _grow(net, optimizers)

    checkpointer = gemini_ft.Checkpointer(model, optimizers, on_late="wait", rebuild=rebuild if what == "everything" else None, **options)
    start = checkpointer.resume()
    with open(f"{out}.{os.environ['RANK']}", "a", buffering=1) as trace:
        for iteration in range(start, STEPS):
            if model is net:
                _change(net, optimizers, iteration)
            x = torch.randint(12, (6,))

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                loss: torch.Tensor = model(x).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            loss = closure()
            optimizers[0].step(closure)
            optimizers[0].zero_grad()
            if len(optimizers) > 1 and iteration % 3 == 2:
                optimizers[1].step()
                optimizers[1].zero_grad()
            trace.write(f"{iteration} {float(loss).hex()}\n")
            checkpointer.step()
    checkpointer.close()
    final = {"model": net.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    final = tree_map_only(DTensor, DTensor.to_local, final)
    return {"start": start, "state": digest(final), "frozen": [name for name, p in net.named_parameters() if not p.requires_grad]}


def _change(net: Net, optimizers: list[Any], iteration: int) -> None:
    """Makes the changes that a loop makes once, and not again after a restart."""
    if iteration == 4:
        net.backbone.requires_grad_(True)
        optimizers[1].add_param_group({"params": list(net.backbone.parameters()), "lr": 0.05})
        net.norm.eval()
    if iteration == 6:
        net.scale = 0.5
        if not dist.is_initialized():
            prune.l1_unstructured(net.head, "weight", amount=4)  # type: ignore[no-untyped-call]
    if iteration == 8 and not dist.is_initialized():
        _grow(net, optimizers)


def _grow(net: Net, optimizers: list[Any]) -> None:
    """Appends a layer, which nobody but the script can build."""
    net.extra = nn.Linear(4, 4)
    optimizers[1].add_param_group({"params": list(net.extra.parameters()), "lr": 0.01})


def stranger(out: str) -> str:
    """Steps with an optimizer that the Checkpointer was not given; returns the error."""
    net = nn.Linear(2, 2)
    checkpointer = gemini_ft.Checkpointer(net, torch.optim.SGD(net.parameters(), 0.1))
    checkpointer.resume()
    other = torch.optim.Adam(net.parameters())
    net(torch.ones(2)).sum().backward()
    other.step()
    try:
        checkpointer.step()
    except StateError as error:
        Path(out).write_text(str(error))
    checkpointer.close()
    return Path(out).read_text()


def unfreezing() -> dict[str, list[str]]:
    """The errors of each loop that unfreezes a layer: one that was frozen when DDP wrapped the model, and one frozen after that."""
    gemini_ft.init_process_group("gloo")
    loops = {"plain": _unfreeze_in_a_loop, "fabric": _unfreeze_in_fabric, "trainer": _unfreeze_in_the_trainer}
    errors: dict[str, list[str]] = {kind: [] for kind in loops}
    for kind, loop in loops.items():
        for early in (True, False):
            try:
                loop(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), early)
                errors[kind].append("")
            except UnsupportedStateError as error:
                errors[kind].append(str(error))
    return errors


def renormalised(is_by_rank: bool) -> str:
    """The error of a loop whose embedding writes the rows that a rank looks up; ``is_by_rank``: whether each rank looks up others."""
    gemini_ft.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Embedding(8, 4, max_norm=0.1))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    try:
        with gemini_ft.Checkpointer(model, optimizer, name=f"by-rank-{is_by_rank}", on_late="wait") as checkpointer:
            checkpointer.resume()
            for step in range(8):  # the first one, after which ranks are compared in any case, leaves the rows of all ranks alike
                rows = torch.arange(4) + 4 * (dist.get_rank() if is_by_rank and step else 0)
                model(torch.arange(8) if step == 0 else rows).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()
    except (ReplicaDivergedError, RuntimeError) as error:  # the other rank may have left the collective first
        return str(error)
    return ""


def _unfreeze(net: Any, step: int) -> None:
    net[0].requires_grad_(step > 1)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _unfreeze_in_a_loop(net: Any, early: bool) -> None:
    net[0].requires_grad_(not early)
    model, optimizer = DistributedDataParallel(net, find_unused_parameters=True), torch.optim.SGD(net.parameters(), 0.1)
    with gemini_ft.Checkpointer(model, optimizer, name=f"early-{early}") as checkpointer:
        checkpointer.resume()
        for step in range(4):
            _unfreeze(net, step)
            _train(model, optimizer)
            checkpointer.step()


def _unfreeze_in_fabric(net: Any, early: bool) -> None:
    from lightning.fabric import Fabric

    net[0].requires_grad_(not early)
    fabric = Fabric(strategy="gemini_find_unused_parameters_true", accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]))
    fabric.launch()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    state = {"model": model, "optimizer": optimizer}
    fabric.load("gemini://latest", state)
    for step in range(4):
        _unfreeze(net, step)
        _train(model, optimizer)
        fabric.save("gemini://latest", state)
    fabric.strategy.close()  # type: ignore[attr-defined]


def _unfreeze_in_the_trainer(net: Any, early: bool) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import BackboneFinetuning, Callback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = net[0], net[1]

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.head(self.backbone(batch)).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([param for param in self.parameters() if param.requires_grad], 0.1)

    class Later(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            module.backbone.requires_grad_(False)

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.backbone.requires_grad_(trainer.current_epoch > 1)

    trainer = Trainer(
        strategy="gemini_find_unused_parameters_true",
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=3,
        callbacks=[BackboneFinetuning(2, verbose=False) if early else Later()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data: Any = torch.randn(8, 4)
    trainer.fit(Module(), torch.utils.data.DataLoader(data, 2))
