"""Strategies for the Trainer: Lightning's own, with a :class:`~gemini_ft.lightning.fit.Fit` at the right places."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch.nn.parallel import DistributedDataParallel

from gemini_ft.lightning import compat, trainer_callbacks, trainer_checkpoints, trainer_loops
from gemini_ft.lightning.base import Gemini, heeding_signals, join_group
from gemini_ft.lightning.fit import Fit
from gemini_ft.lightning.gradients import FiguresLog, synchronizer_of
from gemini_ft.lightning.logical import Turns
from gemini_ft.loaders.loader import make_resumable
from gemini_ft.state.ddp import first_tensors, send_first
from gemini_ft.worker.rendezvous import exchange

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy as _DDPStrategy
    from lightning.pytorch.strategies.strategy import Strategy as _Strategy

    from gemini_ft.checkpointer import Checkpointer
else:
    _Strategy = _DDPStrategy = object

# Status of a process that ends because rank 0 has had SIGTERM, of which Lightning tells all ranks. Theirs is 0, which other hosts'
# launchers take for the end of the training; with this one the job goes on without the host that was told to end.
_TOLD_TO_END = 128 + signal.SIGTERM


class GeminiMixin(Gemini, _Strategy):
    """A mixin over a strategy of Lightning that handles the Trainer's training."""

    _gemini_replicated: ClassVar[bool] = True
    _gemini_deals: ClassVar[bool] = False  # logical ranks can take the place of what wraps the model
    _gemini_fit_kind: ClassVar[type[Fit]] = Fit
    _gemini_fit: Fit | None = None
    _gemini_figures: FiguresLog | None = None

    @property
    def _gemini_trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def checkpointer(self) -> Checkpointer | None:
        """The Checkpointer of the fit under way: its ``stats``, and ``mutate()`` for writes outside the optimizer's step."""
        return self._gemini_fit.checkpointer if self._gemini_fit is not None else None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the fit under way: a copy of the Trainer has no part in it."""
        live = ("_gemini_fit", "_gemini_figures", "gradients")
        return {name: value for name, value in super().__getstate__().items() if name not in live}

    # --- stations of a fit

    def setup_environment(self) -> None:
        join_group(self)
        super().setup_environment()
        if self._gemini_trainer.state.fn == "fit" and not trainer_callbacks.is_searching(self._gemini_trainer):
            config = heeding_signals(self.gemini_config, getattr(self, "cluster_environment", None))
            arguments = (self._gemini_trainer, self._gemini_package, config, self._gemini_replicated, self._gemini_epoch_hooks)
            self._gemini_fit = self._gemini_fit_kind(*arguments)
            self._gemini_fit.open()

    def _setup_model(self, model: Any) -> Any:
        wrapped = super()._setup_model(model)
        if self._gemini_fit is not None:
            self._gemini_fit.wrapped(wrapped)
        return wrapped

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self._gemini_fit is not None:
            self._gemini_fit.bind()
            self._gemini_figures = FiguresLog(trainer, self.gradients) if self.gradients is not None else None

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        fit = self._gemini_fit
        if fit is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def closure_then_wait() -> Any:
            # Forward and backward run in the closure. An optimizer's pre-hook would come before them, too early.
            result = closure()
            self._gemini_backward_over()
            fit.before_update()
            return result

        result = super().optimizer_step(optimizer, closure_then_wait, model, **kwargs)
        if self._gemini_figures is not None:
            self._gemini_figures.updated()
        return result

    def _gemini_backward_over(self) -> None:
        """Is called when all gradients of the step are there; does nothing here."""

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._gemini_fit is not None:
            self._gemini_fit.pause()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._gemini_fit is not None:
            self._gemini_fit.go_on()

    def on_exception(self, exception: BaseException) -> None:
        fit, self._gemini_fit = self._gemini_fit, None
        if fit is not None:
            fit.close(interrupted=isinstance(exception, KeyboardInterrupt))
        if isinstance(exception, compat.told_to_end(self._gemini_package)):
            exception.code = _TOLD_TO_END
        super().on_exception(exception)

    def teardown(self) -> None:
        if self._gemini_fit is not None:  # no exception took it away: the fit has succeeded, here
            self._gemini_trainer.strategy.barrier("gemini: all ranks have finished")
            fit, self._gemini_fit = self._gemini_fit, None
            fit.close(finished=True)
            self._gemini_close_gradients()
        elif trainer_callbacks.is_searching(self._gemini_trainer):
            self._gemini_close_gradients()
        super().teardown()

    def _gemini_close_gradients(self) -> None:
        if self.gemini_rules is not None:
            self.gradients.close()

    # --- Lightning's own saving and restoring

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return self._is_resuming or super().restore_checkpoint_after_setup

    @property
    def lightning_restore_optimizer(self) -> bool:
        return not self._is_resuming and super().lightning_restore_optimizer

    @property
    def _is_resuming(self) -> bool:
        return self._gemini_fit is not None and self._gemini_fit.resuming

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads the user's ``ckpt_path``, unless the run has got further than that already."""
        load = functools.partial(super().load_checkpoint, checkpoint_path, **compat.if_given(weights_only))
        fit = self._gemini_fit
        if fit is None or not fit.resuming:
            return load()
        return fit.newer_of(checkpoint_path, load)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._gemini_fit is not None and self._gemini_fit.resuming:
            self._gemini_fit.load()
        else:
            super().load_model_state_dict(checkpoint, strict)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._gemini_fit is not None and self._gemini_fit.live is not None:
            return dict(self._gemini_fit.live)  # by reference: no copies, no collectives
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self._gemini_fit is not None and self._gemini_fit.live is not None:
            state: dict[str, Any] = getattr(optimizer, "_optimizer", optimizer).state_dict() if self._gemini_fit.live else {}
            return state
        return super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves a file that another strategy must be able to load, so without the positions of our loaders."""
        trainer_checkpoints.drop_positions(checkpoint, trainer_loops.loaders_at_hand(self.lightning_module))
        if self._gemini_fit is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        self._gemini_fit.files.writes(filepath)
        with self._gemini_fit.checkpointer.paused(validates=False):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self._gemini_fit is not None:
            self._gemini_fit.files.removed(filepath)

    # --- data

    def process_dataloader(self, dataloader: object) -> object:
        loader, trainer, fit = super().process_dataloader(dataloader), self._gemini_trainer, self._gemini_fit
        if fit is None:
            return loader
        training, epoch = fit.training_data, functools.partial(trainer_loops.epoch, trainer)
        if not training.asks:  # the validation's, which may remember something from one to the next
            if any(loader is one for one in trainer_loops.training_loaders(trainer)):
                return loader
            return make_resumable(loader, self._gemini_data_resume, epoch=epoch, active=lambda: not trainer.training, owner=fit, rests=True)
        return make_resumable(
            loader,
            self._gemini_data_resume,
            ahead=functools.partial(trainer_loops.batches_taken_in_advance, trainer),
            in_advance=functools.partial(trainer_loops.takes_in_advance, trainer),
            epoch=epoch,
            active=lambda: training.asks,
            remade=self._gemini_epoch_hooks == "rerun",
            owner=training,
        )


class GeminiDdpMixin(GeminiMixin, _DDPStrategy):
    """A mixin over DDPStrategy. A gradient pipeline is DDP's communication hook; a user's hook gets all that no rule matches."""

    _gemini_deals = True
    _gemini_unsent = False  # whether the model was wrapped without sending rank 0's weights to all ranks

    def _setup_model(self, model: Any) -> Any:
        """Wraps the model.

        A new DDP sends rank 0's weights and buffers to all ranks. Here they are about to be replaced by those of the snapshot, each of
        which is read and compared with the committed root on every rank.
        """
        if self._gemini_turns is not None:
            return model  # its logical ranks' gradients are reduced in their order
        self._gemini_unsent = self._is_resuming
        if not self._is_resuming:
            return super()._setup_model(model)
        with compat.without_first_broadcast(self):
            return super()._setup_model(model)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads as the mixin does; a file of the user's that is newer than the snapshot may have only some of the state."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._gemini_unsent and not self._is_resuming and isinstance(self.model, DistributedDataParallel):
            send_first(first_tensors({"model": self.model}, compat.sends_buffers(self)), exchange)
        self._gemini_unsent = False
        return checkpoint

    @property
    def _gemini_turns(self) -> Turns | None:
        return self._gemini_fit.turns if self._gemini_fit is not None else None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        turns, inner = self._gemini_turns, super().training_step
        return inner(*args, **kwargs) if turns is None else turns.forward(inner, *args, **kwargs)

    def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        turns, inner = self._gemini_turns, super().backward
        return inner(closure_loss, *args, **kwargs) if turns is None else turns.backward(inner, *args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        if self._gemini_turns is not None:
            self._gemini_turns.stepped()
        return result

    def process_dataloader(self, dataloader: object) -> object:
        fit = self._gemini_fit
        if fit is None or fit.turns is None or not fit.training_data.asks:
            return super().process_dataloader(dataloader)
        return fit.turns.deal(dataloader)

    def _register_ddp_hooks(self) -> None:
        if self._gemini_turns is not None:
            return
        if self.gemini_rules is None:
            super()._register_ddp_hooks()
        else:  # on CPUs too, where Lightning leaves hooks out
            self.gradients = synchronizer_of(self.model, self.gemini_rules, self.precision_plugin, compat.ddp_hook(self))

    def _gemini_backward_over(self) -> None:
        if self._gemini_turns is not None:
            self._gemini_turns.reduce()
        elif self.gemini_rules is not None:
            self.gradients.backward_over()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        compat.name_our_strategy(exception)


class GeminiShardedMixin(GeminiMixin):
    """A mixin over ModelParallelStrategy: every rank holds its own parameters. Without sizes all ranks are data parallel."""

    _gemini_replicated = False
    _gemini_shards = True

    def setup_environment(self) -> None:
        compat.fill_mesh(self)
        super().setup_environment()
