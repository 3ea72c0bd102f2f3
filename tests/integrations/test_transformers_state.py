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


def little_model() -> Any:
    sizes = {"vocab_size": 8, "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


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

    model = little_model()
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


class Best:
    """The best score so far, in an object that leads back to what it is in."""

    def __init__(self, app: Any) -> None:
        self.app, self.score = app, 0.0


class Scored:
    """An application that keeps its Trainer, a large table, and what its own metric has seen."""

    def __init__(self, folder: Path, model: Any, steps: int) -> None:
        self.model, self.table = model, [[[row, column] for column in range(60)] for row in range(60)]
        self.seen, self.scores, self.frozen, self.best = 0, [0.0], copy.deepcopy(model), Best(self)
        arguments = transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[], max_steps=steps)
        self.trainer = transformers.Trainer(model, arguments, train_dataset=[{}], compute_metrics=self.metric)

    def metric(self, predicted: Any) -> dict[str, float]:
        self.seen += 1
        self.scores.append(0.5)
        self.best.score = 0.5
        self.table[0][0][0] += 1
        return {}


def test_of_the_object_whose_method_is_a_metric_and_of_its_own_objects_only_small_plain_attributes_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The walk through it led to its Trainer, whose old ``max_steps`` ended a job that was to go on for longer."""
    from gemini_ft.state.remembered import HELD
    from gemini_ft.transformers_state import OwnAttributes

    app = Scored(tmp_path, little_model(), 3)
    kept = OwnAttributes(app.trainer)
    app.trainer.state.max_steps, app.trainer.state.global_step = 3, 2
    with torch.no_grad():
        app.model.lm_head.weight.add_(1)
        app.frozen.lm_head.weight.add_(1)
    app.metric(None)
    with caplog.at_level("WARNING", "gemini_ft"):
        found = kept.collect()
    changed, held = {"seen": 1, "scores": [0.0, 0.5]}, {"compute_metrics": ["scores"]}
    assert found["attributes"] == {"compute_metrics": changed, "compute_metrics.best": {"score": 0.5}, HELD: held}
    assert not caplog.records

    later = Scored(tmp_path, little_model(), 9)
    kept = OwnAttributes(later.trainer)
    later.trainer.state.max_steps = 9
    kept.restore(found)
    assert (later.seen, later.scores, later.best.score) == (1, [0.0, 0.5], 0.5)
    assert (later.trainer.state.max_steps, later.trainer.state.global_step) == (9, 0)
    later.scores += [0.0] * 64
    with caplog.at_level("WARNING", "gemini_ft"):
        kept.collect()
    (told,) = [record.getMessage() for record in caplog.records if record.name == "gemini_ft"]
    assert told.startswith("compute_metrics.scores changed while training and will not be restored")


class Teacher(torch.nn.Module):
    """A model that counts how often it was looked at."""

    looks = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def named_modules(self, *arguments: Any, **named: Any) -> Any:  # which its parameters are found by
        type(self).looks += 1
        return super().named_modules(*arguments, **named)


class Distilling(transformers.Trainer):  # type: ignore[misc]
    """A Trainer that holds another model than the one that it trains."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.teacher = Teacher()


def test_a_model_that_a_trainer_holds_is_looked_at_now_and_then_until_it_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from gemini_ft.transformers_state import OwnAttributes

    class Student(Teacher):
        looks = 0

    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = Distilling(Student(), arguments, train_dataset=[{}])
    Student.looks = Teacher.looks = 0
    kept = OwnAttributes(trainer)
    with caplog.at_level("WARNING", "gemini_ft"):
        for _ in range(40):
            kept.collect()
        looks = Teacher.looks
        assert (looks <= 24, Student.looks) == (True, 1)  # steps 1, 2, 4, 8, 16 and 32
        with torch.no_grad():
            trainer.teacher.weight.add_(1)
        for _ in range(40):
            found = kept.collect()
        assert 0 < Teacher.looks - looks <= 8
        (told,) = [record.getMessage() for record in caplog.records if record.name == "gemini_ft"]
        assert told.startswith("trainer.teacher changed while training and will not be restored")
        assert found["named"] == ["trainer.teacher"]

        caplog.clear()
        trainer = Distilling(Student(), arguments, train_dataset=[{}])
        kept = OwnAttributes(trainer)
        kept.restore(found)
        with torch.no_grad():
            trainer.teacher.weight.add_(1)
        for _ in range(2):
            assert kept.collect()["named"] == ["trainer.teacher"]
        assert not caplog.records


class Drawn(torch.nn.Module):
    """A loss that draws from a generator of its own, and has a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(5)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.mean += 1
        return torch.rand((), generator=self.noise)


def test_a_loss_that_is_a_module_keeps_its_generators_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from gemini_ft.transformers_state import OwnAttributes

    def kept(loss: Drawn) -> OwnAttributes:
        arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        trainer = transformers.Trainer(Teacher(), arguments, train_dataset=[{}], compute_loss_func=loss)
        return OwnAttributes(trainer)

    loss, again = Drawn(), Drawn()
    attributes = kept(loss)
    loss(None, None)
    with caplog.at_level("WARNING", "gemini_ft"):
        found = attributes.collect()
    assert found["named"] == ["trainer.compute_loss_func"]
    kept(again).restore(found)
    assert again(None, None) == loss(None, None)


def smoothed() -> Any:
    """A loss with noise from a generator that it encloses."""
    noise = torch.Generator().manual_seed(5)

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return torch.rand((), generator=noise)

    return loss


def test_what_a_loss_function_encloses_goes_on(tmp_path: Path) -> None:
    from gemini_ft.transformers_state import OwnAttributes

    def kept(loss: Any) -> OwnAttributes:
        arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        return OwnAttributes(transformers.Trainer(little_model(), arguments, train_dataset=[{}], compute_loss_func=loss))

    loss, again = smoothed(), smoothed()
    attributes = kept(loss)
    loss(None, None)
    found = attributes.collect()
    kept(again).restore(found)
    assert again(None, None) == loss(None, None)


class Asking(transformers.TrainerCallback):  # type: ignore[misc]
    """A callback that knows the application, and so its Trainer."""

    def __init__(self, app: Scored) -> None:
        self.app = app


def test_a_callback_that_leads_to_the_trainer_does_not_put_the_planned_end_back(tmp_path: Path) -> None:
    from gemini_ft.transformers_state import OwnAttributes

    def made(steps: int) -> tuple[Scored, OwnAttributes]:
        app = Scored(tmp_path, little_model(), steps)
        app.trainer.add_callback(Asking(app))
        kept = OwnAttributes(app.trainer)
        app.trainer.state.max_steps = steps
        return app, kept

    _, kept = made(3)
    found = kept.collect()
    app, kept = made(9)
    kept.restore(found)
    assert app.trainer.state.max_steps == 9
