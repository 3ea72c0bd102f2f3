"""What gemini-ft keeps of transformers' Trainer beside its own state, without a training: positions in batches, attributes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

data_loader = pytest.importorskip("accelerate.data_loader", reason="needs accelerate: pip install accelerate")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

pytestmark = pytest.mark.preloaded("transformers")


def test_batches_that_rank_0_fetches_for_all_go_on_in_data_that_are_indexed() -> None:
    """accelerate's own skipping makes a loader of another form, to which no position fits, and leaves out too few of its batches."""

    from gemini_ft.transformers_state import TrainingData

    def made() -> tuple[Any, TrainingData]:
        loader = data_loader.DataLoaderDispatcher(list(range(10)), batch_size=2)
        return loader, TrainingData(loader, 1)

    loader, position = made()
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    found = copy.deepcopy(position.before_step(2))
    loader, position = made()
    iterator = iter(position.rest_of(loader, 2, found))
    assert next(iterator).tolist() == [4, 5]
    position.settle()
    assert [batch.tolist() for batch in iterator] == [[6, 7], [8, 9]]
    assert len([*loader]) == 5


class Shadowing(transformers.TrainerCallback):  # type: ignore[misc]
    """A callback that keeps the model that is trained, and an average of it."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.model, self.head = named["model"], named["model"].lm_head
        self.average = copy.deepcopy(named["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(now, 0.5)


def test_what_a_callback_keeps_of_a_model_is_named_and_the_trained_model_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from gemini_ft.transformers_state import OwnAttributes

    sizes = {"vocab_size": 8, "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 1}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    shadow = Shadowing()
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    kept = OwnAttributes(transformers.Trainer(model, arguments, train_dataset=[{}], callbacks=[shadow]))
    shadow.on_train_begin(None, None, None, model=model)
    with caplog.at_level("WARNING", "gemini_ft"):
        for _ in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            shadow.on_step_end(None, None, None)
            kept.collect()
    (told,) = [record.getMessage() for record in caplog.records if record.name == "gemini_ft"]
    assert told.startswith("callbacks.Shadowing.0.average changed while training and will not be restored")
