"""Gradient pipelines are training state: what they remember is in every snapshot, and what they do is shown."""

from __future__ import annotations

import itertools
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agent_kit import Job, eventually, stopped
from capture_kit import shard_of
from compression_kit import EVERY, gradients, method, together
from gradient_case import STEPS, ByHand, Toy, everything, train
from plain_case import history
from rank_kit import World
from torch import nn

import gemini_ft
from gemini_ft.cli import commands
from gemini_ft.core.layout import PER_RANK, Layout, Read, build_layout
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import LayoutMismatchError, StateError, UnsupportedStateError
from gemini_ft.export.source import Checkpoint
from gemini_ft.export.state_dicts import State
from gemini_ft.recovery.restore import StateRestore
from gemini_ft.state import codec
from gemini_ft.state.base import PlainState, TrainingState
from gemini_ft.state.gradients import FiguresReporter, WithGradients, check_presence
from gemini_ft.state.tensors import Fingerprint, Live
from gemini_ft.testing import first_difference
from gemini_ft.wire.worker_messages import Figures, ToAgent

WORLD = 2


class Shard:
    """What one rank's snapshot is, whole."""

    where = "memory"

    def __init__(self, state: TrainingState, rank: int, world: int) -> None:
        live = state.survey()
        sources = state.describe(live, rank, world)
        self.layout = build_layout([source.spec for source in sources], rank, world)
        self._data = shard_of(sources, self.layout)
        self._extras = codec.encode({"tensors": state.extras()})

    def extras(self) -> bytes:
        return self._extras

    def chunks(self, live: object = None, *_: object) -> Iterator[tuple[int, memoryview]]:
        data = memoryview(self._data.numpy())
        for start in range(0, len(data), 100):
            yield start, data[start : start + 100]

    def close(self) -> None:
        pass


class Shards:
    """Of all ranks, as `gemini_ft.recovery.readers.ShardReaders`."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self.plan = SimpleNamespace(world_size=len(shards), version=Version(Incarnation(1, "a"), 1))
        self.extras = {owner: codec.decode(shard.extras())["tensors"] for owner, shard in enumerate(shards)}

    def copies(self, owner: int) -> int:
        return 1

    def read(self, owner: int, rank: int, use: Callable[[Shard], Any], keep: bool = False, part: int = 0) -> Any:
        return use(self._shards[owner])

    def close(self) -> None:
        pass


def plain(seed: int = 0) -> PlainState:
    torch.manual_seed(seed)
    net = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(4)).sum().backward()
    optimizer.step()
    return PlainState.of(net, optimizer, replicated=True)


def snapshot(states: Sequence[TrainingState]) -> list[Shard]:
    return [Shard(state, rank, len(states)) for rank, state in enumerate(states)]


def load(shards: Sequence[Shard], state: TrainingState, rank: int, world: int = WORLD) -> None:
    sources: Any = Shards(shards)
    filling = StateRestore(sources, state, sources.extras, rank, world)
    filling.read()
    state.apply_extras(filling.own)


class TestSnapshot:
    def test_everything_comes_back_on_every_rank_as_it_was_there(self) -> None:
        shards = snapshot([WithGradients(plain(), Toy(everything(rank))) for rank in range(WORLD)])
        for rank in range(WORLD):
            net, toy = plain(seed=1), Toy()
            load(shards, WithGradients(net, toy), rank)
            assert first_difference(toy.state, everything(rank)) is None
            assert _order(toy.state) == _order(everything(rank))
            assert first_difference(net.models["model"].state_dict(), plain().models["model"].state_dict()) is None

    def test_tensors_are_this_ranks_own_and_copied_at_once(self) -> None:
        state = WithGradients(plain(), Toy(everything(1)))
        sources = {source.spec.name: source for source in state.describe(state.survey(), 1, WORLD)}
        ours = {name: source for name, source in sources.items() if name.startswith("gradients.")}
        assert ours.keys() == {
            "gradients.residuals.net%2E0%2Eweight",
            "gradients.residuals.50%25%2Ebias",
            "gradients.factors.net.0",
            "gradients.factors.net.halves",
            "gradients.counts",
        }
        assert all(source.mutable and source.spec.group == (1,) for source in ours.values())
        assert {source.spec.logical for source in ours.values()} == {f"{PER_RANK} cpu"}
        assert {sources[name].spec.group for name in sources.keys() - ours.keys()} == {(0, 1)}

    def test_a_plan_lasts_as_long_as_memory_stays_where_it_is(self) -> None:
        pipeline = ByHand()
        state = WithGradients(plain(), pipeline)
        pipeline.synchronise(gradients(0))
        first = Fingerprint(state.survey())
        for seed in range(1, 4):
            pipeline.synchronise(gradients(seed))
            assert Fingerprint(state.survey()) == first
        pipeline.load_state_dict(pipeline.state_dict())
        assert Fingerprint(state.survey()) != first

    @pytest.mark.parametrize(
        ("state", "words"),
        [
            ({"rules": {7: 1}}, "gradients.rules has the key 7; keys of gradient state must be strings"),
            ({"sum": torch.zeros(2).to_sparse()}, "gradients.sum has the layout torch.sparse_coo; gradient state must be dense tensors"),
        ],
    )
    def test_what_cannot_be_captured_is_named(self, state: dict[str, Any], words: str) -> None:
        with pytest.raises(UnsupportedStateError, match=re.escape(words)):
            snapshot([WithGradients(plain(), Toy(state))])

    @pytest.mark.gpu
    def test_what_was_on_a_gpu_returns_there(self) -> None:
        given = {"gpu": torch.randn(1000, device="cuda"), "host": torch.randn(3)}
        shards = snapshot([WithGradients(plain(), Toy(given))] * WORLD)
        load(shards, WithGradients(plain(), toy := Toy()), 1)
        assert {name: value.device.type for name, value in toy.state.items()} == {"gpu": "cuda", "host": "cpu"}
        assert all(torch.equal(toy.state[name], given[name]) for name in given)

    def test_no_model_takes_its_name(self) -> None:
        taken = PlainState({"gradients": nn.Linear(2, 2)}, ())
        with pytest.raises(UnsupportedStateError, match="a model cannot be named 'gradients'"):
            taken.survey()

    def test_an_export_has_the_model_alone(self) -> None:
        shards: Any = snapshot([WithGradients(plain(), Toy(everything(rank))) for rank in range(WORLD)])
        exported = State(
            Checkpoint(
                run="run",
                stream="main",
                version=Version(Incarnation(1, "n"), 1),
                where="here",
                shards=shards,
                secret=None,
                trust_pickle=False,
            ),
            optimizers=True,
        )
        assert first_difference(exported.model(), dict(plain().models["model"].state_dict())) is None
        assert exported.optimizers()[0].state.keys() == {"weight", "bias"}


def _order(state: Mapping[str, Any]) -> list[Any]:
    return [(key, _order(value) if isinstance(value, dict) else None) for key, value in state.items()]


class Resizable(PlainState):
    """As an engine that cuts its partitions anew: here there is nothing to cut."""

    def resized(
        self, layouts: Mapping[int, Layout], extras: Mapping[int, dict[str, Any]], rank: int, world_size: int
    ) -> tuple[Sequence[Read], Mapping[str, torch.Tensor], dict[str, Any]]:
        return [], {}, extras[rank % len(layouts)]


class TestOtherJobs:
    def test_a_pipeline_cannot_begin_or_end_in_the_middle_of_a_run(self) -> None:
        bare, whole = plain(), WithGradients(plain(), Toy(everything(0)))
        with pytest.raises(LayoutMismatchError, match=r"made without a gradient pipeline, and this job has one.*resume='never'"):
            load(snapshot([bare, bare]), whole, 0)
        whole.survey()
        with pytest.raises(LayoutMismatchError, match=r"holds the state of a gradient pipeline .* job has none; give it.*resume='never'"):
            check_presence(whole.extras(), attached=False)

    def test_what_another_pipeline_has_saved_is_refused(self) -> None:
        saved = snapshot([WithGradients(plain(), Toy({"rules": {"matrices": {}}}))] * WORLD)
        with pytest.raises(
            LayoutMismatchError, match=r"does not fit this pipeline \(KeyError: 'step'\); resume with the pipeline that made it"
        ):
            load(saved, WithGradients(plain(), ByHand()), 0)

    def test_with_another_number_of_ranks_it_begins_anew_and_says_so(self, caplog: pytest.LogCaptureFixture) -> None:
        saved = snapshot([WithGradients(Resizable(plain().models, ()), Toy(everything(rank))) for rank in range(WORLD)])
        fresh = [Toy({"fresh": 1}) for _ in range(3)]
        with caplog.at_level(logging.WARNING):
            for rank in range(3):
                load(saved, WithGradients(Resizable(plain().models, ()), fresh[rank]), rank, world=3)
        assert [toy.state for toy in fresh] == [{"fresh": 1}] * 3
        assert len(caplog.messages) == 1
        nbytes = sum(4 * 3 * (5 + rank) + 4 + 4 * 24 + 2 * 7 + 8 * 3 * rank for rank in range(WORLD))
        assert f"2 ranks cannot be used by 3: 5 tensors of residuals, momenta and factors ({nbytes:,} bytes" in caplog.messages[0]

    def test_one_is_attached_once_and_in_time(self) -> None:
        checkpointer = gemini_ft.Checkpointer(nn.Linear(2, 2), torch.optim.SGD([nn.Parameter(torch.ones(1))]), gradients=Toy())
        with pytest.raises(StateError, match="a Checkpointer has one gradient state; give one object"):
            checkpointer.attach_gradients(Toy())
        late = gemini_ft.Checkpointer(nn.Linear(2, 2))
        late.stats.snapshots = 1
        with pytest.raises(StateError, match=r"must come before resume\(\)"):
            late.attach_gradients(Toy())


@pytest.mark.parametrize("name", EVERY)
def test_reducers_that_hold_still_have_the_same_addresses_and_the_same_bits(name: str) -> None:
    ranks = 3
    moving, still = [[method(name) for _ in range(ranks)] for _ in range(2)]
    for each in still:
        each.hold_still()
    places: list[Any] = []
    for step in range(6):
        given = [gradients(100 * step + rank) for rank in range(ranks)]
        given[1]["conv"][0, 0, 0, 0] = math.nan if step == 3 else 1.0
        assert first_difference(together(still, given, step), together(moving, given, step)) is None
        states = [each.state_dict() for each in still]
        assert first_difference(states, [each.state_dict() for each in moving]) is None
        places.append([[(live.name, live.tensor.data_ptr()) for live in _tensors(state)] for state in states])
    assert places[2:] == [places[1]] * 4


def _tensors(state: dict[str, Any]) -> list[Live]:
    return WithGradients(PlainState({}, ()), Toy(state)).survey()


class TestJob:
    def test_killed_and_resumed_it_ends_with_the_bits_of_an_undisturbed_one(self, tmp_path: Path) -> None:
        with World(tmp_path, 2) as ranks:
            expected = ranks.outcome(train, str(tmp_path / "undisturbed"))
            assert [said["start"] for said in expected] == [0, 0]
        faults = "step=5:rank=0:sigkill; step=9:rank=1:sigkill:moment=in_copy"
        with World(tmp_path, 2) as ranks:
            killed = ranks.start(train, str(tmp_path / "disturbed"), GEMINI_FAULTS=faults)
            assert not killed.wait()
            killed.kill()
            refused = ranks.outcome(train, str(tmp_path / "refused"), False)
            assert [type(error) for error in refused] == [LayoutMismatchError] * 2
            assert "this job has none; give it (Checkpointer(gradients=...)" in str(refused[0])
            results = ranks.finish(train, str(tmp_path / "disturbed"), GEMINI_FAULTS=faults)
            assert ranks.restarts == 1
        assert all(said["start"] >= 7 and set(said["restored"]) == {"own memory"} for said in results)
        for rank in range(2):
            assert history(tmp_path / "disturbed", rank) == history(tmp_path / "undisturbed", rank)
            assert len(history(tmp_path / "disturbed", rank)) == STEPS
            shown = [line for line in results[rank]["told"].splitlines() if "gradients of" in line]
            assert [line.split(":")[0].strip() for line in shown] == [f"gradients of rank {rank}, {rule}" for rule in ("matrices", "rest")]
            assert re.search(r", matrices: 576 -> 72 bytes, communication \d+\.\d\d ms, overlap 25\.0%$", shown[0])
            told = results[rank]["document"]["streams"]["main"]["gradients"]
            assert told.keys() == {str(rank)}
            assert {rule: figures.keys() for rule, figures in told[str(rank)].items()} == {
                rule: figures.keys() for rule, figures in results[rank]["figures"].items()
            }


class TestFigures:
    def reporter(self, monkeypatch: pytest.MonkeyPatch, taken: bool = True) -> tuple[FiguresReporter, list[ToAgent], list[float]]:
        sent, clock = list[ToAgent](), [100.0]
        toy = Toy(figures={"all": {"density": 0.5, "overlap": math.nan, "bytes_after": 7}})
        monkeypatch.setattr("gemini_ft.state.gradients.time", SimpleNamespace(monotonic=lambda: clock[0]))

        def offer(message: ToAgent) -> bool:
            sent.append(message)
            return taken

        return FiguresReporter(toy.summary, offer), sent, clock

    def test_they_are_sent_once_a_second_as_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reporter, sent, clock = self.reporter(monkeypatch)
        for _ in range(10):
            reporter.step_over()
            clock[0] += 0.25
        assert sent == [Figures(figures={"all": {"density": 0.5, "bytes_after": 7.0}})] * 3

    def test_what_was_not_taken_is_offered_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reporter, sent, _ = self.reporter(monkeypatch, taken=False)
        reporter.step_over()
        reporter.step_over()
        assert len(sent) == 2

    def test_an_agent_that_hangs_is_not_waited_for(self, tmp_path: Path) -> None:
        message = Figures(figures={"rule": {f"figure{number}": 1.0 for number in range(50)}})
        with Job(tmp_path) as job:
            client = job.start("a")[0].client
            assert client.offer(message)
            eventually(lambda: job.stream("a")["gradients"] == {"0": message.figures}, "the figures' arrival")
            assert not client.offer(Figures(figures={"x" * 100_000: {}}))  # more than can be sent without waiting
            with stopped(job.pid("a")):
                offered = sum(1 for _ in itertools.takewhile(bool, (client.offer(message) for _ in range(10_000))))
                assert 0 < offered < 10_000
                begin = time.monotonic()
                assert not client.offer(message)
                assert time.monotonic() - begin < 1
            eventually(lambda: client.offer(message), "room for figures")
            job.open(job.ranks)
            assert job.stream("a")["gradients"] == {}  # of ranks of another incarnation

    def test_all_that_is_known_is_in_words(self) -> None:
        known = {"bytes_before": 4096.0, "bytes_after": 128.0, "encode_ms": 0.125, "communication_ms": 12.0, "decode_ms": 1.5}
        figures = {**known, "overlap": 0.876, "density": 0.01, "collectives": 3.0}
        shown = commands.describe_gradients({"10": {"late": {}}, "9": {"embed.*": figures, "rest": {"density": 1.0}}})
        assert shown == [
            "    gradients of rank 9, embed.*: 4,096 -> 128 bytes, encode 0.12 ms, communication 12.00 ms, decode 1.50 ms, overlap 87.6%, "
            "density 1.0%, collectives 3",
            "    gradients of rank 9, rest: density 100.0%",
        ]
        assert commands.describe_gradients({}) == []
