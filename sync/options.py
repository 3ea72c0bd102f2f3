"""The types of the options of schemes: ranges, and what users are told of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

_PORT = r"([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"  # 1 to 65535
_PLACES = rf"^[^,\s]+:{_PORT}(\s*,\s*[^,\s]+:{_PORT})*$"
_PACKET = "bytes of a packet's values, a multiple of 8 from 8 to 32768"
_EVERY = "sums of which one has a packet compared with its exact sum, 0 or more; 0: none"

Check = Annotated[bool, Field(description="compare the ranks' shapes and dtypes first")]
Bits = Annotated[Literal[2, 4, 8] | None, Field(description="of each value of the sums, 2, 4 or 8; null: all, exactly")]
Bucket = Annotated[int, Field(ge=8, multiple_of=8, description="values that share a norm, a multiple of 8")]
RingWords = Annotated[Literal["int8", "e4m3", "e5m2", "bf16"], Field(description="in which values travel, int8, e4m3, e5m2 or bf16")]
Hashing = Annotated[Literal["rotation", "hierarchical"], Field(description="how units are divided, rotation or hierarchical")]
Switches = Annotated[str, Field(pattern=_PLACES, description="host:port of the switch, or of several, with commas; ports from 1 to 65535")]
SlotCount = Annotated[int, Field(ge=1, le=2**16, description="packets that are under way at once, from 1 to 65536")]
PacketBytes = Annotated[int, Field(ge=8, le=2**15, multiple_of=8, description=_PACKET)]
Patience = Annotated[float, Field(gt=0, description="seconds of silence after which a switch counts as dead, above 0")]
Mode = Annotated[Literal["fpisa", "fpisa-a"], Field(description="how the switch adds, fpisa or fpisa-a")]
CompareEvery = Annotated[int, Field(ge=0, description=_EVERY)]
LocalSize = Annotated[int, Field(ge=1, description="ranks of a host, 1 or more; the number of ranks must be a multiple of it")]
