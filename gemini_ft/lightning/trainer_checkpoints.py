"""The Trainer's checkpoints: made for a snapshot, handed back to restore from, and cleared of what no file should have."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gemini_ft.lightning.around import Around
from gemini_ft.lightning.trainer_callbacks import shipped_names
from gemini_ft.loaders.bookmark import is_position
from gemini_ft.loaders.loader import bookmark_of
from gemini_ft.state.hyperparameters import Given, of_mapping, of_scheduler

log = logging.getLogger("gemini_ft")
_KEPT = "="  # a line of the note of `Files`


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """Lightning's checkpoint, as a dictionary; asks the strategy for the states of model and optimizers."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return checkpoint


def is_checkpoint_seen(trainer: Any) -> bool:
    """Whether a hook looks at checkpoints while they are made. A hook that was not overridden belongs to a base class."""
    hooks = [type(holder).on_save_checkpoint for holder in (trainer.lightning_module, trainer.precision_plugin, *trainer.callbacks)]
    return not all(hook.__qualname__.partition(".")[0] in ("CheckpointHooks", "Precision", "Callback") for hook in hooks)


def offer_checkpoint(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Lets the Trainer restore from ``checkpoint`` as if it had read it from a file."""
    trainer._checkpoint_connector._loaded_checkpoint = checkpoint


def withdraw_checkpoint(trainer: Any) -> None:
    """Undoes :func:`offer_checkpoint`."""
    trainer._checkpoint_connector._loaded_checkpoint = {}


def hyper_parameters(trainer: Any) -> dict[str, Any]:
    """The hyperparameters of module and datamodule, under the keys a checkpoint has them."""
    found = {}
    for holder in _with_hparams(trainer):
        if holder.hparams:
            found[holder.CHECKPOINT_HYPER_PARAMS_KEY] = dict(holder.hparams)
    return found


def given(trainer: Any) -> tuple[Given, Given]:
    """Hyperparameters that the script gives beside the optimizers': those that a resume puts back, and those that it leaves."""
    is_elastic = trainer.strategy.gemini_config.elastic is not None  # then it changes with the number of ranks
    snapshots = of_mapping("the Trainer", {} if is_elastic else {"accumulate_grad_batches": trainer.accumulate_grad_batches})
    for index, config in enumerate(trainer.lr_scheduler_configs):
        snapshots |= of_scheduler(f"scheduler {index} ({type(config.scheduler).__name__})", config.scheduler)
    scripts: Given = {}
    for holder in _with_hparams(trainer):
        scripts |= of_mapping(type(holder).__name__, holder.hparams)
    return snapshots, scripts


def without_hyper_parameters(trainer: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint without hyperparameters: they may hold whole modules, and the script makes them anew anyway."""
    keys: set[str] = set()
    for holder in _with_hparams(trainer):
        keys |= {holder.CHECKPOINT_HYPER_PARAMS_KEY, holder.CHECKPOINT_HYPER_PARAMS_NAME, holder.CHECKPOINT_HYPER_PARAMS_TYPE}
    return {key: value for key, value in checkpoint.items() if key not in keys}


def _with_hparams(trainer: Any) -> list[Any]:
    return [holder for holder in (trainer.lightning_module, trainer.datamodule) if holder is not None]


def pin_checkpoint_folders(trainer: Any, checkpoint: Mapping[str, Any], *, is_same_launch: bool) -> None:
    """Gives ModelCheckpoints the folders that they had before the restart: in another one they forget which checkpoints were the best.

    One without a folder would take the logger's, whose version counts up with every start of the script. One with a folder keeps it in
    another launch, as it may be another on purpose; a launcher that starts the same script anew gets another one only where the script
    names it by the time, as Hydra does.
    """
    for callback in trainer.checkpoint_callbacks:
        saved = checkpoint.get("callbacks", {}).get(callback.state_key)
        if not isinstance(saved, dict) or not saved.get("dirpath"):
            continue
        if (now := getattr(callback, "dirpath", "")) is None or (is_same_launch and now and now != saved["dirpath"]):
            if now is not None and trainer.is_global_zero:
                log.warning("%s goes on in %s, and not in %s: a restart keeps the folder", type(callback).__name__, saved["dirpath"], now)
            callback.dirpath = saved["dirpath"]


def drop_positions(checkpoint: Mapping[str, Any], loaders: Sequence[Any] = ()) -> None:
    """Removes positions of loaders that were made resumable from a checkpoint, and leaves those that loaders save themselves.

    ``checkpoint``: as Lightning made it, with a position for each of ``loaders``. ``loaders``: those of the training, if they are at hand.
    """
    state = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    marks = [mark for mark in map(bookmark_of, loaders) if mark is not None]
    others = []
    for position in state.get("combined_loader", []):
        own = position.get("own") if is_position(position) else position
        if is_position(position) and marks:
            own = marks.pop(0).own_position
        if own is not None:
            others.append(own)
    if others:
        state["combined_loader"] = others
    else:
        state.pop("combined_loader", None)


def as_if_saved_by_callback(checkpoint: Mapping[str, Any]) -> None:
    """Shapes the loops' state as a ModelCheckpoint saves it, just before a batch counts as completed.

    The Trainer's restart logic knows that moment. From ours, between two batches, it would take the step as the last
    one before a validation, and count it a second time.
    """
    loop = checkpoint["loops"]["fit_loop"]
    for counts in ("total", "current"):
        loop["epoch_loop.batch_progress"][counts]["completed"] -= 1
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def logged_steps(checkpoint: Mapping[str, Any]) -> int:
    """The number under which metrics of the next step would be logged."""
    return int(checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"])


class Files:
    """The files in the folders of the ModelCheckpoints, which name a new one after those that are there.

    What they had written after the resumed step is written again. The files of the first time count as not being there, so that they are
    written over and none is called "-v1". They are known by a note on the host of rank 0; all others may be another run's, and stay.
    """

    def __init__(self, trainer: Any, io: Any = None) -> None:
        self._trainer, self._io = trainer, io
        self._there: dict[str, set[str]] = {}  # names by folder, on rank 0
        self._early: set[str] = set()  # paths of files that are to be written again
        self._seeing: list[Around] = []
        # On rank 0: has the launch, and a line for each file that this run has written or removed since its last start.
        self._note: Path | None = None
        self._is_kept = False  # whether the note has `_KEPT`

    def state(self) -> dict[str, list[str]]:
        """Names of the files by folder, as plain data."""
        return {folder: sorted(names) for folder, names in self._there.items()}

    def begin(self, saved: Mapping[str, Sequence[str]] | None, note: Path, launch: str) -> None:
        """Looks into the folders, before the first batch. Collective.

        Args:
            saved: the `state` of the snapshot; None: nothing is resumed, as after a failure before the first commit.
            note: the file in which this host keeps what the run has written.
            launch: the name of all attempts of the present launcher; empty: files of a start that resumes nothing stay.
        """
        callbacks = [callback for callback in self._trainer.checkpoint_callbacks if "ModelCheckpoint" in shipped_names(callback)]
        folders = {str(callback.dirpath): callback for callback in callbacks if callback.dirpath}
        if not folders:
            return
        if self._trainer.is_global_zero:
            self._there = {folder: _names_in(callback._fs, folder) for folder, callback in folders.items()}
            self._note = note
            self._early = self._written_again(saved, launch)
            self._write_note("w", "".join(f"{line}\n" for line in (launch, *(f"+{path}" for path in self._early))))
        self._early = set(self._trainer.strategy.broadcast(self._early))
        if self._early or self._io is not None:
            self._seeing = [Around(callback, "file_exists", self._is_seen) for callback in callbacks]

    def writes(self, path: Any) -> None:
        """Records a file that is about to be written."""
        self._early.discard(str(path))
        self._change("+", path)

    def removed(self, path: Any) -> None:
        """Records a file that was removed."""
        self._change("-", path)

    def keep(self) -> None:
        """Has an attempt that resumes nothing leave these files alone: there is a commit, and if it is lost they are all that is left."""
        if self._note is not None and not self._is_kept:
            self._is_kept = True
            self._write_note("a", f"{_KEPT}\n")

    def end(self) -> None:
        """Lets the ModelCheckpoints see all files again."""
        for around in self._seeing:
            around.end()

    def _written_again(self, saved: Mapping[str, Sequence[str]] | None, launch: str) -> set[str]:
        """Takes the files that this run has written after the snapshot out of those that are there; returns their paths.

        Where nothing is resumed these are those of an attempt of this launch that has failed before its first commit.
        """
        assert self._note is not None
        ours: set[str] = set()
        with contextlib.suppress(OSError, ValueError):
            by, *lines = self._note.read_text().splitlines()
            for line in lines if saved is not None or (by == launch != "" and _KEPT not in lines) else ():
                (ours.add if line.startswith("+") else ours.discard)(line[1:])
        early = set()
        for folder, names in self._there.items():
            paths = {name: os.path.join(folder, name) for name in names.difference(saved.get(folder, names) if saved is not None else ())}
            again = {name for name, path in paths.items() if _target(path) in ours}
            names -= again
            early |= {paths[name] for name in again}
        return early

    def _change(self, sign: str, path: Any) -> None:
        folder, name = os.path.split(str(path))
        if folder in self._there:
            (self._there[folder].add if sign == "+" else self._there[folder].discard)(name)
            self._write_note("a", f"{sign}{path}\n")

    def _write_note(self, mode: str, text: str) -> None:
        assert self._note is not None
        try:
            self._note.parent.mkdir(parents=True, exist_ok=True)
            with self._note.open(mode) as file:
                file.write(text)
        except OSError as error:
            log.warning("%s: cannot be written (%s): checkpoints that are written again after a failure get other names", self._note, error)

    def _is_seen(self, exists: Callable[[Any, Any], bool], path: Any, trainer: Any) -> bool:
        is_there = exists(path, trainer)
        if self._io is not None:
            is_there = trainer.strategy.broadcast(self._io.is_there(str(path), is_there))
        return is_there and str(path) not in self._early


def _target(path: str) -> str:
    """The file that a link of ``save_last="link"`` stands for; else the path itself."""
    return os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path))) if os.path.islink(path) else path


def _names_in(files: Any, folder: str) -> set[str]:
    return {os.path.basename(path.rstrip("/")) for path in files.ls(folder, detail=False)} if files.isdir(folder) else set()
