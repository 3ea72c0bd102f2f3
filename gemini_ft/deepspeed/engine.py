"""Protects an engine (``attach``): updates wait for the copy under way, and every update is followed by a snapshot.

A "gradient_pipeline" section gives the engine a pipeline as well (`gemini_ft.deepspeed.gradients`), with protection or without.

Only the one engine that is given is changed: it becomes an instance of a subclass of its own class.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import deepspeed
from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader

from gemini_ft.deepspeed.data import initialize_protected
from gemini_ft.deepspeed.gradients import install
from gemini_ft.deepspeed.protection import COUNTERS, Protection
from gemini_ft.deepspeed.several import engines
from gemini_ft.errors import ConfigError, GeminiError
from gemini_ft.launch import hooks
from gemini_ft.state.rng import unchanged_randomness

_log = logging.getLogger("gemini_ft")
_NOT_SCRIPTS = {"accelerate", "deepspeed", "gemini_ft", "transformers"}


def finish() -> None:
    """Ends, with the script that has ended well, the training of every engine that was not destroyed; then raises the first error."""
    errors: list[GeminiError] = []
    for protection in engines.in_order():  # the same on all ranks: a last snapshot may be collective
        try:
            protection.close()
        except GeminiError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _told(name: str) -> property:
    """A counter of an engine that tells its `Protection` when the script reads it."""

    def read(engine: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] not in _NOT_SCRIPTS:
            engine.gemini.is_followed = True
        return vars(engine)[name]

    def write(engine: Any, value: Any) -> None:
        vars(engine)[name] = value

    return property(read, write)


class _Protected:
    """The mixin that extends a protected engine's class."""

    gemini: Protection

    def _take_model_step(self, lr_kwargs: Any = None) -> Any:
        self.gemini.tell_who_does_not_follow()
        self.gemini.checkpointer.wait_before_update()
        result = super()._take_model_step(lr_kwargs)  # type: ignore[misc]
        self.gemini.updated()
        return result

    def load_checkpoint(self, *arguments: Any, **named: Any) -> Any:
        with self.gemini.checkpointer.mutate():
            result = super().load_checkpoint(*arguments, **named)  # type: ignore[misc]
        self.gemini.loaded()
        return result

    def destroy(self) -> Any:
        """Ends the training, unless this is the way out of an exception."""
        self.gemini.close(finished=sys.exc_info()[0] is None)
        return super().destroy()  # type: ignore[misc]

    def __del__(self) -> None:
        self.gemini.close(finished=False)  # training has not been ended by hand; the engine's own calls destroy()
        super().__del__()  # type: ignore[misc]


class _ProtectedEngine(_Protected):
    module: Any

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if self.module.training:  # before torch has put the hooks of this call together: those of `verify: replay` come now
            self.gemini.begins()
        return super().forward(*arguments, **named)  # type: ignore[misc]

    def step(self, *arguments: Any, **named: Any) -> Any:
        result = super().step(*arguments, **named)  # type: ignore[misc]
        self.gemini.stepped()
        return result


class _ProtectedPipeline(_Protected):
    def _build_data_iter(self, dataset: Any) -> None:
        make = super().deepspeed_io  # type: ignore[misc]
        vars(self)["deepspeed_io"] = lambda *arguments, **named: self.gemini.follow(make(*arguments, **named))
        try:
            super()._build_data_iter(dataset)  # type: ignore[misc]
        finally:
            del vars(self)["deepspeed_io"]

    def train_batch(self, *arguments: Any, **named: Any) -> Any:
        self.gemini.begins()
        result = super().train_batch(*arguments, **named)  # type: ignore[misc]
        self.gemini.stepped()
        return result


def attach(engine: Any, options: Mapping[str, Any] | None = None) -> Any:
    """Protects an engine, with its gradient pipeline, and resumes it if there is something to resume. Collective.

    Args:
        engine: as ``deepspeed.initialize`` returned it, before its first step.
        options: fields of `gemini_ft.GeminiConfig`; default: the ``"gemini"`` section of the engine's configuration.

    Returns:
        The same engine. ``engine.global_steps`` says how many steps are done, ``engine.gemini`` is its `Protection`.

    In workers of ``gemini run`` an engine with such a section is protected already (`gemini_ft.launch.autoprotect`); that is no error.
    An engine whose configuration has a "gradient_pipeline" section and no "gemini" section gets the pipeline alone.

    Raises:
        ConfigError: there is no section, or an option in it is wrong; or the engine is protected already, with other options; or the
            gradient pipeline does not fit the engine.
        GeminiError: the state cannot be captured or resumed.
    """
    if isinstance(engine, _Protected):
        if options is not None:
            raise ConfigError('this engine is protected already; give the options in one place, the "gemini" section or attach()')
        return engine
    section = engine.config.get("gemini") if options is None else options
    if (pipeline := engine.config.get("gradient_pipeline")) is not None:
        install(engine, pipeline)
        if section is None:
            return engine
    if section is None:
        raise ConfigError('the configuration has no "gemini" section; add one ({} for the defaults), or give options to attach()')
    if not isinstance(section, Mapping):
        raise ConfigError(f'the "gemini" section must be a mapping of options, got {section!r}; {{}} stands for the defaults')
    kind = type(engine)
    extension = _ProtectedPipeline if isinstance(engine, deepspeed.PipelineEngine) else _ProtectedEngine
    engine.__dict__["gemini"] = Protection(engine, section)  # past nn.Module's own __setattr__
    engine.__class__ = type(
        f"Gemini{kind.__name__}", (extension, kind), {"__module__": kind.__module__, **{name: _told(name) for name in COUNTERS}}
    )
    loader = engine.training_dataloader
    if isinstance(loader, RepeatingLoader) and isinstance(loader.loader, DeepSpeedDataLoader):
        with unchanged_randomness():  # an iteration has begun with the pipeline, and is begun again; its workers draw other numbers
            loader.data_iter = iter(engine.gemini.follow(loader.loader, begun=True))
    elif isinstance(loader, DeepSpeedDataLoader):
        engine.gemini.follow(loader)
    hooks.at_end[finish] = None
    return engine


def initialize(*arguments: Any, **named: Any) -> tuple[Any, Any, Any, Any]:
    """Does what ``deepspeed.initialize`` does, and `attach` if the configuration has a section of ours.

    Raises:
        GeminiError: see `attach`.
    """
    return initialize_protected(deepspeed.initialize, _attach_or_warn, *arguments, **named)  # type: ignore[no-any-return]


def _attach_or_warn(engine: Any) -> None:
    if isinstance(engine.config, dict) and not engine.config.keys().isdisjoint(hooks.DEEPSPEED_SECTIONS):
        attach(engine)
    else:
        _log.warning('the DeepSpeed configuration has no "gemini" section: nothing is protected')
