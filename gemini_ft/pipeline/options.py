"""The options of every method and scheme as rules give them and docs/pipelines.md lists them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model

from gemini_ft.compression.options import METHOD_OPTIONS
from gemini_ft.sync import options as of_schemes
from gemini_ft.sync.schemes import SCHEMES
from gemini_ft.validation import options_model

_INTER: Any = (Annotated[Literal[tuple(SCHEMES)], Field(description=f"the scheme between hosts, one of {', '.join(SCHEMES)}")], "zen")
SCHEME_OPTIONS: dict[str, type[BaseModel]] = {
    **{name: options_model(name) for name in (*SCHEMES, "auto")},
    **of_schemes.SCHEME_OPTIONS,
    "hierarchical": create_model("hierarchical", __base__=of_schemes.SCHEME_OPTIONS["hierarchical"], inter=_INTER),
}


def options_table() -> str:
    """All options as a Markdown table."""
    lines = ["| of | option | default | |", "|---|---|---|---|"]
    for title, models in (("compress", METHOD_OPTIONS), ("sync", SCHEME_OPTIONS)):
        for name, model in models.items():
            for option, field in model.model_fields.items():
                default = "needed" if field.is_required() else f"`{_plain(field.default)}`"
                lines.append(f"| {title} `{name}` | `{option}` | {default} | {field.description} |")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    """The value as YAML writes it."""
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if value is None or isinstance(value, bool) else str(value)
