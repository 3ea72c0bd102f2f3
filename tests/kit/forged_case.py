"""The rank of test_forged_state.py: it resumes a snapshot, in which one value after another has been taken away or exchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from forging import places
from torch import nn

import gemini_ft
from gemini_ft.errors import GeminiError
from gemini_ft.state import codec as codec_of_snapshots


def always(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def more(held: Any) -> Any:
    return {**held, "unknown": 1} if isinstance(held, dict) else [held, held]


CHANGES = (more, *map(always, (None, [], {}, "a text", -1)))


def job() -> gemini_ft.Checkpointer:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
    optimizer = torch.optim.Adam(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    checkpointer = gemini_ft.Checkpointer(net, optimizer, state={"scheduler": scheduler}, on_late="wait")
    checkpointer.net, checkpointer.optimizer = net, optimizer  # type: ignore[attr-defined]
    return checkpointer


def train(steps: int) -> None:
    checkpointer: Any = job()
    for _ in range(checkpointer.resume(), steps):
        checkpointer.net(torch.randn(2, 4)).sum().backward()
        checkpointer.optimizer.step()
        checkpointer.step(loss=1.0)


def resume_forged() -> list[str]:
    """All that does not end in a refusal by name, or well."""
    codec: Any = codec_of_snapshots
    read, found, wrong = codec.decode, list[Any](), list[str]()

    def look(*args: Any, **options: Any) -> Any:
        found.append(read(*args, **options))
        return found[0]

    def forged(at: tuple[Any, ...], change: Callable[[Any], Any] | None) -> Callable[..., Any]:
        return lambda *args, **options: changed(copy.deepcopy(found[0]), at, change)

    codec.decode = look
    job().resume()
    for number, at in enumerate(at for at in places(found[0]) if at):
        for change in (None, CHANGES[number // 2 % len(CHANGES)])[: 1 + number % 2]:
            codec.decode = forged(at, change)
            checkpointer = job()
            try:
                checkpointer.resume()
            except GeminiError:
                pass
            except Exception as error:
                wrong.append(f"{at}, {number}: {type(error).__name__}: {error}")
            finally:
                checkpointer.close()
    return wrong


def changed(body: Any, at: tuple[Any, ...], change: Callable[[Any], Any] | None) -> Any:
    """A copy in which the value at a place is gone, or another one."""
    rest = body.copy() if isinstance(body, dict) else list(body)
    if len(at) > 1:
        rest[at[0]] = changed(body[at[0]], at[1:], change)
    elif change is not None:
        rest[at[0]] = change(body[at[0]])
    else:
        del rest[at[0]]
    return rest
