"""``gemini watch`` and ``gemini top``, of real agents: on this machine, and at their pages."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest
from agent_kit import WAIT, Job, end_agent, eventually
from drills import DRILLS, SINCE

from gemini_ft.agent import lifecycle
from gemini_ft.cli import accounts, top, watch
from gemini_ft.cli import main as cli
from gemini_ft.hosts import began, is_readable
from gemini_ft.wire.worker_messages import Launch, Request

GEMINI = [sys.executable, "-m", "gemini_ft.cli.main"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Two agents of one job, one of which has a page; four steps are committed, and a rank of host b has been lost once."""
    with Job(tmp_path_factory.mktemp("watched")) as job:
        launch = Launch(
            id="test", pid=os.getpid(), ticks=began(os.getpid()) or 0, started=time.time(), command=["x"], folder="/", script="", environ={}
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GEMINI_METRICS", "0")
            ranks = job.start("a", "b", hello={"launch": launch})
        job.commit(ranks, 1, 2)
        ranks[0].client.tell(Request(iteration=3, held=[(0.004, 0.002)]))
        ranks[1].give_up(3)
        ranks[0].wait_for("abort", iteration=3)
        job.commit(ranks, 4)
        yield job


def address(job: Job, host: str) -> str:
    return str(eventually(lambda: json.loads(lifecycle.status(job.run, host) or '{"metrics": ""}')["metrics"], "an address of metrics"))


def at_end(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = cli.main(arguments)
    return status, capsys.readouterr().out


def test_top_of_this_machine_and_of_pages(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, names in (
        (["--run-id", job.run], [f"{job.run}/a", f"{job.run}/b"]),
        ([address(job, "a"), address(job, "b")], [address(job, "a"), address(job, "b")]),
    ):
        status, shown = at_end(capsys, "top", *arguments)
        assert status == 0
        lead, head, *rows = shown.splitlines()
        assert lead == f"main, led by {names[0]}: hosts 2, ranks 2, absent hosts 0, replicas left out 0, stragglers 0"
        columns = re.split(r"\s{2,}", head)
        found = [dict(zip(columns, re.split(r"\s{2,}", row), strict=True)) for row in rows]
        assert [row["host"] for row in found] == names
        for row in found:
            assert (row["stream"], row["ranks"], row["committed"]) == ("main", "1", "4")
            assert float(row["steps/s"]) > 0
            assert row["memory"].endswith(" GiB")
            assert (row["stored"], row["uploads"], row["last failure"]) == ("-", "0", "-")
        assert (found[0]["step"], found[0]["lag"]) == ("4", "0")


def test_top_names_who_does_not_answer_and_says_when_nobody_does(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = at_end(capsys, "top", address(job, "a"), "127.0.0.1:1")
    assert (status, shown.splitlines()[1]) == (0, "no answer: 127.0.0.1:1")
    assert at_end(capsys, "top", "127.0.0.1:1") == (1, "no answer: 127.0.0.1:1\n" + "  ".join(top.HEAD) + "\n")


def test_top_in_a_terminal_goes_on_until_it_is_interrupted(job: Job) -> None:
    pytest.importorskip("rich", reason="needs rich: pip install rich")
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen([*GEMINI, "top", "--run-id", job.run, "--every", "0.2"], stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    shown = b""
    try:
        while shown.count(f"{job.run}/b".encode()) < 2:
            assert is_readable(ours, WAIT), shown
            shown += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def judged(answers: dict[str, Any], later: float = 0.0) -> list[str]:
    """The alerts after two looks at real answers, as if they had come so much ``later``."""
    history, alerts = watch.History(3600.0), watch.Alerts(watch.read_rules(watch.RULES.read_text()))
    now = time.time() + later
    changed = []
    for at in (now - 3000, now - 15, now):
        history.add(at, answers)
        changed += alerts.judge(history, at)
    return [watch.said(change) for change in changed if change["status"] == "firing"]


def test_a_job_that_goes_well_has_no_alert_and_one_that_stands_still_has(job: Job) -> None:
    answers = accounts.here(job.run)
    assert len(answers) == 2
    assert judged(answers) == []
    stalled = [each for each in judged(answers, later=200) if "GeminiProgressStalled" in each]
    assert [re.sub(r"3\.\d min", "3 min", each) for each in stalled] == [
        f"critical GeminiProgressStalled: {job.run}/{host}: no step of main has been committed for 3 min" for host in "ab"
    ]


def test_one_look(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert at_end(capsys, "watch", "--for", "0", "--run-id", job.run) == (0, "")
    assert cli.main(["watch", "--for", "0", "--run-id", "there-is-none"]) == 1
    assert "no agent has answered; `gemini ps --all`" in capsys.readouterr().err


RULES = """
groups: [{name: mine, rules: [
  {alert: Committed, expr: gemini_committed_step > 3, labels: {severity: %s, team: x},
   annotations: {summary: "{{ $labels.instance }} is at {{ $value }} of {{ $labels.stream }}"}},
  {alert: Later, expr: gemini_committed_step > 3, for: 1h}]}]
"""


@pytest.mark.parametrize(("severity", "status"), [("warning", 3), ("critical", 4), ("info", 3)])
def test_the_status_says_how_grave_it_was(job: Job, severity: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rules.yml").write_text(RULES % severity)
    found, shown = at_end(capsys, "watch", "--for", "0", "--rules", str(tmp_path / "rules.yml"), address(job, "a"), "127.0.0.1:1")
    assert found == status
    (line,) = shown.splitlines()
    assert line.endswith(f" firing {severity} Committed: {address(job, 'a')} is at 4 of main")


def test_the_hook_is_told_and_one_that_fails_or_hangs_costs_a_line(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rules.yml").write_text(RULES % "critical")
    monkeypatch.setattr(watch, "HOOK_SECONDS", 0.3)
    common = ["watch", "--rules", str(tmp_path / "rules.yml"), "--run-id", job.run, "--until", "critical"]
    assert cli.main([*common, "--hook", f"cat > {tmp_path}/told"]) == 4
    told = json.loads((tmp_path / "told").read_text())
    assert (told["version"], told["status"]) == ("4", "firing")
    first = told["alerts"][0]
    assert first["labels"] == {
        "alertname": "Committed", "instance": f"{job.run}/a", "job": "gemini", "stream": "main", "severity": "critical", "team": "x"
    }  # fmt: skip
    assert first["annotations"]["summary"] == f"{job.run}/a is at 4 of main"
    capsys.readouterr()
    assert cli.main([*common, "--hook", "exit 5"]) == 4
    assert capsys.readouterr().err == "the hook ended with status 5: exit 5\n"
    assert cli.main([*common, "--hook", "sleep 60"]) == 4
    assert capsys.readouterr().err == "the hook did not end within 0.3 s: sleep 60\n"


@contextmanager
def sidecar(folder: Path, rules: str) -> Iterator[tuple[str, subprocess.Popen[str], IO[str]]]:
    """The run of an agent that has committed a step, ``gemini watch`` beside it once it has said that "Here" fires, and what it prints."""
    (folder / "rules.yml").write_text(rules)
    with Job(folder) as job:
        ranks = job.start("a")
        job.commit(ranks, 1)
        command = [*GEMINI, "watch", "--run-id", job.run, "--every", "0.1", "--rules", str(folder / "rules.yml")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            assert process.stdout.readline().endswith(" firing warning Here: \n")
            yield job.run, process, process.stdout
        finally:
            process.kill()
            process.communicate()


def test_a_sidecar_says_when_an_alert_ends_and_how_grave_it_was_at_sigterm(tmp_path: Path) -> None:
    """The agent is lost; it is known from a look before."""
    rules = "groups: [{name: mine, rules: [{alert: Here, expr: gemini_committed_step > 0}, {alert: Gone, expr: up == 0}]}]"
    with sidecar(tmp_path, rules) as (run, process, output):
        end_agent(run, "a")
        said = {output.readline()[9:] for _ in range(2)}
        assert said == {"resolved warning Here: \n", "firing warning Gone: \n"}
        process.terminate()
        assert process.wait(WAIT) == 3


def test_an_agent_of_this_machine_that_leaves_is_not_away(tmp_path: Path) -> None:
    rules = "groups: [{name: mine, rules: [{alert: Here, expr: gemini_workers >= 0}, {alert: Gone, expr: up == 0, for: 1s}]}]"
    with sidecar(tmp_path, rules) as (run, process, output):
        eventually(lambda: lifecycle.leave(run, "a"), "the end of an agent")
        assert output.readline().endswith(" resolved warning Here: \n")
        time.sleep(2)  # many looks
        process.terminate()
        assert process.communicate(timeout=WAIT)[0] == ""


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\ngemini_", b"nonsense\r\n\r\n"])
def test_an_agent_that_dies_while_it_answers_is_away(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def die() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=die)
        thread.start()
        assert accounts.page_at(f"127.0.0.1:{listener.getsockname()[1]}") is None
        thread.join(WAIT)


def test_a_page_without_end_is_away_and_what_one_says_moves_no_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(text: bytes, again: bytes, head: bytes) -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(65536)
                connection.sendall(head + text)
                until = time.monotonic() + 5
                while again:
                    connection.sendall(again)
                    time.sleep(0.01)
                    assert time.monotonic() < until, "it goes on reading"

        def asked(text: bytes, again: bytes = b"", head: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> Any:
            thread = threading.Thread(target=answer, args=(text, again, head))
            thread.start()
            found = accounts.page_at(f"127.0.0.1:{listener.getsockname()[1]}")
            thread.join(WAIT)
            return found

        assert asked(b'gemini_step{stream="\x1b[2J"} 4\n') == [("gemini_step", {"stream": "\\x1b[2J"}, 4.0)]
        monkeypatch.setattr(accounts, "PAGE_SECONDS", 0.3)
        assert asked(b"", b"#") is None
        for head in (b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;"):
            assert asked(b"", b"a", head) is None
        monkeypatch.setattr(accounts, "PAGE_BYTES", 100)
        assert asked(b"#" * 200) is None


def test_a_page_that_is_elsewhere_is_not_asked_for(job: Job) -> None:
    """Whoever listens at an address sends nobody to another one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def redirect() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(f"HTTP/1.1 302 Found\r\nLocation: http://{address(job, 'a')}/metrics\r\n\r\n".encode())

        thread = threading.Thread(target=redirect)
        thread.start()
        assert accounts.page_at(f"127.0.0.1:{listener.getsockname()[1]}") is None
        thread.join(WAIT)


def test_at_sigint_the_status_says_that_no_agent_has_answered(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupted)
    assert cli.main(["watch", "--run-id", "there-is-none"]) == 1
    assert "no agent has answered" in capsys.readouterr().err


def test_a_hook_for_which_no_process_is_left_costs_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", refused)
        watch.tell("curl", [])
    assert "the hook could not be run (" in capsys.readouterr().err


def test_an_alert_is_held_back_no_longer_where_the_clock_is_set_back() -> None:
    history = watch.History(3600.0)
    alerts = watch.Alerts(watch.read_rules("groups: [{name: x, rules: [{alert: Here, expr: gemini_step > 0, for: 2m}]}]"))
    for at in (10_000.0, 10_060.0, 6400.0, 6460.0):
        history.add(at, {"a": [("gemini_step", {}, 1.0)]})
        assert alerts.judge(history, at) == []
    history.add(6520.0, {"a": [("gemini_step", {}, 1.0)]})
    assert [alert["labels"]["alertname"] for alert in alerts.judge(history, 6520.0)] == ["Here"]


def test_a_hook_that_no_signal_ends_does_not_stop_the_watch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal is not sent, as one in a system call that cannot be interrupted would not take it."""
    hooks = list[subprocess.Popen[str]]()

    class NotedHook(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            hooks.append(self)

    monkeypatch.setattr(watch, "HOOK_SECONDS", 0.1)
    monkeypatch.setattr(watch, "KILLED_SECONDS", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", NotedHook)
        patch.setattr("os.killpg", lambda group, number: None)
        watch.tell("sleep 3", [])
    assert capsys.readouterr().err == "the hook did not end within 0.1 s: sleep 3\n"
    os.killpg(hooks[0].pid, signal.SIGKILL)
    hooks[0].wait(WAIT)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rules", "/nowhere"], "--rules /nowhere: cannot be read"),
        (["--every", "0"], "--every 0: must be more than 0 seconds"),
        (["--every", "nan"], "--every nan: must be more than 0 seconds"),
        (["nonsense"], "metrics='nonsense'"),
    ],
)
def test_what_is_wrong_is_named(arguments: Sequence[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "groups: [",
        "[]",
        "groups: {}",
        "groups: [{rules: [{alert: x}]}]",
        "groups: [{rules: [{alert: x, expr: 'avg(up)'}]}]",
        "groups: [{rules: [{alert: x, expr: 3}]}]",
        "groups: [{rules: [{alert: x, expr: up, for: soon}]}]",
        "groups: [{rules: [{alert: x, expr: up, annotations: no}]}]",
        "groups: [{rules: [{record: x, expr: up}]}]",
        "groups: [{rules: [{alert: x, expr: 'clamp(up, up, up)'}]}]",
        "groups: [{rules: [{alert: x, expr: 'max_over_time(up[2h]) > 0'}]}]",
    ],
)
def test_rules_that_are_none_are_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rules.yml").write_text(text)
    assert cli.main(["watch", "--rules", str(tmp_path / "rules.yml"), "--for", "0"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gemini watch: ")
    assert "Traceback" not in error


def test_the_rules_are_printed_for_prometheus(capsys: pytest.CaptureFixture[str]) -> None:
    assert at_end(capsys, "watch", "--print-rules") == (0, watch.RULES.read_text())


def test_what_a_drill_would_show() -> None:
    """A row has all figures that there are in a drill, and a dash for the others."""
    answers = DRILLS["storage"].answers(SINCE + 120)
    rows = top.rows(answers, SINCE + 120)
    assert [row[top.HEAD.index("stored")] for row in rows] == ["-", "fails for 2.0 min"]
    assert [row[top.HEAD.index("age")] for row in rows] == ["1 s", "1 s"]
    assert rows[0][top.HEAD.index("uploads")] == "-"
