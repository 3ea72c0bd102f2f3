"""transformers' Trainer under DeepSpeed, killed in the middle of an epoch, ends with the loss of an undisturbed run.

    python examples/huggingface_trainer.py                                                      # both runs, and compares them
    gemini run --standalone --nproc-per-node 2 examples/huggingface_trainer.py --train          # one run

What makes it survive: the "gemini" section in configs/huggingface_zero2.json, and `GeminiCallback`. A small GPT-2 is built
here and learns the standard library's own source text, byte by byte: nothing is downloaded.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

CONFIG = Path(__file__).parent.parent / "configs" / "huggingface_zero2.json"
CONTEXT = 64  # bytes
FAULTS = "step=12:rank=1:sigkill; step=21:rank=0:sigkill:moment=in_copy"


def train() -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from gemini_ft.huggingface import GeminiCallback

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    windows = [{"input_ids": window.long(), "labels": window.long()} for window in text[: 128 * CONTEXT].split(CONTEXT)]
    sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
    torch.manual_seed(0)
    trainer = Trainer(
        GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)),
        TrainingArguments(
            deepspeed=str(CONFIG),
            output_dir=tempfile.gettempdir(),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            learning_rate=3e-3,
            logging_steps=4,
            save_strategy="no",  # gemini keeps the state
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=windows,
        callbacks=[GeminiCallback()],
    )
    result = trainer.train()
    if os.environ["RANK"] == "0":
        print(f"step {result.global_step}: training loss {result.training_loss.hex()}", flush=True)


def run(faults: str) -> str:
    """The last line of a run on two workers."""
    command = [sys.executable, "-m", "gemini_ft.cli.main", "run", "--standalone", "--nproc-per-node", "2", __file__, "--train"]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "GEMINI_FAULTS": faults}
    with tempfile.TemporaryDirectory(prefix="gemini-huggingface-") as folder:
        name = Path(folder).name
        env |= {"GEMINI_RUN_ID": name, "GEMINI_FAULTS_DIR": f"{folder}/faults", "GEMINI_LOG_DIR": folder, "GEMINI_LINGER": "60"}
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            if line.startswith("step "):
                last = line.strip()
        if process.wait() != 0:
            sys.exit(f"the run failed with status {process.returncode}")
    return last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="train in this process, as one of the workers of gemini run")
    if parser.parse_args().train:
        train()
        return
    undisturbed, disturbed = run(""), run(FAULTS)
    print(f"undisturbed: {undisturbed}\nkilled twice: {disturbed}")
    if disturbed != undisturbed:
        sys.exit("DIFFERENT")
    print("IDENTICAL: not one bit differs")


if __name__ == "__main__":
    main()
