"""One script three ways: under torchrun with plain DDP, with gemini undisturbed, and with gemini and ranks that are killed.

The script trains one cell after the other, each in a folder of its own, and writes down there, by `Record`, whatever it computes.
`run` starts it one of the three ways, and `differing` compares what it has written down.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

STACKS = signal.SIGUSR2  # on which a rank, and each process of a loader that it has forked, prints the stacks of all its threads
WAYS = {  # way -> (launcher, the Trainer's strategy, whether ranks are killed)
    "ddp": ("torch.distributed.run", "ddp", False),
    "undisturbed": ("gemini_ft.cli.main", "gemini", False),
    "killed": ("gemini_ft.cli.main", "gemini", True),
}


@dataclass
class Cell:
    """One training: the script's options for it, and moments at which a rank is killed, as "rank:" and what it has `Record.reached`."""

    options: dict[str, Any] = field(default_factory=dict)
    kills: list[str] = field(default_factory=list)


class Record:
    """A rank's side: writes values down as lines of JSON, and kills this process where the cell says so, once each."""

    def __init__(self, folder: Path, kills: list[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        faulthandler.register(STACKS)
        self._rank, self._folder, self._kills = os.environ["RANK"], folder, kills
        self._life = len(list(folder.glob(f"life-{self._rank}-*")))
        (folder / f"life-{self._rank}-{self._life}").touch()

    def note(self, key: str, *values: Any) -> None:
        with open(self._folder / f"rank-{self._rank}", "a") as file:
            file.write(json.dumps([self._life, key, [_plain(value) for value in values]]) + "\n")

    def state(self, key: str, state: Any) -> None:
        """Notes every leaf of nested containers under a key of its own, so that a difference names itself."""
        for path, leaf in _leaves(state, key):
            self.note(path, leaf)

    def reached(self, *moment: object) -> None:
        kill = ":".join(map(str, (self._rank, *moment)))
        if kill in self._kills and not (marker := self._folder / f"killed-{kill}").exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def run(script: Path, way: str, *, folder: Path, cells: Mapping[str, Cell], ranks: int = 2, timeout: float = 300) -> None:
    """Runs ``script FOLDER STRATEGY {cell: [options, kills]}`` one way.

    Args:
        script: trains the cells in their order, in subfolders of the given folder that have their names.
        way: of `WAYS`.
        folder: for this way.
        cells: name -> cell.
        ranks: number of ranks.
        timeout: seconds.
    """
    launcher, strategy, disturbed = WAYS[way]
    jobs = {name: [cell.options, cell.kills if disturbed else []] for name, cell in cells.items()}
    restarts = sum(len(kills) for _, kills in jobs.values())
    command = [sys.executable, "-m", launcher, *(["run"] if launcher.startswith("gemini") else [])]
    command += ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", str(script)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GEMINI_")}
    environment |= {"OMP_NUM_THREADS": "1", "GEMINI_RUN_ID": f"{os.getpid()}-{folder.name}-{way}", "GEMINI_LINGER": "60"}
    # Steps take milliseconds, less than a commit does; and fits that are over begin anew after each kill of a later one.
    environment |= {"GEMINI_ON_LATE": "wait", "GEMINI_MAX_RETRIES": "50"}
    with open(folder / "output", "w") as output:
        arguments = [str(folder), strategy, json.dumps(jobs)]
        with subprocess.Popen([*command, *arguments], env=environment, cwd=folder, stdout=output, stderr=output) as job:
            try:
                status: object = job.wait(timeout)
            except subprocess.TimeoutExpired:
                status = f"no end within {timeout:g} s; {_shown_stacks(job.pid)}"
                job.kill()
    assert status == 0, f"{way}: {status}\n" + (folder / "output").read_text()[-12000:]


def _shown_stacks(pid: int) -> str:
    """Has all processes of a job that hangs print their stacks; returns which processes there are."""
    there = [each for each in psutil.Process(pid).children(recursive=True) if each.is_running()]
    listening = [each for each in there if _handles(each.pid, STACKS)]
    for each in listening:
        each.send_signal(STACKS)
        time.sleep(0.5)  # so that their texts do not mix
    return ", ".join(f"{each.pid} {each.status()} {' '.join(each.cmdline())[:60]}" for each in there)


def _handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
    return bool(caught >> (number - 1) & 1)


def run_side_by_side(script: Path, folder: Path, cells: Mapping[str, Cell], ranks: int = 2) -> dict[str, Path]:
    """Runs the script all ways at once, since ranks mostly wait for each other; returns their folders, which are inside the given one."""
    folders = {way: folder / way for way in WAYS}
    with ThreadPoolExecutor() as threads:
        for each in folders.values():
            each.mkdir()
        list(threads.map(lambda way: run(script, way, folder=folders[way], cells=cells, ranks=ranks), WAYS))
    return folders


def differing(folders: Mapping[str, Path], name: str, cell: Cell, ranks: int = 2) -> list[str]:
    """Names what each way of a cell has recorded otherwise than plain DDP did, and what it has recorded in two versions."""
    found = [f"{kill} did not happen" for kill in cell.kills if not (folders["killed"] / name / f"killed-{kill}").exists()]
    for rank in range(ranks):
        plain, _ = recorded(folders["ddp"] / name / f"rank-{rank}")
        for way in ("undisturbed", "killed"):
            values, repeated = recorded(folders[way] / name / f"rank-{rank}")
            found += [f"{way}, rank {rank}: {text}" for text in repeated]
            for key in {**plain, **values}:
                if plain.get(key) != values.get(key):
                    found.append(f"{way}, rank {rank}: {key} is {values.get(key)} in place of {plain.get(key)}")
    return found


def recorded(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Key -> value, and what was written down again otherwise. Keys that begin with "end" say how things ended: the last one counts."""
    values: dict[str, Any] = {}
    repeated = []
    for line in path.read_text().splitlines():
        life, key, value = json.loads(line)
        if values.get(key, value) != value and not key.startswith("end"):
            repeated.append(f"{key} was {values[key]} and is {value} in life {life}")
        values[key] = value
    return values, repeated


def _leaves(state: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict) and state:
        for key, value in state.items():
            yield from _leaves(value, f"{path}/{key}")
    elif isinstance(state, (list, tuple)) and state:
        for index, value in enumerate(state):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, state


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().double().flatten().tolist()
        return [number.hex() for number in flat] if len(flat) <= 8 else hashlib.sha256(np.asarray(flat).tobytes()).hexdigest()[:16]
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in sorted(value.items(), key=repr)}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value if isinstance(value, (str, int, bool, type(None))) else repr(value)
