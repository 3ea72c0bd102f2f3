"""The test kit: emulated hosts die as wholes and leave nothing behind; states are compared to the last bit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.testing import DrillError, EmulatedHosts, assert_identical, digest, first_difference

# In the place of a launcher: torch's takes seconds to start. It has a worker, and an agent in a session of its own.
LAUNCHER = """
import os, subprocess, sys, time
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
processes = [subprocess.Popen(sleeper), subprocess.Popen(sleeper, start_new_session=True)]
name = os.environ["GEMINI_HOST_ID"]
with open(os.environ["PIDS"] + "/" + name + ".part", "w") as file:
    file.write(" ".join(str(pid) for pid in [os.getpid(), *(p.pid for p in processes)]))
os.rename(file.name, file.name.removesuffix(".part"))
print("arguments", *sys.argv[1:], flush=True)
if sys.argv[-1] == "stay":
    time.sleep(600)
for process in processes:
    process.kill()
sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., EmulatedHosts]:
    script, folder = tmp_path / "launcher.py", tmp_path / "hosts"
    script.write_text(LAUNCHER)
    folder.mkdir()

    def start(count: int, ending: str) -> EmulatedHosts:
        return EmulatedHosts(count, [ending], folder, env={"PIDS": str(tmp_path)}, launcher=[sys.executable, str(script)])

    return start


def pids_of(hosts: EmulatedHosts, host: str) -> list[int]:
    path = hosts.folder.parent / host
    hosts.wait_for(path.exists, 60)
    return [int(pid) for pid in path.read_text().split()]


def running(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_host_dies_as_a_whole_and_is_replaced_by_another(start: Callable[..., EmulatedHosts]) -> None:
    with start(2, "stay") as hosts:
        first, second = pids_of(hosts, "host0"), pids_of(hosts, "host1")
        assert len(running(first)) == 3
        assert hosts.replace("host0") == "host2"
        assert not running(first)
        assert len(running(second)) == 3
        assert (hosts.alive, hosts.lost) == (["host1", "host2"], ["host0"])
        third = pids_of(hosts, "host2")
    assert not running([*second, *third])


def test_nothing_is_left_after_a_failure_inside(start: Callable[..., EmulatedHosts]) -> None:
    pids: list[int] = []

    def fail_inside() -> None:
        with start(1, "stay") as hosts:
            pids.extend(pids_of(hosts, "host0"))
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        fail_inside()
    assert len(pids) == 3
    assert not running(pids)


def test_hosts_end_with_whoever_started_them(tmp_path: Path, start: Callable[..., EmulatedHosts]) -> None:
    """Even when that one is killed and cannot clean up: launchers at once; agents see that on their own."""
    start(1, "stay").stop()  # has written the script
    code = """if True:
        import pathlib, sys, time
        from gemini_ft.testing import EmulatedHosts
        top = pathlib.Path(sys.argv[1])
        with EmulatedHosts(1, ["stay"], top / "hosts", env={"PIDS": str(top)}, launcher=[sys.executable, str(top / "launcher.py")]):
            time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) as parent:
        until = time.monotonic() + 60
        while not (tmp_path / "host0").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        launcher, *others = [int(pid) for pid in (tmp_path / "host0").read_text().split()]
        parent.kill()
    try:
        while running([launcher]):
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        for pid in others:
            os.kill(pid, 9)


def test_launchers_get_torchruns_arguments(start: Callable[..., EmulatedHosts]) -> None:
    with start(2, "0") as hosts:
        hosts.finish(60)
        words = (hosts.folder / "host1.log").read_text().split()
    assert {"--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-conf=is_host=0", f"--rdzv-id={hosts.run}"} < set(words)


def test_a_job_that_fails_is_told_with_its_log(start: Callable[..., EmulatedHosts]) -> None:
    with start(1, "3") as hosts, pytest.raises(DrillError, match=r"the job failed: \{'host0': 3\}\n--- host0:\narguments --nnodes=1"):
        hosts.finish(60)


def test_a_job_that_does_not_end_is_told(start: Callable[..., EmulatedHosts]) -> None:
    with start(1, "stay") as hosts, pytest.raises(DrillError, match=r"host0 did not end within 0\.1 s"):
        hosts.finish(0.1)


def test_a_job_without_any_host_left_has_failed(start: Callable[..., EmulatedHosts]) -> None:
    with start(1, "stay") as hosts:
        hosts.kill("host0")
        with pytest.raises(DrillError, match="the job failed: all hosts were killed"):
            hosts.finish(60)


def test_waiting_ends(start: Callable[..., EmulatedHosts]) -> None:
    with start(1, "stay") as hosts:
        assert hosts.wait_for(lambda: hosts.alive, 60) == ["host0"]
        with pytest.raises(DrillError, match=r"did not happen within 0\.1 s"):
            hosts.wait_for(lambda: False, 0.1)
        hosts.kill("host0")
        with pytest.raises(DrillError, match="all hosts have ended before"):
            hosts.wait_for(lambda: False, 60)


def test_settings_of_the_shell_do_not_reach_the_hosts(start: Callable[..., EmulatedHosts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_REPLICAS", "7")
    with start(1, "stay") as hosts:
        environ = Path(f"/proc/{pids_of(hosts, 'host0')[0]}/environ").read_bytes().split(b"\0")
    assert b"GEMINI_HOST_ID=host0" in environ
    assert not [entry for entry in environ if entry.startswith(b"GEMINI_REPLICAS")]


# -- comparing

ONE = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def with_bit_flipped(tensor: torch.Tensor) -> torch.Tensor:
    flipped = tensor.clone()
    flipped.view(torch.int32)[1, 0] ^= 1
    return flipped


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        (ONE, with_bit_flipped(ONE), "the state[1, 0]: 0x40400000 and 0x40400001 (1 of 4 elements differ)"),
        ({"a": {"b": [ONE, ONE]}}, {"a": {"b": [ONE, -ONE]}}, "a.b[1][0, 0]: 0x3f800000 and 0xbf800000 (4 of 4 elements differ)"),
        (torch.tensor(0.0), torch.tensor(-0.0), "the state: 0x00000000 and 0x80000000 (1 of 1 elements differ)"),
        (ONE, ONE.double(), "the state: torch.float32[2, 2] and torch.float64[2, 2]"),
        (ONE, ONE.flatten(), "the state: torch.float32[2, 2] and torch.float32[4]"),
        (ONE.bfloat16(), ONE.half(), "the state: torch.bfloat16[2, 2] and torch.float16[2, 2]"),
        ({"a": 1, "b": 2}, {"a": 1, "c": 2}, "the state: keys ['b'] only in one, ['c'] only in the other"),
        ([1, 2], [1], "the state: 2 and 1 entries"),
        ([1], (1,), "the state: list and tuple"),
        (1, True, "the state: int and bool"),
        (0.1 + 0.2, 0.3, "the state: 0x1.3333333333334p-2 and 0x1.3333333333333p-2"),
        (0.0, -0.0, "the state: 0x0.0p+0 and -0x0.0p+0"),
        ("epoch", "step", "the state: 'epoch' and 'step'"),
        (np.float32(1), np.float32(2), "the state: 0x3f800000 and 0x40000000 (1 of 1 elements differ)"),
    ],
)
def test_the_first_difference_is_named(one: Any, other: Any, difference: str) -> None:
    assert first_difference(one, other) == difference
    assert digest(one) != digest(other)
    with pytest.raises(AssertionError):
        assert_identical(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (float("nan"), float("nan")),
        (torch.full((2,), torch.nan), torch.full((2,), torch.nan)),
        (ONE.t(), ONE.t().contiguous()),
        (torch.empty(0, 3), torch.empty(0, 3)),
        (ONE.bfloat16(), ONE.bfloat16()),
        (torch.tensor([True, False]), torch.tensor([True, False])),
    ],
)
def test_what_is_equal_to_the_last_bit(one: Any, other: Any) -> None:
    assert_identical(one, other)
    assert digest(one) == digest(other)


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.floats(), st.text(max_size=2))
STATES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=1), inner, max_size=2), max_leaves=4
)


@given(STATES, STATES)
def test_digests_agree_with_differences(one: Any, other: Any) -> None:
    assert first_difference(one, one) is None
    assert (digest(one) == digest(other)) == (first_difference(one, other) is None)
