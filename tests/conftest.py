from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from foreign_imports import Quiet
from hypothesis import settings
from warm_python import launchers, use_huge_pages

if TYPE_CHECKING:
    from rank_kit import World

# A deadline per example would be a timing assertion, which a busy machine breaks. The suite tries the same examples every
# time, so that its verdict is about the code; looking for new ones is what the soak is for.
settings.register_profile("suite", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("soak", deadline=None, print_blob=True)

sys.meta_path.insert(0, Quiet())

# DeepSpeed compiles at first use, with the environment's own ninja: what another one has built, it would build again.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix, "torch_extensions")))


# A test that was killed in a build has left its lock, for which torch would wait without an end. A living process has the file open.
def _is_open(path: Path) -> bool:
    mark = path.stat()
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.path.samestat(file.stat(), mark):
                return True
    return False


for _lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/lock"):
    with contextlib.suppress(FileNotFoundError):
        if not _is_open(_lock):
            _lock.unlink()

# Options of the developer's own shell, or of the allocation that the tests run in, must not reach them, nor the processes they start.
_OURS = ("GEMINI_", "TORCHELASTIC_", "SLURM")


def _ours() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_OURS)}


for _name in _ours():
    del os.environ[_name]

# Thousands of processes would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Tensors are tiny, and other tests want the cores: a second thread would only spin until the first one has something for it.
os.environ["OMP_NUM_THREADS"] = "1"

# What hosts remember of runs belongs to this run of the tests alone.
os.environ["GEMINI_STATE_DIR"] = tempfile.mkdtemp(prefix="gemini-state-")
atexit.register(shutil.rmtree, os.environ["GEMINI_STATE_DIR"], ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def _no_agent_is_left_behind() -> Iterator[None]:
    """An agent takes a process that stays connected, and says nothing for minutes, for one that hangs: it would kill the tests'."""
    yield
    gc.collect()
    gc.freeze()  # a test, or a benchmark that it calls, may have given a million objects back to the collector
    left = [thread for thread in threading.enumerate() if thread.name == "gemini-agent-client"]
    assert not left, f"{len(left)} connections of this process to agents have not been closed"


@pytest.fixture(scope="module", autouse=True)
def _the_environment_is_left_as_it_was() -> Iterator[None]:
    """A job that a later test starts would inherit what an earlier one has left in it: the name of a launch, a signal that is blocked."""
    before = _ours(), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    assert (_ours(), signal.pthread_sigmask(signal.SIG_BLOCK, [])) == before


@pytest.fixture(scope="module", autouse=True)
def _other_files_of_tests_are_no_modules_of_the_script(request: pytest.FixtureRequest) -> Iterator[None]:
    """They would be looked through for generators at each snapshot, and their pages be copied in each process of a loader."""
    rng = sys.modules.get("gemini_ft.state.rng")
    if rng is None:
        yield
        return
    find, module = rng.script_modules, request.module
    used = {module.__name__, *(getattr(value, "__module__", None) for value in vars(module).values())}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rng, "script_modules", lambda: [each for each in find() if (name := each.__name__)[:5] != "test_" or name in used])
        yield


@pytest.fixture(scope="module", autouse=True)
def _launchers_are_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Spares jobs the seconds in which each of their processes would load torch, but for those whose start is what is tested."""
    with _launchers_for(request.node):
        yield


@pytest.fixture(autouse=True)
def _launchers_of_a_test_are_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    with _launchers_for(request.node):
        yield


def _launchers_for(node: pytest.Item) -> contextlib.AbstractContextManager[None]:
    """The launchers that the marks of a test or of a module ask for."""
    preloaded = node.get_closest_marker("preloaded")
    forked, taken_apart = node.get_closest_marker("started_anew") is None, node.get_closest_marker("taken_apart") is not None
    return launchers(*(preloaded.args if preloaded else ()), forked=forked, taken_apart=taken_apart)


@pytest.fixture
def one(tmp_path: Path) -> Iterator[World]:
    """A run of one rank."""
    yield from _world(tmp_path, 1)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[World]:
    """A run of two ranks, each on an emulated host of its own."""
    yield from _world(tmp_path, 2)


def _world(folder: Path, size: int) -> Iterator[World]:
    from rank_kit import World  # only where it is needed: it imports torch

    with World(folder, size) as world:
        yield world


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Where a run's checkpoints go."""
    return tmp_path / "store"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Computes on one thread: for tiny tensors a pool of threads only fights with the other tests for the cores."""
    import torch  # only where it matters: the pure tests start without it

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Folders of tests: those of whole jobs first, and small files last, so that all processes of the tests end together.
_LONG = ["jobs", "launch", "integrations", "gradients"]
_ORDER = [*_LONG, "project", "storage", "state", "export", "core", "recovery", "wire"]
_WAITING = ["agent", "cli"]  # use the processors least: one after the other among the long ones, which keep them busy meanwhile


def _places(files: Iterable[Path]) -> dict[Path, float]:
    """The place of each file of tests in the order of all."""
    folders = {file: file.parent.name for file in files}
    order = sorted(folders, key=lambda file: _ORDER.index(folders[file]) if folders[file] in _ORDER else len(_ORDER))
    waiting = [file for file in order if folders[file] in _WAITING]
    others = [file for file in order if folders[file] not in _WAITING]
    distance = sum(folders[file] in _LONG for file in others) / max(1, len(waiting))
    places = {file: float(place) for place, file in enumerate(others)}
    return places | {file: (place + 0.5) * distance for place, file in enumerate(waiting)}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", default="1/1", help="2/3: of the tests that are selected the second third (scripts/soak)")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("soak" if config.option.markexpr == "soak" else "suite")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the collector from what stays to the end: it would look through a million objects while they are made, and after each file."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        if os.environ.get("PYTEST_XDIST_WORKER"):  # it has all files, and forks
            use_huge_pages()
        gc.enable()


@pytest.hookimpl(trylast=True)  # after the selection by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = _places(dict.fromkeys(item.path for item in items))
    items.sort(key=lambda item: (places[item.path], str(item.path)))
    number, count = map(int, config.getoption("share").split("/"))
    first, end = (len(items) * each // count for each in (number - 1, number))  # neighbours stay together: they may share a job
    config.hook.pytest_deselected(items=[*items[:first], *items[end:]])
    items[:] = items[first:end]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # only where it matters: the pure tests start without it

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: see docs/gpu.md"))
