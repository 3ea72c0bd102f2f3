"""Another user of the same machine: he takes addresses and folders before we come, and learns nothing by it."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from agent_kit import CHUNK, WAIT, Job, content, eventually

from gemini_ft.agent import lifecycle, watchdog
from gemini_ft.errors import AgentError, AgentTimeoutError, ConfigError
from gemini_ft.faults import inject as faults
from gemini_ft.hosts import is_readable
from gemini_ft.wire.private import open_log, own_folder, runtime_folder

NOBODY = 65534
SECRET = b"s" * 16  # of the kit's ranks
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs another user: run as root, who can become one")

SQUATTER = """
import os, socket, sys
os.setgid(65534), os.setuid(65534)
listener = socket.socket(socket.AF_UNIX)
listener.bind({name!r})
listener.listen({queue})
waiting = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) for _ in range({queue} == 0)]
for sock in waiting:  # fill the queue, and take nobody out of it
    sock.connect(listener.getsockname())
print("ready", flush=True)
if waiting:
    sys.stdin.read()
while True:
    sock, _ = listener.accept()
    print("heard", sock.recv(65536).hex(), flush=True)
"""


@contextmanager
def squatting(name: bytes, queue: int = 8) -> Iterator[subprocess.Popen[str]]:
    """A process of uid 65534 that listens at an abstract address and prints whatever it is told; without a queue nobody gets through."""
    command = [sys.executable, "-c", SQUATTER.format(name=name, queue=queue)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@needs_root
class TestSocket:
    def test_a_worker_says_nothing_to_another_users_process_and_names_it(self, tmp_path: Path) -> None:
        with Job(tmp_path) as job, squatting(lifecycle.socket_name(job.run, "a")) as squatter:
            with pytest.raises(AgentError, match=rf"process {squatter.pid} of uid {NOBODY} listens at the address of the agent of run"):
                job.rank("a", 0)
            assert squatter.stdout is not None
            assert squatter.stdout.readline() == "heard \n"

    @pytest.mark.parametrize("question", [lifecycle.status, lifecycle.leave])
    def test_commands_say_nothing_either(self, question: object, tmp_path: Path) -> None:
        with Job(tmp_path) as job, squatting(lifecycle.socket_name(job.run, "a")) as squatter:
            if question is lifecycle.status:
                with pytest.raises(AgentError, match="nothing was said to it"):
                    lifecycle.status(job.run, "a")
            else:
                lifecycle.leave(job.run, "a")
            assert squatter.stdout is not None
            assert squatter.stdout.readline() == "heard \n"

    def test_an_address_that_is_taken_when_the_agent_dies_gets_no_secret(self, tmp_path: Path) -> None:
        with Job(tmp_path) as job:
            rank = job.rank("a", 0)
            os.kill(rank.client.welcome.pid, 9)
            eventually(lambda: rank.client.lost)  # its end has been noticed: the address is free
            with squatting(lifecycle.socket_name(job.run, "a")) as squatter:
                with pytest.raises(AgentError, match=f"of uid {NOBODY}"):
                    job.rank("a", 0)
                assert squatter.stdout is not None
                assert squatter.stdout.readline() == "heard \n"

    def test_a_full_queue_holds_up_nobody_for_long(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Who listens is known only once a connection has been taken in."""
        monkeypatch.setattr(lifecycle, "QUEUE_SECONDS", 0.2)
        why = r"has taken in no connection for 0\.2 s; .* another user's process has the address"
        with Job(tmp_path) as job, squatting(lifecycle.socket_name(job.run, "a"), queue=0), pytest.raises(AgentTimeoutError, match=why):
            job.rank("a", 0)

    def test_the_launcher_watches_on_when_the_address_is_given_back(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with Job(tmp_path) as job:
            watchman = watchdog.AgentWatch(job.run, "a", 1.0)
            with squatting(lifecycle.socket_name(job.run, "a")):
                watchman.start()
                eventually(lambda: f"of uid {NOBODY} listens" in caplog.text)
            job.rank("a", 0)
            assert watchman.is_alive()
            watchman.stop()

    def test_those_who_knock_again_and_again_do_not_fill_the_disk(self, tmp_path: Path) -> None:
        knocking = """
import os, socket
os.setgid(65534), os.setuid(65534)
for _ in range(300):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect({name!r})
        sock.recv(1)
"""
        with Job(tmp_path) as job:
            rank = job.rank("a", 0)
            name = lifecycle.socket_name(job.run, "a")
            subprocess.run([sys.executable, "-c", knocking.format(name=name)], timeout=WAIT, check=True)
            with socket.create_connection(rank.address, WAIT):
                pass  # strangers on the network are counted apart
            assert 0 < job.log("a").count("turned away") < 100


PORT_SQUATTER = """
import os, socket
os.setgid(65534), os.setuid(65534)
with socket.create_server(("{host}", {port})) as listener:
    print("ready", flush=True)
    while True:
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(1)
            print("heard", sock.recv(65536).hex(), flush=True)
            sock.sendall(b"HTTP/1.1 200 OK")
"""


@needs_root
def test_a_dead_agents_port_taken_by_another_user_gets_no_byte_of_the_state(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        ranks = job.start("a", "b", replica_timeout=1.0)
        job.commit(ranks, 1)
        host, port = ranks[1].address
        os.kill(job.pid("b"), 9)
        eventually(lambda: ranks[1].client.lost)
        command = [sys.executable, "-c", PORT_SQUATTER.format(host=host, port=port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as squatter:
            try:
                assert squatter.stdout is not None
                assert squatter.stdout.readline() == "ready\n"
                ranks[0].request(2)
                ranks[0].copy(2)
                assert is_readable(squatter.stdout.fileno(), WAIT), job.log("a")
                heard = squatter.stdout.readline()
                eventually(lambda: "no TLS handshake" in job.log("a"), "the line in the log")  # of the answer, which comes after that
            finally:
                squatter.kill()
        assert heard.startswith("heard 1603"), heard  # a TLS hello, and nothing after it
        assert not any(secret.hex() in heard for secret in (SECRET, content(0, 1, 4 * CHUNK)[:8]))


def test_names_of_other_sockets_do_not_disturb_the_search_for_agents(tmp_path: Path) -> None:
    """Any user may give a socket any name, and the kernel shows it as it is."""
    mine = f"gemini-ft-{os.getuid()}-"
    fakes = [b"\0\xff\xfe", b"\0one\n\nline more", f"\0{mine}".encode() + b"\xff" * 24, f"\0{mine}../../x".encode()]
    with Job(tmp_path) as job, contextlib.ExitStack() as bound:
        job.rank("a", 0)
        for fake in fakes:
            bound.enter_context(socket.socket(socket.AF_UNIX)).bind(fake)
        found = lifecycle.addresses()
        assert lifecycle.socket_name(job.run, "a") in found
        assert not {*fakes} & {*found}


class TestFolder:
    @pytest.fixture(autouse=True)
    def elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        monkeypatch.delenv("GEMINI_LOG_DIR", raising=False)
        monkeypatch.delenv("GEMINI_FAULTS_DIR", raising=False)

    def test_it_is_made_for_this_user_alone(self, tmp_path: Path) -> None:
        folder = runtime_folder()
        assert folder == tmp_path / f"gemini-ft-{os.getuid()}"
        assert folder.stat().st_mode & 0o777 == 0o700

    def test_where_nothing_can_be_written_to_says_what_to_mount(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A container whose root file system is read-only."""
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        monkeypatch.setattr("tempfile.tempdir", None)
        monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc"])
        with pytest.raises(ConfigError, match="mount one at /tmp, or name one that can be written to by TMPDIR"):
            runtime_folder()

    def test_the_users_own_runtime_folder_comes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        assert lifecycle.log_path("run", "a").parent == tmp_path / "gemini-ft"

    def test_a_link_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "his").mkdir()
        (tmp_path / f"gemini-ft-{os.getuid()}").symlink_to(tmp_path / "his")
        for find in (lambda: lifecycle.log_path("run", "a"), lambda: faults.notes_folder("run")):
            with pytest.raises(ConfigError, match="is a link where a folder of this user is due; remove it"):
                find()

    @needs_root
    def test_another_users_folder_is_refused_by_his_uid(self, tmp_path: Path) -> None:
        folder = tmp_path / f"gemini-ft-{os.getuid()}"
        folder.mkdir(mode=0o700)
        os.chown(folder, NOBODY, NOBODY)
        with pytest.raises(ConfigError, match=f"belongs to uid {NOBODY}"):
            lifecycle.log_path("run", "a")

    def test_a_folder_that_others_may_write_to_is_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / "open"
        folder.mkdir()
        folder.chmod(0o777)
        with pytest.raises(ConfigError, match="has mode 0777, so that others may write to it"):
            own_folder(folder)


class TestLog:
    def test_a_link_in_the_logs_place_is_not_followed(self, tmp_path: Path) -> None:
        victim = tmp_path / "precious"
        victim.write_text("untouched")
        (tmp_path / "agent.log").symlink_to(victim)
        with pytest.raises(ConfigError, match="cannot be opened"):
            open_log(tmp_path / "agent.log")
        assert victim.read_text() == "untouched"

    def test_no_writer_waits_for_a_pipe_in_the_logs_place(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "agent.log")
        with pytest.raises(ConfigError, match="cannot be opened"):
            open_log(tmp_path / "agent.log")

    def test_a_second_name_of_another_file_is_not_written_to(self, tmp_path: Path) -> None:
        """Some systems let users link files that are not theirs."""
        victim = tmp_path / "precious"
        victim.write_text("untouched")
        os.link(victim, tmp_path / "agent.log")
        with pytest.raises(ConfigError, match="is no plain file of one name"):
            open_log(tmp_path / "agent.log")
        assert victim.read_text() == "untouched"

    @needs_root
    def test_another_users_file_is_not_written_to(self, tmp_path: Path) -> None:
        log = tmp_path / "agent.log"
        log.touch()
        os.chown(log, NOBODY, NOBODY)
        with pytest.raises(ConfigError, match=f"is no plain file of one name and of uid {os.getuid()}"):
            open_log(log)

    def test_it_is_for_this_user_alone(self, tmp_path: Path) -> None:
        os.close(open_log(tmp_path / "agent.log"))
        assert (tmp_path / "agent.log").stat().st_mode & 0o777 == 0o600


READER = """
import os, sys
os.setgid(65534), os.setuid(65534)
pid = int(sys.argv[1])
for path in (f"/proc/{pid}/environ", f"/proc/{pid}/mem", f"/proc/{pid}/maps", sys.argv[2]):
    try:
        open(path, "rb").read(1)
        print("read", path)
    except PermissionError:
        pass
try:
    print("listed", os.listdir(f"/proc/{pid}/fd"))
except PermissionError:
    pass
print(open(f"/proc/{pid}/cmdline").read())
"""


@needs_root
class TestReading:
    def test_another_user_sees_no_memory_no_environment_no_log_and_no_secret_among_the_arguments(self, tmp_path: Path) -> None:
        with Job(tmp_path) as job:
            rank = job.rank("a", 0)
            command = [sys.executable, "-c", READER, str(rank.client.welcome.pid), rank.client.log]
            seen = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=True, cwd="/").stdout
        assert "read" not in seen
        assert "listed" not in seen
        assert "gemini_ft.agent.main" in seen  # it did look at the agent
        assert SECRET.decode() not in seen
        assert SECRET.hex() not in seen


def test_an_agent_that_crashes_leaves_no_core(tmp_path: Path) -> None:
    """In which the run secret and all copies would be. The limit is 1, as 0 does not keep the kernel from piping a core to a program."""
    soft, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))
    try:
        with Job(tmp_path) as job:
            assert resource.prlimit(job.rank("a", 0).client.welcome.pid, resource.RLIMIT_CORE)[0] == 1
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, most))


def test_two_processes_of_one_user_trust_each_other() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        from gemini_ft.wire.private import check_listener

        check_listener(ours, "a test")
