"""Options of the strategies: gemini's, the base strategy's, and nothing else.

Lightning's DDPStrategy hands what it does not know to DistributedDataParallel, so that a misspelt option would show up
when training starts, as an error about something else. Here every name is known when the strategy is made.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple, get_args

from torch.nn.parallel import DistributedDataParallel

from gemini_ft.config import GeminiConfig, load_config
from gemini_ft.errors import ConfigError
from gemini_ft.loaders.parts import DataResume
from gemini_ft.pipeline.rules import Rules, load_rules

_BUCKET_CAP_MB = 1  # the pipeline chooses the groups; small buckets tell it sooner that gradients are ready


EpochHooks = Literal["restore", "rerun"]


class Options(NamedTuple):
    """The options of a strategy, sorted by the parts that take them; ``rules`` is None without a gradient pipeline."""

    config: GeminiConfig
    data_resume: DataResume
    epoch_hooks: EpochHooks
    rules: Rules | None
    base: dict[str, Any]


def sort_options(strategy: str, base: type, options: Mapping[str, Any]) -> Options:
    """Checks ``options`` and sorts them by the parts that take them.

    ``timeout`` is the name of two options: a timedelta is the process group's, seconds are gemini's.

    Raises ConfigError: an option is unknown or has a wrong value.
    """
    rest = dict(options)
    data_resume = rest.pop("data_resume", os.environ.get("GEMINI_DATA_RESUME", "auto"))
    if data_resume not in get_args(DataResume):
        raise ConfigError(f"{strategy}: data_resume={data_resume!r} must be one of {', '.join(get_args(DataResume))}")
    epoch_hooks = rest.pop("epoch_hooks", os.environ.get("GEMINI_EPOCH_HOOKS", "restore"))
    if epoch_hooks not in get_args(EpochHooks):
        raise ConfigError(f"{strategy}: epoch_hooks={epoch_hooks!r} must be one of {', '.join(get_args(EpochHooks))}")
    pipeline = rest.pop("gradient_pipeline", None)
    rules = None if pipeline is None else load_rules(pipeline)
    known = _parameters_of(base)
    for_base = {name: value for name, value in rest.items() if name in known and not _is_ours(name, value)}
    ours = {name: value for name, value in rest.items() if name not in for_base}
    if unknown := ours.keys() - GeminiConfig.model_fields:
        raise ConfigError(_about_unknown(strategy, base, unknown))
    if rules is not None and "bucket_cap_mb" in known:
        for_base.setdefault("bucket_cap_mb", _BUCKET_CAP_MB)
    return Options(load_config(ours), data_resume, epoch_hooks, rules, for_base)


def signature_of(base: type) -> inspect.Signature:
    """The options as keyword-only parameters, for help() and editors."""
    empty = inspect.Parameter.empty
    parameters = {"self": inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)}
    for name, field in GeminiConfig.model_fields.items():
        parameters[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation)
    own = {"data_resume": ("auto", DataResume), "epoch_hooks": ("restore", EpochHooks), "gradient_pipeline": (None, list[Any] | str | None)}
    for name, (default, annotation) in own.items():
        parameters[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    for name, given in _parameters_of(base).items():
        annotation = given.annotation if given.annotation is not empty else Any
        if name == "timeout":
            annotation = timedelta | float
        parameters[name] = given.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotation)
    return inspect.Signature(list(parameters.values()))


def of_command_line(signature: inspect.Signature) -> inspect.Signature:
    """The same for LightningCLI, which else would give each default as an argument, before which the environment does not count.

    Texts are taken as our options are: its own check of types would refuse many of them.
    """
    first, *options = signature.parameters.values()
    return signature.replace(parameters=[first, *(each.replace(default=argparse.SUPPRESS, annotation=Any) for each in options)])


def section_of(strategy: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The section "gemini" of a DeepSpeed configuration; empty if it has none.

    Raises ConfigError: it has an option that gemini does not know.
    """
    section = config.get("gemini", {})
    if not isinstance(section, Mapping):
        raise ConfigError(f'{strategy}: "gemini" in the DeepSpeed configuration must hold a mapping of options, got {section!r}')
    ours = sorted(GeminiConfig.model_fields)
    if unknown := section.keys() - set(ours):
        raise ConfigError(
            f'{strategy}: unknown option {_with_hints(unknown, ours)} in the section "gemini" of the DeepSpeed configuration; '
            f"allowed are {', '.join(ours)}"
        )
    return dict(section)


def refuse_platform(device_type: str) -> None:
    """Raises ConfigError where the agent cannot run."""
    if sys.platform != "linux":
        raise ConfigError(f"strategy='gemini' needs Linux (memfd, abstract sockets), this is {sys.platform}; use strategy='ddp' here")
    if device_type == "mps":
        raise ConfigError("strategy='gemini' does not support MPS devices; use accelerator='cpu' or 'gpu'")


def _is_ours(name: str, value: Any) -> bool:
    return name in GeminiConfig.model_fields and not (name == "timeout" and isinstance(value, timedelta))


def _parameters_of(base: type) -> dict[str, inspect.Parameter]:
    """The named parameters of ``base``, and of DistributedDataParallel if ``base`` passes on what it does not know."""
    parameters = dict(inspect.signature(base.__init__).parameters)  # type: ignore[misc]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        made_by_lightning = {"self", "module", "device_ids", "output_device", "process_group"}
        ddp = inspect.signature(DistributedDataParallel.__init__).parameters
        parameters |= {name: parameter for name, parameter in ddp.items() if name not in made_by_lightning}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in named and name != "self"}


def _about_unknown(strategy: str, base: type, unknown: Iterable[str]) -> str:
    ours, theirs = sorted(GeminiConfig.model_fields), sorted({"data_resume", "epoch_hooks", "gradient_pipeline", *_parameters_of(base)})
    return (
        f"{strategy}: unknown option {_with_hints(unknown, [*ours, *theirs])}; allowed are gemini's {', '.join(ours)}, "
        f"and {base.__name__}'s {', '.join(theirs)}"
    )


def _with_hints(unknown: Iterable[str], known: Sequence[str]) -> str:
    hints = []
    for name in sorted(unknown):
        close = difflib.get_close_matches(name, known, n=1)
        hints.append(f"{name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""))
    return ", ".join(hints)
