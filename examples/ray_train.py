"""A Lightning Trainer under Ray Train that goes on from memory after the loss of workers and nodes.

    python examples/ray_train.py --workers 2                     # on this machine
    python examples/ray_train.py --workers 16 --address auto     # on a cluster, from one of its nodes

Ray starts the workers, and all of them anew when one fails (`max_failures`). The first worker on a node starts the agent that keeps copies
there, which outlives it. docs/deploy.md says what happens at each failure.
"""

import argparse

import lightning as L
import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.lightning import RayLightningEnvironment
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset

import gemini_ft


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.model(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(settings: dict[str, int]) -> str:
    """Runs in every worker, anew after every failure: the strategy finds out where to go on. Returns the last weights in hex."""
    L.seed_everything(0)
    inputs = torch.randn(2048, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True)), batch_size=32)
    trainer = L.Trainer(
        strategy=gemini_ft.lightning.GeminiStrategy(),  # in the place of RayDDPStrategy; prepare_trainer, which looks for that, is left out
        accelerator="auto",
        devices=get_context().get_local_world_size(),
        plugins=[RayLightningEnvironment()],
        max_epochs=settings["epochs"],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    model = Regression()
    trainer.fit(model, data)
    return b"".join(value.detach().cpu().numpy().tobytes() for value in model.parameters()).hex()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker")
    parser.add_argument("--address", help="of a cluster; default: start Ray on this machine")
    parser.add_argument("--name", default="gemini-regression", help="of the run; one of the same name goes on where this one has ended")
    parser.add_argument("--folder", help="where Ray keeps its records of runs; all nodes must reach it")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    ray.init(address=options.address)
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": options.epochs},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
        run_config=RunConfig(name=options.name, storage_path=options.folder, failure_config=FailureConfig(max_failures=20)),
    )
    print("weights", trainer.fit().return_value)


if __name__ == "__main__":
    main()
