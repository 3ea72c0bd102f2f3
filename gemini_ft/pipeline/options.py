"""The options of every method and scheme as rules give them and docs/pipelines.md lists them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model

from gemini_ft.sync import options as of_schemes
from gemini_ft.sync.schemes import SCHEMES, SWITCH_SCHEMES
from gemini_ft.validation import options_model

_INTER: Any = (Annotated[Literal[tuple(SCHEMES)], Field(description=f"the scheme between hosts, one of {', '.join(SCHEMES)}")], "zen")
SCHEME_OPTIONS: dict[str, type[BaseModel]] = {
    **{name: options_model(name) for name in (*SCHEMES, "auto")},
    **{name: of_schemes.SCHEME_OPTIONS[name] for name in of_schemes.SCHEME_OPTIONS if name not in SWITCH_SCHEMES},
    "hierarchical": create_model("hierarchical", __base__=of_schemes.SCHEME_OPTIONS["hierarchical"], inter=_INTER),
    **{name: of_schemes.SCHEME_OPTIONS[name] for name in SWITCH_SCHEMES},
}
