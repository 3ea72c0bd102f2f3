"""A Trainer whose processes SLURM starts itself, one task each: lightning.sbatch runs this."""

import argparse

import lightning as L
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader, TensorDataset

import gemini_ft  # noqa: F401  makes strategy="gemini" known to Lightning


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.model(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--tasks-per-node", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    L.seed_everything(0)
    inputs = torch.randn(2048, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True)), batch_size=32)
    trainer = L.Trainer(
        strategy="gemini",
        accelerator="auto",
        num_nodes=options.nodes,
        devices=options.tasks_per_node,
        max_epochs=options.epochs,
        plugins=[SLURMEnvironment(auto_requeue=False)],  # the batch script requeues, and the signal that gives notice drains
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    model = Regression()
    trainer.fit(model, data)
    if trainer.is_global_zero:
        print("weights", b"".join(value.detach().cpu().numpy().tobytes() for value in model.parameters()).hex(), flush=True)


if __name__ == "__main__":
    main()
