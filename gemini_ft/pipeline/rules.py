"""The user's rules: a list, of which the first that matches a parameter's name decides how its gradient travels.

gradient_pipeline:
  - {params: "*embed*", sync: zen}
  - {params: "*", compress: {method: topk, ratio: 0.01}, fusion: cupcake}
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from gemini_ft.compression.base import Compressor, Reducer
from gemini_ft.compression.chunked import ChunkedTopK
from gemini_ft.compression.dgc import MomentumCorrection
from gemini_ft.compression.feedback import ErrorFeedback
from gemini_ft.compression.methods import COMPRESSORS, METHOD_OPTIONS, METHODS, create
from gemini_ft.compression.sparse import Sparsifier, WithRatio
from gemini_ft.config import Bytes, load_config, read_options
from gemini_ft.errors import ConfigError
from gemini_ft.pipeline.qualities import LOCAL, WAYS
from gemini_ft.sync.auto import Auto
from gemini_ft.sync.base import Scheme
from gemini_ft.sync.hierarchical import Hierarchical
from gemini_ft.sync.schemes import LOSSY_SCHEMES, SCHEMES, SWITCH_SCHEMES
from gemini_ft.validation import check_options, options_of
from gemini_ft.wire.trust import switch_key

# The options of every method and scheme as rules give them, and docs/pipelines.md lists them.
_SCHEMES: dict[str, type[Scheme]] = {**SCHEMES, "auto": Auto, **LOSSY_SCHEMES}
_INTER: Any = (Annotated[Literal[tuple(SCHEMES)], Field(description=f"the scheme between hosts, one of {', '.join(SCHEMES)}")], "zen")
SCHEME_OPTIONS: dict[str, type[BaseModel]] = {
    **{name: options_of(make) for name, make in _SCHEMES.items()},
    "hierarchical": create_model("hierarchical", __base__=options_of(Hierarchical), inter=_INTER),
    **{name: options_of(make) for name, make in SWITCH_SCHEMES.items()},
}

SYNCS = (*SCHEMES, "auto", "hierarchical", *LOSSY_SCHEMES, *SWITCH_SCHEMES)
PLANNED = ("cupcake", "espresso", "auto")  # fusions for which training is observed first
MOST_OF_INT8 = 127  # ranks, whose integers must have a sum of eight bits
_CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}  # methods that are all-reduces in a narrower dtype
_OURS = ("feedback", "two_phase")  # options of compress that are not the method's own
_PLACES = ("switch", "patience", "compare_every")  # options of sync that make no difference to averages


_FEWER_HOSTS = (
    "it is given to the launcher: with elastic: batch and gemini run --nnodes MIN:MAX the hosts that are left go on (docs/elastic.md), "
    "and with spare hosts one of these takes the place of the lost one, with its state. Leave min_hosts out"
)


class _RuleModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Buckets(_RuleModel):
    """Groups of a given number of bytes, as those of DDP."""

    bucket: Bytes = Field(description="Dense bytes at which a group is closed.")


class Groups(_RuleModel):
    """A given number of groups of about as many tensors each."""

    groups: int = Field(ge=1, description="Groups; fewer where there are fewer tensors.")


class Control(_RuleModel):
    """A ratio that follows the network."""

    method: Literal["dc2"]
    deadline: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Seconds that its collectives may take in a step; default: as long as a step computes."
    )
    every: int = Field(5, ge=1, description="Steps between two decisions.")


class Outer(_RuleModel):
    """The optimizer of outer steps: torch's SGD, without dampening; its gradients are the averages of what ranks have moved."""

    lr: float = Field(0.7, gt=0, allow_inf_nan=False, description="Its learning rate, above 0; 1 without momentum: the plain average.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Its momentum, at least 0 and below 1.")
    nesterov: bool = Field(True, description="Whether its momentum is Nesterov's.")


Fusion = Literal["layer-wise", "cupcake", "espresso", "auto"] | Buckets | Groups
DEFAULT_FUSION = Buckets(bucket=25 * 2**20)


class Sync(BaseModel):
    """A scheme, and its own options."""

    model_config = ConfigDict(extra="allow", frozen=True)
    scheme: str = Field(description=f"One of {', '.join(SYNCS)}.")

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _exists(self) -> Sync:
        if self.scheme not in SYNCS:
            raise ValueError(f"sync {self.scheme!r}: must be one of {', '.join(SYNCS)}")
        self.make()
        return self

    def make(self) -> Scheme:
        check_options(f"sync {self.scheme}", SCHEME_OPTIONS[self.scheme], self.options)
        if self.scheme == "hierarchical":
            options = {"inter": "zen"} | self.options
            inter = options.pop("inter")
            return Hierarchical(SCHEMES[inter](), **options)
        if self.scheme in SWITCH_SCHEMES:
            return SWITCH_SCHEMES[self.scheme](**self.options, key=lambda: switch_key(load_config()))
        return _SCHEMES[self.scheme](**self.options)


class Compression(BaseModel):
    """A method, its error feedback, and the method's own options."""

    model_config = ConfigDict(extra="allow", frozen=True)
    method: str = Field(description=f"One of {', '.join(METHODS)}.")
    feedback: float | None = Field(
        None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="Part of the residual that is kept; default: 1 where the method needs it, else none; 0: none.",
    )
    two_phase: bool = Field(False, description="Whether owners of parts aggregate, so that bytes do not grow with the world size.")

    @model_validator(mode="after")
    def _exists(self) -> Compression:
        if self.method not in METHODS:
            near = difflib.get_close_matches(self.method, METHODS, 1)
            raise ValueError(f"compress {self.method!r}: must be one of {', '.join(METHODS)}" + (f"; is it {near[0]!r}?" if near else ""))
        self.make()
        return self

    def make(self) -> Reducer:
        """A method ready for use, without any memory yet."""
        options, what = dict(self.model_extra or {}), f"compress {self.method}"
        check_options(what, METHOD_OPTIONS[self.method], options, _OURS if self.method in COMPRESSORS else ())
        return create(self.method, feedback=self.feedback, two_phase=self.two_phase, **options)


def _named(key: str) -> BeforeValidator:
    """A validator by which ``"zen"`` stands for ``{"scheme": "zen"}``."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


class Rule(_RuleModel):
    """A rule for the gradients of some parameters."""

    params: Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)] = Field(
        description="Glob, or globs, on the names of parameters (as in model.named_parameters())."
    )
    sync: Annotated[Sync, _named("scheme")] = Field(Sync(scheme="dense"), description="Scheme that adds gradients up.")
    compress: Annotated[Compression | None, _named("method")] = Field(None, description="Compression; default: none.")
    fusion: Fusion = Field(
        DEFAULT_FUSION,
        description="Which gradients travel together: layer-wise, {bucket: 25MB}, {groups: 4}, or planned by cupcake, espresso, or auto.",
    )
    quality: Literal["all-reduce", "equal", "any", "loss"] = Field(
        "equal",
        description="What fusion auto chooses among: all-reduce, that alone, in the gradients' dtype or 16 bits; equal, what trains alike, "
        "ring8 too; any, compress too; loss, DiLoCo too, by seconds to a loss.",
    )
    control: Annotated[Control | None, _named("method")] = Field(
        None, description="Whether the ratio of compress follows the network: dc2; default: it stays."
    )

    every: int | None = Field(
        None, ge=1, description="Steps that each rank makes alone between two averages; default: gradients are averaged."
    )
    outer: Outer | None = Field(
        None, description="The optimizer that steps with the average of what ranks have moved; default: they take it."
    )
    fragments: int = Field(1, ge=1, description="Parts of the parameters that are averaged at different steps of a period.")
    delay: int = Field(0, ge=0, description="Steps that ranks go on for while an average is under way, before they take it.")
    within: Literal["host"] | None = Field(
        None, description="host: ranks of a host average their gradients in each step, and hosts train alone; default: each rank does."
    )

    @field_validator("params")
    @classmethod
    def _some(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or not all(value):
            raise ValueError("must be a glob such as '*embed*', or a list of globs; '*' matches every parameter")
        return value

    @model_validator(mode="after")
    def _relations(self) -> Rule:
        if self.is_sparse and self.compress is not None and sparsifier_of(self.compress.make()) is None:
            what = f"{self.compress.method}{' with two_phase' if self.compress.two_phase else ''}"
            raise ValueError(
                f"sync {self.sync.scheme} adds up what a sparsifier has picked, such as topk or sidco_e; "
                f"{what} is none: leave one of the two out"
            )
        is_tried = self.sync.scheme == "ring8" and self.fusion == "auto"
        if self.is_whole and (self.compress is not None or (self.fusion in PLANNED and not is_tried)):
            raise ValueError(f"sync {self.sync.scheme} takes whole gradients as they are: leave compress out, and fusions that are planned")
        if self.is_sparse and self.compress is None and self.fusion not in (DEFAULT_FUSION, "layer-wise"):
            raise ValueError(
                f"fusion {self.fusion!r}: sync {self.sync.scheme} takes gradients one by one; leave fusion out, or add compress"
            )
        if self.control is not None:
            self._check_control()
        if self.fusion == "espresso" and self.compress is None:
            raise ValueError("fusion espresso chooses between compressing and not; add compress")
        self._check_quality()
        self._check_local()
        return self

    def _check_local(self) -> None:
        if self.every is None:
            if self.outer is not None or self.fragments > 1 or self.within is not None or self.delay:
                raise ValueError("outer, fragments, delay and within are of local steps: add every, such as every: 30, or leave them out")
            return
        if self.fragments > self.every:
            raise ValueError(f"fragments={self.fragments}: at most one for each of the {self.every} steps of a period")
        if self.delay >= self.every:
            raise ValueError(
                f"delay={self.delay}: an average must come before the next one begins, within the {self.every} steps of a period"
            )
        if self.sync.scheme != "dense" or self.fusion in PLANNED or self.control is not None:
            raise ValueError(
                "every averages what ranks have moved by an all-reduce or by compress: leave out sync, control and planned fusions"
            )

    def _check_quality(self) -> None:
        lossy = "ring8" if self.is_whole else self.compress.method if self.compress is not None and self.cast is None else None
        if lossy and self.fusion == "auto" and self.quality in ("equal", "all-reduce"):
            raise ValueError(
                f"fusion auto chooses by seconds, and {lossy} does not train as all-reduce does: leave it out, take another fusion, "
                "or add quality: any once you have compared the loss with that method and your optimizer"
            )
        if self.quality == "all-reduce" and self.fusion != "auto":
            raise ValueError("quality all-reduce has fusion auto choose among all-reduces: give it fusion: auto, or leave quality out")
        if self.quality == "loss" and not (self.is_plain and self.fusion == "auto"):
            raise ValueError(
                "quality loss has fusion auto choose DiLoCo, or what trains alike: give it fusion: auto, without sync, and without "
                "compress but for fp16 and bf16"
            )
        if self.quality == "any" and not (lossy and self.fusion == "auto"):
            raise ValueError("quality any lets fusion auto choose the method of compress, or ring8: give both, or leave quality out")

    def _check_control(self) -> None:
        if self.compress is None or steerable(self.compress.make()) is None:
            what = f"compress {self.compress.method}" if self.compress is not None else "no compress"
            raise ValueError(
                "control dc2 changes the ratio of a method whose error feedback keeps what is left out; "
                f"{what} as it is given here is none that it knows: "
                "take topk, randomk, sidco_e, sidco_p or adaq, without two_phase and feedback 0"
            )
        if self.fusion in ("espresso", "auto"):
            raise ValueError(
                f"fusion {self.fusion} chooses whether to compress by costs that do not change, control dc2 by the network's delay: "
                "leave one of them out, or take fusion cupcake"
            )

    @property
    def is_sparse(self) -> bool:
        """Whether a sparse scheme adds up."""
        return self.sync.scheme != "dense" and not self.is_whole

    @property
    def is_whole(self) -> bool:
        """Whether gradients are added up whole, in groups, by a scheme of its own."""
        kinds: Mapping[str, type[Scheme]] = {**LOSSY_SCHEMES, **SWITCH_SCHEMES}
        return self.sync.scheme in kinds and kinds[self.sync.scheme].whole

    @property
    def is_local(self) -> bool:
        """Whether ranks make steps alone."""
        return self.every is not None

    @property
    def apart(self) -> Rule:
        """The rule by which ranks train alone where quality loss has chosen that; any other rule as it is."""
        return Rule.model_validate({"params": self.params, **WAYS[LOCAL].rule}) if self.quality == "loss" else self

    @property
    def is_plain(self) -> bool:
        """Whether an all-reduce is all that the rule asks for."""
        return self.sync.scheme == "dense" and (self.compress is None or self.cast is not None)

    @property
    def cast(self) -> torch.dtype | None:
        """The dtype in which gradients travel and backends add them up, if compression is nothing but that."""
        given = self.compress
        return _CASTS.get(given.method) if given is not None and not given.feedback else None

    def matches(self, name: str) -> bool:
        """Whether the rule is for a parameter of that name."""
        return any(fnmatchcase(name, glob) for glob in self.params)

    def pack(self) -> dict[str, Any]:
        """All that was given and that averages depend on, as plain data: where a switch is, and when it counts as dead, may change."""
        packed = self.model_dump(mode="json", exclude_defaults=True)
        if self.sync.scheme in SWITCH_SCHEMES:
            packed["sync"] = {name: value for name, value in packed["sync"].items() if name not in _PLACES}
        return packed

    def __str__(self) -> str:
        parts = [f"params={list(self.params) if len(self.params) > 1 else self.params[0]!r}", f"sync={self.sync.scheme}"]
        parts += [f"compress={self.compress.method}"] if self.compress is not None else []
        parts += [f"control={self.control.method}"] if self.control is not None else []
        parts += [f"every={self.every}"] if self.every is not None else []
        return ", ".join(parts)


Rules = tuple[Rule, ...]
PLAIN = Rule.model_validate({"params": "*"})
"""The rule for parameters that no other rule matches: dense all-reduce in buckets."""
_ADAPTER = TypeAdapter(tuple[Rule, ...])


def load_rules(source: str | Path | Sequence[Any] | Mapping[str, Any] | None) -> Rules:
    """Rules from a list, from a mapping that has them under ``gradient_pipeline``, or from a YAML or JSON file with either.

    Raises ConfigError: something in it is wrong; all faults are listed at once.
    """
    where, found = "gradient_pipeline", source
    if isinstance(source, str | Path):
        where, found = str(source), read_options(str(source), str(source))
        if found is None:
            raise ConfigError(f"{where}: is empty; give a JSON or YAML file with a gradient_pipeline, [] for no rules")
    if isinstance(found, Mapping):
        if "gradient_pipeline" not in found:
            there = f", only {', '.join(map(str, found))}" if found else ""
            raise ConfigError(f"{where}: has no gradient_pipeline{there}; it must be a list of rules under that name")
        found = found["gradient_pipeline"]
    if isinstance(found, tuple) and all(isinstance(rule, Rule) for rule in found):
        return found
    if not isinstance(found, Sequence | None) or isinstance(found, str):
        raise ConfigError(f"{where}={found!r}: must be a list of rules, for example [{{'params': '*', 'compress': 'bf16'}}]")
    try:
        return _ADAPTER.validate_python(list(found or ()))
    except ValidationError as error:
        raise ConfigError(_explain(where, error)) from None


def check_world(rules: Rules, world: int) -> None:
    """Checks whether ``world`` ranks can use the rules.

    Raises ConfigError: names the rule, and says which numbers of ranks are possible.
    """
    for number, rule in enumerate(rules):
        what = f"gradient_pipeline: rule {number + 1} ({rule})"
        local = rule.sync.options.get("local_size", 1)
        if world % local:
            raise ConfigError(
                f"{what}: local_size={local}: {world} ranks are no multiple of it; give the ranks of a host, or another scheme"
            )
        if rule.compress is not None and rule.compress.method == "int8" and world > MOST_OF_INT8:
            raise ConfigError(f"{what}: int8 works on up to {MOST_OF_INT8} ranks, and there are {world}; take qsgd, or another method")


def sparsifier_of(reducer: Reducer) -> Sparsifier | None:
    """The sparsifier inside a method, if its payload is that of one."""
    inner = getattr(reducer, "inner", reducer)
    return inner if isinstance(inner, Sparsifier) and not hasattr(reducer, "owner") else None


def steerable(reducer: Reducer) -> ErrorFeedback | MomentumCorrection | None:
    """The method, if its ratio can be changed, up to sending everything by an all-reduce, and nothing is lost by that.

    Not `ChunkedTopK`, whose entries take bits: `DelayControl` counts whole bytes.
    """
    if not isinstance(reducer, ErrorFeedback | MomentumCorrection):
        return None
    inner: object = reducer.inner
    return reducer if isinstance(inner, WithRatio) and not isinstance(inner, ChunkedTopK) else None


def payload_of_one_length(reducer: Reducer) -> Compressor | None:
    """The compressor inside a method, if any rank can make, send and add its payloads, of parts too: what Espresso's options need."""
    inner = getattr(reducer, "inner", reducer)
    return inner if isinstance(inner, Compressor) and inner.has_parts_of_one_length else None


def _explain(where: str, error: ValidationError) -> str:
    lines: list[str] = []
    for item in error.errors():
        number, *path = item["loc"] or (0,)
        place = f"rule {int(number) + 1}" if isinstance(number, int) else str(number)
        text = item["msg"].removeprefix("Value error, ")
        if not path and not isinstance(item["input"], Mapping):
            text = f"{item['input']!r} is no rule; a rule is a mapping such as {{'params': '*', 'compress': 'bf16'}}"
        if item["type"] == "extra_forbidden" and len(path) == 1:
            text = _FEWER_HOSTS if path[0] == "min_hosts" else f"unknown option; a rule has {', '.join(Rule.model_fields)}"
        if path and path[0] == "fusion":
            text = "must be layer-wise, cupcake, espresso, auto, {bucket: bytes} or {groups: number}"
            path = path[:1]
            if any(f"{place}, fusion=" in line for line in lines):  # one kind of fusion after the other has been tried
                continue
        line = f"{place}{', ' + '.'.join(map(str, path)) if path else ''}={item.get('input')!r}: {text}" if path else f"{place}: {text}"
        if line not in lines:
            lines.append(line)
    return f"{where}: " + "; ".join(lines)
