"""The options of every method: types, ranges and defaults. Checked by `gemini_ft.compression.methods.create`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from gemini_ft.truncation import Bound
from gemini_ft.validation import Flag, Seed, options_model

Ratio = Annotated[float, Field(gt=0, le=1, description="part of each tensor that travels, above 0 and at most 1, for example 0.01")]
Sample = Annotated[float, Field(gt=0, le=1, description="part of each tensor that is looked at for a threshold, above 0 and at most 1")]
Warmup = Annotated[int, Field(ge=0, description="steps in which the ratio falls to its target, 0 or more")]
Momentum = Annotated[float, Field(ge=0, lt=1, description="of the method, at least 0 and below 1; the optimizer's own is apart from it")]
Bucket = Annotated[int, Field(ge=8, multiple_of=8, description="elements that share a scale, a multiple of 8")]
_SAMPLED = {"ratio": (Ratio, 0.001), "sample": (Sample, 0.01), "warmup_steps": (Warmup, 0)}

_METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp16": {},
    "bf16": {},
    "topk": {"ratio": (Ratio, 0.01)},
    "randomk": {
        "ratio": (Ratio, 0.01),
        "seed": (Seed, 0),
        "scaled": (Annotated[Flag, Field(description="multiply by d / k, which makes it unbiased")], False),
    },
    "threshold": {"value": (Annotated[float, Field(gt=0, description="magnitude from which on elements travel, above 0")], 0.01)},
    "hard_threshold": {"count": (Annotated[int, Field(ge=1, description="elements of the whole model per step, 1 or more")], ...)},
    "sampled_threshold": _SAMPLED,
    "sidco_e": {"ratio": (Ratio, 0.001)},
    "sidco_p": {"ratio": (Ratio, 0.001)},
    "sidco_gp": {"ratio": (Ratio, 0.001)},
    "adaq": {"ratio": (Ratio, 0.01)},
    "efsignsgd": {},
    "onebit": {},
    "qsgd": {
        "levels": (Annotated[int, Field(ge=1, le=127, description="from 1 to 127; up to 7 take half the bytes")], 127),
        "bucket": (Bucket, 128),
        "seed": (Seed, 0),
    },
    "terngrad": {
        "clip": (Annotated[float | None, Field(gt=0, description="standard deviations about 0 to clip to, above 0; null: unbiased")], 2.5),
        "seed": (Seed, 0),
    },
    "natural": {"seed": (Seed, 0)},
    "natural8": {"seed": (Seed, 0)},
    "dynamic8": {},
    "threelc": {"sparsity": (Annotated[float, Field(ge=1, lt=2, description="from 1, most exact, to below 2, sparsest")], 1.0)},
    "sketch": {},
    "inceptionn": {"bound": (Bound, 10)},
    "atomo": {"atoms": (Annotated[int, Field(ge=1, description="rank-one matrices per matrix, 1 or more")], 3), "seed": (Seed, 0)},
    "dgc": {
        "momentum": (Momentum, 0.9),
        "nesterov": (Annotated[Flag, Field(description="Nesterov's momentum")], False),
        "clip_norm": (
            Annotated[float | None, Field(gt=0, description="L2 norm of a tensor's gradient, over all ranks, above 0; null: any")],
            None,
        ),
        **_SAMPLED,
    },
    "signsgd": {"momentum": (Momentum, 0.0), "seed": (Seed, 0)},
    "signum": {"momentum": (Momentum, 0.9), "seed": (Seed, 0)},
    "powersgd": {
        "rank": (Annotated[int, Field(ge=1, description="of the factors, 1 or more")], 1),
        "least_rate": (Annotated[float, Field(ge=1, description="times that factors must be smaller than the matrix, 1 or more")], 2.0),
        "error_feedback": (Annotated[Flag, Field(description="keep what the factors leave out")], True),
        "seed": (Seed, 0),
    },
    "int8": {"bucket": (Bucket, 128), "seed": (Seed, 0)},
}
METHOD_OPTIONS: dict[str, type[BaseModel]] = {name: options_model(name, **fields) for name, fields in _METHODS.items()}
