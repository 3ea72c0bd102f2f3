"""examples/torchtitan_trainer.py on CPUs: killed, and killed without its memory, it ends with the bits of torchtitan alone."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="needs torchtitan: pip install torchtitan==0.3.0 triton"),
]
ROOT = Path(__file__).parents[2]
OURS = ROOT / "examples" / "torchtitan_trainer.py"
ARGUMENTS = [
    *("--module", "llama3", "--config", "llama3_debugmodel", "--hf_assets_path", "tokenizer", "--dataloader.dataset_path", "texts"),
    *("--debug.seed", "1", "--training.steps", "6", "--training.seq_len", "64", "--training.local_batch_size", "2"),
    *("--training.disable_cuda_graphs", "--parallelism.spmd_backend", "partial_dtensor"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a small tokenizer, and texts as the debug model's data set has them."""
    import tokenizers

    made = tmp_path_factory.mktemp("titan")
    texts = [" ".join(str((i * i * 7 + j * 13) % 997) for j in range(60)) for i in range(400)]
    (made / "texts").mkdir()
    (made / "texts" / "texts.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (made / "tokenizer").mkdir()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(made / "tokenizer" / "tokenizer.json"))
    (made / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return made


def train(folder: Path, script: str, run: str, *more: str, faults: str = "", fails: bool = False) -> tuple[list[str], str]:
    """The last weights of both ranks, and the output."""
    env = {"GEMINI_RUN_ID": f"{folder.name}-{run}", "GEMINI_FAULTS": faults, "GEMINI_FAULTS_DIR": str(folder), "GEMINI_ON_LATE": "wait"}
    places = {"GEMINI_LOG_DIR": str(folder), "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1"} | (
        {"GEMINI_LINGER": "2"} if fails else {}
    )
    launch = [sys.executable, "-m", "gemini_ft.cli.main", "run", "--nproc-per-node", "2", "--max-restarts", "0" if fails else "3"]
    command = [*launch, str(ROOT / "tests" / "kit" / "torchtitan_case.py"), script, *ARGUMENTS, *more]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | env | places, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    assert (done.returncode != 0) == fails, done.stdout[-8000:]
    return sorted(re.findall("^last: (.*)", done.stdout, re.MULTILINE)), done.stdout


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[str]:
    """The last weights of torchtitan's own train.py."""
    spec = importlib.util.find_spec("torchtitan.train")
    assert spec is not None
    assert spec.origin is not None
    return train(folder, spec.origin, "alone")[0]


def test_it_ends_with_the_same_bits_undisturbed_and_killed(folder: Path, alone: list[str]) -> None:
    assert len(alone) == 2
    assert train(folder, str(OURS), "undisturbed")[0] == alone
    killed, said = train(folder, str(OURS), "killed", faults="step=3:rank=1:sigkill")
    assert "resuming at iteration 2 from memory" in said or "resuming at iteration 3 from memory" in said
    assert killed == alone


def test_where_nothing_is_in_memory_it_loads_the_checkpoint_of_torchtitan(folder: Path, alone: list[str]) -> None:
    own = ["--checkpoint.enable", "--checkpoint.interval", "2"]
    train(folder, str(OURS), "first", *own, faults="step=5:rank=1:sigkill", fails=True)
    ends, said = train(folder, str(OURS), "second", *own)
    assert "Training starts at step 5" in said
    assert ends == alone
