"""What loggers of Trainers get beside a Trainer's own figures: the run that they go on with after a restart, and the ledger of time.

Trackers of experiments, Weights & Biases and MLflow, are not imported here: a script that uses one has done so.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

_log = logging.getLogger("gemini_ft")
_EVERY = 30.0  # seconds between two questions to the agent
_ANSWER_SECONDS = 0.5  # for its answer, in which a step waits
_VARIABLES = {"wandb": {"WANDB_RUN_ID": "{}", "WANDB_RESUME": "allow"}, "mlflow": {"MLFLOW_RUN_ID": "{}"}}


def open_runs() -> dict[str, str]:
    """Returns tracker -> id of the run that this process has begun, or goes on with."""
    found = dict[str, str]()
    if (run := getattr(sys.modules.get("wandb"), "run", None)) is not None:
        found["wandb"] = str(run.id)
    if (active := getattr(sys.modules.get("mlflow"), "active_run", None)) is not None and (run := active()) is not None:
        found["mlflow"] = str(run.info.run_id)
    return found


@contextmanager
def continued(then: Mapping[str, str]) -> Iterator[None]:
    """Inside, whoever begins a run of a tracker goes on with that of ``then``.

    The user may name another one in the environment, and one that MLflow no longer has is left out.
    """
    now = open_runs()
    with ExitStack() as stack:
        for tracker, run in then.items():
            if now.get(tracker, run) != run:
                told_too_early(tracker, run, now[tracker])
            wanted = {name: value for name, value in _VARIABLES.get(tracker, {}).items() if name not in os.environ and tracker not in now}
            if wanted and tracker == "mlflow" and (look := getattr(sys.modules.get("mlflow"), "get_run", None)) and not goes_on(run, look):
                continue
            for name, value in wanted.items():
                os.environ[name] = value.format(run)
                stack.callback(os.environ.pop, name, None)
        yield


def goes_on(run: str, look: Callable[[str], Any]) -> bool:
    """Whether MLflow still has a run, of which ``look`` gives what it knows; warns of the new one where it has not.

    W&B needs no such look: it begins a run anew under the id of one that it does not know.
    """
    try:
        why = "it was deleted" if getattr(look(run).info, "lifecycle_stage", "active") == "deleted" else ""
    except Exception as error:  # of any kind: the library is not ours, and another store has other errors
        why = f"{type(error).__name__}: {error}"
    if why:
        _log.warning("MLflow cannot go on with run %s: %s. A new run is begun, and the figures until now are not in it", run, why)
    return not why


def told_too_early(tracker: str, then: str, now: str) -> None:
    """Warns of a run that was begun before it was known which one would be continued."""
    _log.warning(
        "%s has begun run %s before the training was resumed, whose figures had gone to run %s: they go to the new one from here on; to "
        "continue the old one, begin it with that id, or leave the beginning to the Trainer",
        *(tracker, now, then),
    )


class TimeFigures:
    """The ledger of a run's time as this host's agent sees it, for loggers; asked for at most every thirty seconds.

    ``run``, ``stream``: whose ledger it is.
    """

    def __init__(self, run: str, stream: str) -> None:
        self._run, self._stream, self._next = run, stream, 0.0

    def due(self) -> dict[str, float]:
        """Returns ``gemini/training_seconds`` and so on, ``gemini/goodput`` and ``gemini/restarts``; nothing where they are not due."""
        if (now := time.monotonic()) < self._next:
            return {}
        self._next = now + _EVERY
        from gemini_ft.launch.endings import account_of  # with torch's launcher, which a worker that does not ask has no need of

        stream = account_of(self._run, _ANSWER_SECONDS).get("streams", {}).get(self._stream)
        if stream is None or (run := stream["measures"]["run"]) is None:
            return {}
        seconds, total = run["seconds"], sum(run["seconds"].values())
        found = {f"gemini/{phase.replace(' ', '_')}_seconds": float(value) for phase, value in seconds.items()}
        goodput = (seconds["training"] + seconds.get("validation", 0.0)) / total if total else 0.0
        return {**found, "gemini/goodput": goodput, "gemini/restarts": float(sum(failure["count"] for failure in run["failures"]))}
