"""gemini-ft itself: every step into the host's agent and to the peer's, committed when both copies are verified."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist
from torch import nn

import common
import gemini_ft
from common import MARK
from gemini_ft.agent import lifecycle
from load import Load
from peers import Adapter

_PATIENCE = 60.0  # seconds
_POLICIES = {"normal": (os.SCHED_OTHER, 0), "nice": (os.SCHED_BATCH, 10), "idle": (os.SCHED_IDLE, 0)}


class Gemini(Adapter):
    """Two emulated hosts, two copies, TCP between the agents.

    Args:
        replicated: whether the ranks hold equal state, of which each then owns one half.
        encrypt: whether replicas are encrypted on their way.
        protected: False: the agents are those of `plain_agent`.
        modules: modules without parameters that the model is given, so that what is done for each module shows.
        policy: how agents and copying threads are scheduled, in place of SCHED_BATCH: a name in `_POLICIES`.
    """

    def __init__(
        self, replicated: bool = False, encrypt: bool = False, protected: bool = True, modules: int = 0, policy: str | None = None
    ) -> None:
        super().__init__()
        self._policy = policy
        self._replicated, self._encrypt, self._protected, self._modules = replicated, encrypt, protected, modules
        self._returned: dict[int, tuple[int, float]] = {}  # the benchmark's step -> our iteration, and when the call returned
        self._iteration = 0

    def setup(self, load: Load, folder: Path) -> None:
        os.environ |= {"GEMINI_HOST_ID": f"host{dist.get_rank()}", "GEMINI_RUN_ID": os.environ[MARK], "GEMINI_LOG_DIR": str(folder)}
        if not self._protected:
            _start_plain_agent(os.environ["GEMINI_RUN_ID"], os.environ["GEMINI_HOST_ID"])
        load.model.beside = nn.ModuleList(nn.LayerNorm(8, elementwise_affine=False) for _ in range(self._modules))
        self._checkpointer = gemini_ft.Checkpointer(
            load.model, load.optimizer, replicated=self._replicated, replicas=2, encrypt=self._encrypt
        )
        self._checkpointer.resume()
        if self._policy is not None:
            self._step()  # all threads are there
            _schedule(*_POLICIES[self._policy])

    def save(self, step: int) -> None:
        self._step()
        self._returned[step] = self._iteration, time.monotonic()

    def _step(self) -> None:
        self._checkpointer.step()
        self._iteration += 1

    def before_update(self) -> None:
        self._checkpointer.wait_before_update()

    def wait_complete(self) -> None:
        stats, until = self._checkpointer.stats, time.monotonic() + _PATIENCE
        while len(stats.commit_seconds) + stats.skipped < stats.snapshots:
            if time.monotonic() > until:
                raise TimeoutError(f"{stats.snapshots} snapshots, {len(stats.commit_seconds)} committed, {stats.skipped} skipped")
            time.sleep(0.001)
        for step, (iteration, returned) in self._returned.items():
            if iteration in stats.commit_seconds:
                self.completed[step] = returned + stats.commit_seconds[iteration]

    def close(self) -> None:
        self._checkpointer.close()


def _start_plain_agent(run: str, host: str) -> None:
    """The workers of this host find it and start no other."""
    program = Path(__file__).with_name("plain_agent.py")
    agent = subprocess.Popen([sys.executable, str(program), "--run", run, "--host", host], stdin=subprocess.DEVNULL, start_new_session=True)
    until = time.monotonic() + _PATIENCE
    while not lifecycle.is_listening(run, host):
        if agent.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the plain agent does not listen (status {agent.returncode})")
        time.sleep(0.01)


def _schedule(policy: int, nice: int) -> None:
    """Schedules this host's agent, and the thread of this process that copies."""
    agents = common.marked(os.environ[MARK], GEMINI_HOST_ID=os.environ["GEMINI_HOST_ID"])
    tasks = [int(task.name) for pid in agents for task in Path(f"/proc/{pid}/task").iterdir()]
    copying = [each.native_id for each in threading.enumerate() if each.name == "gemini-snapshot" and each.native_id is not None]
    if not tasks or not copying:
        raise RuntimeError(f"agents {agents}, copying threads {copying}: there must be some of both")
    for task in (*tasks, *copying):
        os.sched_setscheduler(task, policy, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, task, nice)
