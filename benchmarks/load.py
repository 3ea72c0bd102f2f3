"""The training that every row carries: real matrix products, a real backward pass, a real in-place Adam update."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 1024
_BYTES_PER_PARAMETER = 12  # fp32 weight and Adam's two fp32 moments


class Model(nn.Module):
    """Residual linear layers of width 1024; the last one is narrower, so that the state has exactly the wanted size."""

    def __init__(self, state_bytes: int) -> None:
        super().__init__()
        rows = round(state_bytes / _BYTES_PER_PARAMETER / WIDTH)
        widths = [WIDTH] * (rows // WIDTH) + ([rows % WIDTH] if rows % WIDTH else [])
        self.layers = nn.ModuleList(nn.Linear(WIDTH, width, bias=False) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, 1024) float32 in, a scalar loss out."""
        for layer in self.layers:
            y = torch.relu(layer(x))
            x = x + 0.1 * y if y.shape == x.shape else y
        return x.square().mean()


class Load:
    """One rank's training.

    Args:
        state_bytes: bytes of weights and Adam's moments together.
        tokens: rows of input per iteration; the time of an iteration grows with it, the state does not.
        seed: ranks with equal seeds hold equal state, as under plain data parallelism.
    """

    def __init__(self, state_bytes: int, tokens: int, seed: int) -> None:
        torch.manual_seed(seed)
        torch.set_flush_denormal(True)
        self.model = Model(state_bytes)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        self.input = torch.randn(tokens, WIDTH)

    def gradients(self) -> None:
        """Forward, backward, and the scalar all-reduce that keeps the ranks in step, as synchronous training does."""
        loss = self.model(self.input)
        loss.backward()
        if dist.is_initialized():
            dist.all_reduce(loss.detach())

    def update(self) -> None:
        """Adam in place. Gradients are zeroed in place too: an iteration allocates nothing of the size of the state."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live state by name: weights and moments; every tensor is what the next update will change."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name}.{key}"] = value
        return found

    @property
    def state_bytes(self) -> int:
        """Bytes of the live state."""
        return sum(tensor.nbytes for tensor in self.tensors().values())
