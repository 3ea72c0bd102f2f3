"""The progress of a job, posted to the Kubeflow Trainer that has started it: percent, seconds left, and the step that is committed.

The Trainer names an endpoint in the environment of the pods (kubeflow/trainer, proposal 2779). The launcher of rank 0's host reports
there, at most every few seconds and on a thread of its own, so that an endpoint which refuses, hangs or is gone costs the training nothing.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gemini_ft.launch.endings import account_of

_log = logging.getLogger(__name__)

# The names under which releases (the first) and earlier versions of the proposal have the endpoint, and files with its CA and a token.
_PREFIXES = "KUBEFLOW_TRAINER_SERVER", "KUBEFLOW_TRAINER_STATUS"
_LOOK_SECONDS, _LEAST_SECONDS = 1.0, 5.0  # between two looks at the job; between two posts, as the Trainer asks for
PATIENCE = 5.0  # seconds for an endpoint to answer


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The place that takes reports."""

    url: str  # https only, since the token goes there
    ca: str  # path of the certificate that its own must be signed by
    token: str  # path of the token, which is renewed now and then

    def post(self, status: Mapping[str, Any]) -> None:
        """Posts one report; redirections are not followed, and no proxy is asked.

        Raises:
            OSError: it cannot be reached, or is another than its certificate should say; or a file cannot be read.
            http.client.HTTPException: it does not speak HTTP, or has refused the report.
        """
        place = urlsplit(self.url)
        headers = {"Authorization": f"Bearer {Path(self.token).read_text().strip()}", "Content-Type": "application/json"}
        context = ssl.create_default_context(cafile=self.ca)
        connection = http.client.HTTPSConnection(place.hostname or "", place.port, timeout=PATIENCE, context=context)
        with contextlib.closing(connection):
            connection.request("POST", place.path, json.dumps({"trainerStatus": status}), headers)
            answer = connection.getresponse()
            if answer.status >= 300:
                raise http.client.HTTPException(f"status {answer.status}: {answer.read(300).decode(errors='replace')}")


def endpoint_of(environ: Mapping[str, str]) -> Endpoint | None:
    """The endpoint that the environment names, if it names one that a token may be sent to."""
    for prefix in _PREFIXES:
        url, ca, token = (environ.get(f"{prefix}_{part}", "") for part in ("URL", "CA_CERT", "TOKEN"))
        if url.startswith("https://") and ca and token:
            return Endpoint(url=url, ca=ca, token=token)
        if url:
            _log.warning("no progress is reported to %s: that takes https, and %s_CA_CERT and %s_TOKEN", url, prefix, prefix)
    return None


class ProgressEstimate:
    """Reckons how far a job of ``total`` optimizer steps is."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock = total, clock
        self._first: tuple[int, float] | None = None  # step and time since when the pace is measured

    def status(self, step: int) -> dict[str, Any]:
        """The report for a step that is committed, as the Trainer wants it; only a job that has ended is at 100 percent."""
        now = self._clock()
        if self._first is None or step < self._first[0]:
            self._first = step, now
        since, began = self._first
        status = _status(min(99, 100 * step // self._total), step)
        if step > since:
            status["estimatedRemainingSeconds"] = int(max(0, self._total - step) * (now - began) / (step - since))
        return status

    def ended(self) -> dict[str, Any]:
        return _status(100, self._total) | {"estimatedRemainingSeconds": 0}


def _status(percent: int, step: int) -> dict[str, Any]:
    metrics = [{"name": "committed_step", "value": str(step)}]
    return {"progressPercentage": percent, "metrics": metrics, "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds")}


class Reports(threading.Thread):
    """Reports the progress of a job.

    ``total``: tells the number of optimizer steps of the whole job once it is known; nothing is reported before.
    """

    def __init__(self, endpoint: Endpoint, run: str, total: Callable[[], int | None]) -> None:
        super().__init__(name="gemini-trainjob", daemon=True)
        self._endpoint, self._of_run, self._total = endpoint, run, total
        self._progress: ProgressEstimate | None = None
        self._over, self._has_ended = threading.Event(), False
        self._is_failing = False

    def stop(self, ended: bool) -> None:
        """Ends reporting, with a last report where the whole job has ended well; waits no longer than an endpoint is given to answer."""
        self._has_ended = ended
        self._over.set()
        self.join(2 * PATIENCE)

    def run(self) -> None:
        said: int | None = None
        next_post = 0.0
        while not self._over.wait(_LOOK_SECONDS):
            step = self._step()
            if step is not None and step != said and time.monotonic() >= next_post and (total := self._total()):
                self._progress = self._progress or ProgressEstimate(total)
                self._post(self._progress.status(step))
                said, next_post = step, time.monotonic() + _LEAST_SECONDS
        if self._has_ended and self._progress is not None:
            self._post(self._progress.ended())

    def _step(self) -> int | None:
        """The newest step that is committed; None where rank 0 is on another host, whose launcher reports."""
        document = account_of(self._of_run)
        if "0" not in document.get("workers", {}):
            return None
        return max((stream["committed"] for stream in document["streams"].values() if stream["committed"] is not None), default=None)

    def _post(self, status: Mapping[str, Any]) -> None:
        try:
            self._endpoint.post(status)
        except Exception as error:  # of any kind: the training goes on
            if not self._is_failing:
                _log.warning("progress cannot be reported to %s, which is tried again: %s", self._endpoint.url, error)
            self._is_failing = True
        else:
            if self._is_failing:
                _log.warning("progress is reported again to %s", self._endpoint.url)
            self._is_failing = False


@contextmanager
def reported_progress(environ: Mapping[str, str], run: str, total: Callable[[], int | None]) -> Iterator[None]:
    """Inside, the job's progress is reported if a Kubeflow Trainer wants to know; leaving without an exception means that it has ended."""
    endpoint = endpoint_of(environ)
    if endpoint is None:
        yield
        return
    reports = Reports(endpoint, run, total)
    reports.start()
    ended = False
    try:
        yield
        ended = True
    finally:
        reports.stop(ended)
