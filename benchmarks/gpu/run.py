"""Everything that only a machine with an accelerator can show, in under ten minutes, most important first. `make gpu` runs this.

    python benchmarks/gpu/run.py [--out build/gpu] [--budget 540] [--kit build/gpu-kit] [part ...]

Needs no network: what the machine lacks comes from the folder of wheels that `make gpu-kit` has filled, and goes into a folder of its own.
Tests and drills run side by side, three on 16 cores; benchmarks follow, and run alone. After every part the report is written anew,
so that a run that was cut off still tells. GEMINI_FAKE_GPU=1 runs all of it on a CPU: tests marked `gpu` are skipped, gloo stands for NCCL,
benchmarks are tiny, and the report and the log say that they are fake.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import itertools
import lzma
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FAKE = os.environ.get("GEMINI_FAKE_GPU") == "1"
PACKAGES = ("torch", "triton", "lightning", "deepspeed")
CORES = 5  # for each of the parts that run side by side
TAIL = 6000  # characters of a part's output that the report has
_running: set[int] = set()  # sessions of the parts under way


@dataclass(frozen=True)
class Part:
    """One process, and how long it may take; one that measures has the machine to itself."""

    name: str
    what: str
    seconds: int
    command: list[str]
    measures: bool = False


def _tests(*names: str) -> list[str]:
    files = [str(file.relative_to(ROOT)) for name in names for file in ROOT.glob(f"tests/*/test_{name}.py")]
    return ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "--timeout", "60", *files]


def _here(script: str, *arguments: str) -> list[str]:
    return [f"benchmarks/gpu/{script}.py", *arguments]


OURS, THEIRS = "none gemini", "none gemini copies lm_resiliency async_save nvrx"
READS = "4GB_1rank_reads_loss"


def _overhead(name: str, what: str, seconds: int, rows: str, cells: str) -> Part:
    size = ["--tiny"] if FAKE else ["--quick", "--cells", *cells.split()]
    return Part(name, what, seconds, _here("overhead", *size, "--rows", *rows.split()), measures=True)


PARTS = [
    Part("order", "streams, pinned slots, GradScaler, torch.compile, fused and foreach optimizers", 120, _tests("gpu")),
    Part("lightning", "a Lightning job is killed and ends with the bits of an undisturbed one", 75, _here("drill", "lightning")),
    Part("deepspeed", "the same of a DeepSpeed job, ZeRO 2", 90, _here("drill", "deepspeed")),
    Part("fsdp2", "the same of FSDP2 with 2 ranks on one device", 75, _here("drill", "fsdp2")),
    Part("courier", "workers carry replicas over NCCL, two ranks on one device; a host is lost", 75, _here("drill", "courier")),
    Part("collectives", "pipelines and sparse schemes: NCCL alone, gloo with 2 ranks on one device", 60, _here("collectives")),
    Part(
        "state",
        "optimizer state, generators, codec and the fork server",
        75,
        _tests("state", "codec", "modes", "gradients", "forkserver", "espresso_executor"),
    ),
    Part(
        "kernels",
        "Zen's hashing, bit packing, top-k, thresholds and rounding against their references",
        75,
        _tests("sync_hashing", "compression_kernels"),
    ),
    _overhead(
        "overhead",
        "what a snapshot of every step costs a GPT",
        180,
        f"{OURS} gemini_profiled",
        f"{READS} 4GB_1rank_runs_ahead 16GB_1rank_reads_loss",
    ),
    _overhead("hosts", "the same with two ranks that are two hosts, with two copies", 90, OURS, "4GB_2ranks_reads_loss"),
    _overhead("peers", "the same at 4 and 1 GB, beside other packages", 110, THEIRS, f"{READS} 1GB_1rank_reads_loss"),
    Part("lanes", "GB/s and seconds per GB between two agents, 1 to 16 lanes", 75, ["benchmarks/lanes.py", "--quick"], measures=True),
    Part(
        "deeds", "seconds per GB of copy, hash, tag, and of both ends of a lane", 60, ["benchmarks/byte_costs.py", "--quick"], measures=True
    ),
    Part(
        "hashing", "how long grouping the indices of a gradient takes", 60, _here("hashing", *(["--quick"] if FAKE else [])), measures=True
    ),
]


@dataclass
class Result:
    part: Part
    verdict: str
    seconds: float = 0.0
    output: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--kit", type=Path, default=ROOT / "build" / "gpu-kit")
    parser.add_argument("--budget", type=float, default=540, help="seconds for all parts")
    parser.add_argument("parts", nargs="*", choices=[[], *(part.name for part in PARTS)], metavar="part")
    arguments = parser.parse_args()
    until, out = time.monotonic() + arguments.budget, arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    environment = _environment(_install(arguments.kit.resolve()), out)
    nccl = _nccl(arguments.kit.resolve())
    head, is_usable = _describe(environment)
    if not is_usable and not FAKE:
        sys.exit("there is no accelerator; GEMINI_FAKE_GPU=1 runs this on the CPU")
    log = out / "log.txt"
    log.write_text(head)
    results = [Result(part, "not run") for part in PARTS if not arguments.parts or part.name in arguments.parts]
    lock = threading.Lock()  # of log and report

    def run(result: Result) -> None:
        own = environment | ({"LD_PRELOAD": nccl} if nccl and result.part.name == "courier" else {})
        _run(result, until - time.monotonic(), own, out / f"{result.part.name}.txt")
        with lock:
            with log.open("a") as whole:
                whole.write(f"\n=== {result.part.name}\n{result.output}")
            _report(out / "report.md", head, results)
            print(f"{result.part.name}: {result.verdict} ({result.seconds:.0f} s)", flush=True)

    for measures, several in itertools.groupby(results, lambda result: result.part.measures):
        with ThreadPoolExecutor(1 if measures else max(1, (os.cpu_count() or 1) // CORES)) as pool:
            list(pool.map(run, several))
    return 0 if all(result.verdict.startswith("passed") for result in results) else 1


def _install(kit: Path) -> Path | None:
    """The folder into which the kit's own pip has unpacked the wheels that this machine lacks; None: it lacks none."""
    wheels = [wheel for wheel in sorted(kit.glob("*.whl")) if _is_missing(wheel.name.partition("-")[0])]
    if not wheels:
        return None
    if (pip := next(kit.glob("pip-*.whl"), None)) is None:
        sys.exit(f"{kit} has no wheel of pip; fill it anew with `make gpu-kit`")
    target = kit / "installed"
    command: list[str | Path] = [
        sys.executable,
        pip / "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--upgrade",
        "--target",
        target,
        *wheels,
    ]
    subprocess.run(command, check=True)
    return target


def _nccl(kit: Path) -> str:
    """The NCCL of the kit, which takes several ranks on one device where torch's own does not; empty: the kit has none."""
    packed, library = kit / "libnccl.so.2.xz", kit / "libnccl.so.2"
    if packed.exists():
        library.write_bytes(lzma.decompress(packed.read_bytes()))
    return str(library) if packed.exists() else ""


def _environment(installed: Path | None, out: Path) -> dict[str, str]:
    """The environment of the parts. Extensions are built in a folder of this Python: one of another version would be built over its own."""
    own = Path(sys.prefix, "torch_extensions")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *([str(installed)] if installed else []), *os.environ.get("PYTHONPATH", "").split()]),
        "PATH": os.pathsep.join([*([str(installed / "bin")] if installed else []), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "TORCH_EXTENSIONS_DIR": str(own if own.is_dir() else out / "torch_extensions"),
        "TRITON_INTERPRET": "0",
    }
    if FAKE:
        del environment["GEMINI_FAKE_GPU"]  # an option of this script alone
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def _is_missing(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


_ASK = f"""
import importlib.metadata, torch
found = {{each.name.lower(): each.version for each in importlib.metadata.distributions()}}
print(", ".join(f"{{name}} {{found[name]}}" for name in {PACKAGES} if name in found))
print(torch.get_device_module().get_device_name() if torch.accelerator.is_available() else "")
"""


def _describe(environment: dict[str, str]) -> tuple[str, bool]:
    """The head of the report (device, date, versions), and whether there is a device."""
    said = subprocess.run([sys.executable, "-c", _ASK], env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    versions, name = said.split("\n")[:2]
    title = "# FAKE: no accelerator, everything ran on a CPU" if FAKE else f"# On one {name}"
    note = "GEMINI_FAKE_GPU=1. Nothing here says anything about an accelerator.\n\n" if FAKE else ""
    return f"{title}\n\n{note}{datetime.date.today()}. Python {platform.python_version()}, {versions}.\n", bool(name)


def _run(result: Result, left: float, environment: dict[str, str], log: Path) -> None:
    """Runs one part in its own session, and ends all of that when its time is up."""
    if left < 5:
        result.verdict = "no time was left"
        return
    seconds, begin = min(result.part.seconds, left), time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *result.part.command],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _running.add(process.pid)
    try:
        status = process.wait(seconds)
        result.verdict = f"failed ({status})" if status else "passed (fake)" if FAKE else "passed"
    except subprocess.TimeoutExpired:
        result.verdict = f"cut off after {seconds:.0f} s"
    finally:
        _end(process.pid)
        process.wait()
    result.seconds = time.monotonic() - begin
    result.output = log.read_text(errors="replace")


def _end(session: int) -> None:
    _running.discard(session)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def _interrupted(*_: object) -> None:
    for session in list(_running):
        _end(session)
    os._exit(143)


def _report(path: Path, head: str, results: list[Result]) -> None:
    lines = [head, "| part | what | result | seconds | at most |", "|---|---|---|---|---|"]
    lines += [f"| {r.part.name} | {r.part.what} | {r.verdict} | {r.seconds:.0f} | {r.part.seconds} |" for r in results]
    lines += [f"\n## {r.part.name}{' (fake)' if FAKE else ''}\n\n```\n{r.output[-TAIL:].strip()}\n```" for r in results if r.output]
    fresh = path.with_suffix(".part")
    fresh.write_text("\n".join(lines) + "\n")
    fresh.replace(path)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupted)  # parts that are under way are ended too
    sys.exit(main())
