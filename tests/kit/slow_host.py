"""A training script, one host of which is slow, or falls asleep, or has a weight flipped, after ten steps.

``slow_host.py STEPS HOST [sleeps | flips]``.
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gemini_ft

gemini_ft.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
is_odd, mode = os.environ["GEMINI_HOST_ID"] == sys.argv[2], "".join(sys.argv[3:])
options: dict[str, Any] = {"verify": "replay", "compare_every": 1} if mode == "flips" else {}
checkpointer = gemini_ft.Checkpointer(model, optimizer, **options)
sick = Path(os.environ["XDG_RUNTIME_DIR"], "sick")
for step in range(checkpointer.resume(), int(sys.argv[1])):
    if is_odd and mode and step == 10 and not sick.exists():
        sick.touch()
        if mode == "sleeps":
            threading.Event().wait()
        model.module.weight.detach().numpy()[0, 0] *= 2  # as a bit of its exponent does, past torch
    time.sleep(0.005 + 0.06 * (is_odd and not mode))
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    checkpointer.step()
checkpointer.close()
