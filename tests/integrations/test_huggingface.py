"""accelerate and transformers' Trainer under DeepSpeed: protected by the configuration alone, and exact with the callback."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agent_kit import end_agent
from rank_kit import World

from gemini_ft.errors import ConfigError

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")
pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")

CASE = Path(__file__).parents[1] / "kit" / "huggingface_case.py"
FAULTS = "step=8:rank=1:sigkill; step=12:rank=0:sigkill:moment=in_copy"
# Six steps in an epoch, the last of them with one batch; three epochs.
TRAINER = {
    "kind": "trainer",
    "accumulate": 2,
    "arguments": {"save_strategy": "steps", "save_steps": 8, "dataloader_num_workers": 2, "dataloader_persistent_workers": True},
}

pytestmark = [pytest.mark.timeout(300), pytest.mark.preloaded("deepspeed", "transformers")]


class Run:
    """A job of two ranks, restarted until it is done."""

    def __init__(self, folder: Path, run: dict[str, Any], *options: str, faults: str, **environ: str) -> None:
        command = [sys.executable, "-m", "gemini_ft.cli.main", "run", *options, "--nproc-per-node=2", "--max-restarts=4", str(CASE)]
        command.append(json.dumps(run | {"out": str(folder)}))
        env = os.environ | {"OMP_NUM_THREADS": "1", "GEMINI_RUN_ID": f"{os.getpid()}-{folder.name}", "GEMINI_LINGER": "300"}
        env |= {
            "GEMINI_LOG_DIR": str(folder),
            "GEMINI_FAULTS": faults,
            "GEMINI_FAULTS_DIR": str(folder / "faults"),
            "DS_ACCELERATOR": "cpu",
            **environ,
        }
        with open(folder / "output", "w") as output:
            done = subprocess.run(command, cwd=folder, env=env, stdout=output, stderr=output, timeout=200)
        self.folder, self.output = folder, (folder / "output").read_text()
        assert done.returncode == 0, self.output[-6000:]
        lines = [[json.loads(line) for line in (folder / f"rank-{rank}").read_text().splitlines()] for rank in range(2)]
        self.engines = [[(line["engine"], line["steps"]) for line in of if "engine" in line] for of in lines]  # of every attempt
        self.ends = [[line for line in of if "end" in line] for of in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("undisturbed"), TRAINER, faults=FAULTS)


def test_without_the_section_nothing_happens(undisturbed: Run) -> None:
    # DeepSpeed by itself sometimes ends in an abort, and torch's launcher begins anew.
    assert {engine for of in undisturbed.engines for engine in of} == {("DeepSpeedEngine", 0)}
    assert "[gemini" not in undisturbed.output


def test_a_trainer_with_the_callback_ends_with_the_very_bits(undisturbed: Run, tmp_path: Path) -> None:
    """Every loss, norm of gradients, learning rate, evaluation and weight, though it is killed in and between two epochs."""
    run = Run(tmp_path, TRAINER | {"section": True, "callback": True}, faults=FAULTS)
    first, killed, killed_in_copy = run.engines[0]
    assert run.engines == [[first, killed, killed_in_copy]] * 2
    assert (first[1], killed[1]) == (0, 7)
    assert killed_in_copy[1] in (11, 12)  # whichever was complete
    assert [len(ends) for ends in run.ends] == [1, 1]
    for rank in range(2):
        assert run.ends[rank][0] == undisturbed.ends[rank][-1]
    assert run.ends[0][0]["end"] == 18


@pytest.mark.soak
def test_what_is_newer_than_a_checkpoint_wins(undisturbed: Run, tmp_path: Path) -> None:
    """The first start follows ``resume_from_checkpoint``, as without gemini-ft; the restart goes on from memory."""
    checkpoint = str(undisturbed.folder / "checkpoints" / "checkpoint-8")
    run = Run(tmp_path, TRAINER | {"section": True, "callback": True, "checkpoint": checkpoint}, faults="step=12:rank=0:sigkill")
    assert run.engines == [[("GeminiDeepSpeedEngine", steps) for steps in (8, 11)]] * 2
    for rank in range(2):
        end, expected = run.ends[rank][0], undisturbed.ends[rank][-1]
        assert end["bits"] == expected["bits"]
        assert end["history"][:-1] == expected["history"][:-1]  # the last entry is of what was trained after the checkpoint


@pytest.mark.soak
def test_a_loop_that_is_not_changed_goes_on_with_the_resumed_engine(tmp_path: Path) -> None:
    """ZeRO 3 under accelerate, in workers that are started cold; the loop begins again: eleven steps more."""
    run = Run(tmp_path, {"kind": "loop", "stage": 3, "section": True}, "--cold", faults="step=6:rank=1:sigkill", GEMINI_INTERVAL="1")
    (first, again) = run.engines[0]
    assert run.engines == [[first, again]] * 2
    assert {engine for engine, _ in (first, again)} == {"GeminiDeepSpeedEngine"}
    assert (first[1], again[1]) in ((0, 5), (0, 4))  # whichever was complete
    assert [[end["end"] for end in ends] for ends in run.ends] == [[11 + again[1]]] * 2
    assert run.ends[0][0]["bits"] == run.ends[1][0]["bits"]
    told = f"THE LOOP HAS BEGUN AGAIN, and the engine was resumed at step {again[1]}: nothing has read engine.global_steps"
    assert run.output.count(told) == run.output.count("Write `for step in range(engine.global_steps, N)`") == 1


@pytest.mark.soak
def test_a_loop_of_accelerate_under_deepspeed_keeps_its_loader(tmp_path_factory: pytest.TempPathFactory) -> None:
    case = {"kind": "loop", "kept": True}
    undisturbed = Run(tmp_path_factory.mktemp("plain"), case, faults="")
    run = Run(tmp_path_factory.mktemp("killed"), case | {"section": True}, faults="step=3:rank=0:sigkill; step=7:rank=1:sigkill")
    assert [len(engines) for engines in run.engines] == [3, 3]
    for rank in range(2):
        assert run.ends[rank] == undisturbed.ends[rank]


@pytest.mark.taken_apart("transformers")
def test_a_trainer_that_knows_of_nothing_goes_on_where_it_was(tmp_path: Path) -> None:
    """Under DeepSpeed the section resumes the engine, and the callback that `gemini run` adds the Trainer."""
    case = {"kind": "trainer", "section": True, "arguments": {"max_steps": 6}}
    run = Run(tmp_path, case, faults="step=3:rank=1:sigkill")
    (first, again) = run.engines[0]
    assert first[1] == 0 < again[1]
    assert "THE LOOP HAS BEGUN AGAIN" not in run.output
    assert f"the Trainer goes on after step {again[1]} of epoch 0" in run.output
    assert run.ends[0][0]["end"] == 6


def test_a_trainer_on_ddp_ends_with_the_very_bits(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Loss, evaluation, learning rate, order of the data, random numbers, state of the Trainer and weights, those of a reference that
    follows the model too; in an unchanged script, on a device whose copies lag behind (lagging_device.py)."""
    undisturbed, run = _plain(tmp_path_factory, callback=False, follows=True, lag=0.01)
    assert "will not be restored" not in run.output
    assert "[gemini" not in undisturbed.output
    assert run.output.count("resumed at iteration") == 2


def test_a_trainer_that_goes_on_from_its_last_checkpoint_ends_with_the_very_bits(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Rank 0 is killed when it has written that, and the step has no snapshot yet; memory has one of the step before."""
    arguments = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "no", "num_train_epochs": 2}
    case = {"kind": "trainer", "plain": True, "accumulate": 2, "arguments": arguments, "checkpoint": "latest"}
    undisturbed = Run(tmp_path_factory.mktemp("plain"), case, faults="", GEMINI_WRAP="0")
    run = Run(tmp_path_factory.mktemp("killed"), case | {"killed_saving": 3}, faults="", GEMINI_ON_LATE="wait")
    assert run.output.count("resumed at iteration 2") == 1
    assert run.ends == undisturbed.ends


class _Over(Exception):
    pass


def _goes_on(folder: Path, protected: bool, steps: int) -> tuple[list[tuple[int, str]], list[str]]:
    """Trains in one process until ``steps`` steps are made, and ends as a crash would; the Trainer saves after 12 steps.

    Returns the steps that were made at the begin of each step, with a digest of the weights then, and what was said.
    """
    from huggingface_case import Texts, model
    from session_case import Recorded
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from gemini_ft.huggingface import GeminiCallback

    begun: list[tuple[int, str]] = []

    class Watching(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            parts = [param.detach().numpy().tobytes() for _, param in sorted(named["model"].named_parameters())]
            begun.append((state.global_step, hashlib.sha256(b"".join(parts)).hexdigest()))
            if state.global_step == steps:
                raise _Over

    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):  # without a process group
        os.environ.pop(name)
    told = Recorded()
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=100,
        save_steps=12,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    callbacks = [Watching(), *([GeminiCallback(on_late="wait")] if protected else [])]  # it crashes before the next snapshot
    folder.mkdir(exist_ok=True)
    trainer = Trainer(model=model(), args=arguments, train_dataset=Texts(22), callbacks=callbacks)
    with pytest.raises(_Over):
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    return begun, told.texts


def test_a_checkpoint_that_is_much_newer_than_what_memory_has_is_followed(tmp_path: Path) -> None:
    """It is in the Trainer's own folder, and was not written just before the failure: memory is of another time."""
    out = tmp_path / "out"
    with World(tmp_path) as world:
        ((begun, _),) = world.outcome(_goes_on, out, True, 4)
        assert [steps for steps, _ in begun] == [0, 1, 2, 3, 4]
        ((until, _),) = world.outcome(_goes_on, out, False, 12)
        ((begun, told),) = world.outcome(_goes_on, out, True, 13)
    assert begun[0] == until[12]
    (said,) = [text for text in told if "is followed" in text]
    assert said.endswith("checkpoint-12 is followed, not the snapshot of step 3, which is 9 steps behind it")


def _notes_arrays(folder: Path, steps: int) -> tuple[list[str], list[str]]:
    """Trains as `_goes_on`; what step 1 has logged json cannot write. Returns the log at the end, and the log in each snapshot."""
    from huggingface_case import Texts, model
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from gemini_ft.checkpointer import Checkpointer
    from gemini_ft.huggingface import GeminiCallback

    class Notes(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step == 1:
                state.log_history.append({"step": 1, "array": np.arange(3), "tensor": torch.ones(2)})
            if state.global_step == steps:
                raise _Over

    saved: list[Any] = []
    save = Checkpointer.save

    def see(checkpointer: Checkpointer, iteration: int, extras: Any) -> None:
        saved.append(extras["client_state"]["transformers"]["history"])
        save(checkpointer, iteration, extras)

    pytest.MonkeyPatch().setattr(Checkpointer, "save", see)  # this process is the test's own
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):  # without a process group
        os.environ.pop(name)
    arguments = TrainingArguments(str(folder), use_cpu=True, max_steps=9, save_strategy="no", report_to=[], dataloader_pin_memory=False)
    callbacks = [Notes(), GeminiCallback(on_late="wait")]
    trainer = Trainer(model=model(), args=arguments, train_dataset=Texts(80), callbacks=callbacks)
    with pytest.raises(_Over):
        trainer.train()
    first = {id(each): index for index, each in reversed([*enumerate(saved)])}
    return [*map(repr, trainer.state.log_history)], [f"{type(each).__name__} {first[id(each)]}" for each in saved]


def test_a_log_that_json_cannot_write_is_encoded_once_and_comes_back(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        ((log, saved),) = world.outcome(_notes_arrays, tmp_path, 4)
        assert saved == ["bytes 0"] * 3  # of steps 1 to 3
        ((again, _),) = world.outcome(_notes_arrays, tmp_path, 5)
    assert log == again == ["{'step': 1, 'array': array([0, 1, 2]), 'tensor': tensor([1., 1.])}"]


@pytest.mark.soak
def test_a_trainer_on_ddp_with_the_callback_ends_with_the_very_bits(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With workers that live on from epoch to epoch, those of evaluations too."""
    _plain(tmp_path_factory, callback=True, arguments={"dataloader_num_workers": 2, "dataloader_persistent_workers": True})


@pytest.mark.soak
def test_batches_that_rank_0_fetches_for_all_come_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    _plain(tmp_path_factory, callback=False, streamed=True, arguments={"max_steps": 9, "eval_strategy": "no", "eval_on_start": False})


def _plain(
    folders: pytest.TempPathFactory, callback: bool, streamed: bool = False, follows: bool = False, arguments: Any = None, **more: Any
) -> tuple[Run, Run]:
    """Runs a job undisturbed without gemini-ft, and killed twice; they end alike."""
    given = {"save_strategy": "steps", "save_steps": 4, "lr_scheduler_type": "cosine", "warmup_steps": 3, "eval_on_start": True}
    given |= arguments or {}
    case = {"kind": "trainer", "plain": True, "accumulate": 2, "arguments": given, "streamed": streamed, "follows": follows}
    undisturbed = Run(folders.mktemp("plain"), case, faults="", GEMINI_WRAP="0")
    faults = "step=4:rank=1:sigkill; step=7:rank=0:sigkill"
    run = Run(folders.mktemp("killed"), case | {"callback": callback} | more, faults=faults, GEMINI_ON_LATE="wait")
    assert [len(engines) for engines in run.engines] == [3, 3]
    for rank in range(2):
        assert run.ends[rank] == undisturbed.ends[rank]
    return undisturbed, run


@pytest.mark.soak
def test_a_trainer_on_ddp_with_a_gradient_pipeline_ends_with_the_very_bits(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its residuals are part of every snapshot, and the callback has the pipeline made before it resumes."""
    rules = [{"params": "*.bias"}, {"params": "*", "compress": {"method": "topk", "ratio": 0.1}}]
    case = {"kind": "trainer", "plain": True, "accumulate": 2, "callback": True, "rules": rules, "arguments": {"eval_strategy": "no"}}
    undisturbed = Run(tmp_path_factory.mktemp("undisturbed"), case, faults="", GEMINI_ON_LATE="wait")
    run = Run(tmp_path_factory.mktemp("killed"), case, faults="step=4:rank=1:sigkill; step=7:rank=0:sigkill", GEMINI_ON_LATE="wait")
    assert "gradient_pipeline: rule 2" in run.output
    assert [len(engines) for engines in run.engines] == [3, 3]
    assert run.ends == undisturbed.ends


@pytest.mark.soak
def test_a_trainer_on_fsdp2_ends_with_the_very_bits(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each rank's shards, and after an evaluation, which leaves the parameters whole."""
    sharding = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}
    arguments = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "num_train_epochs": 2, **sharding}
    case = {"kind": "trainer", "plain": True, "sharded": True, "accumulate": 2, "arguments": arguments}
    undisturbed = Run(tmp_path_factory.mktemp("plain"), case, faults="", GEMINI_WRAP="0")
    run = Run(tmp_path_factory.mktemp("killed"), case, faults="step=2:rank=1:sigkill; step=5:rank=0:sigkill")
    assert [[engine for engine, _ in engines] for engines in run.engines] == [["FSDPGPT2LMHeadModel"] * 3] * 2
    for rank in range(2):
        assert run.ends[rank] == undisturbed.ends[rank]
    assert run.ends[0][0]["bits"] != run.ends[1][0]["bits"]


def test_a_loop_of_accelerate_ends_with_the_very_bits(tmp_path_factory: pytest.TempPathFactory) -> None:
    undisturbed = Run(tmp_path_factory.mktemp("plain"), {"kind": "loop on ddp"}, faults="")
    run = Run(tmp_path_factory.mktemp("killed"), {"kind": "loop on ddp"}, faults="step=4:rank=1:sigkill; step=9:rank=0:sigkill")
    assert run.output.count("resumed at iteration") in (1, 2)  # of the first three steps, none may have been complete
    assert undisturbed.ends[0][0]["processes"] == 2
    assert run.ends == undisturbed.ends


@pytest.mark.taken_apart("accelerate")
def test_a_loop_of_accelerate_without_ours_is_told_once_that_nothing_is_protected(tmp_path: Path) -> None:
    run = Run(tmp_path, {"kind": "unprotected"}, faults="")
    assert run.ends == [[{"end": 6, "processes": 2}]] * 2
    steps = [steps for _, steps in run.engines[0]]
    assert steps[-6:] == [*range(6)]  # from the beginning
    assert steps[:-6] in ([0, 1, 2], [0, 1])  # the other rank may have failed before this one had said that it makes its third step
    assert run.output.count("nothing in this job is protected: no worker has joined a run, so a restart begins at the beginning") == 1


def _under_deepspeed(folder: Path, skipping: bool) -> str:
    """Trains in one rank as an unchanged script of `gemini run` does, and ends as a crash would; returns the error's text."""
    from huggingface_case import Texts, configuration, model
    from transformers import Trainer, TrainingArguments

    import gemini_ft
    from gemini_ft.launch import autoprotect

    autoprotect.install()
    gemini_ft.init_process_group("gloo")
    arguments = TrainingArguments(
        output_dir=str(folder),
        deepspeed=configuration({"section": True}),
        per_device_train_batch_size=2,
        max_grad_norm=1.0,
        learning_rate=1e-2,
        max_steps=3,
        ignore_data_skip=skipping,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model(), args=arguments, train_dataset=Texts(22))
    try:
        trainer.train()
    except ConfigError as error:
        return " ".join([str(error), *error.__notes__])
    trainer.model_wrapped.gemini.checkpointer.flush()
    return ""


def test_what_was_recorded_without_the_callback_has_no_position_to_go_on_from(tmp_path: Path) -> None:
    """The section alone has protected the engine, as the Trainer could not be; then the script is mended."""
    with World(tmp_path, DS_ACCELERATOR="cpu") as world:
        assert world.outcome(_under_deepspeed, tmp_path, True) == [""]
        (told,) = world.outcome(_under_deepspeed, tmp_path, False)
    assert "step 3 was recorded without a GeminiCallback, so the Trainer's position is not known; start afresh with another run_id" in told
    assert told.endswith("GEMINI_WRAP=0 leaves them as they are")


@pytest.mark.parametrize("callback", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["section alone", "callback"])
def test_a_gradient_pipeline_needs_a_section_only(tmp_path: Path, callback: bool) -> None:
    """In a script that is not changed; a callback sees to it where deepspeed is not wrapped."""
    rules = [{"params": "*", "compress": {"method": "topk", "ratio": 0.1}}]
    run = TRAINER | {"config": {"gradient_pipeline": rules}, "arguments": {"num_train_epochs": 1}, "callback": callback}
    done = Run(tmp_path, run, faults="", **({"GEMINI_WRAP": "0"} if callback else {}))
    assert "gradient_pipeline: rule 1 (params='*', sync=dense, compress=topk) keeps a memory of the whole gradients" in done.output
    nothing = 'GeminiCallback keeps nothing: the DeepSpeed configuration has no "gemini" section; {} in it means the defaults'
    assert (nothing in done.output) == callback
    assert {engine for of in done.engines for engine in of} == {("DeepSpeedEngine", 0)}
    assert done.ends[0][-1]["bits"] == done.ends[1][-1]["bits"]
    assert done.ends[0][-1]["end"] == 6


REFUSALS = """
import warnings
warnings.simplefilter("ignore")
import torch
from transformers import Trainer, TrainingArguments
from gemini_ft.errors import ConfigError
from gemini_ft.huggingface import GeminiCallback

try:
    GeminiCallback(replcas=2)
except ConfigError as error:
    print("REFUSED:", error)
arguments = TrainingArguments(output_dir="out", use_cpu=True, report_to=[], ignore_data_skip=True)
try:
    Trainer(model=torch.nn.Linear(1, 1), args=arguments, train_dataset=[{}], callbacks=[GeminiCallback()]).train()
except ConfigError as error:
    print("REFUSED:", error)
Trainer._run_epoch = lambda self, epoch: None
try:
    GeminiCallback()
except ConfigError as error:
    print("REFUSED:", error)

import accelerate, gemini_ft
from accelerate.data_loader import DataLoaderDispatcher
accelerate.Accelerator(cpu=True)
try:
    gemini_ft.resumable(DataLoaderDispatcher([{}]))
except ConfigError as error:
    print("REFUSED:", error)
"""


UNASKED = """
import copy, pickle, warnings
warnings.simplefilter("ignore")
import torch
from gemini_ft.launch import autoprotect
autoprotect.install()
from transformers import Trainer, TrainerCallback, TrainingArguments

class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.line = torch.nn.Linear(width, width)

    def forward(self, x):
        return {"loss": self.line(x).sum()}

def train(width=1, callbacks=None, kind=Trainer, **named):
    global trainer
    arguments = TrainingArguments(output_dir="out", use_cpu=True, report_to=[], **named)
    try:
        trainer = kind(model=Net(width), args=arguments, train_dataset=[{"x": torch.ones(width)}], callbacks=callbacks)
        trainer.train()
        print("DONE")
    except BaseException as error:
        print("FAILED:", type(error).__name__, error, *getattr(error, "__notes__", []))

class Noting(TrainerCallback):
    def on_step_end(self, args, state, control, **named):
        state.log_history.append({"step": state.global_step, "array": torch.ones(2).numpy(), "tensor": torch.ones(2)})
        copies = copy.deepcopy(trainer.callback_handler.callbacks), pickle.loads(pickle.dumps(trainer.callback_handler.callbacks[-1]))
        assert type(copies[0][-1]) is type(copies[1]) is type(trainer.callback_handler.callbacks[-1])

class Counted(Trainer):
    def set_initial_training_values(self, args, dataloader):
        return 3, 1, 1, 3, 1, 1, 3

class Asking(TrainerCallback):
    def on_step_end(self, args, state, control, **named):
        Trainer.set_initial_training_values(trainer, args, trainer.get_train_dataloader())

    def on_train_end(self, args, state, control, **named):
        protection = trainer.callback_handler.callbacks[-1]._protection
        print("SNAPSHOTS", state.global_step, protection.checkpointer.name, protection.checkpointer.stats.snapshots)

train(width=1500)
train(callbacks=[Noting()], save_strategy="no", disable_tqdm=True)
train(callbacks=[Asking()], kind=Counted, save_strategy="no", disable_tqdm=True)
train(ignore_data_skip=True)
Trainer._run_epoch = lambda self, epoch: None
train()
"""


def test_what_a_trainer_of_gemini_run_is_told(tmp_path: Path) -> None:
    """A Trainer that is not supported runs unprotected, its callbacks can be copied, and an error of gemini-ft names the way out.

    One that counts its steps itself is protected, whoever asks for them meanwhile.
    """
    named = {"GEMINI_RUN_ID": f"{os.getpid()}-{tmp_path.name}", "GEMINI_HOST_ID": "little", "GEMINI_LOG_DIR": str(tmp_path)}
    env = os.environ | named | {"GEMINI_MEMORY_LIMIT": "16MiB", "GEMINI_ON_LATE": "wait"}
    try:
        command = [sys.executable, "-X", "warm", "-c", UNASKED]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    finally:
        end_agent(named["GEMINI_RUN_ID"], "little")  # it would wait for the job to come back
    little, noting, counting, skipping, other_version = [line for line in done.stdout.splitlines() if line.startswith(("DONE", "FAILED"))]
    assert little.endswith("`gemini run` protects every Trainer; GEMINI_WRAP=0 leaves them as they are")
    assert (noting, counting, skipping) == ("DONE", "DONE", "DONE")
    assert "SNAPSHOTS 3 trainer-2 3" in done.stdout
    assert other_version.startswith("FAILED: TypeError <lambda>()")
    told = [line for line in done.stderr.splitlines() if "transformers' Trainer is not protected: " in line]
    assert "ignore_data_skip=True gives up the position" in told[0]
    assert "Trainer._run_epoch is missing or takes other arguments" in told[1]
    assert len(told) == 2


def test_what_the_callback_refuses(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-X", "warm", "-c", REFUSALS], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    option, skipped, other_version, dispatched = [line for line in done.stdout.splitlines() if line.startswith("REFUSED:")]
    assert "replcas" in option
    assert "ignore_data_skip=True gives up the position in the data, which GeminiCallback restores; leave it out" in skipped
    assert "Trainer._run_epoch is missing or takes other arguments" in other_version
    assert (
        "rank 0 fetch the batches of all ranks, and cannot be resumed; give DataLoaderConfiguration(dispatch_batches=False)" in dispatched
    )


PIPELINE = """
import warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments
from gemini_ft.errors import ConfigError
from gemini_ft.huggingface import GeminiCallback

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line = torch.nn.Linear(8, 8)

    def forward(self, x):
        return {"loss": self.line(x).square().sum()}

def trainer_of(rule):
    data = [{"x": torch.linspace(-1, 1, 8) * at} for at in range(1, 9)]
    how = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(
        output_dir="out", max_steps=4, max_grad_norm=0.0, optim="sgd", learning_rate=0.01, lr_scheduler_type="constant", **how
    )
    return Trainer(model=Net(), args=arguments, train_dataset=data, callbacks=[GeminiCallback(gradient_pipeline=[rule])])

topk = {"params": "*", "compress": {"method": "topk", "ratio": 0.1}}
try:
    trainer_of(topk).train()
except ConfigError as error:
    print("REFUSED:", error)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
weights = []
for scaler in (None, torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)):
    trainer = trainer_of(topk)
    wrapped = DistributedDataParallel(trainer.model)
    trainer.model_wrapped = wrapped if scaler is None else torch.compile(wrapped, backend="eager")
    trainer.accelerator.scaler = scaler
    trainer.train()
    weights.append(trainer.model.line.weight.detach().clone())
    if scaler is None:
        trainer.train()
        print("TWICE:", trainer.state.global_step, not torch.equal(weights[0], trainer.model.line.weight))
print("SCALED:", scaler.get_scale(), torch.equal(*weights))
"""


def test_a_gradient_pipeline_is_kept_from_one_training_to_the_next(tmp_path: Path) -> None:
    """And leaves out the scale of mixed precision, here powers of two that change nothing else; without DDP it is refused."""
    named = {"GEMINI_RUN_ID": f"{os.getpid()}-{tmp_path.name}", "GEMINI_HOST_ID": "lone", "GEMINI_LOG_DIR": str(tmp_path)}
    try:
        command = [sys.executable, "-X", "warm", "-c", PIPELINE]
        done = subprocess.run(command, cwd=tmp_path, env=os.environ | named, capture_output=True, text=True, timeout=120)
    finally:
        end_agent(named["GEMINI_RUN_ID"], "lone")
    assert done.returncode == 0, done.stderr
    refused, twice, scaled = [line for line in done.stdout.splitlines() if line.startswith(("REFUSED", "TWICE", "SCALED"))]
    assert "gradient_pipeline=) is for a Trainer on DistributedDataParallel, and this one trains a Net in 1 processes" in refused
    assert twice == "TWICE: 4 True"
    assert scaled == "SCALED: 64.0 True"
