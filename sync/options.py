"""The options of the schemes that have any: types, ranges and defaults. Checked where one is made."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from gemini_ft.validation import Flag, Seed, options_model

SCHEME_OPTIONS: dict[str, type[BaseModel]] = {
    "dense": options_model("dense", check=(Annotated[Flag, Field(description="compare the ranks' shapes and dtypes first")], True)),
    "zen": options_model(
        "zen",
        hashing=(
            Annotated[Literal["rotation", "hierarchical"], Field(description="how units are divided, rotation or hierarchical")],
            "rotation",
        ),
        seed=(Seed, 0),
    ),
    "hierarchical": options_model(
        "hierarchical",
        local_size=(
            Annotated[int, Field(ge=1, description="ranks of a host, 1 or more; the number of ranks must be a multiple of it")],
            ...,
        ),
    ),
}
