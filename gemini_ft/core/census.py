"""The census of a job's state: every thing that training depends on is captured, derived, declared to be the user's, or refused.

    _LOADER = declare("loaders with a state_dict of their own", Fate.CAPTURED, "by that state_dict")     # once, at import
    checkpointer.census.register("loaders", lambda: [_LOADER.found("train_dataloader", nbytes=120)])     # for each job

A rule is one kind of thing and its fate; all rules together are the table in docs/failure_model.md. A finding is one such thing in one
job. The census is taken at the first snapshot, and again when a part's fingerprint has changed. A refused thing stops the job then, by
name, and not at the restart. Pure: no torch.

The rules for what integrations add stand here, and not with them, so that the table can be made without their packages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from gemini_ft.core import words
from gemini_ft.errors import UnsupportedStateError


class Fate(StrEnum):
    """The fate of a piece of state. There is no fifth one."""

    CAPTURED = "captured"  # part of every snapshot
    DERIVED = "derived"  # follows from captured state, or from the script
    USERS = "the user's"  # not restored, and the user has been told or has said so
    REFUSED = "refused"  # the job stops, and the error names the way out


@dataclass(frozen=True)
class StateKind:
    """One kind of state and its fate: a row of the table in docs/failure_model.md."""

    what: str  # the kind, in the plural
    fate: Fate  # what becomes of it
    how: str  # how it is captured, from what it is derived, or the way out

    def found(self, where: str, nbytes: int = 0, note: str = "") -> Finding:
        """A finding of this kind.

        Args:
            where: its name in the job, such as ``optim0.base_optimizer``.
            nbytes: bytes of it in each snapshot of this rank, where that is known.
            note: more about this one.
        """
        return Finding(self, where, nbytes, note)


@dataclass(frozen=True)
class Finding:
    """One thing that a job's state consists of."""

    rule: StateKind
    where: str
    nbytes: int = 0
    note: str = ""


Walk = Callable[[], Iterable[Finding]]
_rules: dict[str, StateKind] = {}
IGNORED = StateKind("whatever the option `ignore` names", Fate.USERS, "it is not captured; the script restores it or does without")


def declare(what: str, fate: Fate, how: str) -> StateKind:
    """Adds a kind of state to the table. The same declaration may be made again."""
    return _rules.setdefault(what, StateKind(what, fate, how))


def rules() -> list[StateKind]:
    """All rules that the modules loaded so far have declared: by fate, in the order of their names."""
    order = list(Fate)
    return sorted({**_rules, IGNORED.what: IGNORED}.values(), key=lambda rule: (order.index(rule.fate), rule.what))


class Census:
    """The parts of one job's state, each with a function that walks it.

    ``ignore``: patterns (as for files) of names that are the user's.
    """

    def __init__(self, ignore: Iterable[str] = ()) -> None:
        self._ignore = tuple(ignore)
        self._parts: dict[str, tuple[Walk, Callable[[], object]]] = {}
        self._seen: tuple[object, ...] | None = None

    def register(self, part: str, walk: Walk, fingerprint: Callable[[], object] = lambda: None) -> None:
        """Adds a part of the state, or replaces it.

        Args:
            walk: gives one finding for each thing in it; called at the first snapshot and after a change.
            fingerprint: cheap enough for every snapshot; the census is taken again when its value is another.
        """
        self._parts[part] = (walk, fingerprint)
        self._seen = None

    def is_ignored(self, where: str) -> bool:
        """Whether the user has said that a thing is not to be captured."""
        return any(fnmatchcase(where, pattern) for pattern in self._ignore)

    def is_due(self) -> bool:
        """Whether the census must be taken, for the first time or again; a caller that gets True takes it."""
        now = tuple(fingerprint() for _, fingerprint in self._parts.values())
        changed, self._seen = now != self._seen, now
        return changed

    def findings(self) -> list[Finding]:
        """Everything there is, by part; ignored things are the user's."""
        found = [item for walk, _ in self._parts.values() for item in walk()]
        return [IGNORED.found(item.where, 0, item.note) if self.is_ignored(item.where) else item for item in found]

    def take(self) -> list[Finding]:
        """The findings, if nothing is refused.

        Raises UnsupportedStateError: something cannot be captured; each such thing is named, with the way out.
        """
        found = self.findings()
        if refused := [item for item in found if item.rule.fate is Fate.REFUSED]:
            lines = "; ".join(f"{item.where}{f' ({item.note})' if item.note else ''}: {item.rule.how}" for item in refused)
            raise UnsupportedStateError(f"not captured, and not declared to be the user's: {lines}. Or name it in the option `ignore`")
        return found


def table(findings: Sequence[Finding]) -> str:
    """Findings as a table for people: place, kind, fate, bytes and more."""
    rows = [("what", "where", "fate", "bytes", "how")]
    rows += [(item.rule.what, item.where, str(item.rule.fate), f"{item.nbytes:,}", item.note or item.rule.how) for item in findings]
    return words.table(rows)


# -- rules for the state that integrations add -------------------------------------------------------

ENGINE_TENSORS = declare(
    "masters, optimizer state, buffers and frozen parameters of DeepSpeed engines", Fate.CAPTURED, "each partition by its rank"
)
ENGINE_COUNTERS = declare(
    "counters, loss scalers and LR scheduler of DeepSpeed engines", Fate.CAPTURED, "with the small state of each rank"
)
ENGINE_WEIGHTS = declare("16-bit weights of DeepSpeed engines", Fate.DERIVED, "cast and gathered from the masters")
LOOPS = declare(
    "loops, schedulers, precision plugin, counters and logged values of Lightning's Trainer",
    Fate.CAPTURED,
    "with the small state of each rank",
)
LOADERS = declare(
    "positions in training loaders, order of samplers, random states of data and its workers",
    Fate.CAPTURED,
    "the next batch is the one that would have come (lightning.md)",
)
LOADERS_AGAIN = declare(
    "loaders whose state cannot be kept: iterables, own iterations, data that changes what is not small and plain",
    Fate.DERIVED,
    "the batches of the epoch are loaded again and dropped (lightning.md)",
)
DATA = declare("small plain attributes of datasets, samplers and collate functions, once they change", Fate.CAPTURED, "as those of modules")
METRICS = declare("torchmetrics of Lightning's module, callbacks and datamodule", Fate.CAPTURED, "states, counts and caches")
CALLBACKS = declare("callbacks of Lightning with a state of their own, hooks that write checkpoints", Fate.CAPTURED, "by these")
TICKETS = declare("first weights that Lightning's ModelPruning returns to", Fate.CAPTURED, "copied at once, as large as the parameters")
CALLBACKS_MADE = declare("callbacks of Lightning without such a state", Fate.DERIVED, "made by the script; attributes as above")
CALLBACKS_REFUSED = declare(
    "BatchSizeFinder, LearningRateFinder, SpikeDetection of Lightning",
    Fate.REFUSED,
    "leave it out of a Trainer with a gemini strategy; search with Tuner.lr_find, or with another Trainer",
)
LOGS = declare(
    "CSVLogger and TensorBoardLogger of Lightning's Trainer",
    Fate.CAPTURED,
    "their version; what was logged after the resumed step is taken away (lightning.md)",
)
LOGGERS = declare(
    "other loggers, and profilers, of Lightning's Trainer",
    Fate.USERS,
    "made by the script; runs of W&B and MLflow go on; what was logged of an iteration that is computed again is logged again",
)
TRAINER = declare(
    "step, epoch, position in the data, schedulers, logs of transformers' Trainer, attributes of its callbacks and subclasses",
    Fate.CAPTURED,
    "by GeminiCallback; attributes as those of modules",
)
TRAINER_DATA = declare(
    "what datasets of transformers' Trainer keep from sample to sample, where rank 0 fetches the batches of all ranks (`dispatch_batches`)",
    Fate.USERS,
    "begins anew; a dataset is told its epoch (`set_epoch`)",
)
BEHIND_STEP = declare(
    "what a DeepSpeed loop writes behind `engine.step()`",
    Fate.CAPTURED,
    "tensors that are captured, from the second such step on, but for masters (deepspeed.md); "
    "for all else call `engine.gemini.save()` (deepspeed.md)",
)
