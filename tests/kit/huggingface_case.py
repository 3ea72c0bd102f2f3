"""What the ranks of test_huggingface.py run; never imported. No word of gemini-ft but the callback that a run asks for.

Usage: huggingface_case.py '{"out": FOLDER, "kind": "trainer" | "loop", ...}'. Each rank writes FOLDER/rank-R: one JSON line
when its engine is there, one at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

SAMPLES, LENGTH, VOCABULARY, BATCH = 22, 12, 48, 2


class Texts(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, samples: int) -> None:
        self._ids = torch.randint(VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(samples))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


class ToldTexts(Texts):
    """Other texts in each epoch, of which a loader tells it."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (self._ids[index] + self.epoch) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


class Streamed(IterableDataset[dict[str, torch.Tensor]]):
    """Texts that come one after the other, changed by what the dataset has seen; rank 0 fetches those of all ranks."""

    seen = 0

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for index in range(len(self._texts)):
            self.seen += 1
            ids = (self._texts[index]["input_ids"] + self.seen) % VOCABULARY
            yield {"input_ids": ids, "labels": ids}


class Masking:
    """A collate function that hides tokens, as masked language models have it, and counts its batches."""

    batches = 0

    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        self.batches += 1
        ids = torch.stack([sample["input_ids"] for sample in samples])
        hidden = (torch.rand(ids.shape) < 0.3) | torch.from_numpy(np.random.random(tuple(ids.shape)) < 0.1)
        return {"input_ids": ids.masked_fill(hidden, self.batches % 3), "labels": ids}


class Counting(TrainerCallback):  # type: ignore[misc]
    """A callback that keeps what it has seen to itself."""

    def __init__(self) -> None:
        self.steps = 0
        self.rates: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.steps += 1
        args.max_grad_norm = 1.0 / self.steps
        self.rates = [*self.rates[-4:], named["optimizer"].param_groups[0]["lr"]]


class Following(TrainerCallback):  # type: ignore[misc]
    """Mixes the trained weights into a reference every other step, as TRL's Trainers do with ``sync_ref_model``."""

    def __init__(self, reference: torch.nn.Module) -> None:
        self.reference = reference

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step % 2 == 0:
            for mean, now in zip(self.reference.parameters(), named["model"].parameters(), strict=True):
                mean.lerp_(now, 0.6)


class Weighed:
    """A loss and a metric of the script's own, in one object that remembers what it has seen."""

    mean, best, asked = 1.0, 0.0, 0

    def loss(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = functional.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        self.mean = 0.9 * self.mean + 0.1 * float(loss.detach())
        return loss / self.mean

    def __call__(self, predicted: Any) -> dict[str, float]:
        self.asked += 1
        self.best = max(self.best, float((predicted.predictions.argmax(-1) == predicted.label_ids).mean()))
        return {"best": self.best}


def model() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))  # with dropout


def configuration(run: dict[str, Any]) -> dict[str, Any]:
    zero = {"stage": run.get("stage", 2), "reduce_bucket_size": 5000, "allgather_bucket_size": 100000}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": run.get("accumulate", 1),
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if run.get("section"):
        config["gemini"] = {"on_late": "wait"}
    given: dict[str, Any] = config | run.get("config", {})
    return given


class Diary:
    def __init__(self, run: dict[str, Any]) -> None:
        self._path = Path(run["out"]) / f"rank-{os.environ['RANK']}"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.is_first = not self._path.exists()  # of all attempts

    def note(self, **values: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def engine(self, engine: Any) -> None:
        steps = vars(engine).get("global_steps", 0)  # so that the engine does not take this for a script that follows it
        self.note(engine=type(engine).__name__, steps=steps, restart=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))


def bits(model: Any) -> str:
    """A digest of the whole model's parameters, or of this rank's shards where the model is sharded."""
    found = hashlib.sha256()
    if isinstance(model, FSDPModule):
        whole: Any = model  # torch's stubs do not show that it is a module, too
        shards: dict[str, Any] = whole.state_dict()
        for name in sorted(shards):
            found.update(name.encode() + shards[name].to_local().numpy().tobytes())
        return found.hexdigest()
    for name, param in sorted(model.module.named_parameters()):
        with gathered([param]):
            found.update(name.encode() + param.detach().float().numpy().tobytes())
    return found.hexdigest()


def gathered(params: list[Any]) -> Any:
    if "deepspeed" not in sys.modules:
        return contextlib.nullcontext()
    return sys.modules["deepspeed"].zero.GatheredParameters(params)


def shard_on_cpus() -> None:
    """Makes accelerate shard on CPUs, which it does on accelerators only: to it, they are the accelerators of several processes."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    original = PartialState.__init__

    def made(state: PartialState, *arguments: Any, **named: Any) -> None:
        original(state, *arguments, **named)
        if state.distributed_type == DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU

    PartialState.__init__ = made


def train(run: dict[str, Any], diary: Diary) -> None:
    if run.get("sharded"):
        shard_on_cpus()

    class Tell(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **named: Any) -> None:
            diary.engine(trainer.model_wrapped)

        def on_save(self, args: Any, state: Any, *_: Any, **named: Any) -> None:
            if os.environ["RANK"] == "0" and state.global_step == run.get("killed_saving") and diary.is_first:
                os.kill(os.getpid(), signal.SIGKILL)

    counting = Counting()

    class Adding(Counting):
        """Brings another callback, and goes."""

        def on_train_begin(self, *_: Any, **named: Any) -> None:
            trainer.add_callback(counting)
            trainer.remove_callback(self)

    callbacks: list[TrainerCallback] = [Tell(), Adding()]
    if run.get("callback"):
        import gemini_ft.huggingface

        callbacks.append(gemini_ft.huggingface.GeminiCallback(gradient_pipeline=run.get("rules")))
    arguments = TrainingArguments(
        output_dir=f"{run['out']}/checkpoints",
        **({"use_cpu": True, "ddp_backend": "gloo"} if run.get("plain") else {"deepspeed": configuration(run)}),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=run.get("accumulate", 1),
        max_grad_norm=1.0,
        learning_rate=1e-2,
        logging_steps=2,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{"num_train_epochs": 3, "seed": 5, "save_strategy": "no", "eval_strategy": "epoch"} | run.get("arguments", {}),
    )

    class Weighing(Trainer):  # type: ignore[misc]
        """A Trainer that weighs its losses by what it has seen of them."""

        best_metric = 1.0  # a name that other objects of transformers have

        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            loss = super().compute_loss(*arguments, **named)
            if run.get("follows") and self.model.training:
                with torch.no_grad():
                    distance = self.ref_model(arguments[1]["input_ids"]).logits.square().mean()
                loss = loss * (1 + distance)
            if self.model.training:
                self.best_metric = 0.9 * self.best_metric + 0.1 * float(loss.detach() if torch.is_tensor(loss) else loss[0])
            return loss / self.best_metric if torch.is_tensor(loss) else loss

    class Evaluating(Weighing):
        """accelerate's own gathering of results fails on the CPU under DeepSpeed: each rank takes itself for the only one."""

        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            metrics = {"eval_loss": torch.rand(()).item()}
            self.log(metrics)
            return metrics

    texts: Any = Streamed(Texts(SAMPLES)) if run.get("streamed") else ToldTexts(SAMPLES)
    kind = Weighing if run.get("plain") else Evaluating
    weighed = Weighed()
    data = {"train_dataset": texts, "eval_dataset": Texts(4), "data_collator": Masking()}
    data |= {"compute_loss_func": weighed.loss, "compute_metrics": weighed}
    trainer = kind(model=model(), args=arguments, callbacks=callbacks, **data)
    if run.get("follows"):
        arguments.sync_ref_model, trainer.ref_model = True, model().eval()
        trainer.add_callback(Following(trainer.ref_model))
    checkpoint = run.get("checkpoint")
    os.makedirs(arguments.output_dir, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir) if checkpoint == "latest" else checkpoint)
    clock = ("runtime", "per_second")
    history = [{key: value for key, value in entry.items() if not key.endswith(clock)} for entry in trainer.state.log_history]
    kept = {"mean": trainer.best_metric, "steps": counting.steps, "rates": counting.rates, "weighed": vars(weighed)}
    diary.note(end=trainer.state.global_step, history=history, bits=bits(trainer.model_wrapped), kept=kept)


def loop(run: dict[str, Any], diary: Diary) -> None:
    """As plain as accelerate's own examples; it knows nothing of resuming, unless the loader is to be kept."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader

    set_seed(1)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=configuration(run)))
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    data = DataLoader(Texts(SAMPLES), BATCH, shuffle=True, collate_fn=Masking())
    engine, optimizer, loader = accelerator.prepare(net, optimizer, data)
    diary.engine(engine)
    if run.get("kept"):
        import gemini_ft

        loader = gemini_ft.resumable(loader)
        if run.get("section"):
            engine.gemini.keep(loader=loader)
    diary.note(processes=accelerator.num_processes, index=accelerator.process_index)
    for batch in loader:
        accelerator.backward(engine(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    diary.note(end=engine.global_steps, bits=bits(engine))


def loop_on_ddp(run: dict[str, Any], diary: Diary) -> None:
    """As docs/huggingface.md has it."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader

    import gemini_ft

    set_seed(1)
    accelerator = Accelerator(cpu=True)
    net = model()
    data = DataLoader(ToldTexts(SAMPLES), BATCH, shuffle=True, collate_fn=Masking())
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), data)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    loader = gemini_ft.resumable(loader)
    checkpointer = gemini_ft.Checkpointer(net, optimizer, state={"scheduler": scheduler, "loader": loader})
    checkpointer.resume()
    losses = checkpointer.scalars.get("losses", [])
    for epoch in range(checkpointer.scalars.get("epoch", 0), 3):
        loader.set_epoch(epoch)
        for batch in loader:
            loss = net(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses = [*losses, [float(loss).hex(), float(scheduler.get_last_lr()[0]).hex(), batch["input_ids"].sum().item()]]
            checkpointer.step(epoch=epoch, losses=losses)
    checkpointer.close()
    diary.note(end=len(losses), losses=losses, bits=bits(net), drawn=float(torch.rand(())).hex(), processes=accelerator.num_processes)


def unprotected_loop(run: dict[str, Any], diary: Diary) -> None:
    """The same without gemini-ft; a worker of the first attempt is killed."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True)
    net = model()
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), DataLoader(Texts(SAMPLES), BATCH))
    for steps, batch in enumerate(loader):
        if (steps, accelerator.process_index, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (3, 1, "0"):
            os.kill(os.getpid(), signal.SIGKILL)
        accelerator.backward(net(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        diary.note(engine=type(net).__name__, steps=steps)
    diary.note(end=len(loader), processes=accelerator.num_processes)


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    if "lag" in job:
        import lagging_device

        from gemini_ft import accelerator as devices

        lagging_device.install(devices, job["lag"])
    kinds = {"trainer": train, "loop": loop, "loop on ddp": loop_on_ddp, "unprotected": unprotected_loop}
    kinds[job["kind"]](job, Diary(job))
