"""The body that plain loops, DDP and engines share: one model's averager, ready times and tuner, which go from step to step together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gemini_ft.errors import ConfigError
from gemini_ft.pipeline.averager import Averager
from gemini_ft.pipeline.drift import Drift
from gemini_ft.pipeline.plan import Tensor
from gemini_ft.pipeline.ready_times import ReadyTimes
from gemini_ft.pipeline.rules import Rules
from gemini_ft.pipeline.telemetry import Step
from gemini_ft.pipeline.tuner import Tuner


class Body:
    """Counts steps, finds plans, compares ranks, and keeps the state. A `gemini_ft.state.gradients.GradientState`.

    Args:
        model: whose forward passes are watched.
        parameters: that are averaged, by name.
        tensors: the same, as rules see them.
        rules: of the pipeline.
        group: of the ranks, for the averages alone; None: one rank.
        control: of the same ranks and on CPUs, for what the training thread asks; None: one rank.
        device: of the gradients.
        profile_steps: steps that are watched before a planned fusion is planned.

    Attributes:
        averager: averages; its ``plan`` says what travels together.
        groups: of processes that it waits in.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, torch.Tensor],
        tensors: Sequence[Tensor],
        rules: Rules,
        *,
        group: Any,
        control: Any,
        device: torch.device,
        profile_steps: int,
    ) -> None:
        self._parameters = dict(parameters)
        self._names = {id(param): name for name, param in self._parameters.items()}
        self._sparse = {tensor.name for tensor in tensors if tensor.sparse}
        self._control = control
        self.groups = [each for each in (group, control) if each is not None]
        self.averager = Averager(tensors, rules, group, control, device)
        self._ready_times = ReadyTimes(model)
        self._tuner = Tuner(self.averager, self._ready_times, profile_steps, device)
        self._drift = Drift(control, self._common, self.averager.controls.told, self.averager.controls.heard)
        self.averager.on_begin = self._drift.check
        self._untuned = False  # a step has been counted, and the tuner, which is collective, has not heard of it yet

    def step_over(self) -> None:
        """Takes note that everything has been averaged. Collective at some steps."""
        self._count()
        self._tune()

    def _count(self) -> None:
        self.averager.step_over(self._ready_times.begun)
        self._ready_times.step_over()
        self._untuned = True
        with self._explaining():
            self._drift.begin()

    def _tune(self) -> None:
        if self._untuned:
            self._untuned = False
            with self._explaining():
                self._tuner.step_over()

    def _common(self) -> dict[str, Any]:
        """State that is the same on all ranks as long as nothing is wrong."""
        return {**self.averager.common(), "trials": self._tuner.common()}

    def _settle(self) -> None:
        """Counts a step that is over and has not been counted."""

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tells the other ranks of an error on this rank's training thread: they would wait for its gradients."""
        try:
            yield
        except BaseException as error:
            if (found := self.averager.failed(error)) is not error:
                raise found from error
            raise

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Raises, in place of a broken collective's error, the one that the failed rank has told, or that it was killed."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            if (found := self.averager.broken(error)) is not error:
                raise found from error
            raise

    # -- its knowledge

    @property
    def settled(self) -> bool:
        """Whether the plan is final: nothing is to be found out any more."""
        return self._tuner.settled

    @property
    def last_step(self) -> Step | None:
        """Costs of the last step, by rule."""
        self._settle()
        return self.averager.telemetry.last

    def summary(self) -> dict[str, dict[str, float]]:
        """The costs of the last step as plain data."""
        self._settle()
        return self.averager.telemetry.summary()

    def state_dict(self) -> dict[str, Any]:
        """Residuals and all else that the next step depends on, between two steps; tensors are not copied. It differs between ranks.

        Does not wait for other ranks: whether they were together at this step is known before the next average, and seen again when
        the state is loaded.
        """
        self._settle()
        return {"averager": self.averager.state_dict(), "tuner": self._tuner.state_dict(), "untuned": self._untuned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`, to go on as if never interrupted. Collective; a pending step is ended first, and forgotten.

        Raises:
            StateError: it is of other parameters or rules.
            RecoveryError: it is of another step, or of other choices, than on other ranks.
        """
        with self._explaining():
            self._settle()
            self._drift.drop()
            self._end_pending()
            self.averager.load_state_dict(state["averager"])
            self._tuner.load_state_dict(state["tuner"])
            self._ready_times.step_over()
            self._untuned = bool(state.get("untuned", False))
            self._drift.begin_anew()

    def _end_pending(self) -> None:
        """Ends the averages that are under way, without counting them. Collective."""
        self.averager.drop()

    def forget(self, parameters: Iterable[torch.Tensor | str] | None = None) -> None:
        """Forgets all that error feedback and momenta keep of past gradients, after a step whose averages are thrown away.

        Plans, counters, and factors that all ranks have in common stay as they are.

        Args:
            parameters: of the model, or their names; None: all.

        Raises:
            ConfigError: one of them is not of the pipeline.
        """
        self._settle()
        self.averager.routes.forget(self._named(parameters))

    def _named(self, parameters: Iterable[torch.Tensor | str] | None) -> set[str]:
        if parameters is None:
            return set(self._parameters)
        given = [each if isinstance(each, str) else self._names.get(id(each), each) for each in parameters]
        if odd := [each for each in given if not isinstance(each, str) or each not in self._parameters]:
            what = odd[0] if isinstance(odd[0], str) else f"a parameter of shape {tuple(odd[0].shape)}"
            raise ConfigError(f"{what} is not averaged by this gradient pipeline; it has {', '.join(list(self._parameters)[:5])}, ...")
        return {str(each) for each in given}
