"""Finds where an iteration of a script's own loop ends: with ``engine.step()``, or later if the script writes state after it.

A snapshot at the end of ``step()`` lacks what the script does afterwards (an average of weights), which a restart would not do again. So
the captured state is compared when the next forward pass begins. Where the script has written tensors in between, snapshots are taken then
from there on, with random generators and loaders as they were at the end of ``step()``, since the next batch may have been drawn already.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from gemini_ft.deepspeed.partitions import written_weights
from gemini_ft.errors import StateError
from gemini_ft.state.tensors import version_of

if TYPE_CHECKING:
    from gemini_ft.deepspeed.protection import Protection

_log = logging.getLogger("gemini_ft")
_WAY_OUT = "set engine.gemini.deferred = True, and call engine.gemini.save() as the last statement of the loop"


class Weights:
    """Notices weights that the script writes after ``engine.step()``: a resumed engine makes them of the masters.

    It looks where torch has counted a write since the step, and the 1st, 2nd, 4th, 8th, ... time that it is asked to, as writes to
    ``.data`` are not counted.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._params = [getattr(param, "ds_tensor", param) for param in engine.module.parameters()]
        self._asked = self._count = 0
        self._is_open = self._has_differed = False

    def stepped(self) -> None:
        """Records that the engine has written its weights."""
        self._count, self._is_open = self._counted(), True

    def forget(self) -> None:
        """Records that the weights, and the masters, are others now."""
        self._is_open = False

    def check(self) -> None:
        """Looks whether the weights are still those of the masters. Raises StateError: they are not, and were not after the step before."""
        is_open, self._is_open = self._is_open, False
        self._asked += is_open
        if not is_open or (self._asked & (self._asked - 1) and not self._has_differed and self._count == self._counted()):
            return
        written, had = written_weights(self._engine), self._has_differed
        self._has_differed = bool(written)
        if not written:
            return
        why = (
            f"the weights of {', '.join(written[:5])} are not what their masters give: the script has written one of the two after "
            "engine.step(). A resumed engine makes its weights of the masters, and so does the next step; write masters "
            "(safe_set_full_fp32_param) before engine.step(), behind the last backward()"
        )
        if had:
            raise StateError(why)
        _log.warning("step %d: %s", self._engine.global_steps, why)

    def _counted(self) -> int:
        return sum(map(version_of, self._params))


class Border:
    """Decides when the state after a step of one engine is saved."""

    def __init__(self, protection: Protection, module: torch.nn.Module) -> None:
        self.is_late = False  # when the next forward pass begins, because the script writes tensors after ``engine.step()``
        self._protection = protection
        self._moment: Any = None  # of the end of a step whose state is still to be saved
        self._values: dict[str, Any] = {}  # of client_state, at the end of the step
        self._marks: dict[str, Any] | None = None  # marks of the tensors captured at the end of the step
        self._has_warned = False
        self._has_evaluated = False
        self._handle = module.register_forward_pre_hook(
            lambda module, _: self.passed() if module.training else self._evaluates(), prepend=True
        )

    def stepped(self) -> None:
        """Records that ``engine.step()`` is over."""
        if self.is_late:
            self._moment, self._values = self._protection.moment(), dict(_values(self._protection.client_state))
        else:
            self._protection.save()
            self._marks, self._values = self._look(), dict(_values(self._protection.client_state))

    def passed(self) -> None:
        """Records that the next forward pass begins, or the training is over.

        Raises StateError: where the iteration ends cannot be told.
        """
        if self._moment is not None:
            moment, self._moment = self._moment, None
            if changed := self._changed_values():
                raise StateError(f"client_state[{changed}] has changed after engine.step(), and so have captured tensors; {_WAY_OUT}")
            self._protection.save(moment)
        elif self._marks is not None:
            before, self._marks = self._marks, None
            now = self._look()
            if written := [name for name, mark in before.items() if now.get(name) != mark]:
                self.is_late = True
                _log.warning(
                    "%s written after engine.step(): from the next step on its state is saved when the next forward pass begins; to say "
                    "yourself where an iteration ends, %s",
                    ", ".join(written[:5]),
                    _WAY_OUT,
                )
            elif (changed := self._changed_values()) and not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "client_state[%s] has changed after engine.step(), whose snapshot has it as it was before; %s", changed, _WAY_OUT
                )

    def _evaluates(self) -> None:
        """Warns, once, of an evaluation between two steps: the generators in the snapshot are those from before it."""
        if not self._has_evaluated and (self._marks is not None or self._moment is not None):
            self._has_evaluated = True
            _log.warning(
                "the model is evaluated after engine.step(), whose snapshot has the random generators as they were before: after a failure "
                "in the next iteration this evaluation is not made again, and a DataLoader that it iterates draws from them. To have the "
                "same numbers, %s. Where it belongs to the next iteration (samples that are generated to train on), all is as it should be",
                _WAY_OUT,
            )

    def close(self) -> None:
        """Stops looking."""
        self._handle.remove()

    def _look(self) -> dict[str, Any]:
        marks: dict[str, Any] = {f"client_state[{name}]": version_of(tensor) for name, tensor in _tensors(self._protection.client_state)}
        others = self._protection.others()
        marks |= {f"what is kept as {name}": version_of(tensor) for name, tensor in _tensors(others)}
        return self._protection.checkpointer.marks() | marks | {f"what is kept as {name}": value for name, value in _values(others)}

    def _changed_values(self) -> str:
        now = dict(_values(self._protection.client_state))
        return next((name for name in sorted({*now, *self._values}) if now.get(name) != self._values.get(name)), "")


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}[{key!r}]" if name else repr(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}[{index}]")
    else:
        yield name, value


def _tensors(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, leaf) for name, leaf in _leaves(value) if isinstance(leaf, torch.Tensor))


def _values(value: Any) -> Iterator[tuple[str, Any]]:
    return ((name, leaf) for name, leaf in _leaves(value) if isinstance(leaf, int | float | str | bool | None))
