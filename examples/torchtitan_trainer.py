"""torchtitan's trainer with a copy of every step in the hosts' memory: in the place of `torchtitan/train.py`, with its arguments.

    gemini run --nproc-per-node 8 examples/torchtitan_trainer.py --module llama3 --config llama3_8b

After a failure the job goes on from memory at its last step. Where nothing is in memory, nor in gemini-ft's storage, torchtitan loads its
own checkpoint, which it goes on writing as `--checkpoint.*` says. docs/torchtitan.md says what was run.
"""

from dataclasses import dataclass, fields
from types import SimpleNamespace

import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger

import gemini_ft


class GeminiCheckpoints(CheckpointManager):
    """torchtitan's checkpoint manager, which its trainer asks after every step, with gemini-ft before it."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """As torchtitan's own: its class says who is built."""

    def __init__(self, config, *, dataloader, model_parts, optimizers, lr_schedulers, states, **others):
        own = SimpleNamespace(state_dict=dataloader.state_dict, load_state_dict=dataloader.load_state_dict)  # of torchtitan's checkpoints
        self.gemini = gemini_ft.Checkpointer(
            {f"part{index}": part for index, part in enumerate(model_parts)},
            list(optimizers),
            state={"data": gemini_ft.resumable(dataloader), "trainer": states["train_state"]}
            | {f"scheduler{index}": scheduler for index, scheduler in enumerate(lr_schedulers)},
        )
        super().__init__(
            config,
            dataloader=own,
            model_parts=model_parts,
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            states=states,
            **others,
        )

    # Not _load and _save, which are called only where torchtitan's own checkpoints are enabled.

    def load(self, step=-1):
        return self.gemini.resume() > 0 or super().load(step)

    def save(self, curr_step, last_step=False):
        self.gemini.step()
        return super().save(curr_step, last_step)


def main():
    init_logger()
    config = ConfigManager().parse_args()
    config.checkpoint = GeminiCheckpoints.Config(**{each.name: getattr(config.checkpoint, each.name) for each in fields(config.checkpoint)})
    trainer = config.build()
    with trainer.checkpointer.gemini:
        trainer.train()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
