"""Jobs on two devices in one process, which are no CPU for anybody who asks: plain, undisturbed and killed, they end with the same bits.

The double has no queues, and no backend of collectives: gloo takes tensors of the CPU and of CUDA alone. What several ranks do, and the
order of copies, is tested on tests/kit/lagging_device.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemini_ft.agent.lifecycle import leave

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
KIT = Path(__file__).parent.parent / "kit"
SCRIPT = """
import contextlib, pathlib, sys
import private_device, torch
from torch import nn
import gemini_ft

kind, way = sys.argv[1:]
torch.manual_seed(0)

def part(device, *sizes):
    return nn.Sequential(nn.Linear(*sizes), nn.BatchNorm1d(sizes[-1]), nn.GELU(), nn.Dropout(0.1)).to(device)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = part("private:0", 16, 300)
        self.second = part("private:1" if kind == "on both" else "private:0", 300, 4)

    def forward(self, batch):
        return self.second(self.first(batch).to(self.second[0].weight.device))

net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, capturable=kind == "capturable", foreach=kind != "one by one")
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
losses = []
with contextlib.ExitStack() as stack:
    first, checkpointer = 0, None
    if way != "plain":
        state = {"scheduler": scheduler}
        checkpointer = stack.enter_context(gemini_ft.Checkpointer(net, optimizer, state=state, replicas=1, on_late="wait"))
        first = checkpointer.resume()
    for step in range(first, 20):
        loss = net(torch.randn(8, 16).to("private:0")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if checkpointer is not None:
            checkpointer.step()
devices = [each.device.index for each in [*net.parameters(), *net.buffers()]]
state = [value for each in optimizer.state.values() for _, value in sorted(each.items())]
numbers = [each.detach().cpu().double().sum().item().hex() for each in [*net.parameters(), *net.buffers(), *state]]
pathlib.Path(f"end {way}").write_text(f"{devices} {numbers} {loss.item().hex()} {torch.rand(()).item().hex()}")
pathlib.Path(f"resumed {way}").write_text(str(first))
"""


@pytest.mark.parametrize("kind", ["on one", "on both", "capturable", "one by one"])
def test_a_job_ends_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = f"private-{os.getpid()}-{kind.replace(' ', '-')}"
    environ = {**os.environ, "PYTHONPATH": str(KIT), "GEMINI_LOG_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for way in ("plain", "undisturbed", "killed"):
        environ |= {"GEMINI_RUN_ID": f"{run}-{way}", "GEMINI_FAULTS": "step=9:rank=0:sigkill" if way == "killed" else ""}
        launch = [] if way == "plain" else ["-m", "gemini_ft.cli.main", "run", "--standalone", "--nproc-per-node", "1"]
        done = subprocess.run([sys.executable, *launch, "train.py", kind, way], cwd=tmp_path, env=environ, capture_output=True, text=True)
        leave(environ["GEMINI_RUN_ID"])
        assert done.returncode == 0, done.stderr
    ends = {way: (tmp_path / f"end {way}").read_text() for way in ("plain", "undisturbed", "killed")}
    assert ends["undisturbed"] == ends["plain"]
    assert ends["killed"] == ends["plain"]
    assert [(tmp_path / f"resumed {way}").read_text() for way in ("undisturbed", "killed")] == ["0", "8"]
