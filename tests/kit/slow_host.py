"""A training script, one host of which is slow: ``slow_host.py STEPS HOST``."""

import os
import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gemini_ft

gemini_ft.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
checkpointer = gemini_ft.Checkpointer(model, optimizer)
for _ in range(checkpointer.resume(), int(sys.argv[1])):
    time.sleep(0.005 + 0.06 * (os.environ["GEMINI_HOST_ID"] == sys.argv[2]))
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    checkpointer.step()
checkpointer.close()
