"""The rank of test_forged_state.py: it resumes a snapshot, in which one value after another has been taken away or exchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from forging import places, put_at
from torch import nn

import gemini_ft
from gemini_ft.errors import GeminiError
from gemini_ft.recovery import restore

STRANGE = (None, [], {}, "a text", -1)
GONE = object()


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
    read, found = restore.codec.decode, list[Any]()
    wrong = list[str]()

    def attempt(forge: Callable[[Any], Any]) -> None:
        restore.codec.decode = lambda *args, **options: forge(copy.deepcopy(found[0]))
        checkpointer = job()
        try:
            checkpointer.resume()
        finally:
            checkpointer.close()

    def look(*args: Any, **options: Any) -> Any:
        found.append(read(*args, **options))
        return found[0]

    restore.codec.decode = look
    job().resume()
    everywhere = [at for at in places(found[0]) if at]
    cases = [(at, value) for number, at in enumerate(everywhere) for value in (GONE, STRANGE[number % len(STRANGE)])]
    for at, value in cases:
        try:
            attempt(lambda body, at=at, value=value: without(body, at) if value is GONE else put_at(body, at, value))  # type: ignore[misc]
        except GeminiError:
            pass
        except Exception as error:
            wrong.append(f"{at} {'gone' if value is GONE else repr(value)}: {type(error).__name__}: {error}")
    return wrong


def without(body: Any, at: tuple[Any, ...]) -> Any:
    if len(at) > 1:
        return put_at(body, at[:1], without(body[at[0]], at[1:]))
    rest = dict(body) if isinstance(body, dict) else list(body)
    del rest[at[0]]
    return rest
