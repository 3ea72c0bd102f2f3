"""The options of the schemes that have any: types, ranges and defaults. Checked where one is made."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from gemini_ft.truncation import Bound
from gemini_ft.validation import Flag, Seed, options_model

_PORT = r"([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"  # 1 to 65535
_SWITCH = (
    Annotated[
        str,
        Field(
            pattern=rf"^[^,\s]+:{_PORT}(\s*,\s*[^,\s]+:{_PORT})*$",
            description="host:port of the switch, or of several, with commas; ports from 1 to 65535",
        ),
    ],
    ...,
)
_SLOTS = (Annotated[int, Field(ge=1, le=2**16, description="packets that are under way at once, from 1 to 65536")], 256)
_PATIENCE = (Annotated[float, Field(gt=0, description="seconds of silence after which a switch counts as dead, above 0")], 3.0)


def _packet(default: int) -> tuple[object, int]:
    said = "bytes of a packet's values, a multiple of 8 from 8 to 32768"
    return Annotated[int, Field(ge=8, le=2**15, multiple_of=8, description=said)], default


SCHEME_OPTIONS: dict[str, type[BaseModel]] = {
    "dense": options_model("dense", check=(Annotated[Flag, Field(description="compare the ranks' shapes and dtypes first")], True)),
    "dsar-split-allgather": options_model(
        "dsar-split-allgather",
        bits=(Annotated[Literal[2, 4, 8] | None, Field(description="of each value of the sums, 2, 4 or 8; null: all, exactly")], None),
        bucket=(Annotated[int, Field(ge=8, multiple_of=8, description="values that share a norm, a multiple of 8")], 1024),
        seed=(Seed, 0),
    ),
    "zen": options_model(
        "zen",
        hashing=(
            Annotated[Literal["rotation", "hierarchical"], Field(description="how units are divided, rotation or hierarchical")],
            "rotation",
        ),
        seed=(Seed, 0),
    ),
    "inceptionn-ring": options_model("inceptionn-ring", bound=(Bound, 10)),
    "switchml": options_model("switchml", switch=_SWITCH, slots=_SLOTS, packet=_packet(1408), patience=_PATIENCE),
    "omnireduce-streaming": options_model("omnireduce-streaming", switch=_SWITCH, slots=_SLOTS, patience=_PATIENCE),
    "fpisa": options_model(
        "fpisa",
        switch=_SWITCH,
        mode=(Annotated[Literal["fpisa", "fpisa-a"], Field(description="how the switch adds, fpisa or fpisa-a")], "fpisa"),
        slots=_SLOTS,
        packet=_packet(1408),
        patience=_PATIENCE,
        compare_every=(
            Annotated[int, Field(ge=0, description="sums of which one has a packet compared with its exact sum, 0 or more; 0: none")],
            100,
        ),
    ),
    "hierarchical": options_model(
        "hierarchical",
        local_size=(
            Annotated[int, Field(ge=1, description="ranks of a host, 1 or more; the number of ranks must be a multiple of it")],
            ...,
        ),
    ),
}
