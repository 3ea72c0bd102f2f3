"""Loaders that accelerate has prepared, in plain loops: where they go on, and what they are to the script."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import gemini_ft
from gemini_ft.errors import ConfigError
from gemini_ft.loaders.ahead import FetchedAhead
from gemini_ft.loaders.bookmark import Bookmark
from gemini_ft.state.iterators import BatchSource
from gemini_ft.state.loop import LoopWatch

data_loader = pytest.importorskip("accelerate.data_loader", reason="needs accelerate: pip install accelerate")


def _prepared(samples: int = 10, **options: Any) -> Any:
    return gemini_ft.resumable(data_loader.DataLoaderShard(list(range(samples)), batch_size=2, **options))


def _plain(samples: int = 10) -> Any:
    return gemini_ft.resumable(DataLoader(list(range(samples)), batch_size=2))


def _batches(loader: Any, most: int = 100) -> list[list[int]]:
    found = []
    for batch in loader:
        found.append(batch.tolist())
        if len(found) == most:
            break
    return found


@pytest.mark.parametrize("made", [_plain, _prepared], ids=["plain", "accelerate"])
def test_a_validation_that_was_left_early_begins_anew_beside_a_training_that_goes_on(made: Any) -> None:
    """As a loader that is no adapter does."""

    def training(loader: Any, batches: int) -> Any:
        iterator = iter(loader)
        for _ in range(batches):
            next(iterator)
        return iterator

    train, validation = made(20), made()
    first = training(train, 4)
    assert _batches(validation, 3) == [[0, 1], [2, 3], [4, 5]]
    then = copy.deepcopy([train.state_dict(), validation.state_dict()])
    del first
    train, validation = made(20), made()
    train.load_state_dict(then[0])
    validation.load_state_dict(then[1])
    assert next(iter(train)).tolist() == [8, 9]
    assert _batches(validation, 3) == [[0, 1], [2, 3], [4, 5]]


def test_an_epoch_that_is_over_counts_for_accelerate_too() -> None:
    loader = _prepared(4)
    iterator = iter(loader)
    assert [next(iterator).tolist(), next(iterator).tolist()] == [[0, 1], [2, 3]]
    then = copy.deepcopy(loader.state_dict())  # of the last batch
    again = _prepared(4)
    again.load_state_dict(then)
    assert _batches(again) == []
    assert (again.iteration, _batches(again)) == (1, [[0, 1], [2, 3]])


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated:UserWarning")  # by torchdata 0.11
def test_a_loader_with_a_position_of_accelerates_own_is_refused() -> None:
    pytest.importorskip("torchdata", reason="needs torchdata: pip install torchdata")
    with pytest.raises(ConfigError, match=r"use_stateful_dataloader.*leave that option out"):
        _prepared(use_stateful_dataloader=True)


def test_the_position_is_asked_for_once_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate asks a loader that has a state for it, too."""
    loader, asked = _prepared(), []
    state_dict = Bookmark.state_dict
    monkeypatch.setattr(Bookmark, "state_dict", lambda bookmark: asked.append(1) or state_dict(bookmark))
    assert len(_batches(loader)) == 5
    assert len(asked) == 6  # and before the end


def test_a_batch_that_accelerate_has_fetched_is_none_that_the_loop_keeps() -> None:
    loader = _prepared()
    source = BatchSource([loader])
    ahead = []
    for _ in loader:
        ahead.append(source.is_ahead([loader]))
        source.has_changed([loader])
    assert ahead == [False] * 5


def test_a_copy_is_accelerates_own_and_attributes_are_set_there() -> None:
    loader = _prepared()
    loader.iteration = 3
    other = copy.copy(loader)
    assert type(other) is data_loader.DataLoaderShard
    assert other.iteration == 3


class Remembering(Dataset[torch.Tensor]):
    """A dataset that no snapshot can have, and that draws."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        self.seen.append(index)
        return torch.rand(())


def test_data_of_a_trainer_that_no_snapshot_can_have_are_named_once_and_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    """A script that has not asked for gemini-ft trains as it does without."""
    loader = DataLoader(Remembering(), batch_size=2)
    FetchedAhead(loader, lenient=True)
    with caplog.at_level("WARNING", "gemini_ft"):
        assert [len([*loader]) for _ in range(2)] == [50, 50]
    (told,) = caplog.records
    assert "the training data keeps what no snapshot can have (dataset.seen changes)" in told.getMessage()


def test_generators_of_accelerates_samplers_are_the_loaders(caplog: pytest.LogCaptureFixture) -> None:
    """Also where the script has the sampler in a variable, and ranks share the batches of one order."""
    made = DataLoader(list(range(24)), batch_size=2, shuffle=True)
    prepared = data_loader.prepare_data_loader(made, num_processes=2, process_index=1, use_seedable_sampler=True)
    loader, watched, sampler = gemini_ft.resumable(prepared), LoopWatch(), prepared.batch_sampler.batch_sampler.sampler
    with caplog.at_level("WARNING", "gemini_ft"):
        for _ in range(2):
            for _ in loader:
                watched.look([], {"loader": loader}, [])
    assert [text for text in caplog.messages if "draws from the generator" in text] == []
    assert sampler.generator is not None


def test_the_count_of_local_sgd_is_named(caplog: pytest.LogCaptureFixture) -> None:
    local_sgd = pytest.importorskip("accelerate.local_sgd", reason="needs accelerate: pip install accelerate").LocalSGD
    model = torch.nn.Linear(2, 2)
    for enabled in (False, True):
        present = object.__new__(local_sgd)
        present.enabled = enabled
        with caplog.at_level("WARNING", "gemini_ft"):
            LoopWatch().look([model], {}, [torch.optim.SGD(model.parameters(), lr=0.1)])
        assert ("begin with local_sgd.num_steps = checkpointer.scalars.get('local', 0)" in caplog.text) is enabled
