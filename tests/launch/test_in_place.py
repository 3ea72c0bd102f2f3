"""Workers that stay: what keeps one from it, and what an attempt's end reaches."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from agent_kit import eventually
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

import gemini_ft
from gemini_ft import accelerator, checkpointer
from gemini_ft.agent import lifecycle
from gemini_ft.agent.client import AgentClient
from gemini_ft.errors import ConfigError, UnsupportedStateError
from gemini_ft.events import read_events
from gemini_ft.faults import inject
from gemini_ft.hosts import began, is_readable
from gemini_ft.launch.grace import Process, Workers, await_news
from gemini_ft.launch.in_place import ARRIVED, BEGUN, FAILED, LEAVES, PARKED, Attempt, Survivors
from gemini_ft.launch.replaced import replaced
from gemini_ft.launch.worker_start import ForkServer, ForkServerError, StandBy, WarmStart, WorkerHandler, cold_workers
from gemini_ft.state.copy_plan import MappedSlot
from gemini_ft.wire import channel
from gemini_ft.wire.worker_messages import Over
from gemini_ft.worker import attempt, in_place
from gemini_ft.worker.attempt import OverError, OwnAttempt, leave_if_over
from gemini_ft.worker.collectives import observe


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The launcher's end of the channel of an attempt that this process is in."""
    theirs, ours = channel.pair()
    with theirs, ours:
        monkeypatch.setattr(attempt, "present", OwnAttempt(ours))
        yield theirs


def refusal() -> str:
    assert attempt.present is not None
    return attempt.present.refusal


def test_an_attempt_ends_where_the_package_looks_for_the_launchers_word(launcher: socket.socket) -> None:
    leave_if_over()
    channel.send(launcher, {"over": True})
    for _ in range(2):  # whatever the loop makes of the first one
        with pytest.raises(OverError):
            leave_if_over()


def test_a_rank_that_computes_hears_of_the_end_at_its_next_collective(launcher: socket.socket) -> None:
    """With the first gradients that are whole, and not after all of them: on processors a step may take seconds."""
    gone: list[int] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with observe():
            layers = [torch.nn.Linear(300, 300) for _ in range(4)]
            model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
            model(torch.ones(2, 300)).sum().backward()
            layers[0].weight.register_hook(lambda gradient: gone.append(1))
            loss = model(torch.ones(2, 300)).sum()
            channel.send(launcher, {"over": True})
            assert attempt.present is not None
            attempt.watch(model.parameters())
            with pytest.raises(OverError):
                loss.backward()
            assert not gone
            del layers, model, loss
            assert not (attempt.present.left_behind() and attempt.present.left_behind())
    finally:
        dist.destroy_process_group()


class Slow(Dataset[int]):
    """Its sample takes a while, though less than the five seconds after which torch looks after its processes."""

    def __getitem__(self, index: int) -> int:
        time.sleep(4)
        return index

    def __len__(self) -> int:
        return 1


def test_a_rank_that_waits_for_its_data_hears_of_the_end_at_once(launcher: socket.socket) -> None:
    iterator = iter(DataLoader(Slow(), num_workers=1))
    threading.Timer(0.2, lambda: channel.send(launcher, {"over": True})).start()
    with replaced(type(iterator), _try_get_data=in_place.heeding(type(iterator)._try_get_data)), pytest.raises(OverError):
        next(iterator)
    iterator._shutdown_workers()


def test_a_result_that_comes_after_the_launchers_word_is_none(launcher: socket.socket) -> None:
    """The launcher takes the attempt for ended, and would not see how this process ends."""
    assert attempt.present is not None
    assert in_place.once(lambda: "done", attempt.present) == ["done"]
    channel.send(launcher, {"over": True})
    assert in_place.once(lambda: "done", attempt.present) == []


def test_a_refusal_leaves_the_process_whatever_a_script_makes_of_it(launcher: socket.socket) -> None:
    """The launcher is to see its status; the next attempt in the same process would begin without what was refused."""

    def train() -> None:
        try:
            raise UnsupportedStateError("a deque")
        except UnsupportedStateError as error:
            raise RuntimeError("the experiment has failed") from error

    assert attempt.present is not None
    with pytest.raises(RuntimeError, match="the experiment has failed"):
        in_place.once(train, attempt.present)


def test_an_error_whose_text_cannot_be_had_costs_no_process_either(launcher: socket.socket) -> None:
    class UnshownError(Exception):
        def __str__(self) -> str:
            raise AttributeError("text")

    def train() -> None:
        raise UnshownError

    assert attempt.present is not None
    assert in_place.once(train, attempt.present) == []
    received = channel.receive(launcher)
    assert received is not None
    assert received[0] == {"word": FAILED}


def test_the_files_of_an_attempt_are_closed_with_it(tmp_path: Path) -> None:
    handler = WorkerHandler.__new__(WorkerHandler)
    handler.proc, handler.workers = Mock(Attempt), Mock(stopped_by=None)
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        handler._stdout, handler._stderr = out, err
        handler.close()
        assert (out.closed, err.closed) == (True, True)
    handler.workers.send.assert_not_called()


def test_a_process_that_the_worker_has_forked_has_no_attempt(launcher: socket.socket) -> None:
    channel.send(launcher, {"over": True})
    pid = os.fork()
    if pid == 0:
        os._exit(attempt.present is not None)
    assert os.waitpid(pid, 0)[1] == 0
    with pytest.raises(OverError):  # the word is still there
        leave_if_over()


def test_what_has_no_weak_references_may_be_gone_or_not(launcher: socket.socket) -> None:
    assert attempt.present is not None
    loader = gemini_ft.resumable(DataLoader(TensorDataset(torch.ones(4, 2)), 2))
    loader.dataset.noise = np.random.default_rng(1)
    gemini_ft.Checkpointer(torch.nn.Linear(2, 2), state={"mine": np.random.default_rng(2), "loader": loader})
    del loader
    assert in_place.leftovers(attempt.present, threading.enumerate()) == ""
    mine = np.random.default_rng(2)
    gemini_ft.Checkpointer(torch.nn.Linear(2, 2), state={"mine": mine, "again": mine})
    assert "referenced from outside of it: Generator" in in_place.leftovers(attempt.present, threading.enumerate())


@pytest.mark.parametrize("is_stuck", [False, True])
def test_the_agent_hears_of_an_attempts_end_only_once_no_copy_is_under_way(
    is_stuck: bool, launcher: socket.socket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would let other snapshots have the slots that the process still writes to."""
    events, begun, may_end, write = tmp_path / "events", threading.Event(), threading.Event(), MappedSlot.write

    def slowly(*arguments: Any) -> None:
        begun.set()
        may_end.wait(60)
        write(*arguments)

    def noted(client: AgentClient, message: Any, *fds: Any) -> None:
        told.append(type(message))
        tell(client, message, *fds)

    told, tell = list[Any](), AgentClient.tell
    monkeypatch.setattr(AgentClient, "tell", noted)
    monkeypatch.setattr(MappedSlot, "write", slowly)
    for name, value in {"GEMINI_RUN_ID": f"over-{os.getpid()}-{is_stuck}", "GEMINI_EVENTS": str(events), "GEMINI_ON_LATE": "wait"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GEMINI_LINGER", "1")  # of the agent that waits for this process's end
    model = torch.nn.Linear(2, 2)
    checkpointer = gemini_ft.Checkpointer(model, torch.optim.SGD(model.parameters(), 0.1))
    checkpointer.resume()
    checkpointer.save(1, {})
    assert begun.wait(60)
    if not is_stuck:
        may_end.set()
    assert attempt.present is not None
    attempt.present.close()
    if not is_stuck:
        eventually(lambda: any(event["event"] == "lost" and event["cause"] == "failed" for event in read_events(events)), "the loss")
    may_end.set()
    for thread in threading.enumerate():
        if thread.name == "gemini-snapshot":
            thread.join(60)
    assert told.count(Over) == (not is_stuck)
    lifecycle.leave(os.environ["GEMINI_RUN_ID"])


def stepping(model: torch.nn.Module, optimizer: torch.optim.Optimizer, checkpointer: gemini_ft.Checkpointer) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpointer.step()


def test_a_step_without_a_snapshot_is_the_first_one_too(launcher: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the launcher kills a worker that is stopped."""
    launcher.setblocking(False)
    monkeypatch.setenv("GEMINI_RUN_ID", f"first-{os.getpid()}")
    monkeypatch.setenv("GEMINI_LINGER", "1")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    checkpointer = gemini_ft.Checkpointer(model, optimizer, interval=4)
    checkpointer.resume()
    with pytest.raises(BlockingIOError):
        channel.receive(launcher)
    for _ in range(2):
        stepping(model, optimizer, checkpointer)
    assert channel.receive(launcher) == ({"word": ARRIVED}, [])
    with pytest.raises(BlockingIOError):
        channel.receive(launcher)
    assert checkpointer.stats.snapshots == 0
    checkpointer.close()


def test_the_slots_that_an_attempt_has_mapped_serve_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """To give them up and to get their pages anew costs more than all the rest of a rollback."""
    monkeypatch.setenv("GEMINI_RUN_ID", f"mapped-{os.getpid()}")
    monkeypatch.setenv("GEMINI_LINGER", "1")
    mapped, map_one = list[MappedSlot](), MappedSlot.__init__

    def note(slot: MappedSlot, *arguments: Any) -> None:
        mapped.append(slot)
        map_one(slot, *arguments)

    monkeypatch.setattr(MappedSlot, "__init__", note)
    weights, counts, pairs = torch.empty(0), list[int](), [channel.pair() for _ in range(3)]
    for number, (_, ours) in enumerate(pairs):
        present = OwnAttempt(ours)
        monkeypatch.setattr(attempt, "present", present)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        checkpointer = gemini_ft.Checkpointer(model, optimizer, on_late="wait")
        assert checkpointer.resume() == number
        assert number == 0 or torch.equal(model.weight, weights)
        stepping(model, optimizer, checkpointer)
        checkpointer.flush()
        weights = model.weight.detach().clone()
        counts.append(len(os.listdir("/proc/self/fd")))
        if number < 2:
            present.close()
    checkpointer.close()
    for end in itertools.chain(*pairs):
        end.close()
    assert len(mapped) == 2
    assert counts[1] == counts[2]
    assert all(slot.is_closed for slot in mapped)


def test_a_worker_that_cannot_join_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GEMINI_RUN_ID", f"unwritable-{os.getpid()}")
    monkeypatch.setenv("GEMINI_LINGER", "1")
    monkeypatch.setenv("GEMINI_EVENTS", str(tmp_path / "nowhere" / "events"))
    known = threading.enumerate()
    checkpointer = gemini_ft.Checkpointer(torch.nn.Linear(2, 2))
    try:
        with pytest.raises(ConfigError, match="GEMINI_EVENTS"):
            checkpointer.resume()
        for thread in threading.enumerate():
            if thread not in known:
                thread.join(5)
        assert [thread.name for thread in threading.enumerate() if thread not in known] == []
    finally:
        checkpointer.close(finished=False)
        lifecycle.leave(os.environ["GEMINI_RUN_ID"])


def test_lines_of_a_worker_that_stays_have_the_rank_of_the_moment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is another one when hosts have gone or come."""
    log = logging.getLogger("gemini_ft")
    for each in (log, logging.getLogger()):
        monkeypatch.setattr(each, "handlers", [])
    for rank in "21":
        monkeypatch.setenv("RANK", rank)
        checkpointer.log_to_stderr()
        log.warning("said")
    assert capsys.readouterr().err == "[gemini W rank 2] said\n[gemini W rank 1] said\n"


def test_a_fault_outlives_the_checkpointer_that_was_the_last_to_join(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(inject, "drill", None)
    environ = {"RUN_ID": f"drill-{os.getpid()}", "FAULTS": "step=2:rank=0:corrupt", "FAULTS_DIR": str(tmp_path / "faults"), "LINGER": "1"}
    for name, value in environ.items():
        monkeypatch.setenv(f"GEMINI_{name}", value)
    checkpointers = [gemini_ft.Checkpointer(torch.nn.Linear(2, 2), name=name) for name in ("first", "second")]
    for each in checkpointers:
        each.resume()
    second = weakref.ref(checkpointers[1])
    checkpointers.pop().close()
    del each
    gc.collect()
    assert second() is None
    for _ in range(3):
        checkpointers[0].step()
    assert inject.drill is not None
    assert inject.drill.rest() == []
    checkpointers[0].close()


def test_a_parameter_whose_hook_holds_it_is_gone_with_the_attempt(launcher: socket.socket) -> None:
    model = torch.nn.Linear(2, 2)
    gemini_ft.Checkpointer(model)
    model.weight.register_hook(lambda _, held=model: None)
    trainer: list[Any] = [model(torch.ones(1, 2))]
    trainer.append(trainer)
    del model, trainer
    assert attempt.present is not None
    assert in_place.leftovers(attempt.present, threading.enumerate()) == ""


def test_code_is_compiled_anew_as_in_a_new_process(launcher: socket.socket) -> None:
    """Torch compiles eight forms of a function at most, and then none, without a word: other bits."""
    compiled: list[Any] = []

    def note(graph: Any, inputs: Any) -> Any:
        compiled.append(inputs[0].shape)
        return graph.forward

    twice = torch.compile(lambda tensor: tensor * 2, backend=note)
    assert attempt.present is not None
    for number in (1, 2):
        twice(torch.ones(3))
        assert len(compiled) == number
        assert in_place.leftovers(attempt.present, threading.enumerate()) == ""


def test_a_compiler_that_was_not_used_is_not_imported(launcher: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing it takes longer than all the rest of a restart."""
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.setattr(torch.compiler, "reset", lambda: pytest.fail("imports it"))
    assert attempt.present is not None
    assert in_place.leftovers(attempt.present, threading.enumerate()) == ""


def test_what_accelerate_keeps_for_a_process_is_made_anew(launcher: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {name: SimpleNamespace(_shared_state={"device": "cpu"}) for name in ("AcceleratorState", "PartialState", "GradientState")}
    monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace(**kinds))
    assert attempt.present is not None
    assert in_place.leftovers(attempt.present, threading.enumerate()) == ""
    assert not any(kind._shared_state for kind in kinds.values())


def test_a_worker_that_can_never_stay_is_signalled_at_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Told that its attempt is over, it would be waited for until `in_place_timeout`."""
    survivors = Survivors(Workers(), 5.0)
    process = Mock(pid=os.getpid(), signs=[], poll=lambda: None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        first = survivors.begin({"LOCAL_RANK": "0"}, [], lambda: process)
        end.connect(f"\0{survivors.address}")
        monkeypatch.setattr(attempt, "present", OwnAttempt(end))
        leave_if_over()
        monkeypatch.setattr(accelerator, "in_use", lambda: torch)
        leave_if_over()
        leave_if_over()
        assert first.poll() is None, "it goes on"
        assert not first.end_in_place()
        assert caplog.text.count("does not stay, and another one is started: it uses a device") == 1
    survivors.close()


def test_others_are_started_while_a_survivor_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """And torch's launcher, to which a worker with another process id is a failure, does not learn that another one has taken its place."""
    workers = Workers()
    survivors, begun, rank = Survivors(workers, 0.2), time.monotonic(), {"LOCAL_RANK": "0"}

    def start() -> Process:
        child = subprocess.Popen(["sleep", "100"], start_new_session=True)
        return workers.adopt(child.pid, child.poll)

    survivor: Any = Mock(pid=os.getpid(), signs=[], poll=lambda: None)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            first = survivors.begin(rank, [], lambda: survivor)
            end.connect(f"\0{survivors.address}")
            assert first.end_in_place()
            second = survivors.begin(rank, [], start)
            assert (second.poll(), second.process) == (None, survivor)
            while second.process is survivor and time.monotonic() < begun + 10:
                assert second.poll() is None
        assert time.monotonic() >= begun + 0.2
        assert second.pid == first.pid != second.process.pid
        assert "has not come back within 0.2 s (in_place_timeout)" in caplog.text
        await_news(SimpleNamespace(subprocess_handlers={0: Mock(proc=second)}), 0.0)
        workers.send(second.process, signal.SIGKILL)
        await_news(SimpleNamespace(subprocess_handlers={0: Mock(proc=second)}), 30.0)
        assert second.poll() == -signal.SIGKILL
        assert time.monotonic() < begun + 20
    finally:
        workers.stop()
        survivors.close()


def test_no_worker_begins_while_the_job_is_stopped(caplog: pytest.LogCaptureFixture) -> None:
    """Torch's launcher polls its workers while it ends them, also those that wait for their next attempt."""
    workers, started = Workers(), list[Process]()
    survivors, rank = Survivors(workers, 30.0), {"LOCAL_RANK": "0"}

    def start() -> Process:
        child = subprocess.Popen(["sleep", "100"], start_new_session=True)
        started.append(workers.adopt(child.pid, child.poll))
        return started[-1]

    try:
        first = survivors.begin(rank, [], start)
        first.end(1)
        second = survivors.begin(rank, [], start)
        assert second.poll() is None
        workers.stopped_by = signal.SIGTERM
        workers.send(second.process, signal.SIGTERM)
        assert second.wait(30.0) == second.poll() == -signal.SIGTERM
        assert len(started) == 1
    finally:
        workers.stop()
        survivors.close()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_worker_that_is_parked_is_told_to_end_while_the_job_is_stopped(is_stopped: bool) -> None:
    """The attempt may have taken the launcher's signal for itself, as Lightning's handler does."""
    workers = Workers()
    survivors, rank = Survivors(workers, 30.0), {"LOCAL_RANK": "0"}
    process: Any = Mock(pid=os.getpid(), signs=[], poll=lambda: None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        first = survivors.begin(rank, [], lambda: process)
        end.connect(f"\0{survivors.address}")
        first.end(1)
        second = survivors.begin(rank, [], lambda: process)
        channel.send(end, {"word": PARKED})
        workers.stopped_by = signal.SIGTERM if is_stopped else None
        assert second.poll() is None
        assert is_readable(end.fileno())
        assert (channel.receive(end) is None) == is_stopped
    survivors.close()


def test_a_worker_that_cannot_stay_is_replaced_at_once_though_its_threads_run_on() -> None:
    """Its word was forgotten where the launcher heard the end of its channel with it, and it was waited for until `in_place_timeout`."""
    survivors, rank = Survivors(Workers(), 60.0), {"LOCAL_RANK": "0"}
    process, other = Mock(pid=os.getpid(), signs=[], poll=lambda: None), Mock(pid=os.getpid(), signs=[], poll=lambda: None)
    survivors.workers.send = Mock()  # type: ignore[method-assign]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        first = survivors.begin(rank, [], lambda: process)
        end.connect(f"\0{survivors.address}")
        first.end(1)
        second = survivors.begin(rank, [], lambda: other)
        channel.send(end, {"word": LEAVES, "why": "a thread runs"})
        end.shutdown(socket.SHUT_RDWR)
        assert second.poll() is None
        assert second.process is other
        assert second.poll() is None  # the word was not of this one
    survivors.workers.send.assert_called_once_with(process, signal.SIGKILL)
    survivors.close()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_worker_that_is_stopped_while_it_waits_for_its_next_attempt_is_replaced(is_stopped: bool) -> None:
    """It had the order, and never took it: the other ranks waited until torch's timeout of half an hour."""
    survivors, rank = Survivors(Workers(), 0.2), {"LOCAL_RANK": "0"}
    process, other = Mock(pid=os.getpid(), signs=[], poll=lambda: None), Mock(pid=os.getpid(), signs=[], poll=lambda: None)
    survivors.workers.send = Mock()  # type: ignore[method-assign]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        first = survivors.begin(rank, [], lambda: process)
        end.connect(f"\0{survivors.address}")
        first.end(1)
        second, until = survivors.begin(rank, [], lambda: other), time.monotonic() + 0.5
        channel.send(end, {"word": PARKED})
        while time.monotonic() < until:
            assert second.poll() is None
            if not is_stopped and is_readable(end.fileno()):
                channel.receive(end)
                channel.send(end, {"word": BEGUN})
        assert second.process is (other if is_stopped else process)
        if not is_stopped:
            channel.send(end, {"word": FAILED})
            assert second.poll() == 1
    assert survivors.workers.send.called == is_stopped
    survivors.close()


@pytest.mark.parametrize(
    "does", ["runs on", "is stopped", "is stopped for a moment", "is stopped with its launcher", "is stopped after its first step"]
)
def test_a_worker_that_is_stopped_before_its_first_step_is_killed(does: str, caplog: pytest.LogCaptureFixture) -> None:
    """The others waited for it until the process group's timeout, half an hour."""
    workers, words = Workers(), [BEGUN, ARRIVED] if does.endswith("step") else [BEGUN]
    survivors, rank = Survivors(workers, 30.0), {"LOCAL_RANK": "0"}
    reader, writer = os.pipe()

    def start() -> Process:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
                    end.connect(f"\0{survivors.address}")
                    channel.send(end, {"word": PARKED})
                    channel.receive(end)
                    for word in words:
                        channel.send(end, {"word": word})
                    os.write(writer, b"x")
                    time.sleep(100)
            finally:
                os._exit(3)
        return workers.adopt(pid, lambda: os.waitstatus_to_exitcode(done[1]) if (done := os.waitpid(pid, os.WNOHANG))[0] else None)

    first = survivors.begin(rank, [], start)
    process, pid = first.process, first.pid
    try:
        first.end(1)
        second = survivors.begin(rank, [], lambda: pytest.fail("another one is started"))
        eventually(lambda: second.poll() is None and is_readable(reader), "its word")
        assert second.poll() is None
        survivors.seconds = 0.3
        if does != "runs on":
            os.kill(pid, signal.SIGSTOP)
        if does.endswith("launcher"):  # which goes on first
            time.sleep(0.5)
            assert second.poll() is None
        if does.endswith(("moment", "launcher")):
            os.kill(pid, signal.SIGCONT)
        until = time.monotonic() + (30.0 if does == "is stopped" else 0.5)
        while time.monotonic() < until and second.poll() is None:
            time.sleep(0.02)
        assert second.poll() == (-signal.SIGKILL if does == "is stopped" else None)
        assert ("was stopped before it had reported a step, for 0.3 s (in_place_timeout)" in caplog.text) == (does == "is stopped")
    finally:
        survivors.kill(process)
        survivors.close()
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("state", ["parked", "stopped", "ended"])
def test_a_worker_in_reserve_has_the_first_attempt_or_another_one_is_started(state: str) -> None:
    """One that is stopped, or runs on before `gemini_ft.run`, has `in_place_timeout` from the moment at which it is needed."""
    survivors, rank = Survivors(Workers(), 0.2), {"LOCAL_RANK": "0"}
    reserve, other = (Mock(pid=os.getpid(), signs=[], poll=lambda: None) for _ in range(2))
    survivors.workers.send = Mock()  # type: ignore[method-assign]
    survivors.reserve(rank, [], lambda: None)  # none can be forked
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        survivors.reserve(rank, [], lambda: reserve)
        survivors.reserve(rank, [], lambda: other)
        end.connect(f"\0{survivors.address}")
        if state == "parked":
            channel.send(end, {"word": PARKED})
        time.sleep(0.3)
        reserve.poll = lambda: 0 if state == "ended" else None
        first = survivors.begin({**rank, "RANK": "5"}, [], lambda: other)
        assert first.process is (other if state == "ended" else reserve)
        if state == "parked":
            order = channel.receive(end)
            assert order is not None
            assert order[0] == {"environ": {"RANK": "5"}}
            channel.send(end, {"word": BEGUN})
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            assert first.poll() is None
        assert first.process is (reserve if state == "parked" else other)
    survivors.close()


# Notes the rank that it believes to have.
ASKS = """
import os, subprocess, sys
def note(environ):
    rank = int(environ.get("RANK", "0"))
    open(sys.argv[1], "w").write(str(rank))
again = [sys.executable, __file__, sys.argv[1], "get"]
match sys.argv[2]:
    case "get": note(os.environ)
    case "copy": note(os.environ.copy())
    case "items": note(dict(os.environ.items()))
    case "unpacked": note({**os.environ})
    case "bytes": note({name.decode(): value for name, value in os.environb.items()})
    case "child": subprocess.run(again, check=True)
    case "exec": os.execv(sys.executable, again)
    case "fork":
        if os.fork() == 0:
            try:
                note(os.environ)
            finally:
                os._exit(0)
        sys.exit(os.wait()[1] or 1)
"""


class Spare:
    """A host that waits as a spare, with a worker in reserve that has been forked for a script."""

    def __init__(self, folder: Path, script: str, *arguments: str, places: int = 1) -> None:
        (folder / "script.py").write_text(script)
        self.program, self.servers = [str(folder / "script.py"), *arguments], list[ForkServer]()
        self.workers = Workers()
        self.survivors, self.warm = Survivors(self.workers, 5.0), WarmStart(self._server)
        self.stand_by = StandBy(self.warm, self.survivors, self.program, places)
        assert self.servers[0].wait_ready() is None

    def _server(self) -> ForkServer:
        self.servers.append(ForkServer(self.program, [], self.workers))
        return self.servers[-1]

    def begin(self, *, place: int = 0, command: Sequence[str] = (), **environ: str) -> Any:
        """The attempt at a place, as torch's launcher begins it."""
        program, *arguments = command or (sys.executable, "-u", *self.program)
        known: Any = {"entrypoint": program, "args": tuple(arguments), "stdout": None, "stderr": None, "numa_options": None}
        env = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "RANK": "5", **environ}
        return WorkerHandler(self.workers, self.warm, tuple, self.survivors, env=env, local_rank_id=place, **known).proc


@pytest.fixture
def spare(tmp_path: Path) -> Iterator[Callable[..., Spare]]:
    with contextlib.ExitStack() as stack:

        def wait(*arguments: Any, **options: Any) -> Spare:
            made = Spare(tmp_path, *arguments, **options)
            for close in (made.warm.close, made.survivors.close, made.workers.stop):
                stack.callback(close)
            return made

        yield wait


@pytest.mark.parametrize("way", ["get", "copy", "items", "unpacked", "bytes", "child", "exec", "fork"])
def test_nothing_in_reserve_finds_a_rank(way: str, spare: Callable[..., Spare], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Only `os.environ[...]` was watched: copies of it, and processes that the script started, took rank 0 and went on."""
    host = spare(ASKS, str(tmp_path / "rank"), way)
    host.stand_by.prepare()
    (process,) = host.workers.all
    assert process.wait(30) != 0
    assert not (tmp_path / "rank").exists()
    if way == "get":
        assert "asks for RANK before gemini_ft.run" in capfd.readouterr().err


def test_what_is_known_in_reserve_or_set_by_the_script_is_no_question() -> None:
    lines = "import os; from gemini_ft.launch import reserve; os.environ.update(reserve.variables(7, 8)); reserve.begin()"
    lines += "\nprint(os.environ['LOCAL_RANK'], os.getenv('PATH') != '')"
    lines += "\nos.environ['WORLD_SIZE'] = '3'; print(os.environ['WORLD_SIZE'])\nprint(reserve.end(), 'RANK' in os.environ)"
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["7", "True", "3", "True", "False"]), done.stderr


@pytest.mark.parametrize(
    ("argument", "wrapper", "environ"),
    [
        ("same", [], {}),
        ("${local_rank}", [], {}),
        ("same", ["/usr/bin/env"], {}),
        ("same", [], {"CUDA_VISIBLE_DEVICES": "3"}),
        ("same", [], {"LOCAL_RANK": "1"}),
    ],
    ids=["the same", "substituted", "wrapped", "a device of its own", "another local rank"],
)
def test_a_worker_in_reserve_that_torch_would_start_otherwise_is_replaced(
    argument: str, wrapper: list[str], environ: dict[str, str], spare: Callable[..., Spare]
) -> None:
    """It kept the text ``${local_rank}`` among its arguments, and ran on processors of another NUMA node."""
    host = spare("import time; time.sleep(1000)", argument)
    host.stand_by.prepare()
    (reserve,) = host.workers.all
    command = [*wrapper, sys.executable, "-u", host.program[0], argument.replace("${local_rank}", "0")]
    begun = host.begin(command=command, **environ)
    is_same = argument == "same" and not wrapper and not environ
    assert (begun.process is reserve) == is_same
    assert reserve.poll() == (None if is_same else -signal.SIGKILL)
    assert begun.poll() is None


def test_workers_that_share_a_local_rank_do_not_have_each_others_attempts(spare: Callable[..., Spare]) -> None:
    """By --virtual-local-rank all of them have number 0: each one was taken for the survivor of the one before."""
    host = spare("import time; time.sleep(1000)")
    first, second = (host.begin(place=place, CUDA_VISIBLE_DEVICES=str(place)) for place in (0, 1))
    assert first.process is not second.process
    assert (first.poll(), second.poll()) == (None, None)


def test_a_worker_in_reserve_that_no_attempt_is_for_is_killed() -> None:
    survivors = Survivors(Workers(), 60.0)
    processes = [Mock(pid=os.getpid(), signs=[], poll=lambda: None) for _ in range(2)]
    survivors.workers.send = Mock()  # type: ignore[method-assign]
    for place, process in enumerate(processes):
        survivors.reserve({"LOCAL_RANK": str(place)}, [], Mock(return_value=process))
    survivors.begin({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, [], Mock(), place="0")
    survivors.workers.send.assert_any_call(processes[1], signal.SIGKILL)
    survivors.close()


def test_what_a_worker_in_reserve_has_started_ends_with_it(spare: Callable[..., Spare], tmp_path: Path) -> None:
    """It ended with status 0, so that its processes were taken for what a finished worker leaves."""
    script = (
        "import os, subprocess, sys; open(sys.argv[1], 'w').write(str(subprocess.Popen(['sleep', '1000']).pid)); os.environ.get('RANK')"
    )
    host = spare(script, str(tmp_path / "pid"))
    host.stand_by.prepare()
    eventually(lambda: host.workers.all[0].returncode is not None, "the end of the worker, which nobody else looks for")
    child = int((tmp_path / "pid").read_text())
    eventually(lambda: began(child) is None, "the end of the child")


@pytest.mark.parametrize("is_known", [False, True])
def test_no_imports_are_waited_for_while_workers_in_reserve_are_started(
    is_known: bool, spare: Callable[..., Spare], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server has been killed while the host waits; for its successor's imports the launcher gave no sign of life."""
    host = spare("", places=2)
    os.kill(host.servers[0].pid, signal.SIGKILL)
    if is_known:
        with pytest.raises(ForkServerError):
            host.servers[0].fork(host.program, os.environ, [0, 1, 2])
    wait_ready = ForkServer.wait_ready
    monkeypatch.setattr(ForkServer, "wait_ready", lambda server: wait_ready(server) if server is host.servers[0] else pytest.fail("waits"))
    host.stand_by.prepare()
    assert len(host.servers) == 1
    assert host.workers.all == []


def test_the_log_says_why_a_worker_in_reserve_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody hears its word before it is needed, and then another one has its place."""
    survivors, rank = Survivors(Workers(), 60.0), {"LOCAL_RANK": "0"}
    reserve, other = (Mock(pid=pid, signs=[], poll=lambda: None) for pid in (os.getpid(), 0))
    survivors.reserve(rank, [], lambda: reserve)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.connect(f"\0{survivors.address}")
        channel.send(end, {"word": LEAVES, "why": "it uses a device"})
    reserve.poll = lambda: 1
    first = survivors.begin(rank, [], lambda: other)
    assert first.poll() is None
    assert first.process is other
    assert "another one is started: it uses a device" in caplog.text
    survivors.close()


def test_a_worker_in_reserve_that_cannot_wait_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("GEMINI_IN_PLACE", f"{os.getppid()}:nobody-listens-here")
    monkeypatch.setenv("GEMINI_RESERVE", "1")
    monkeypatch.setattr(in_place, "has_begun", False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(SystemExit):
        gemini_ft.run(lambda: pytest.fail("trains"))
    assert "this worker in reserve ends" in caplog.text
    assert "as the process group was made before it" in caplog.text


@pytest.mark.parametrize("spare_option", ["cold", "warm"])
def test_workers_in_reserve_that_are_started_cold_are_none(
    spare_option: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GEMINI_RESTART", "in_place")
    monkeypatch.setenv("GEMINI_SPARE", spare_option)
    with cold_workers():
        pass
    assert caplog.text.count("spare='warm' changes nothing here") == (spare_option == "warm")


@pytest.mark.parametrize(("start_seconds", "goes_on"), [(3600.0, True), (1.0, False)], ids=["on its way", "stuck"])
def test_a_worker_in_reserve_that_is_on_its_way_has_the_time_that_another_one_would_take(
    start_seconds: float, goes_on: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was killed after `in_place_timeout`, and another one began to prepare anew what it had prepared for minutes."""
    now, rank = [1000.0], {"LOCAL_RANK": "0"}
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    survivors = Survivors(Workers(), 10.0, start_seconds)
    reserve, other = (Mock(pid=pid, signs=[], poll=lambda: None) for pid in (os.getpid(), 0))
    survivors.workers.send = Mock()  # type: ignore[method-assign]
    survivors.reserve(rank, [], lambda: reserve)
    now[0] += 300.0
    first = survivors.begin(rank, [], lambda: other)
    now[0] += 299.0
    assert first.poll() is None
    assert first.process is (reserve if goes_on else other)
    now[0] += 2.0
    assert first.poll() is None
    assert first.process is other
    assert f"has not come to gemini_ft.run within {300 if goes_on else 10} s" in caplog.text
    survivors.close()


@pytest.mark.parametrize("is_signalled", [False, True])
def test_a_parked_worker_ends_with_its_job_whatever_handler_the_script_has_left(is_signalled: bool) -> None:
    """Lightning's handler only notes the signal; the launcher has waited for such a worker for 30 s."""
    theirs, ours = channel.pair()
    pid = os.fork()
    if pid == 0:
        theirs.close()
        signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            in_place.park(OwnAttempt(ours), threading.enumerate())
        except SystemExit as end:
            os._exit(end.code == 1)
        finally:
            os._exit(3)
    ours.close()
    try:
        received = channel.receive(theirs)
        assert received is not None
        assert received[0] == {"word": PARKED}
        if is_signalled:
            os.kill(pid, signal.SIGTERM)
        else:
            theirs.close()
        end = time.monotonic() + 5
        while not (done := os.waitpid(pid, os.WNOHANG))[0]:
            assert time.monotonic() < end
            time.sleep(0.01)
        pid = 0
        assert os.waitstatus_to_exitcode(done[1]) == (-signal.SIGTERM if is_signalled else 1)
    finally:
        theirs.close()
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


# Prints the MiB that an attempt has beside those before it: after it has freed 256, and while it uses 128 of them again.
FREES = """
import os, sys, torch, gemini_ft
from gemini_ft.worker import attempt

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

def train():
    before = resident()
    (torch.ones(2**25), torch.ones(2**25))
    if "never" in sys.argv:
        attempt.never_stay("it uses a device")
    kept, _again = resident() - before, torch.ones(3 * 2**23)  # whatever lies between the two that are free
    print(kept, resident() - before)

if "set" in sys.argv:
    os.environ["MALLOC_ARENA_MAX"] = "2"
gemini_ft.run(train)
"""


def kept_by_an_attempt(*options: str) -> tuple[int, int]:
    """The two numbers that FREES prints, in a process of its own: what the tests have left of their heap would count."""
    env = {name: value for name, value in os.environ.items() if not (name.startswith("MALLOC_") or name == "GLIBC_TUNABLES")}
    address = f"in-place-memory-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        env["GEMINI_IN_PLACE"] = f"{os.getpid()}:{address}"
        done = subprocess.run([sys.executable, "-X", "warm", "-c", FREES, *options], env=env, stdout=subprocess.PIPE, text=True, check=True)
    kept, used = map(int, done.stdout.split())
    return kept, used


def test_a_worker_that_stays_gets_no_fresh_pages_for_what_it_has_freed() -> None:
    kept, used = kept_by_an_attempt()
    assert kept > 200
    assert used < kept + 64
    kept, used = kept_by_an_attempt("set")  # the user's own setting counts
    assert kept < 64 < used


def test_a_worker_that_cannot_stay_does_not_keep_what_it_has_freed() -> None:
    """Workers on devices, and of DeepSpeed, kept their peak to the end, for a next attempt that they never had."""
    kept, used = kept_by_an_attempt("never")
    assert kept < 64 < used


def test_a_setting_that_torch_does_not_tell_is_left_alone() -> None:
    """`torch.get_float32_matmul_precision` raises an error once a script has set the precision by torch's newer attributes."""
    before = torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision = "tf32"
        puts = [put for put, _ in in_place._settings()]
    finally:
        torch.backends.fp32_precision = before
    assert torch.set_float32_matmul_precision not in puts
    assert torch.set_num_threads in puts


@pytest.mark.parametrize("is_held", [False, True])
def test_meshes_of_sharded_parameters_are_forgotten_or_the_process_does_not_stay(is_held: bool, launcher: socket.socket) -> None:
    """A mesh of the attempt before would be taken for an equal one of the next, whose process groups are others."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def train() -> Any:
        mesh = init_device_mesh("cpu", (1,))
        model = torch.nn.Linear(2, 2)
        model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        gemini_ft.Checkpointer(model)
        (model.weight + model.weight).redistribute(mesh, [Replicate()])  # torch has caches for what this needs
        return mesh if is_held else None

    gc.freeze()  # as where workers are forked
    try:
        kept = train()
        assert attempt.present is not None
        said = in_place.leftovers(attempt.present, threading.enumerate())
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # else every later collection would look through all that was imported
    assert said == ("what train() has trained is still referenced from outside of it: DeviceMesh" if kept is not None else "")


def test_a_group_that_could_not_be_made_leaves_no_number_behind(launcher: socket.socket) -> None:
    """The next one had another name than on the other ranks, which looked for each other in vain until torch's timeout of 30 minutes."""
    assert attempt.present is not None
    with pytest.raises(RuntimeError):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(milliseconds=10))
    assert in_place.leftovers(attempt.present, threading.enumerate()) == ""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        assert dist.group.WORLD.group_name == "0"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("is_first", [True, False], ids=["a group made before", "the second call"])
def test_another_worker_would_begin_elsewhere(is_first: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("GEMINI_IN_PLACE", f"{os.getppid()}:nobody-listens-here")
    monkeypatch.setattr(in_place, "has_begun", not is_first)
    monkeypatch.setattr(dist, "is_initialized", lambda: is_first)
    seen: list[Any] = []
    assert gemini_ft.run(lambda: seen.append(attempt.present) or "done") == "done"
    assert seen == [None]
    assert "after a failure this worker is started anew, as" in caplog.text
