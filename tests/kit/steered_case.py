"""What the ranks of test_pipeline_control.py run: rules whose ratio follows the network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from typing import Any
from unittest.mock import patch

import torch
from compression_kit import gradients
from pipeline_case import Loop, alike, close, exact, own, rule
from plain_case import Net, start_ranks
from sync_case import join

import gemini_ft
from gemini_ft.pipeline.control import Controls
from gemini_ft.pipeline.lanes import GroupCost
from gemini_ft.pipeline.plan import Group
from gemini_ft.testing import digest

STEPS = 16
METHODS = ("topk", "randomk", "dgc", "sidco_gp", "adaq")


def extremes(ddp: bool) -> dict[str, list[Any]]:
    """With real clocks, by method and deadline: the ratio in the end, whether averages are exact then, whether ranks agree on the state."""
    join()
    found: dict[str, list[Any]] = {}
    cases = [(name, deadline, "dense") for name in METHODS for deadline in (1e-9, 100.0)] + [("topk", 1e-9, "zen"), ("topk", 100.0, "zen")]
    for name, deadline, sync in cases:
        options = {"momentum": 0.0} if name == "dgc" else {}
        control = {"method": "dc2", "deadline": deadline, "every": 1}
        with closing(Loop(rule(compress={"method": name, "ratio": 0.1, **options}, sync=sync, control=control), ddp)) as loop:
            for step in range(12):
                given = own(step)
                means = {key: value.clone() for key, value in loop.step(given).items()}
            controls = loop.synchronizer.averager.controls
            decided = controls.of(0)
            assert decided is not None
            outcome = [decided.ratio, decided.dense, close(means, exact(given), 1e-5), alike(controls.common())]
            found[f"{name}, {sync}, {deadline:g}"] = outcome
    return found


def default_deadline() -> list[Any]:
    """The deadline without one given, and how many steps the link's model has seen."""
    join()
    with closing(Loop(rule(compress={"method": "topk", "ratio": 0.1}, control="dc2"))) as loop:
        for step in range(8):
            loop.step(own(step))
        control = loop.synchronizer.averager.controls.of(0)
        assert control is not None
        return [control.deadline, control.link.count]


class Scripted(Controls):
    """Figures as of a network that becomes ten times as slow, and of ranks that differ."""

    step = 0

    def note(self, groups: Sequence[tuple[Group, GroupCost]], computing: float) -> None:
        for group, figures in groups:
            rate = 2e5 if Scripted.step % 12 < 5 else 2e4  # bytes per second
            figures.communicate = figures.nbytes / rate * (1 + 0.1 * int(os.environ["RANK"])) if group.rule == 0 else 0.0
        super().note(groups, 0.005)


def train(out: str) -> int:
    """Trains to the end with a scripted network; loss, weights, ratio and the whole state of each iteration go to ``<out>.<rank>``."""
    rank, _ = start_ranks()
    torch.manual_seed(0)
    net = Net(16)
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    rules = rule(compress={"method": "topk", "ratio": 0.1}, control={"method": "dc2", "every": 2})
    with patch("gemini_ft.pipeline.averager.Controls", Scripted):
        synchronizer = gemini_ft.GradientSynchronizer(net, rules)
    checkpointer = gemini_ft.Checkpointer(net, optimizer, replicated=True, on_late="wait")
    start = checkpointer.resume()
    with open(f"{out}.{rank}", "a", buffering=1) as trace:
        for iteration in range(start, STEPS):
            Scripted.step = iteration
            optimizer.zero_grad()
            loss = net(torch.randn(8, 8)).square().mean()
            loss.backward()
            synchronizer.synchronize()
            optimizer.step()
            control = synchronizer.averager.controls.of(0)
            assert control is not None
            state = digest(synchronizer.state_dict()["averager"]["controls"])
            trace.write(f"{iteration} {loss.item().hex()} {digest(net.state_dict())} {control.ratio} {state}\n")
            checkpointer.step()
    checkpointer.close()
    synchronizer.close()
    return start


def losses_nothing() -> list[float]:
    """The part of the gradients' sum that is neither in the averages nor in the residuals, while the ratio moves up and down."""
    join()
    lost = []
    for name in ("topk", "sidco_e"):
        pipeline = rule(compress={"method": name, "ratio": 0.1}, control={"method": "dc2", "every": 1})
        with patch("gemini_ft.pipeline.averager.Controls", Scripted), closing(Loop(pipeline)) as loop:
            total = {key: torch.zeros_like(value, dtype=torch.float64) for key, value in gradients(0).items()}
            ratios = set()
            for step in range(24):
                Scripted.step, given = step, own(step)
                means, mean = loop.step(given), exact(given)
                for key in total:
                    total[key] += mean[key] - means[key]
                control = loop.synchronizer.averager.controls.of(0)
                assert control is not None
                ratios.add((control.ratio, control.dense))
            (route,) = loop.synchronizer.state_dict()["averager"]["routes"].values()
            left = exact({key: value.view(total[key].shape) for key, value in route["residuals"].items()})
            lost.append(max(float((total[key] - left[key]).abs().max()) for key in total))
            assert len(ratios) > 2
            assert {dense for _, dense in ratios} == {False, True}
    return lost
