"""The training job that recovery_time.py kills. It writes down when it reaches each phase; run it by torchrun or `gemini run`.

The model is the same in all jobs: data parallel, `--megabytes` of weights and Adam's moments, equal on all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.parallel import DistributedDataParallel

from lightning_load import Inputs, LightningLoad, quiet
from load import Load

TOKENS = 128
STEPS = 100_000  # it is killed long before


class Log:
    """Appends one line of JSON per event to a file that all ranks of all attempts share."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._attempts = 0  # that this process has begun

    def started(self) -> None:
        """An attempt begins, in a process made for it or in one that has stayed."""
        self._attempts += 1
        at = created() if self._attempts == 1 else time.monotonic()
        self.write("started", created=at, host=os.environ.get("GEMINI_HOST_ID", ""), world=int(os.environ["WORLD_SIZE"]))

    def write(self, event: str, **more: Any) -> None:
        who = {"pid": os.getpid(), "life": f"{os.getpid()}.{self._attempts}", "rank": int(os.environ["RANK"])}
        line = {"event": event, "at": time.monotonic(), **who, **more}
        os.write(self._file, (json.dumps(line) + "\n").encode())


def created() -> float:
    """Monotonic time at which this process came to be, to 10 ms: the fork, where a fork server made it."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return since_boot + time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)


class Reporting(LightningLoad):
    """The load as a LightningModule that reports its phases."""

    def __init__(self, megabytes: int, log: Log) -> None:
        super().__init__(megabytes * 10**6)
        self._log_file = log
        log.write("model")

    def setup(self, stage: str) -> None:
        self._log_file.write("group")  # Lightning has made the process group just before

    def on_train_start(self) -> None:
        self._log_file.write("restored", step=self.global_step)  # and has restored everything by now

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self._log_file.write("forward")

    def on_after_backward(self) -> None:
        self._log_file.write("backward")

    def optimizer_step(self, *arguments: Any, **named: Any) -> None:
        super().optimizer_step(*arguments, **named)
        self._log_file.write("step", step=self.global_step + 1)  # Lightning counts it after this hook


def lightning_job(arguments: argparse.Namespace, log: Log) -> None:
    """Lightning, with gemini-ft's strategy or with a checkpoint of every step on local disk."""
    gemini = arguments.keeper == "gemini"
    if gemini:
        import gemini_ft  # noqa: F401  registers the strategy
    every_step = ModelCheckpoint(arguments.folder, filename="{step}", every_n_train_steps=1, save_top_k=1, save_last="link")
    trainer = quiet(
        strategy="gemini" if gemini else "ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_steps=STEPS,
        callbacks=[] if gemini else [every_step],
        enable_checkpointing=not gemini,
    )
    trainer.fit(Reporting(arguments.megabytes, log), Inputs(STEPS, TOKENS).loader(), ckpt_path=None if gemini else "last")


class Files:
    """A file that rank 0 writes in place of the one before, after each ``every`` steps (0: never), and that all ranks load."""

    def __init__(self, load: Load, folder: Path, every: int) -> None:
        self._parts: dict[str, Any] = {"model": load.model, "optimizer": load.optimizer}
        self._path, self._every, self._made = folder / "state.pt", every, 0

    def resume(self) -> int:
        if self._path.exists():
            found = torch.load(self._path, mmap=True)
            for name, part in self._parts.items():
                part.load_state_dict(found[name])
            self._made = found["step"]
        return self._made

    def step(self) -> None:
        self._made += 1
        if self._every and self._made % self._every == 0 and dist.get_rank() == 0:
            self._path.parent.mkdir(exist_ok=True)
            new, parts = self._path.with_suffix(".new"), {name: part.state_dict() for name, part in self._parts.items()}
            torch.save({"step": self._made, **parts}, new)
            new.replace(self._path)


def plain_job(arguments: argparse.Namespace, log: Log) -> None:
    """A loop of one's own around gemini-ft's Checkpointer, or around files, from the beginning of an attempt."""
    import gemini_ft

    gemini = arguments.keeper == "gemini"
    log.started()
    told: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: told.append(number))
    make_group = gemini_ft.init_process_group if gemini else dist.init_process_group
    make_group("gloo", timeout=timedelta(seconds=60))
    log.write("group")
    load = Load(arguments.megabytes * 10**6, TOKENS, seed=0)
    log.write("model")
    model = DistributedDataParallel(load.model, init_sync=not gemini)  # the Checkpointer sends the weights, if there is nothing to resume
    log.write("wrapped")
    keeper: Any = Files(load, arguments.folder, arguments.every)
    if gemini:
        keeper = gemini_ft.Checkpointer(model, load.optimizer, init_sync=True)
    start = keeper.resume()
    log.write("restored", step=start)
    inputs = Inputs(STEPS, TOKENS)
    for step in range(start, STEPS):
        if told:
            raise RuntimeError(f"told to fail at {time.monotonic()}")
        loss = model(inputs[step])
        log.write("forward")
        loss.backward()
        log.write("backward")
        load.update()
        log.write("step", step=step + 1)
        keeper.step()


def torchft_job(arguments: argparse.Namespace, log: Log) -> None:
    """Two replicas of one rank each: the one that lives keeps its process, waits for the other, and sends it the state.

    A new quorum begins an attempt. Both take part in every step, as in the other jobs.
    """
    from torch._C._distributed_c10d import TCPStore
    from torchft import DistributedDataParallel as Replicated
    from torchft import Manager, Optimizer, ProcessGroupGloo

    os.environ.update(RANK=os.environ["GEMINI_HOST_ID"].removeprefix("host"), WORLD_SIZE="2")
    told: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: told.append(number))
    log.started()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    load = Load(arguments.megabytes * 10**6, TOKENS, seed=0)
    log.write("model")
    parts: dict[str, Any] = {"model": load.model, "optimizer": load.optimizer}
    patience = timedelta(seconds=60)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=patience),
        load_state_dict=lambda found: [part.load_state_dict(found[name]) for name, part in parts.items()],
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        min_replica_size=2,
        use_async_quorum=False,
        timeout=patience,
        quorum_timeout=patience,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=os.environ["GEMINI_HOST_ID"],
        hostname="127.0.0.1",
    )
    model, optimizer = Replicated(manager, load.model), Optimizer(manager, load.optimizer)
    inputs, quorum = Inputs(STEPS, TOKENS), -1
    while (step := manager.current_step()) < STEPS:
        if told:
            raise RuntimeError(f"told to fail at {time.monotonic()}")
        optimizer.zero_grad()  # asks for the quorum, and takes the state from the other one
        if manager._quorum_id != quorum:
            if quorum >= 0:
                log.started()
            quorum, step = manager._quorum_id, manager.current_step()
            log.write("group")
            log.write("restored", step=step)
        loss = model(inputs[step])
        log.write("forward")
        loss.backward()
        log.write("backward")
        optimizer.step()
        if manager.current_step() > step:
            log.write("step", step=step + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loop", choices=("plain", "lightning", "torchft", "nvrx"), required=True)
    parser.add_argument("--keeper", choices=("gemini", "lightning", "files"), required=True)
    parser.add_argument("--every", type=int, default=1, help="steps from one file to the next; 0: none")
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where Lightning's checkpoints go")
    arguments = parser.parse_args()
    log = Log(arguments.events)
    torch.set_num_threads(1)
    if arguments.loop == "plain":
        import gemini_ft

        gemini_ft.run(partial(plain_job, arguments, log))
    elif arguments.loop == "torchft":
        torchft_job(arguments, log)
    elif arguments.loop == "nvrx":
        from nvidia_resiliency_ext.inprocess import Wrapper

        Wrapper(store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 1})(partial(plain_job, arguments, log))()
    else:
        log.started()
        lightning_job(arguments, log)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
