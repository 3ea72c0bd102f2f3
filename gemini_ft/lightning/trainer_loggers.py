"""Loggers of Lightning: those that write files of their own, and those of Weights & Biases and MLflow, go on where they had been.

A logger without a version takes the next free one at every start of the script, so that a restart would cut its curves. It gets
back the version that it had, and what was logged after the resumed step is taken away, because it is logged again. In the same launch it
gets back its folder, too, which a script may name by the time. A tracker's logger goes on with the run that it had begun.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gemini_ft.lightning.around import Around
from gemini_ft.lightning.trainer_callbacks import shipped_names
from gemini_ft.trackers import goes_on, told_too_early

_PLACE = ("_root_dir", "_save_dir", "_name", "_version")  # the attributes that say where a logger writes
_ASIDE = ".aside"  # behind the name of a CSV file: its rows before some were taken out, until as many are there again
_MOST_ROWS = 100  # that a snapshot holds because the logger has not written them to its file yet


class Logs:
    """The loggers of one Trainer. ``trainer``: the Trainer, whose process group exists."""

    def __init__(self, trainer: Any, package: str) -> None:
        self._trainer, self._package = trainer, package
        self._rows: dict[int, int] = {}  # that a CSV file holds, by the index of its logger
        self._counting: list[Around] = []

    def state(self) -> dict[int, dict[str, Any]]:
        """By the index of each logger its version, and how much it has written, or the id of its run."""
        runs = {index: {"run": run} for index, logger in enumerate(self._trainer.loggers) if (run := _run_of(logger)) is not None}
        return runs | {index: self._state_of(index, logger) for index, logger in self._files()}

    def go_on(self, saved: Mapping[int, Mapping[str, Any]], step: int, *, is_same_launch: bool) -> None:
        """Prepares the loggers of a resumed fit; called before Lightning opens them.

        Args:
            saved: what :meth:`state` gave.
            step: the first number under which metrics will be logged.
            is_same_launch: whether the launcher has started the script anew.
        """
        for index, logger in enumerate(self._trainer.loggers):
            if (run := saved.get(index, {}).get("run")) is not None:
                _continue(logger, run)
        for index, logger in self._files():
            then = saved.get(index)
            if then is None:
                continue
            hparams: dict[str, Any] = {}
            place = then.get("place", {"_version": then.get("version")})  # snapshots in storage may be older
            if is_same_launch and _place_of(logger) != place:
                if (opened := logger._experiment) is not None:  # by the script, before the fit
                    hparams = getattr(opened, "hparams", {})
                    getattr(opened, "close", lambda: None)()
                    logger._experiment = None
                vars(logger).update(place)
            if logger._version not in (None, place["_version"]):
                continue
            logger._version = place["_version"]
            if "TensorBoardLogger" in shipped_names(logger):
                logger._kwargs = {**logger._kwargs, "purge_step": step}
                logger._default_hp_metric = False  # it was logged at the first start
            elif self._trainer.is_global_zero and then["rows"] is not None:
                written = self._reopen(logger, then["rows"], then["pending"])
                logger.experiment.hparams.update(hparams)
                self._count(index, logger, written)

    def close(self) -> None:
        """Follows the loggers no longer."""
        for around in self._counting:
            around.end()
        for index, logger in self._files():  # a callback may have taken some away
            writer = logger._experiment
            if index in self._rows and writer is not None and 0 < len(_read(writer, _ASIDE).rows) <= len(_read(writer).rows):
                writer._fs.rm(writer.metrics_file_path + _ASIDE)

    def _files(self) -> list[tuple[int, Any]]:
        return [(index, logger) for index, logger in enumerate(self._trainer.loggers) if is_followed(logger)]

    def _state_of(self, index: int, logger: Any) -> dict[str, Any]:
        state: dict[str, Any] = {"place": _place_of(logger), "rows": None, "pending": []}
        writer = logger._experiment
        if writer is not None and self._trainer.is_global_zero and "CSVLogger" in shipped_names(logger):
            if index not in self._rows:
                self._count(index, logger, len(_read(writer).rows))
            if len(writer.metrics) > _MOST_ROWS:
                writer.save()
            state |= {"rows": self._rows[index], "pending": list(writer.metrics)}
        return state

    def _count(self, index: int, logger: Any, rows: int) -> None:
        """Follows how many rows the file holds, from ``rows`` on."""
        self._rows[index] = rows
        writer = logger._experiment

        def save_and_count(save: Callable[[], None]) -> None:
            rows = len(writer.metrics)
            save()
            self._rows[index] += rows

        self._counting.append(Around(writer, "save", save_and_count))

    def _reopen(self, logger: Any, rows: int, pending: list[dict[str, Any]]) -> int:
        """Lets the logger append to its file, of which the first ``rows`` rows stay; returns how many there are."""
        base = "lightning.fabric" if self._package.startswith("lightning.") else "lightning_fabric"
        kind = importlib.import_module(f"{base}.loggers.csv_logs")._ExperimentWriter
        check = kind._check_log_dir_exists
        kind._check_log_dir_exists = lambda _: None  # it would delete what is there
        try:
            writer = logger.experiment
        finally:
            kind._check_log_dir_exists = check
        table, aside = there, _ = _read(writer), _read(writer, _ASIDE)
        if len(table.rows) > max(rows, len(aside.rows)):
            _write(writer, table, _ASIDE)  # a later fit of the script, which is resumed after this one, may have logged these
        elif len(table.rows) < rows <= len(aside.rows):
            table = aside
        kept = _Table(table.columns, table.rows[:rows])
        writer.metrics_keys, writer.metrics = kept.columns, list(pending)
        if len(kept.rows) != len(there.rows):
            _write(writer, kept)
        return len(kept.rows)


def _place_of(logger: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(logger).items() if name in _PLACE}


def is_followed(logger: Any) -> bool:
    """Whether a resumed fit goes on where this logger stood."""
    return bool(shipped_names(logger) & {"CSVLogger", "TensorBoardLogger"})


def _run_of(logger: Any) -> str | None:
    """The id of the run that a tracker's logger has begun, on the rank that logs; None: there is none."""
    kinds = shipped_names(logger)
    if "WandbLogger" in kinds:
        run = getattr(logger._experiment, "id", None)
        return run if isinstance(run, str) else None
    return logger._run_id if "MLFlowLogger" in kinds and logger._initialized else None


def _continue(logger: Any, run: str) -> None:
    """Has a tracker's logger go on with a run, unless it has begun one, the script names another one, or MLflow no longer has it."""
    kinds, now = shipped_names(logger), _run_of(logger)
    if now is not None:
        if now != run:
            told_too_early(type(logger).__name__, run, now)
    elif "MLFlowLogger" in kinds:
        if not logger._run_id and goes_on(run, logger._mlflow_client.get_run):
            logger._run_id = run
    elif "WandbLogger" in kinds and logger._wandb_init.get("id") is None:
        logger._wandb_init["id"] = logger._id = run


class _Table(NamedTuple):
    """A file that a CSVLogger writes."""

    columns: list[str]
    rows: list[dict[str, str]]


def _read(writer: Any, ending: str = "") -> _Table:
    """The file with ``ending`` behind its name; an empty table if there is none."""
    if not writer._fs.isfile(writer.metrics_file_path + ending):
        return _Table([], [])
    with writer._fs.open(writer.metrics_file_path + ending, "r", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        return _Table(list(reader.fieldnames or ()), rows)


def _write(writer: Any, table: _Table, ending: str = "") -> None:
    with writer._fs.open(writer.metrics_file_path + ending, "w", newline="") as file:
        lines = csv.DictWriter(file, fieldnames=table.columns)
        lines.writeheader()
        lines.writerows(table.rows)
