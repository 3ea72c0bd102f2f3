"""A small GPT learns to write Python, byte by byte, from the standard library's own source text.

    gemini run --nproc-per-node 2 examples/train_gpt.py

One word makes it survive failures: ``strategy="gemini"``. examples/survive_failures.py runs this script on four emulated
hosts and takes them away one after the other.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import gemini_ft  # noqa: F401  makes strategy="gemini" known to Lightning

CONTEXT = 64  # bytes


class SourceText(Dataset):
    """Windows of CONTEXT bytes and the byte that follows each of them."""

    def __init__(self, megabytes: float = 4.0) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[: int(megabytes * 10**6)]
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.bytes[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """Causal self-attention and a feed-forward part, each with a norm before and a sum after."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout * self.training, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.feed_forward(self.norms[1](x))


class GPT(L.LightningModule):
    def __init__(self, width: int, layers: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4, dropout=0.1) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        x = self.embed(inputs) + self.position.weight
        loss = F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), targets.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="windows per rank and step")
    parser.add_argument("--strategy", default="gemini", help="'ddp' trains without any protection")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--out", help="where to save the final checkpoint")
    arguments = parser.parse_args()

    L.seed_everything(0)
    trainer = L.Trainer(
        strategy=arguments.strategy,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_steps=arguments.steps,
        logger=False,
        enable_checkpointing=False,  # gemini keeps the state
        enable_model_summary=False,
        enable_progress_bar=not arguments.quiet,
    )
    trainer.fit(GPT(arguments.width, arguments.layers, arguments.steps), DataLoader(SourceText(), arguments.batch, shuffle=True))
    if arguments.out:
        trainer.save_checkpoint(arguments.out)


if __name__ == "__main__":
    main()
