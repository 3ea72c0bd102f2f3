"""A group's way to its switch, which is up on all ranks or down on all of them."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence

import torch

from . import wire
from .exchange import Exchange
from .switch_client import Client, SwitchRefusedError, SwitchSilentError
from .switch_worker import TensorStream

_WAIT = 2.0  # seconds for a switch's answers at the first call, and when a job is joined
_RETRY = 2.0  # seconds from a failure to the next attempt
_JOB_BYTES = 16
_log = logging.getLogger("gemini_ft")


class SwitchLink:
    """One rank's end of it.

    While it is down, each call asks whether the switch answers, without waiting, and all ranks take it up again once it answers all.

    Args:
        speaks: whether this rank writes to the log.
        make: makes a client, for one attempt.
        name: of the switch.

    Attributes:
        ready: whether it is up; the same on all ranks.
    """

    def __init__(self, speaks: bool, make: Callable[[], Client], name: str) -> None:
        self.ready = False
        self._speaks, self._make, self._name = speaks, make, name
        self._client: Client | None = None
        self._said: bool | None = None  # what the log has of it: up, or down
        self._not_before = 0.0  # time of the next attempt

    @property
    def slots(self) -> int:
        """Slots of all switches together, while it is up."""
        return self._connected.slots

    @property
    def sent_again(self) -> int:
        """Packets that this rank sent more than once since it has been up."""
        return self._connected.sent_again

    @property
    def _connected(self) -> Client:
        if self._client is None:
            raise RuntimeError(f"the link to switch {self._name} is down")
        return self._client

    def meet(self, exchange: Exchange) -> bool:
        """Begins a call: compares what the ranks were given, and goes up if all ranks reach the switch; whether it is up. Collective.

        Raises:
            GradientError: a rank was given something else, or cannot take part.
        """
        if self.ready and self._connected.spent:
            self.close()
            self._said = None  # as at the first call: it waits for the switch
        problem = "" if self.ready else self._look()
        reports = share(exchange, secrets.token_bytes(_JOB_BYTES) + problem.encode())
        if self.ready or self._failed([report[_JOB_BYTES:] for report in reports], drop=False):
            return self.ready
        if self._failed(share(exchange, self._join(reports[0][:_JOB_BYTES].hex()).encode()), drop=True):
            return False
        self.ready = True
        self._say(True, f"gradients go through switch {self._name}")
        return True

    def run(self, stream: TensorStream, exchange: Exchange) -> bool:
        """Takes one tensor through the switch; whether all ranks have its sum, else it is down. Collective."""
        problem = ""
        try:
            self._connected.run(stream)
        except SwitchSilentError as error:
            problem = str(error)
        return not self._failed(share(exchange, problem.encode()), drop=True)

    def close(self) -> None:
        """Ends the job at the switch."""
        self.ready = False
        if self._client is not None:
            self._client.close()
        self._client = None

    def _look(self) -> str:
        """The reason why this rank does not reach the switch, if so. Waits for it at the first time only."""
        if time.monotonic() < self._not_before:
            return f"switch {self._name} is asked again later"
        try:
            self._client = self._client or self._make()
            return self._client.reaches(_WAIT if self._said is None else 0.0) or ""
        except SwitchSilentError as error:
            self._not_before = time.monotonic() + _RETRY
            return str(error)

    def _join(self, job: str) -> str:
        try:
            self._connected.join(job, _WAIT)
        except (SwitchSilentError, SwitchRefusedError) as error:
            return str(error)
        return ""

    def _failed(self, problems: Sequence[bytes], drop: bool) -> bool:
        """Goes down, or stays down, if a rank has a problem. All ranks decide from the same reports."""
        found = next(((rank, problem.decode()) for rank, problem in enumerate(problems) if problem), None)
        if found is None:
            return False
        self.ready = False
        if drop:
            self.close()
            self._not_before = time.monotonic() + _RETRY
        self._say(False, f"rank {found[0]}: {found[1]}: all ranks add gradients up without it until it answers")
        return True

    def _say(self, up: bool, text: str) -> None:
        """Tells the log once whenever it goes up or down."""
        if self._speaks and self._said is not up:
            _log.log(logging.INFO if up else logging.WARNING, "%s", text)
        self._said = up


def share(exchange: Exchange, text: bytes) -> list[bytes]:
    """The texts of all ranks, by rank.

    Raises:
        GradientError: as `Exchange.share`.
    """
    own = wire.new(len(text), exchange.device)
    wire.payload(own).copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.zeros(0, dtype=torch.uint8))
    return [wire.payload(each).cpu().numpy().tobytes() for each in exchange.share(own)]
