"""A training script, one host of which is slow, or falls asleep after ten steps: ``slow_host.py STEPS HOST [sleeps]``."""

import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gemini_ft

gemini_ft.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
checkpointer = gemini_ft.Checkpointer(model, optimizer)
is_odd, sleeps = os.environ["GEMINI_HOST_ID"] == sys.argv[2], sys.argv[3:] == ["sleeps"]
for step in range(checkpointer.resume(), int(sys.argv[1])):
    if is_odd and sleeps and step == 10:
        Path(os.environ["XDG_RUNTIME_DIR"], "sick").touch()
        threading.Event().wait()
    time.sleep(0.005 + 0.06 * (is_odd and not sleeps))
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    checkpointer.step()
checkpointer.close()
