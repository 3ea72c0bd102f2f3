"""Options of methods and schemes: models of their types and ranges, and an error that explains a wrong one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

Seed = Annotated[int, Field(ge=0, lt=2**63, description="of random numbers, a whole number from 0 on")]
Flag = bool


def options_model(name: str, **fields: Any) -> type[BaseModel]:
    """A model of the options of ``name``: for each its annotated type and its default, ``...`` if it has none."""
    return create_model(name, __config__=_STRICT, **fields)


def check_options(what: str, model: type[BaseModel], options: Mapping[str, Any], more: tuple[str, ...] = ()) -> None:
    """Checks that a method or scheme can be made with these options.

    Args:
        what: the thing to be made, in words.
        model: of its options.
        options: as the user gave them.
        more: names of options that others check.

    Raises:
        ValueError: names the option, what was given and what is allowed.
    """
    fields = model.model_fields
    there = f"it has {', '.join((*fields, *more)) or 'none'}"
    if unknown := [name for name in options if name not in fields]:
        raise ValueError(f"{what} has no option {unknown[0]!r}; {there}")
    if needed := [name for name, field in fields.items() if field.is_required() and name not in options]:
        raise ValueError(f"{what} needs the option {needed[0]!r}; {there}")
    try:
        model.model_validate(dict(options))
    except ValidationError as error:
        wrong = [str(item["loc"][0]) for item in error.errors()]
        said = [f"{name}={options[name]!r}: must be {_allowed(model, name)}" for name in dict.fromkeys(wrong)]
        raise ValueError(f"{what}: {'; '.join(said)}") from None


def _allowed(model: type[BaseModel], name: str) -> str:
    field = model.model_fields[name]
    kinds = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    otherwise = "a text" if field.annotation is str else "one of its names"
    kind = next((words for word, words in kinds.items() if word in str(field.annotation)), otherwise)
    return f"{kind} ({field.description})"
