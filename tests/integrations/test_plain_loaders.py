"""A plain loop over DataLoaders: plain DDP, undisturbed under gemini, and killed in the middle of an epoch, with the same bits."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import gemini_ft
from gemini_ft.agent.lifecycle import leave
from gemini_ft.errors import ConfigError
from gemini_ft.state.loop import LoopWatch

SCRIPT = """
import contextlib, itertools, os, pathlib, signal, sys
import torch
import gemini_ft
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

gemini_ft.init_process_group("gloo")
torch.set_num_threads(1)
rank = torch.distributed.get_rank()
data = TensorDataset(torch.arange(64.0).reshape(32, 2))

class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.rand(2) + index

def validations(kind):
    if kind != "validated":
        return []
    return [(DataLoader(Noise(), batch_size=4, num_workers=2, persistent_workers=True), 3), (DataLoader(Noise(), batch_size=16), None)]

def loader_of(kind):
    if kind == "shuffle":
        return DataLoader(data, batch_size=4, shuffle=True)
    if kind == "iterable":
        return [torch.full((4, 2), float(i)) for i in range(4)]
    if kind == "persistent":
        return DataLoader(Noise(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    if kind == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader
        return StatefulDataLoader(Noise(), batch_size=4, shuffle=True, num_workers=2)
    sampler = DistributedSampler(data, seed=3)
    return DataLoader(data, batch_size=4, sampler=sampler, num_workers=2 * (kind == "workers"))

def kill(kind, steps, kill_at, checkpointer):
    done = pathlib.Path(f"killed-{kind}-{steps}")
    if steps in kill_at and rank == 0 and not done.exists():
        done.touch()
        checkpointer.flush()
        os.kill(os.getpid(), signal.SIGKILL)

def end(kind, is_protected, model, *values):
    weights = [param.detach().double().sum().item().hex() for param in model.parameters()]
    path = pathlib.Path(f"end-{sys.argv[1]}-{rank}-{kind}-{'gemini' if is_protected else 'plain'}")
    path.write_text(f"{values} {weights} {torch.rand(()).item().hex()}")

def train_epochs(kind, is_protected, kill_at=()):
    "Calls step() once after each epoch, with the number of the next one; or, wrongly, with its own ('again')."
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader, beside = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=16)
    checkpointer, first, seen = None, 0, 0.0
    with contextlib.ExitStack() as stack:
        if is_protected:
            loader, beside = gemini_ft.resumable(loader), gemini_ft.resumable(beside)
            state = {"loader": loader, "validation": beside, "scheduler": scheduler}
            checkpointer = stack.enter_context(gemini_ft.Checkpointer(model, optimizer, state=state, name=kind, on_late="wait"))
            checkpointer.resume()
            first, seen = checkpointer.scalars.get("epoch", 0), checkpointer.scalars.get("seen", 0.0)
        for epoch in range(first, 3):
            for batch, in loader:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                seen = seen / 2 + batch.sum().item()
            scheduler.step()
            assert len(list(beside)) == 2
            if checkpointer is not None:
                checkpointer.step(epoch=epoch + (kind == "epochs"), seen=seen)
                kill(kind, epoch, kill_at, checkpointer)
    end(kind, is_protected, model, seen, scheduler.get_last_lr())

def train(kind, is_protected, kill_at=()):
    if kind in ("epochs", "again"):
        return train_epochs(kind, is_protected, kill_at and [1])
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    forgotten = torch.optim.lr_scheduler.StepLR(optimizer, 100) if kind == "raw" else None
    loader, beside, epoch, checkpointer, steps, seen = loader_of(kind), validations(kind), 0, None, 0, 0.0
    with contextlib.ExitStack() as stack:
        if is_protected:
            loader = loader if kind == "raw" else gemini_ft.resumable(loader)
            state = {} if kind == "raw" else {"loader": loader}
            state |= {f"validation {number}": gemini_ft.resumable(one) for number, (one, _) in enumerate(beside)}
            checkpointer = gemini_ft.Checkpointer(model, optimizer, state=state, name=kind, on_late="wait")
            stack.enter_context(checkpointer)
            steps, epoch = checkpointer.resume(), checkpointer.scalars.get("epoch", 0)
            seen = checkpointer.scalars.get("seen", 0.0)
        for epoch in range(epoch, 3):
            if (set_epoch := getattr(getattr(loader, "sampler", None), "set_epoch", None)) is not None:
                set_epoch(10 + epoch)
            for batch in loader:
                loss = model(batch[0] if isinstance(batch, list) else batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                steps += 1
                if checkpointer is not None:
                    checkpointer.step(epoch=epoch, seen=seen)
                    kill(kind, steps, kill_at, checkpointer)
            for one, limit in beside:
                for batch in itertools.islice(one, limit):
                    seen = seen / 2 + batch.sum().item()
    end(kind, is_protected, model, steps, seen)

for kind in sys.argv[2].split(","):
    if sys.argv[1] == "undisturbed":
        train(kind, False)
        train(kind, True)
    else:
        train(kind, True, {"shuffle": [6, 8], "persistent": [10]}.get(kind, [6]))  # inside an epoch, and at its end
"""


def run(folder: Path, *arguments: str, status: int = 0) -> tuple[dict[tuple[str, str, str], str], str]:
    """The ends of all trainings of a job of the folder's train.py, by rank, kind and way; and its output."""
    ours = {"GEMINI_RUN_ID": f"loaders-{os.getpid()}-{folder.name}-{arguments[0]}", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gemini_ft.cli.main", "run", "--standalone", "--nproc-per-node", "2", "train.py", *arguments]
    environ = {**os.environ, "GEMINI_LOG_DIR": str(folder), **ours}
    done = subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    leave(ours["GEMINI_RUN_ID"])  # after a refusal the agent would keep the state for half an hour
    assert done.returncode == status, done.stdout
    ends = {tuple(path.name.split("-")[2:]): path.read_text() for path in folder.glob(f"end-{arguments[0]}-*")}
    return ends, done.stdout  # type: ignore[return-value]


@pytest.mark.taken_apart("loaders with workers")
@pytest.mark.parametrize(
    ("kinds", "named"),
    [
        (["shuffle", "sampler", "workers"], "raw"),
        (["iterable", "validated", "epochs"], "again"),
        (["persistent"] + ["stateful"] * (importlib.util.find_spec("torchdata") is not None), ""),
    ],
    ids=["places in an epoch", "other data", "workers that live on"],
)
def test_every_kind_of_loader_goes_on_with_the_same_bits_and_one_that_cannot_is_named(tmp_path: Path, kinds: list[str], named: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    raw, again = ["raw"] * (named == "raw"), ["again"] * (named == "again")
    with ThreadPoolExecutor() as threads:
        undisturbed = threads.submit(run, tmp_path, "undisturbed", ",".join([*raw, *kinds]))
        killed = threads.submit(run, tmp_path, "killed", ",".join([*kinds, *again]), status=70 if again else 0)
    expected, output = undisturbed.result()
    for rank in "01":
        for kind in [*kinds, *raw]:
            assert expected[rank, kind, "gemini"] == expected[rank, kind, "plain"], kind
    assert output.count("this loop iterates a DataLoader (of a TensorDataset) that is not in `state`") == len(raw)
    assert output.count("this script has a StepLR that is in no snapshot") == len(raw)
    found, output = killed.result()
    resumed = [output.count(f"resuming at iteration {steps} ") for steps in (6, 8, 10)]
    assert resumed == [len({*kinds} - {"epochs", "persistent"}), "shuffle" in kinds, "persistent" in kinds], output
    assert ("by step(epoch=1), and the resumed loop has gone through that epoch again" in output) == bool(again)
    assert found == {place: end for place, end in expected.items() if place[2] == "gemini" and place[1] in kinds}


def test_a_plain_loader_in_state_is_refused_with_the_way_out() -> None:
    loader, model = DataLoader(TensorDataset(torch.ones(4, 2))), nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"state\['loader'\] is a DataLoader.*gemini_ft.resumable"):
        gemini_ft.Checkpointer(model, torch.optim.SGD(model.parameters()), state={"loader": loader})


def test_workers_of_an_iterator_that_is_freed_in_a_cycle_end_at_once() -> None:
    iterator = iter(gemini_ft.resumable(DataLoader(TensorDataset(torch.ones(8, 2)), num_workers=1)))
    next(iterator)
    (worker,) = multiprocessing.active_children()
    cycle: list[object] = [iterator]
    cycle.append(cycle)
    del iterator, cycle
    gc.collect()
    worker.join(30)
    assert worker.exitcode == 0  # torch waits 5 s for a worker that it cannot reach, and kills it


@pytest.mark.parametrize("how", ["nested", "in turns", "in a thread"])
def test_batches_that_an_outer_loop_or_a_thread_has_taken_are_named_at_the_first_step(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """The outer loop's batch is at hand while an inner one goes through another loader; a thread has asked for the next one already."""
    loader, beside = (gemini_ft.resumable(DataLoader(torch.arange(8.0), 2)) for _ in range(2))  # type: ignore[arg-type]
    state = {"loader": loader, "beside": beside}
    watch = LoopWatch(state.values(), has_resumed=False)
    with caplog.at_level("WARNING", "gemini_ft"), ThreadPoolExecutor(1) as thread:
        if how == "in a thread":
            batches = iter(loader)
            thread.submit(next, batches).result()
            watch.look([], state, [])
        elif how == "nested":
            for batch in loader:
                for other in beside:
                    watch.look([], state, [], iteration=int(other.sum() + batch.sum()))
        else:
            for batch in loader:
                watch.look([], state, [], iteration=int(batch.sum()))
            for batch in beside:
                watch.look([], state, [], iteration=int(batch.sum()))
    assert ("takes batches of a loader in `state` that later steps use" in caplog.text) is (how != "in turns")


@pytest.mark.parametrize("is_seeded", [True, False], ids=["seeded", "of the process"])
def test_a_loader_is_named_whose_iterations_draw_from_the_process_though_its_order_does_not(
    is_seeded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop that leaves out the batches of its epoch by itself makes another iteration after a failure, and with it another draw."""
    data = TensorDataset(torch.arange(8.0))
    order = RandomSampler(data, generator=torch.Generator())
    loader = DataLoader(data, 2, sampler=order, generator=torch.Generator() if is_seeded else None)
    with caplog.at_level("WARNING", "gemini_ft"):
        for _ in loader:
            LoopWatch().look([], {}, [])
            break
    assert ("this loop iterates a DataLoader (of a TensorDataset) that is not in `state`" in caplog.text) is not is_seeded
