"""Every metric of torchmetrics: captured in the middle of an epoch and restored into a fresh one, it goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torchmetrics import MeanMetric, MeanSquaredError

from gemini_ft.lightning import trainer_callbacks, trainer_metrics
from gemini_ft.state import codec
from gemini_ft.state.rebuilding import modules_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::RuntimeWarning"
)

BINARY = {"task": "binary"}
# Name -> arguments of the constructor, for metrics that need some.
ARGUMENTS: dict[str, Callable[[], Mapping[str, Any]]] = {
    **{
        name: lambda: BINARY
        for name in (
            *("AUROC", "ROC", "Accuracy", "AveragePrecision", "CalibrationError", "CohenKappa", "ConfusionMatrix", "F1Score"),
            *("HammingDistance", "HingeLoss", "JaccardIndex", "LogAUC", "MatthewsCorrCoef", "NegativePredictiveValue", "Precision"),
            *("PrecisionRecallCurve", "Recall", "Specificity", "StatScores"),
        )
    },
    "ExactMatch": lambda: {"task": "multilabel", "num_labels": 3},
    "FBetaScore": lambda: BINARY | {"beta": 0.5},
    "PrecisionAtFixedRecall": lambda: BINARY | {"min_recall": 0.5},
    "RecallAtFixedPrecision": lambda: BINARY | {"min_precision": 0.5},
    "SensitivityAtSpecificity": lambda: BINARY | {"min_specificity": 0.5},
    "SpecificityAtSensitivity": lambda: BINARY | {"min_sensitivity": 0.5},
    "CramersV": lambda: {"num_classes": 3},
    "PearsonsContingencyCoefficient": lambda: {"num_classes": 3},
    "TheilsU": lambda: {"num_classes": 3},
    "TschuprowsT": lambda: {"num_classes": 3},
    "CriticalSuccessIndex": lambda: {"threshold": 0.5},
    "MinkowskiDistance": lambda: {"p": 3},
    "ModifiedPanopticQuality": lambda: {"things": {0}, "stuffs": {1, 2}},
    "PanopticQuality": lambda: {"things": {0}, "stuffs": {1, 2}},
    "PeakSignalNoiseRatio": lambda: {"data_range": 1.0},
    "RetrievalRecallAtFixedPrecision": lambda: {"min_precision": 0.1},
    "PermutationInvariantTraining": lambda: {"metric_func": torchmetrics.functional.scale_invariant_signal_noise_ratio},
    "MetricCollection": lambda: {"metrics": [MeanSquaredError(), torchmetrics.MeanAbsoluteError()]},
    "MetricTracker": lambda: {"metric": MeanSquaredError(), "maximize": False},
    "MinMaxMetric": lambda: {"base_metric": MeanMetric()},
    "BootStrapper": lambda: {"base_metric": MeanSquaredError(), "num_bootstraps": 3},
    "ClasswiseWrapper": lambda: {"metric": torchmetrics.Accuracy(task="multiclass", num_classes=3, average=None)},
    "MultioutputWrapper": lambda: {"base_metric": MeanSquaredError(), "num_outputs": 3},
    "MultitaskWrapper": lambda: {"task_metrics": {"one": MeanSquaredError()}},
}


def image(size: int) -> Callable[[torch.Generator], Sequence[Any]]:
    return lambda g: (torch.rand(2, 3, size, size, generator=g), torch.rand(2, 3, size, size, generator=g))


def whole(g: torch.Generator, *shape: int, below: int = 3) -> torch.Tensor:
    return torch.randint(below, shape, generator=g)


# Kinds of inputs, tried in this order until a metric takes one.
INPUTS: list[Callable[[torch.Generator], Sequence[Any]]] = [
    lambda g: (torch.rand(9, generator=g), whole(g, 9, below=2)),
    lambda g: (torch.rand(9, generator=g), torch.rand(9, generator=g)),
    lambda g: (torch.rand(9, generator=g),),
    lambda g: (torch.rand(9, 3, generator=g), whole(g, 9)),
    lambda g: (torch.rand(9, 3, generator=g), torch.rand(9, 3, generator=g)),
    lambda g: (torch.rand(9, 3, generator=g), whole(g, 9, 3, below=2)),
    lambda g: (torch.rand(9, 3, generator=g).softmax(-1), torch.rand(9, 3, generator=g).softmax(-1)),
    lambda g: (whole(g, 9), whole(g, 9)),
    lambda g: (whole(g, 9, 3),),
    lambda g: (torch.rand(9, generator=g), whole(g, 9, below=2), whole(g, 9)),
    lambda g: (torch.rand(2, 9, 5, generator=g).log_softmax(-1), whole(g, 2, 9, below=5)),
    lambda g: ({"one": torch.rand(9, generator=g)}, {"one": torch.rand(9, generator=g)}),
    lambda g: (["the cat is here " * int(whole(g, 1) + 1)], ["a cat is there and here"]),
    lambda g: (["the cat is here " * int(whole(g, 1) + 1)], [["a cat is there and here"]]),
    lambda g: (
        [{"prediction_text": str(int(whole(g, 1))), "id": "7"}],
        [{"answers": {"answer_start": [1], "text": ["1"]}, "id": "7"}],
    ),
    lambda g: (whole(g, 1, 8, 8, 2), whole(g, 1, 8, 8, 2)),
    image(16),
    image(32),
    image(192),
    lambda g: (torch.rand(2, 3, 16, 16, generator=g),),
    lambda g: (torch.rand(2, 800, generator=g), torch.rand(2, 800, generator=g)),
    lambda g: (torch.rand(2, 2, 80, generator=g), torch.rand(2, 2, 80, generator=g)),
]
BASES = {"Metric", "functional"}  # no metrics by themselves


class Holder(nn.Module):
    """A module with a metric, as Lightning's."""

    def __init__(self, name: str) -> None:
        super().__init__()
        arguments = ARGUMENTS[name]() if name in ARGUMENTS else {}
        self.metric = getattr(torchmetrics, name)(**arguments)
        if name == "MetricTracker":
            self.metric.increment()
        loop = SimpleNamespace(epoch_loop=SimpleNamespace())
        self.trainer = SimpleNamespace(lightning_module=self, callbacks=[], datamodule=None, fit_loop=loop)
        self.modes = trainer_callbacks.modes_of(self.trainer, "lightning.pytorch", modules_of({"module": self}), {})

    def update(self, seed: int, kind: int) -> Any:
        torch.manual_seed(seed)  # bootstrapping draws from it
        inputs = INPUTS[kind](torch.Generator().manual_seed(seed))
        indexes = {"indexes": inputs[2]} if len(inputs) == 3 else {}
        return self.metric(*inputs[:2], **indexes)

    def save(self) -> bytes:
        metrics, collections = trainer_metrics.metrics_of(self.trainer)
        return codec.encode(
            {
                "metrics": {name: trainer_metrics.metric_state(metric) for name, metric in metrics.items()},
                "collections": {name: trainer_metrics.metric_groups(collection) for name, collection in collections.items()},
                "trackers": trainer_metrics.tracked(self.trainer),
                "modes": self.modes.collect(modules_of({"module": self})),
            }
        )

    def load(self, saved: bytes) -> None:
        state = codec.decode(saved)
        trainer_metrics.track(self.trainer, state["trackers"])
        self.modes.restore(state["modes"], modules_of({"module": self}))
        metrics, collections = trainer_metrics.metrics_of(self.trainer)
        for name, value in state["metrics"].items():
            trainer_metrics.set_metric_state(metrics[name], value)
        for name, value in state["collections"].items():
            trainer_metrics.set_metric_groups(collections[name], value)


def kind_of(name: str) -> int:
    """The first kind of inputs that a metric takes, and makes a value of."""
    reasons = []
    for kind in range(len(INPUTS)):
        try:
            holder = Holder(name)
            holder.update(0, kind)
            holder.metric.compute()
        except Exception as error:
            reasons.append(f"{kind}: {type(error).__name__} {error}"[:160])
        else:
            return kind
    raise AssertionError(f"no inputs for {name}; add some to INPUTS, or arguments to ARGUMENTS: {reasons}")


def hexed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [number.hex() for number in value.double().flatten().tolist()]
    if isinstance(value, dict):
        return {key: hexed(part) for key, part in value.items()}
    return [hexed(part) for part in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("name", [name for name in torchmetrics.__all__ if name not in BASES])
def test_every_metric(name: str) -> None:
    kind = kind_of(name)
    metric, again = Holder(name), Holder(name)
    for seed in range(3):
        metric.update(seed, kind)
    metric.metric.compute()
    again.load(metric.save())
    for seed in range(3, 5):
        assert hexed(again.update(seed, kind)) == hexed(metric.update(seed, kind)), "a batch's value"
    assert hexed(again.metric.compute()) == hexed(metric.metric.compute())


@pytest.mark.parametrize("name", ["MeanSquaredError", "RunningMean", "MinMaxMetric", "MetricTracker", "CatMetric"])
def test_that_these_tests_can_fail(name: str) -> None:
    """Without its restored state a metric has another value."""
    kind = kind_of(name)
    metric, again = Holder(name), Holder(name)
    metric.update(0, kind)
    metric.update(1, kind)
    for one in (metric, again):
        one.update(2, kind)
    assert hexed(again.metric.compute()) != hexed(metric.metric.compute())
