"""The strategy over Lightning's DeepSpeedStrategy, where an engine owns the parameters, the optimizer and its steps.

DeepSpeed is not imported before a strategy is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from gemini_ft.errors import ConfigError
from gemini_ft.launch import hooks
from gemini_ft.lightning import compat, trainer_callbacks
from gemini_ft.lightning.fit import Fit
from gemini_ft.lightning.options import section_of
from gemini_ft.lightning.strategy import GeminiMixin
from gemini_ft.worker.attempt import never_stay

if TYPE_CHECKING:
    from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy as _DeepSpeedStrategy
else:
    _DeepSpeedStrategy = object


class EngineFit(Fit):
    """A fit in which an engine counts the steps.

    Lightning counts batches anew in every epoch, and the engine does not: where ``accumulate_grad_batches`` does not divide
    the batches of an epoch, gradients wait for the next epoch, and the two counts differ.
    """

    _first_accumulation = 0  # micro-batches of a step at the first start of the run

    def open(self) -> None:
        super().open()
        if self._found is not None:
            self._first_accumulation = self._found.get("first_accumulation", self._given_accumulation)  # snapshots in storage may be older

    def follow_accumulation(self) -> None:
        count = self._trainer.accumulate_grad_batches
        if self._found is None:
            self._first_accumulation = self._given_accumulation
        else:  # the Trainer, too, goes on with the snapshot's
            count = self._found["loops"]["accumulate_grad_batches"]
        if count != self._engine.gradient_accumulation_steps():
            self._state.accumulate(count)

    def scaled(self, loss: Any) -> Any:
        """The loss as at the first start: Lightning and the engine both divide it by the number of micro-batches, which has changed."""
        now = self._trainer.accumulate_grad_batches
        return loss if not self._config.elastic or now == self._first_accumulation else loss * (now / self._first_accumulation)

    def before_update(self) -> None:
        """Waits, as the engine is about to step; it updates parameters only where enough gradients have been accumulated."""
        if self._engine.is_gradient_accumulation_boundary():
            super().before_update()

    @property
    def _engine(self) -> Any:
        return self._trainer.strategy.model

    def _bind_state(self) -> None:
        from gemini_ft.deepspeed.border import Weights
        from gemini_ft.deepspeed.engine import finish
        from gemini_ft.deepspeed.protection import ONLY_ANEW, bound_collectives
        from gemini_ft.deepspeed.state import EngineState
        from gemini_ft.deepspeed.versions import manages_accumulation  # only here: it loads DeepSpeed

        if not manages_accumulation(self._engine):
            raise ConfigError("managed_gradient_accumulation=false is not supported under Lightning, which does the accumulation itself")
        never_stay(ONLY_ANEW)
        hooks.at_end[finish] = None
        self._weights = Weights(self._engine)
        self._state = EngineState(self._engine, modes=False)
        self.follow_accumulation()
        self.checkpointer.bind_state(self._state)
        bound_collectives(self._engine, self.checkpointer.config.hang_timeout)

    def after_update(self) -> None:
        """Records that the engine has written its weights, if it has: only where enough gradients had been accumulated."""
        if not self._is_accumulating:
            self._weights.stepped()

    def _extras(self) -> dict[str, Any]:
        self._weights.check()
        return super()._extras() | {"first_accumulation": self._first_accumulation}

    def _torch_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {"optim0": self._state.optimizers[0]}

    @property
    def _steps(self) -> int:
        return int(self._engine.global_steps)

    @property
    def _is_accumulating(self) -> bool:
        return bool(self._engine.micro_steps % self._engine.gradient_accumulation_steps())


class EnginesOnCpu(_DeepSpeedStrategy):
    """A mixin over DeepSpeedStrategy, which takes CUDA devices only, although DeepSpeed itself runs on CPUs too."""

    def setup_environment(self) -> None:
        _check_accelerator(self.root_device.type)
        if self.root_device.type != "cpu":
            super().setup_environment()
            return
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        with self._numbered_devices():
            super().setup_distributed()

    def _setup_model_and_optimizer(self, *arguments: Any, **named: Any) -> Any:
        with self._numbered_devices():
            return super()._setup_model_and_optimizer(*arguments, **named)

    def _initialize_deepspeed_inference(self, model: Any) -> None:
        with self._numbered_devices():
            super()._initialize_deepspeed_inference(model)

    @contextlib.contextmanager
    def _numbered_devices(self) -> Iterator[None]:
        """Numbers the CPUs meanwhile, as CUDA devices are: Lightning checks numbers, and gives this rank's to DeepSpeed."""
        devices = self.parallel_devices
        assert devices is not None
        self.parallel_devices = [device if device.type != "cpu" else torch.device("cpu", i) for i, device in enumerate(devices)]
        try:
            yield
        finally:
            self.parallel_devices = devices


class GeminiDeepSpeedMixin(GeminiMixin, EnginesOnCpu):
    """A mixin over DeepSpeedStrategy, whose configuration may have the sections "gemini" and "gradient_pipeline"."""

    _gemini_fit_kind = EngineFit

    def __init__(self, **options: Any) -> None:
        config = compat.read_deepspeed_config(self, options.get("config"))
        if config is not None:
            options = {"gradient_pipeline": config.get("gradient_pipeline")} | section_of(type(self).__name__, config) | options
            # Without the sections, so that the engine is not protected a second time.
            options["config"] = {name: value for name, value in config.items() if name not in hooks.DEEPSPEED_SECTIONS}
        super().__init__(**options)

    def _setup_model_and_optimizer(self, *arguments: Any, **named: Any) -> Any:
        engine, optimizer = super()._setup_model_and_optimizer(*arguments, **named)
        if self.gemini_rules is not None:
            from gemini_ft.deepspeed.gradients import install

            self.gradients = install(engine, self.gemini_rules)
            if self.gradients.lets_ranks_differ and engine.zero_optimization_stage():
                _refuse_files(self._gemini_trainer)
        return engine, optimizer

    def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        fit = self._gemini_fit
        return super().backward(fit.scaled(closure_loss) if isinstance(fit, EngineFit) else closure_loss, *args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        if isinstance(fit := self._gemini_fit, EngineFit):
            fit.after_update()
        return result

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's state for a file; empty for a snapshot, as the engine's optimizer would copy its partitions."""
        if self._gemini_fit is not None and self._gemini_fit.live is not None:
            return {}
        return super().optimizer_state(optimizer)


def _refuse_files(trainer: Any) -> None:
    if any("ModelCheckpoint" in trainer_callbacks.shipped_names(callback) for callback in trainer.callbacks):
        raise ConfigError(
            "gradient_pipeline: ranks that train alone (every) at ZeRO stages 1 and 2 have no checkpoint that DeepSpeed could write, and a "
            "ModelCheckpoint would end the fit: give the Trainer enable_checkpointing=False, and save trainer.strategy.model.module."
            "state_dict() after an average. The snapshots of gemini-ft have each rank's own state"
        )


def _check_accelerator(device_type: str) -> None:
    from deepspeed.accelerator import get_accelerator

    if (chosen := get_accelerator().device_name()) != device_type:
        raise ConfigError(
            f"the Trainer uses {device_type} and DeepSpeed {chosen}; set the environment variable DS_ACCELERATOR={device_type}, "
            f"or use Trainer(accelerator={'gpu' if chosen == 'cuda' else chosen!r})"
        )
