"""A training loop without any framework that survives the loss of its workers:

    gemini run --nproc-per-node 2 examples/plain_loop.py
    GEMINI_FAULTS="step=50:rank=1:sigkill" gemini run --nproc-per-node 2 examples/plain_loop.py

Both print the same last loss, to the last bit. `torchrun` works in the place of `gemini run`.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gemini_ft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", help="where to save the final model and optimizer")
    arguments = parser.parse_args()
    steps = arguments.steps

    gemini_ft.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # each rank draws its own data; DDP makes the weights equal
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    loss = torch.zeros(())

    with gemini_ft.Checkpointer(model, optimizer, state={"scheduler": scheduler}) as checkpointer:
        for step in range(checkpointer.resume(), steps):  # from 0 at a first start
            inputs = torch.randn(64, 32)
            targets = inputs.sin().sum(dim=1, keepdim=True)
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            checkpointer.step()  # the iteration's last statement
            if (step + 1) % 20 == 0 and dist.get_rank() == 0:
                print(f"step {step + 1}: loss {loss.item():.4f} ({loss.item().hex()})", flush=True)

    if arguments.out and dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, arguments.out)


if __name__ == "__main__":
    main()
