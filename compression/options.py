"""The types of the options of methods: ranges, and what users are told of them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Ratio = Annotated[float, Field(gt=0, le=1, description="part of each tensor that travels, above 0 and at most 1, for example 0.01")]
Sample = Annotated[float, Field(gt=0, le=1, description="part of each tensor that is looked at for a threshold, above 0 and at most 1")]
Warmup = Annotated[int, Field(ge=0, description="steps in which the ratio falls to its target, 0 or more")]
Scaled = Annotated[bool, Field(description="multiply by d / k, which makes it unbiased")]
Magnitude = Annotated[float, Field(gt=0, description="magnitude from which on elements travel, above 0")]
Count = Annotated[int, Field(ge=1, description="elements of the whole model per step, 1 or more")]
Levels = Annotated[int, Field(ge=1, le=127, description="from 1 to 127; up to 7 take half the bytes")]
Bucket = Annotated[int, Field(ge=8, multiple_of=8, description="elements that share a scale, a multiple of 8")]
Clip = Annotated[float | None, Field(gt=0, description="standard deviations about 0 to clip to, above 0; null: unbiased")]
Sparsity = Annotated[float, Field(ge=1, lt=2, description="from 1, most exact, to below 2, sparsest")]
Atoms = Annotated[int, Field(ge=1, description="rank-one matrices per matrix, 1 or more")]
Momentum = Annotated[float, Field(ge=0, lt=1, description="of the method, at least 0 and below 1; the optimizer's own is apart from it")]
Nesterov = Annotated[bool, Field(description="Nesterov's momentum")]
ClipNorm = Annotated[float | None, Field(gt=0, description="L2 norm of a tensor's gradient, over all ranks, above 0; null: any")]
Rank = Annotated[int, Field(ge=1, description="of the factors, 1 or more")]
LeastRate = Annotated[float, Field(ge=1, description="times that factors must be smaller than the matrix, 1 or more")]
Feedback = Annotated[bool, Field(description="keep what the factors leave out")]
