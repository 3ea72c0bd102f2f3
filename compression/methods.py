"""Every method by name, with the error feedback it is meant to be used with.

method = create("topk", ratio=0.01)             # ErrorFeedback(TopK(0.01))
method = create("qsgd", levels=7)               # unbiased: none
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import BaseModel

from gemini_ft.validation import check_options, options_of

from .base import Compressor, Reducer
from .cast import Bf16, Dynamic8, Fp16, Identity, Inceptionn, Natural, Natural8
from .chunked import ChunkedTopK
from .dgc import MomentumCorrection, SampledThreshold
from .feedback import ErrorFeedback, TwoPhase
from .low_rank import Atomo, PowerSGD
from .options import ClipNorm, Momentum, Nesterov, Ratio, Sample, Warmup
from .quantise import QSGD, AdaQ, GlobalInt8, Sketch, TernGrad, ThreeLC
from .sidco import SIDCo
from .sign import MajorityVote, OneBit, ScaledSign
from .sparse import RandomK, Threshold, TopK


def _dgc(
    momentum: Momentum = 0.9,
    nesterov: Nesterov = False,
    clip_norm: ClipNorm = None,
    ratio: Ratio = 0.001,
    sample: Sample = 0.01,
    warmup_steps: Warmup = 0,
) -> Reducer:
    return MomentumCorrection(SampledThreshold(ratio, sample, warmup_steps), momentum, nesterov, clip_norm)


COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    "none": Identity,
    "fp16": Fp16,
    "bf16": Bf16,
    "topk": TopK,
    "chunked_topk": ChunkedTopK,
    "randomk": RandomK,
    "threshold": Threshold,
    "hard_threshold": Threshold.hard,
    "sampled_threshold": SampledThreshold,
    "sidco_e": partial(SIDCo, distribution="exponential"),
    "sidco_p": partial(SIDCo, distribution="pareto"),
    "sidco_gp": partial(SIDCo, distribution="gamma"),
    "adaq": AdaQ,
    "efsignsgd": ScaledSign,
    "onebit": OneBit,
    "qsgd": QSGD,
    "terngrad": TernGrad,
    "natural": Natural,
    "natural8": Natural8,
    "dynamic8": Dynamic8,
    "threelc": ThreeLC,
    "sketch": Sketch,
    "inceptionn": Inceptionn,
    "atomo": Atomo,
}

REDUCERS: dict[str, Callable[..., Reducer]] = {  # methods that keep their own residuals, or none: they take no error feedback around them
    "dgc": _dgc,
    "signsgd": MajorityVote,
    "signum": partial(MajorityVote, momentum=0.9),
    "powersgd": PowerSGD,
    "int8": GlobalInt8,
}

METHODS = (*COMPRESSORS, *REDUCERS)
METHOD_OPTIONS: dict[str, type[BaseModel]] = {name: options_of(make) for name, make in (COMPRESSORS | REDUCERS).items()}

# Without error feedback: exact, nearly exact, or unbiased.
_NO_FEEDBACK = {"none", "fp16", "bf16", "qsgd", "terngrad", "natural", "natural8", "atomo"}


def create(name: str, *, feedback: float | None = None, two_phase: bool = False, **options: Any) -> Reducer:
    """A method ready for use.

    Args:
        feedback: beta of the residual; None: 1.0 for a method that needs error feedback, else none; 0: none.
        two_phase: aggregate by owners of parts, see `TwoPhase`; its two residuals take the place of one, and do not leak.

    Raises:
        ValueError: no such method or option, a value that is not allowed, or a combination that makes no sense.
    """
    if name not in METHODS:
        raise ValueError(f"compression {name!r}: must be one of {', '.join(METHODS)}")
    check_options(f"compression {name!r}", METHOD_OPTIONS[name], options)
    if name in REDUCERS:
        if feedback is not None or two_phase:
            raise ValueError(f"{name!r} has its own memory and aggregation: feedback and two_phase cannot be given")
        return REDUCERS[name](**options)
    compressor = COMPRESSORS[name](**options)
    beta = feedback if feedback is not None else 0.0 if name in _NO_FEEDBACK or compressor.unbiased else 1.0
    if two_phase:
        if beta not in (0.0, 1.0):
            raise ValueError(f"feedback={feedback}: with two_phase it must be 0 or 1")
        return TwoPhase(compressor, error_feedback=beta == 1.0)
    return ErrorFeedback(compressor, beta) if beta else compressor
