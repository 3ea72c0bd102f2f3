"""The fate of the state that integrations add: their part of the census's table, here so that it needs none of their packages."""

from __future__ import annotations

from gemini_ft.core.census import Fate, declare

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
    "made by the script; what was logged of an iteration that is computed again is logged again",
)
TRAINER = declare(
    "step, epoch, order of the data, schedulers, logs of transformers' Trainer, callbacks with a state", Fate.CAPTURED, "by GeminiCallback"
)
TRAINER_DATA = declare(
    "what datasets and collators of transformers' Trainer keep from sample to sample, subclasses of it, callbacks without ExportableState",
    Fate.USERS,
    "begins anew; a dataset is told its epoch (`set_epoch`)",
)
BEHIND_STEP = declare(
    "what a DeepSpeed loop writes behind `engine.step()`",
    Fate.CAPTURED,
    "tensors that are captured, from the second such step on; for all else call `engine.gemini.save()` (deepspeed.md)",
)
