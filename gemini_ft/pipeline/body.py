"""The body that plain loops, DDP and engines share: one model's averager, ready times and tuner, which go from step to step together.

After every step `RankComparison` checks that all ranks are at the same step, with the same plan and the same choices. Ranks that are not
would send each other what does not belong together, often without an error: indices that are drawn by a counter, for example, differ where
counters do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gemini_ft.errors import AveragingError, ConfigError, RecoveryError
from gemini_ft.pipeline.averager import Averager
from gemini_ft.pipeline.measuring import ReadyTimes
from gemini_ft.pipeline.plan import Tensor
from gemini_ft.pipeline.rules import Rules
from gemini_ft.pipeline.telemetry import Step
from gemini_ft.pipeline.tuner import Tuner


class RankComparison:
    """Compares hashes over ranks; a few bytes per rank travel beside the update and the next forward pass.

    Args:
        group: on CPUs, used by the training thread alone; None: one rank.
        common: gives what must be the same on all ranks, as plain data by its name, always the same names.
        told: gives figures of this rank that the others are to know, always as many.
        heard: is given the largest of all ranks' figures with the answer, at the same point of all ranks' steps.
    """

    def __init__(
        self,
        group: Any,
        common: Callable[[], Mapping[str, Any]],
        told: Callable[[], Sequence[int]] = tuple,
        heard: Callable[[Sequence[int]], None] = lambda most: None,
    ) -> None:
        self._group, self._common, self._told, self._heard = group, common, told, heard
        self._names: list[str] = []
        self._asked: tuple[Any, list[torch.Tensor]] | None = None

    def begin(self) -> None:
        """Asks all ranks. Every rank does so after every step, wherever its program is then; an earlier answer is looked at first."""
        if self._group is None:
            return
        self.check()
        common = self._common()
        self._names = list(common)
        own = torch.tensor([*(_number(value) for value in common.values()), *self._told()])
        everybody = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        self._asked = dist.all_gather(everybody, own, group=self._group, async_op=True), everybody

    def check(self) -> None:
        """Looks at the answer, if there is one that has not been looked at.

        Raises AveragingError: ranks have drifted apart. On all ranks.
        """
        if (difference := self._difference()) is not None:
            raise AveragingError(
                f"the ranks of the gradient pipeline have drifted apart, {difference}; their averages cannot be trusted any more: resume "
                "from a snapshot, and call load_state_dict(), forget() and no_sync() alike on all ranks"
            )

    def begin_anew(self) -> None:
        """Checks, after all ranks have loaded another state, whether they are together in it. Collective.

        Raises RecoveryError: it was made by ranks that had drifted apart. On all ranks.
        """
        self.begin()
        if (difference := self._difference()) is not None:
            raise RecoveryError(
                f"the gradient pipeline's state is of ranks that had drifted apart, {difference}; resume from an older snapshot"
            )

    def _difference(self) -> str | None:
        """The answer, if there is one that has not been looked at."""
        if self._asked is None:
            return None
        (work, everybody), self._asked = self._asked, None
        work.wait()
        ranks = dist.get_process_group_ranks(self._group)
        for rank, theirs in zip(ranks, everybody, strict=True):
            for name, first, other in zip(self._names, everybody[0].tolist(), theirs.tolist(), strict=False):
                if first != other:
                    by = f": rank {ranks[0]} has {first}, rank {rank} has {other}", f" on ranks {ranks[0]} and {rank}"
                    said = by[0] if min(first, other) >= 0 else by[1]
                    return f"their {name} differ{said}"
        self._heard(torch.stack(everybody).amax(0)[len(self._names) :].tolist())
        return None

    def drop(self) -> None:
        """Waits for the answer without looking at it: all ranks load another state."""
        if self._asked is not None:
            self._asked[0].wait()
            self._asked = None


def _number(value: Any) -> int:
    """A counter as it is, anything else as a negative hash of 62 bits."""
    if isinstance(value, int):
        return value
    text = json.dumps(value, sort_keys=True)
    return -1 - (int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 2)


class Body:
    """Counts steps, finds plans, compares ranks, and keeps the state. A `gemini_ft.state.gradients.GradientState`.

    Args:
        model: whose forward passes are watched.
        parameters: that are averaged, by name.
        tensors: the same, as rules see them.
        group: of the ranks, for the averages alone; None: one rank.
        control: of the same ranks and on CPUs, for what the training thread asks; None: one rank.
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
        self._drift = RankComparison(control, self._common, self.averager.controls.told, self.averager.controls.heard)
        self.averager.on_begin = self._drift.check
        self._untuned = False  # a step has been counted, and the tuner, which is collective, has not heard of it yet

    def step_over(self) -> None:
        """Records that everything has been averaged. Collective at some steps."""
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
        self._settle()
        return self.averager.telemetry.last

    def summary(self) -> dict[str, dict[str, float]]:
        self._settle()
        return self.averager.telemetry.summary()

    def state_dict(self) -> dict[str, Any]:
        """Residuals and all else that the next step depends on, between two steps; tensors are not copied. It differs between ranks.

        Does not wait for other ranks: whether they were together at this step is known before the next average, and seen again when
        the state is loaded.
        """
        self._settle()
        return {"averager": self._averager_state(), "tuner": self._tuner.state_dict(), "untuned": self._untuned}

    def _averager_state(self) -> dict[str, Any]:
        return self.averager.state_dict()

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

    def close(self) -> None:
        """Ends the threads."""
        self._ready_times.close()
        self.averager.close()

    def _named(self, parameters: Iterable[torch.Tensor | str] | None) -> set[str]:
        if parameters is None:
            return set(self._parameters)
        given = [each if isinstance(each, str) else self._names.get(id(each), each) for each in parameters]
        if odd := [each for each in given if not isinstance(each, str) or each not in self._parameters]:
            what = odd[0] if isinstance(odd[0], str) else f"a parameter of shape {tuple(odd[0].shape)}"
            raise ConfigError(f"{what} is not averaged by this gradient pipeline; it has {', '.join(list(self._parameters)[:5])}, ...")
        return {str(each) for each in given}
