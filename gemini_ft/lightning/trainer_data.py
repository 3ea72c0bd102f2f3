"""The Trainer's loaders: when and out of what they were made, so that a resumed fit has the same, and which iterations of them count.

A script may wake the loaders long before its state is restored (``trainer.estimated_stepping_batches`` in ``configure_optimizers`` makes
and iterates them), and may iterate them itself beside the loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from gemini_ft.errors import UnsupportedStateError
from gemini_ft.lightning.around import Around
from gemini_ft.lightning.trainer_callbacks import state_beside, with_state_beside
from gemini_ft.state.rng import randomness, set_randomness, unchanged_randomness

Modes = dict[str, Any]


class Loading:
    """The loaders of the fit's training or of its validation.

    Those of a resumed fit are made out of what Lightning's and the user's code found when they were made before the failure: random
    numbers, counters of the loops (``current_epoch``, ``global_step``), logged values, attributes that hooks had set, what callbacks
    save, rates. Weights and buffers are too large for that, and are as they are at the resumed step.

    Args:
        loop: its ``fit_loop``, or the loop of its validation.
        present: what hooks have set; None before there is a module to look at.
        restore: puts that back.
    """

    def __init__(self, trainer: Any, *, loop: Any, present: Callable[[], Modes | None], restore: Callable[[Modes], None]) -> None:
        if loop._combined_loader is not None:
            raise UnsupportedStateError(
                "loaders were made before the strategy was set up, by the script's configure_callbacks for example, and what they draw "
                "until then cannot be restored; ask for them, or for estimated_stepping_batches, in setup, configure_optimizers or later"
            )
        self.asks = False  # whether the loop is making its loaders, or is asking them for iterators and batches, and not the user's code
        self.made: dict[str, Any] | None = None  # how the present loaders were made, as plain data; None if there are none
        self._trainer, self._loop, self._present, self._restore = trainer, loop, present, restore
        self._times = 0
        self._then: dict[str, Any] | None = None  # how those of the snapshot were made, until the loop has the same
        self._ends: list[Callable[[], None]] = []
        self._wrap(loop._data_source, "dataloader", self._load)
        self._wrap(loop, "setup_data", self._set_up)
        if loop is trainer.fit_loop:
            self._wrap(loop.epoch_loop, "on_run_start", self._asking)
            self._wrap(loop.epoch_loop, "_on_before_fetch", self._before_fetch)
            self._wrap(loop.epoch_loop, "_on_after_fetch", self._after_fetch)

    def resume(self, made: dict[str, Any] | None) -> None:
        """Lets the loop have loaders as they were ``made`` before the failure; None leaves that to the script."""
        self._then = made

    def settle(self) -> None:
        """Makes the loaders of the validation, if there were any, before anything is put back for good.

        That changes attributes of objects which the workers of the training may share, so that these must not have been started.
        """
        if self._then is not None:
            self._trainer.validating = True
            self._loop.setup_data()
            self._trainer.training = True

    def end(self) -> None:
        """Follows the loop no longer."""
        for end in self._ends:
            end()

    def _wrap(self, holder: Any, name: str, around: Callable[..., Any]) -> None:
        self._ends.append(Around(holder, name, around).end)

    @property
    def _is_restored(self) -> bool:
        """Whether the loops stand where the snapshot was taken. Before that the script makes loaders as at its first start."""
        return bool(self._trainer.fit_loop.restarting)

    def _load(self, dataloader: Callable[[], Any]) -> Any:
        """Asks the user's code for loaders."""
        self._times += 1
        then = self._then
        if then is None:
            self.made = self._moment()
            return dataloader()
        with unchanged_randomness():
            if self._is_restored:
                with self._as_it_was(then):
                    return dataloader()
            if then["times"] == 1:
                set_randomness(then["random"])
            return dataloader()

    def _set_up(self, setup_data: Callable[[], None]) -> None:
        then, loop = self._then, self._loop
        if then is None or not self._is_restored:
            self._asking(setup_data)
            return
        if loop._combined_loader is not None and then["times"] == 1:  # objects that hooks may have taken hold of
            if loop is self._trainer.fit_loop:
                loop._data_fetcher.teardown()
                loop._load_combined_loader_states()
                self._asking(lambda: iter(loop._data_fetcher))
        else:
            if loop._combined_loader is not None:
                loop._combined_loader.reset()
            loop._combined_loader = None
            self._asking(setup_data)
        self._then, self.made, self._times = None, then, then["times"]

    def _moment(self) -> dict[str, Any]:
        logged = dict(self._trainer._logger_connector._callback_metrics)
        made = {"times": self._times, "random": randomness(), "loops": self._progress(), "logged": logged, "modes": self._present()}
        return made | {"beside": state_beside(self._trainer)}

    def _progress(self) -> dict[str, Any]:
        """The counters of the loops, without positions of loaders."""
        fit_loop = self._trainer.fit_loop
        loaders, fit_loop._combined_loader = fit_loop._combined_loader, None
        try:
            counters: dict[str, Any] = fit_loop.state_dict()
            return counters
        finally:
            fit_loop._combined_loader = loaders

    @contextlib.contextmanager
    def _as_it_was(self, then: dict[str, Any]) -> Iterator[None]:
        fit_loop, logged = self._trainer.fit_loop, self._trainer._logger_connector._callback_metrics
        now, positions = self._progress(), fit_loop._combined_loader_states_to_load
        fit_loop.load_state_dict(then["loops"])
        logged.update(then["logged"])
        if then["modes"] is not None:
            self._restore(then["modes"])
        set_randomness(then["random"])
        try:
            with with_state_beside(self._trainer, then.get("beside", {})):
                yield
        finally:
            logged.clear()
            fit_loop.load_state_dict(now)
            fit_loop._combined_loader_states_to_load = positions

    def beside(self, call: Callable[[], None]) -> None:
        """Calls what asks for other loaders than the loop's, or is the user's, while the loop makes its own."""
        before, self.asks = self.asks, False
        try:
            call()
        finally:
            self.asks = before

    def _asking(self, call: Callable[..., Any], *arguments: Any) -> None:
        before, self.asks = self.asks, True
        try:
            call(*arguments)
        finally:
            self.asks = before

    def _before_fetch(self, call: Callable[[], None]) -> None:
        call()
        self.asks = True

    def _after_fetch(self, call: Callable[[], None]) -> None:
        self.asks = False
        call()
