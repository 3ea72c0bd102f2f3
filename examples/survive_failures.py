"""A training job is killed three ways and must end with the very bits of an undisturbed run. `make demo` runs this.

    python examples/survive_failures.py

examples/train_gpt.py runs on four hosts, emulated as processes of this machine, with two copies of every shard of its
state, and a spare host waits. A worker is killed; then a whole host, which the spare replaces, with nothing in its memory;
then both hosts that hold the copies of a shard, so that only the last checkpoint in storage is left. The undisturbed run is
beside it, with less of the processors. What is shown comes from the job's own events. All hosts are forked from one process
that has imported torch and Lightning, as the tests' are; with --cold each imports them for itself, as on machines of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1] / "tests" / "kit"))
from warm_python import launchers

from gemini_ft.hosts import is_readable

if TYPE_CHECKING:  # torch takes seconds to import: it is imported where it is needed, after the first line
    import torch

    from gemini_ft.testing import EmulatedHosts

TRAIN = str(Path(__file__).with_name("train_gpt.py"))
HOSTS = 4
SOURCES = ("own memory", "peers", "storage")


# -- the drill --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drill:
    """A training, and the faults that are injected into it."""

    steps: int
    size: Sequence[str]  # of the model: arguments of train_gpt.py
    imports = "lightning"
    note = "under DDP each rank owns a quarter of the state and reads all of it."

    @property
    def faults(self) -> dict[str, str]:
        """The victim of each fault, in words -> the fault as GEMINI_FAULTS has it."""
        return {
            "a worker": f"step={self.steps // 4}:rank=1:sigkill",
            "a host": f"step={self.steps // 2}:host=2:kill",
            "a group": f"step={self.steps * 5 // 6}:group=0:kill",
        }

    def program(self, strategy: str, out: Path) -> list[str]:
        return [TRAIN, "--quiet", f"--steps={self.steps}", *self.size, f"--strategy={strategy}", f"--out={out}"]

    @contextmanager
    def undisturbed(self, folder: Path) -> Iterator[EmulatedHosts]:
        """Train without gemini-ft, on one host that nothing happens to; what is measured beside it goes first."""
        from gemini_ft.testing import EmulatedHosts

        with EmulatedHosts(1, self.program("ddp", folder / "final.ckpt"), folder, workers=HOSTS) as hosts:
            launcher = hosts.launcher_pid("host0")
            hosts.wait_for(lambda: os.getpgid(launcher) == launcher)  # leads the group of what it will start
            os.setpriority(os.PRIO_PGRP, launcher, 10)
            yield hosts

    def disturbed(self, folder: Path, display: Display) -> list[Recovery]:
        """Train with it while hosts and workers are lost; returns what it took."""
        from gemini_ft.testing import EmulatedHosts

        storage = {"url": (folder / "storage").as_uri(), "every_steps": self.steps // 8}
        env = {"GEMINI_REPLICAS": "2", "GEMINI_STORAGE": json.dumps(storage), "GEMINI_FAULTS": ";".join(self.faults.values())}
        watch = ProcessWatch()
        with EmulatedHosts(HOSTS, self.program("gemini", folder / "final.ckpt"), folder, env=env) as hosts:
            display.say(f"{HOSTS} hosts start, and {hosts.add()} as a spare")
            gone: set[str] = set()
            while hosts.alive:
                for host in set(hosts.lost) - gone:
                    gone.add(host)
                    needed = HOSTS + (len(gone) == 1)  # with a spare for the next loss
                    display.say(f"{host} is gone" + (f"; {hosts.add()} starts" if len(hosts.alive) < needed else ""))
                events = hosts.events()
                watch.look(event["pid"] for event in events if event["event"] == "joined")
                display.show(events, hosts.lost)
                time.sleep(0.05)
            hosts.finish()
            events = hosts.events()
            display.show(events, hosts.lost)
        return [recovery(what, fault, events, watch.gone) for what, fault in self.faults.items()]


class ProcessWatch:
    """Notes when processes end, though they are not our children."""

    def __init__(self) -> None:
        self.gone: dict[int, float] = {}  # pid -> when it ended
        self._running: dict[int, int] = {}  # pidfd -> pid

    def look(self, pids: Iterable[int]) -> None:
        for pid in set(pids) - set(self._running.values()) - self.gone.keys():
            try:
                self._running[os.pidfd_open(pid)] = pid
            except ProcessLookupError:
                self.gone[pid] = time.time()
        for pidfd in [one for one in self._running if is_readable(one)]:
            self.gone[self._running.pop(pidfd)] = time.time()
            os.close(pidfd)


# -- what it took -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recovery:
    """One failure and the way back; seconds from the failure on."""

    failure: str
    step: int
    detected: float  # all workers that the failure has left over have been stopped
    resumed_at: int
    sources: Mapping[str, int]  # of SOURCES -> bytes, all ranks together
    reading: float  # seconds the slowest rank took to read them
    next_step: float  # all ranks have completed a step again

    @property
    def lost(self) -> int:
        return self.step - self.resumed_at


def recovery(failure: str, fault: str, events: Sequence[Mapping[str, Any]], gone: Mapping[int, float]) -> Recovery:
    """Put together what the events say of one fault."""
    first = next(index for index, event in enumerate(events) if event.get("fault") == fault)
    at, step = events[first]["at"], events[first]["iteration"]
    old = _incarnation(events[:first], -1)
    later = [event for event in events[first:] if event.get("fault") in (None, fault)]
    new = _incarnation(later, 0)
    steps = [next(e["at"] for e in later if e["event"] == "step" and e["pid"] == pid) for pid in new]
    resumed = [event for event in later if event["event"] == "resumed" and event["pid"] in new]
    sources = dict.fromkeys(SOURCES, 0)
    for event in resumed:
        for where, nbytes in event["sources"].items():
            sources["peers" if where.startswith("peer ") or where == "other ranks" else where] += nbytes
    return Recovery(
        failure,
        step,
        max(gone[pid] for pid in old) - at,
        resumed[0]["iteration"],
        sources,
        max(event["seconds"] for event in resumed),
        max(steps) - at,
    )


def _incarnation(events: Sequence[Mapping[str, Any]], which: int) -> set[int]:
    """Processes of the first (0) or last (-1) attempt whose ranks have all joined and made a step."""
    stepped = {event["pid"] for event in events if event["event"] == "step"}
    attempts: dict[int, set[int]] = {}
    for event in events:
        if event["event"] == "joined":
            attempts.setdefault(event["incarnation"], set()).add(event["pid"])
    return [pids for _, pids in sorted(attempts.items()) if len(pids) == HOSTS and pids <= stepped][which]


# -- what is shown ----------------------------------------------------------------------------------------------------


@dataclass
class Display:
    """A bar per host, and a line for everything that happens; without a terminal, the lines only."""

    console: Console
    steps: int
    begin: float = field(default_factory=time.time)
    _seen: int = 0

    def __post_init__(self) -> None:
        columns = (
            TextColumn("{task.description:7}"),
            BarColumn(40),
            TextColumn("{task.completed:3.0f}/{task.total:.0f} {task.fields[state]}"),
        )
        self._bars = Progress(*columns, TimeElapsedColumn(), console=self.console)
        self._hosts: dict[str, Any] = {}

    def __enter__(self) -> Display:
        self._live = Live(Group(self._bars), console=self.console, transient=True)
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self.console.print(f"[dim]{time.time() - self.begin:6.1f} s[/dim]  {text}", highlight=False)

    def show(self, events: Sequence[Mapping[str, Any]], lost: Iterable[str]) -> None:
        """Take in the events that are new, and which hosts are gone."""
        for event in events[self._seen :]:
            self._take(event)
        self._seen = len(events)
        for host in self._hosts.keys() & set(lost):
            self._bars.update(self._hosts[host], state="[red]gone")

    def _take(self, event: Mapping[str, Any]) -> None:
        host, kind = event["host"], event["event"]
        if host not in self._hosts:
            self._hosts[host] = self._bars.add_task(host, total=self.steps, state="")
        bar = self._hosts[host]
        if kind == "step":
            self._bars.update(bar, completed=event["iteration"], state=f"[green]rank {event['rank']}")
        elif kind == "fault":
            self.say(f"[bold red]step {event['iteration']}: {event['fault']}[/bold red] (on {host})")
        elif kind == "joined":
            self._bars.update(bar, completed=event["iteration"], state="[yellow]has joined")
            if event["rank"] == 0:
                origin = {"memory": "from memory", "storage": "from storage", "nothing": "from the beginning"}[event["resuming"]]
                self.say(f"attempt {event['incarnation']} on {', '.join(event['hosts'])}: at step {event['iteration']}, {origin}")
        elif kind == "left" and event["finished"]:
            self._bars.update(bar, completed=self.steps, state="[green]done")
        elif kind == "left":
            self._bars.update(bar, state="[yellow]its worker has stopped")


def table_of(recoveries: Sequence[Recovery], note: str) -> Table:
    caption = "Detected: the workers that were left over have been stopped. Bytes: of all ranks together;\n"
    table = Table(title="What it took", caption=caption + note)
    table.add_column("killed")
    for column in (
        "at\nstep",
        "detected\nafter",
        *(f"from\n{source}" for source in SOURCES),
        "read\nin",
        "resumed\nat step",
        "steps\nlost",
    ):
        table.add_column(column, justify="right")
    table.add_column("next step\nafter", justify="right", style="bold")
    for row in recoveries:
        sizes = [f"{row.sources[source] / 1e6:.1f} MB" if row.sources[source] else "-" for source in SOURCES]
        numbers = [f"{row.reading:.2f} s", str(row.resumed_at), str(row.lost), f"{row.next_step:.1f} s"]
        table.add_row(row.failure, str(row.step), f"{row.detected:.1f} s", *sizes, *numbers)
    return table


def compare(console: Console, one: Path, other: Path) -> bool:
    """Compare all weights and all optimizer state of two checkpoints, to the last bit."""
    import torch

    from gemini_ft.testing import digest, first_difference

    states = [torch.load(path, weights_only=False) for path in (one, other)]
    table = Table(title="Every bit", caption="SHA-256 over names, shapes, types and bytes")
    for column in ("", "tensors", "bytes", "undisturbed", "after all this"):
        table.add_column(column, justify="right" if column in ("tensors", "bytes") else "left")
    for name, key in (("weights", "state_dict"), ("optimizer", "optimizer_states"), ("learning rates", "lr_schedulers")):
        tensors = list(_tensors(states[0][key]))
        hexes = [f"0x{digest(state[key])[:24]}..." for state in states]
        table.add_row(name, str(len(tensors)), f"{sum(t.nbytes for t in tensors):,}", *hexes)
    console.print(table)
    keys = ("global_step", "state_dict", "optimizer_states", "lr_schedulers")
    difference = first_difference(*({key: state[key] for key in keys} for state in states))
    console.print(f"[bold red]DIFFERENT: {difference}" if difference else "[bold green]IDENTICAL: not one bit differs", highlight=False)
    return difference is None


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def main(quick: Drill, full: Drill, description: str | None = __doc__) -> int:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
    parser.add_argument("--cold", action="store_true", help="every host imports torch anew: longer, as on machines of their own")
    parser.add_argument("--folder", type=Path, help="keep logs, events and checkpoints there (default: a temporary folder)")
    parser.add_argument("--svg", type=Path, help="draw there what was printed")
    arguments = parser.parse_args()
    drill = quick if arguments.quick else full
    console = Console(record=arguments.svg is not None)
    console.width = max(console.width, 110)  # of the last table
    with ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gemini-demo-")))
        for name in ("undisturbed", "disturbed"):
            (folder / name).mkdir(parents=True)
        display = Display(console, drill.steps)
        display.say(f"{HOSTS} emulated hosts are to train for {drill.steps} steps; beside them an undisturbed run, to compare with")
        display.say(f"importing torch and {drill.imports}" + (", every host for itself" if arguments.cold else ", once for all hosts"))
        stack.enter_context(launchers(drill.imports, forked=not arguments.cold))
        with drill.undisturbed(folder / "undisturbed") as undisturbed:
            with display:
                recoveries = drill.disturbed(folder / "disturbed", display)
            console.print(table_of(recoveries, drill.note))
            with console.status("the undisturbed run is still training"):
                undisturbed.finish()
        same = compare(console, folder / "undisturbed" / "final.ckpt", folder / "disturbed" / "final.ckpt")
    console.print(f"{time.time() - display.begin:.0f} s in all")
    if arguments.svg is not None:
        console.save_svg(str(arguments.svg), title="make demo")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(Drill(24, ["--width=64", "--layers=2"]), Drill(32, ["--width=256", "--layers=4"])))
