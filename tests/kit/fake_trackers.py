"""Doubles of the packages wandb and mlflow, as far as Lightning's and transformers' loggers use them; their servers are lines in a file."""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


class FakeTracker:
    """The server of a tracker. ``lines``: the file that it writes: runs that were begun or continued, and what was logged to them."""

    def __init__(self, name: str, lines: Path) -> None:
        self._name, self._lines = name, lines

    def told(self) -> list[dict[str, Any]]:
        """Returns all that it was told."""
        lines = map(json.loads, self._lines.read_text().splitlines()) if self._lines.exists() else []
        return [line for line in lines if line["tracker"] == self._name]

    def begun(self) -> list[str]:
        """The runs that were begun or continued, one for each time."""
        return [line["run"] for line in self.told() if line["what"] in ("begun", "continued")]

    def known(self, run: str) -> str:
        """The lifecycle stage of a run that was begun."""
        if run not in self.begun():
            raise KeyError(f"Run {run!r} not found")
        return "deleted" if any(line["run"] == run and line["what"] == "deleted" for line in self.told()) else "active"

    def begin(self, wanted: str | None, may_go_on: bool) -> str:
        """Begins a run, or continues the wanted one."""
        is_known = wanted in self.begun()
        if is_known and not may_go_on:
            raise RuntimeError(f"run {wanted} exists")
        run = wanted or f"{self._name}-{len(self.begun())}"
        self.write(run, "continued" if is_known else "begun")
        return run

    def write(self, run: str, what: str, **facts: Any) -> None:
        with open(self._lines, "a") as file:
            file.write(json.dumps({"tracker": self._name, "run": run, "what": what, **facts}) + "\n")


class FakeConfig(dict[str, Any]):
    def update(self, values: Any, allow_val_change: bool = False) -> None:  # type: ignore[override]
        super().update(values)


class FakeWandbRun:
    name = "a name"

    def __init__(self, server: FakeTracker, run: str) -> None:
        self.id, self._server, self.config = run, server, FakeConfig()

    def log(self, values: dict[str, Any]) -> None:
        self._server.write(self.id, "logged", names=sorted(values), step=values.get("trainer/global_step", values.get("train/global_step")))

    def define_metric(self, *_: Any, **__: Any) -> None: ...

    def _label(self, **_: Any) -> None: ...


def install(lines: Path) -> tuple[FakeTracker, FakeTracker]:
    """Makes the doubles importable in this process; returns the servers of wandb and mlflow."""
    servers = FakeTracker("wandb", lines), FakeTracker("mlflow", lines)
    for name, module in {**_wandb(servers[0]), **_mlflow(servers[1])}.items():
        made = ModuleType(name)
        made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        made.__path__ = []
        vars(made).update(module)
        sys.modules[name] = made
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, made)
    return servers


def _wandb(server: FakeTracker) -> dict[str, dict[str, Any]]:
    def init(id: str | None = None, resume: str | None = None, **_: Any) -> FakeWandbRun:
        resume = resume or os.environ.get("WANDB_RESUME")
        run = FakeWandbRun(server, server.begin(id or os.environ.get("WANDB_RUN_ID"), resume in ("allow", "must")))
        sys.modules["wandb"].run = run  # type: ignore[attr-defined]
        return run

    def log(values: dict[str, Any]) -> None:
        sys.modules["wandb"].run.log(values)

    quiet = {"config": FakeConfig(), "define_metric": lambda *_, **__: None, "termwarn": lambda *_, **__: None}
    lib = {"RunDisabled": type("RunDisabled", (), {})}
    errors = {"ConfigError": type("ConfigError", (Exception,), {})}
    parts: dict[str, dict[str, Any]] = {"wandb.sdk": {}, "wandb.sdk.lib": lib, "wandb.sdk.lib.config_util": errors}
    parts["wandb.wandb_run"] = {"Run": FakeWandbRun}
    return {"wandb": {"run": None, "init": init, "log": log, **quiet}, **parts}


def _mlflow(server: FakeTracker) -> dict[str, dict[str, Any]]:
    active: list[Any] = []

    def get_run(run: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id=run, experiment_id="1", status="RUNNING", lifecycle_stage=server.known(run)))

    def start_run(run_id: str | None = None, **_: Any) -> Any:
        wanted = run_id or os.environ.get("MLFLOW_RUN_ID")
        if wanted is not None and server.known(wanted) == "deleted":
            raise RuntimeError(f"Cannot start run with ID {wanted} because it is in the deleted state.")
        active.append(get_run(server.begin(wanted, True)))
        return active[-1]

    def log_metrics(metrics: dict[str, float], step: int = 0, **_: Any) -> None:
        server.write(active[-1].info.run_id, "logged", names=sorted(metrics), step=step)

    class MlflowClient:
        def __init__(self, *_: Any) -> None: ...

        def get_experiment_by_name(self, name: str) -> Any:
            return SimpleNamespace(experiment_id="1", lifecycle_stage="active")

        def create_run(self, **_: Any) -> Any:
            return get_run(server.begin(None, True))

        def get_run(self, run: str) -> Any:
            return get_run(run)

        def log_batch(self, run_id: str, metrics: Any = (), **_: Any) -> None:
            if server.known(run_id) == "deleted":
                raise RuntimeError(f"The run {run_id} must be in the 'active' state. Current state is deleted.")
            server.write(
                run_id, "logged", names=sorted(metric.key for metric in metrics), step=max((each.step for each in metrics), default=0)
            )

        def set_terminated(self, run_id: str, status: str) -> None:
            server.write(run_id, "ended", status=status)

    def nothing(*_: Any, **__: Any) -> None: ...

    fluent: dict[str, Any] = {"start_run": start_run, "get_run": get_run, "end_run": nothing, "log_metrics": log_metrics}
    fluent |= {"active_run": lambda: active[-1] if active else None}
    fluent |= {"set_tracking_uri": nothing, "get_tracking_uri": nothing, "is_tracking_uri_set": lambda: True, "log_params": nothing}
    return {
        "mlflow": {"__version__": "3.0.0", **fluent},
        "mlflow.tracking": {"MlflowClient": MlflowClient},
        "mlflow.tracking.context": {},
        "mlflow.tracking.context.registry": {"resolve_tags": lambda tags: tags},
        "mlflow.utils": {},
        "mlflow.utils.validation": {"MAX_PARAM_VAL_LENGTH": 250, "MAX_PARAMS_TAGS_PER_BATCH": 100},
        "mlflow.entities": {"Metric": SimpleNamespace, "Param": SimpleNamespace},
    }
