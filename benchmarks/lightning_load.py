"""The same training as ``load.Load``, as a LightningModule."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from load import WIDTH, Model


class Inputs(Dataset[torch.Tensor]):
    """One seeded batch per step: (tokens, 1024) float32."""

    def __init__(self, steps: int, tokens: int) -> None:
        self._steps, self._tokens = steps, tokens

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(self._tokens, WIDTH, generator=torch.Generator().manual_seed(index))

    def loader(self) -> DataLoader[torch.Tensor]:
        """Batches as they are."""
        return DataLoader(self, batch_size=None)


class LightningLoad(L.LightningModule):
    """Equal state on all ranks; Lightning reduces the gradients."""

    def __init__(self, state_bytes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        torch.set_flush_denormal(True)
        self.model = Model(state_bytes)

    def training_step(self, batch: torch.Tensor, *_: Any) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4, fused=True)


def quiet(**options: Any) -> L.Trainer:
    """A Trainer that prints and logs nothing."""
    return L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, **options)
