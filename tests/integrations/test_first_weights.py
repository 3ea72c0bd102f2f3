"""What ranks send each other when DDP wraps the model: nothing that the snapshot is about to replace."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_kit import World
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import gemini_ft
from gemini_ft.errors import ConfigError, LayoutMismatchError, ReplicaDivergedError
from gemini_ft.testing import digest

LAUNCHED = {"TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


class Interrupted(Exception):
    """The end of an attempt."""


def fit(until: int, folder: str, ckpt_path: str | None = None) -> dict[str, Any]:
    """Whether DDP sent the weights round, and what they were before the first step and when a failure ended the attempt."""
    import lightning.pytorch as pl

    warnings.simplefilter("ignore")
    wrap, given, begun = DistributedDataParallel.__init__, list[bool](), list[str]()

    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        given.append(kwargs.get("init_sync", True))
        wrap(self, *args, **kwargs)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(int(os.environ["RANK"]) + os.getpid())  # no two are alike
            self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
            self.register_buffer("noise", torch.randn(5), persistent=False)

        def on_train_start(self) -> None:
            begun.append(self.now())  # not on the module, where a resume would put back what was there

        def now(self) -> str:
            return digest({**dict(self.named_parameters()), **dict(self.named_buffers())})

        def on_train_batch_start(self, batch: torch.Tensor, _: int) -> None:
            if self.global_step == until:  # before the forward pass, in which DDP gives all ranks the buffers of rank 0
                self.trainer.strategy.checkpointer.flush()
                raise Interrupted

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    module = Module()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="gemini", max_steps=20, default_root_dir=folder, **options)
    with contextlib.suppress(Interrupted):
        trainer.fit(module, DataLoader(torch.linspace(-1, 1, 1600).view(400, 4) ** 3, batch_size=2), ckpt_path=ckpt_path)
    if ckpt_path is None:
        trainer.save_checkpoint(f"{folder}/{until}.ckpt")
    return {"sent": given, "begin": begun[0], "end": module.now()}


def test_weights_that_are_about_to_be_restored_are_not_sent_first(tmp_path: Path) -> None:
    with World(tmp_path, hosts=["host0", "host0"], GEMINI_ON_LATE="wait", **LAUNCHED) as world:
        first = world.outcome(fit, 3, str(tmp_path))
        assert [said["sent"] for said in first] == [[True]] * 2
        assert first[0]["begin"] == first[1]["begin"]
        second = world.outcome(fit, 5, str(tmp_path))
        assert [said["sent"] for said in second] == [[False]] * 2
        assert [said["begin"] for said in second] == [said["end"] for said in first]  # buffers that are in no checkpoint, too
        newer = torch.load(tmp_path / "3.ckpt", weights_only=False) | {"global_step": 100}
        torch.save(newer, tmp_path / "newer.ckpt")
        third = world.outcome(fit, 6, str(tmp_path), f"{tmp_path}/newer.ckpt")
        assert [said["sent"] for said in third] == [[False]] * 2
        assert third[0]["begin"] == third[1]["begin"]  # the file lacks a buffer, which is sent after all
        assert third[0]["begin"] != second[0]["end"]


# -- loops of one's own


class Net(nn.Sequential):
    """No two processes make the same one."""

    def __init__(self) -> None:
        torch.manual_seed(int(os.environ["RANK"]) + os.getpid())
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.register_buffer("noise", torch.randn(5), persistent=False)

    def now(self) -> dict[str, str]:
        """Digests of parameters and of what DDP may leave to the ranks."""
        return {"parameters": digest(dict(self.named_parameters())), "noise": digest({"noise": self.noise})}


@contextlib.contextmanager
def counting() -> Iterator[list[int]]:
    """The sizes of tensors that the first rank sends to all."""
    sizes, send = list[int](), dist.broadcast

    def broadcast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return send(tensor, *args, **kwargs)

    dist.broadcast = broadcast
    try:
        yield sizes
    finally:
        dist.broadcast = send


def plain(until: int, broadcast_buffers: bool) -> dict[str, Any]:
    """Trains until a step and breaks off; returns the sizes of what was broadcast, and digests of the weights then and before."""
    gemini_ft.init_process_group("gloo")
    net = Net()
    model = DistributedDataParallel(net, init_sync=False, broadcast_buffers=broadcast_buffers)
    optimizer = torch.optim.Adam(net.parameters())
    checkpointer = gemini_ft.Checkpointer(model, optimizer, init_sync=True, on_late="wait")
    with counting() as sent:
        start = checkpointer.resume()
    begin = net.now()
    for step in range(start, until):
        model(torch.full((2, 4), step + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step()
    checkpointer.flush()
    return {"sent": sent, "start": start, "begin": begin, "end": net.now()}


def with_fabric(until: int, broadcast_buffers: bool) -> dict[str, Any]:
    """The same under Fabric."""
    from lightning.fabric import Fabric

    from gemini_ft.lightning import GeminiFabricStrategy

    strategy = GeminiFabricStrategy(init_sync=False, broadcast_buffers=broadcast_buffers, on_late="wait")
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with counting() as sent:
        fabric.load("gemini://latest", state)
    start, begin = state["step"], net.now()
    while state["step"] < until:
        state["step"] += 1
        fabric.backward(model(torch.full((2, 4), float(state["step"]))).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        fabric.save("gemini://latest", state)
    strategy.checkpointer.flush()
    return {"sent": sent, "start": start, "begin": begin, "end": net.now()}


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers.*:FutureWarning")
@pytest.mark.parametrize("broadcast_buffers", [True, False])
@pytest.mark.parametrize("job", [plain, with_fabric])
def test_a_wrapper_without_its_first_broadcast(tmp_path: Path, job: Callable[[int, bool], dict[str, Any]], broadcast_buffers: bool) -> None:
    """Ranks begin alike where there is nothing to resume; after a failure nothing is sent that is about to be replaced."""
    with World(tmp_path, hosts=["host0", "host0"], **LAUNCHED) as world:
        first = world.outcome(job, 3, broadcast_buffers)
        assert [said["start"] for said in first] == [0, 0], first
        assert [sum(said["sent"]) for said in first] == [4 * 8 + 3 * 8 + (22 if broadcast_buffers else 0)] * 2
        assert first[0]["begin"]["parameters"] == first[1]["begin"]["parameters"]
        assert (first[0]["begin"]["noise"] == first[1]["begin"]["noise"]) == broadcast_buffers
        second = world.outcome(job, 5, broadcast_buffers)
        assert [(said["start"], said["sent"]) for said in second] == [(3, [])] * 2
        assert [said["begin"] for said in second] == [said["end"] for said in first]


def saving_at_once(alike: bool) -> list[str]:
    """Saves twice under Fabric without a ``fabric.load`` before; returns the warnings about ``init_sync``."""
    from lightning.fabric import Fabric

    from gemini_ft.lightning import GeminiFabricStrategy

    fabric = Fabric(accelerator="cpu", devices=2, strategy=GeminiFabricStrategy(init_sync=False))
    fabric.launch()
    torch.manual_seed(0)
    net = nn.Linear(4, 8) if alike else Net()
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
    said = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gemini_ft").addHandler(handler)
    for step in range(2):
        fabric.save("gemini://latest", {"model": model, "optimizer": optimizer, "step": step})
    return [text for text in said if "init_sync" in text]


def test_a_loop_without_a_load_is_told_what_it_lacks(tmp_path: Path) -> None:
    """Once, where the ranks are alike all the same; else its first snapshot is refused."""
    with World(tmp_path, hosts=["host0", "host0"], **LAUNCHED) as world:
        for said in world.outcome(saving_at_once, True):
            assert len(said) == 1, said
            assert "rank 0's first weights were not sent to the other ranks. Call it before the loop" in said[0]
        for said in world.outcome(saving_at_once, False):
            assert isinstance(said, ReplicaDivergedError), said


def beside_an_average() -> list[str]:
    gemini_ft.init_process_group("gloo")
    net = Net()
    model = DistributedDataParallel(net, init_sync=False)
    average = torch.optim.swa_utils.AveragedModel(net)  # before anybody has been sent anything
    checkpointer = gemini_ft.Checkpointer({"model": model, "average": average}, torch.optim.Adam(net.parameters()), init_sync=True)
    checkpointer.resume()
    return [digest(dict(each.named_parameters())) for each in (net, average.module)]


def test_copies_of_the_model_are_sent_too(tmp_path: Path) -> None:
    with World(tmp_path, 2) as world:
        first, second = world.outcome(beside_an_average)
    assert first == second
    assert first[0] == first[1]


def wrapped_oddly(odd: str) -> None:
    """Rank 1 builds something else, or wraps nothing; or ranks are to differ."""
    gemini_ft.init_process_group("gloo")
    is_odd = os.environ["RANK"] == "1"
    net: nn.Module = nn.Linear(4, 3 if odd == "shape" and is_odd else 2)
    model = net if odd == "wrapper" and is_odd else DistributedDataParallel(net, init_sync=False)
    options = {"replicated": False} if odd == "replicated" else {"replicated": True}
    gemini_ft.Checkpointer(model, torch.optim.Adam(net.parameters()), init_sync=True, **options).resume()


@pytest.mark.parametrize(
    ("odd", "kind", "text"),
    [
        ("shape", LayoutMismatchError, "rank 1 has ('model.weight', (3, 4), 'torch.float32') where rank 0 has ('model.weight', (2, 4)"),
        ("wrapper", ConfigError, "init_sync=True, but no model is a DistributedDataParallel"),
        ("replicated", ConfigError, "init_sync=True is for ranks that hold the same"),
    ],
)
def test_ranks_that_cannot_be_made_alike_are_told_so(tmp_path: Path, odd: str, kind: type[Exception], text: str) -> None:
    with World(tmp_path, 2) as world:
        for said in world.outcome(wrapped_oddly, odd):
            assert isinstance(said, kind), said
            assert text in str(said)
