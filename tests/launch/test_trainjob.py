"""Progress for a Kubeflow Trainer: what is posted, to whom, and that the endpoint cannot disturb a job."""

from __future__ import annotations

import datetime
import http.client
import http.server
import ipaddress
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from weights_kit import SCRIPT

from gemini_ft.launch.trainjob import Endpoint, ProgressEstimate, Reports, endpoint_of

PREFIX = "KUBEFLOW_TRAINER_SERVER"


class Trainer:
    """The status server of a Kubeflow Trainer on loopback, with a certificate of its own.

    Attributes:
        posts: path, token and document of each request.
        statuses: to answer with, in turn; then 200.
        is_held: keeps answers back until it is set.
    """

    def __init__(self, folder: Path) -> None:
        self.posts: list[tuple[str, str, dict[str, Any]]] = []
        self.statuses: list[int] = []
        self.is_held = threading.Event()
        self.is_held.set()
        self.folder = folder
        trainer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                trainer.posts.append((self.path, self.headers["Authorization"], json.loads(body)))
                trainer.is_held.wait(60)
                status = trainer.statuses.pop(0) if trainer.statuses else 200
                self.send_response(status)
                if status in (302, 307):
                    self.send_header("Location", f"https://127.0.0.1:{trainer.port}/elsewhere")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*_certificate(folder))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        (folder / "token").write_text("first\n")
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def environ(self) -> dict[str, str]:
        """The variables that the Trainer gives to pods."""
        url = f"https://127.0.0.1:{self.port}/apis/trainer.kubeflow.org/v1alpha1/namespaces/n/trainjobs/t/status"
        return {f"{PREFIX}_URL": url, f"{PREFIX}_CA_CERT": str(self.folder / "ca.crt"), f"{PREFIX}_TOKEN": str(self.folder / "token")}

    @property
    def endpoint(self) -> Endpoint:
        found = endpoint_of(self.environ)
        assert found is not None
        return found

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.is_held.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _certificate(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "trainer")]), datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "ca.crt", folder / "key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(*pem))
    return paths


@contextmanager
def running(folder: Path) -> Iterator[Trainer]:
    trainer = Trainer(folder)
    trainer.start()
    try:
        yield trainer
    finally:
        trainer.stop()


def test_the_token_is_read_again_for_each_report(tmp_path: Path) -> None:
    with running(tmp_path) as trainer:
        trainer.endpoint.post({"progressPercentage": 1})
        (tmp_path / "token").write_text("renewed\n")
        trainer.endpoint.post({"progressPercentage": 2})
        assert [token for _, token, _ in trainer.posts] == ["Bearer first", "Bearer renewed"]
        assert [document for _, _, document in trainer.posts] == [{"trainerStatus": {"progressPercentage": percent}} for percent in (1, 2)]
        assert {path for path, _, _ in trainer.posts} == {"/apis/trainer.kubeflow.org/v1alpha1/namespaces/n/trainjobs/t/status"}


@pytest.mark.parametrize("status", [302, 307, 403, 500])
def test_a_refusal_is_an_error_and_a_token_follows_no_redirection(tmp_path: Path, status: int) -> None:
    with running(tmp_path) as trainer:
        trainer.statuses = [status]
        with pytest.raises(http.client.HTTPException, match=str(status)):
            trainer.endpoint.post({})
        assert len(trainer.posts) == 1


def test_no_token_is_sent_to_a_server_that_another_authority_vouches_for(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    _certificate(tmp_path / "other")
    with running(tmp_path) as trainer:
        with pytest.raises(ssl.SSLCertVerificationError):
            replace(trainer.endpoint, ca=str(tmp_path / "other" / "ca.crt")).post({})
        assert trainer.posts == []


def test_the_environment_of_releases_and_of_the_proposal_is_known_and_plain_http_is_refused(tmp_path: Path) -> None:
    with running(tmp_path) as trainer:
        environ = trainer.environ
    older = {name.replace("SERVER", "STATUS"): value for name, value in environ.items()}
    assert endpoint_of(environ) == endpoint_of(older) != None  # noqa: E711
    for missing in environ:
        assert endpoint_of({**environ, missing: ""}) is None
    assert endpoint_of({**environ, f"{PREFIX}_URL": "http://127.0.0.1/status"}) is None


def test_progress_has_the_models_fields_and_only_the_end_is_at_100_percent() -> None:
    now = 10.0
    progress = ProgressEstimate(200, lambda: now)
    assert progress.status(50)["progressPercentage"] == 25
    now = 20.0
    half = progress.status(100)
    assert (half["progressPercentage"], half["estimatedRemainingSeconds"]) == (50, 20)
    assert progress.status(200)["progressPercentage"] == 99
    now = 30.0
    assert "estimatedRemainingSeconds" not in progress.status(40)  # a restart from an older step: its pace is not known yet
    assert progress.ended()["progressPercentage"] == 100
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow_trainer_api: pip install kubeflow-trainer-api")
    for status in (half, progress.ended()):
        understood = models.TrainerV1alpha1TrainerStatus.from_dict(status).to_dict()
        assert understood.keys() == status.keys()
        assert understood["metrics"] == status["metrics"]


def test_an_endpoint_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemini_ft.launch.trainjob.PATIENCE", 0.2)
    with running(tmp_path) as trainer:
        trainer.is_held.clear()
        with pytest.raises(TimeoutError):
            trainer.endpoint.post({})
        reports = Reports(trainer.endpoint, "no such run", lambda: 100)
        reports.start()
        reports.stop(ended=True)
        assert len(trainer.posts) == 1  # of a job that has never been seen, no end is told


def test_a_job_reports_its_progress_and_its_end_whatever_the_endpoint_answers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with running(tmp_path) as trainer:
        trainer.statuses = [500]
        env = {**os.environ, **trainer.environ, "GEMINI_TOTAL_STEPS": "60", "GEMINI_RUN_ID": f"trainjob-{os.getpid()}"}
        env |= {"GEMINI_LOG_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "gemini_ft.cli.main", "run", str(tmp_path / "train.py"), "60", str(tmp_path / "weights")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        first, last = trainer.posts[0][2]["trainerStatus"], trainer.posts[-1][2]["trainerStatus"]
    (metric,) = first["metrics"]
    assert first["progressPercentage"] == min(99, 100 * int(metric["value"]) // 60)
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    assert "progress cannot be reported" in done.stderr
    assert "progress is reported again" in done.stderr
