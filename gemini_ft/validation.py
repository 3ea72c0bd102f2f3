"""Options of methods and schemes: their types and ranges, as constructors annotate them, and an error that explains a wrong one.

@checked
def __init__(self, levels: Levels = 127, seed: Seed = 0) -> None: ...     # Levels = Annotated[int, Field(ge=1, description="...")]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from inspect import signature
from numbers import Integral
from typing import Annotated, Any, ParamSpec, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

Seed = Annotated[int, Field(ge=0, lt=2**63, description="of random numbers, a whole number from 0 on")]
P = ParamSpec("P")


def options_of(make: Callable[..., Any]) -> type[BaseModel]:
    """A model of the options of a class or function: its parameters of an annotated type, with their defaults."""
    inner: Any = make.func if isinstance(make, partial) else make
    hints = get_type_hints(inner.__init__ if isinstance(inner, type) else inner, include_extras=True)  # type: ignore[misc]
    found = {name: each for name, each in signature(make).parameters.items() if get_origin(hints.get(name)) is Annotated}
    fields: dict[str, Any] = {name: (hints[name], ... if each.default is each.empty else each.default) for name, each in found.items()}
    return create_model("Options", __config__=_STRICT, **fields)


def checked(init: Callable[P, None]) -> Callable[P, None]:
    """A constructor that checks its options first, see `options_of`; a wrong one is a ValueError as by `check_options`."""
    bind, model = signature(init).bind, cache(partial(options_of, init))

    @wraps(init)
    def checking(*args: P.args, **kwargs: P.kwargs) -> None:
        given = bind(*args, **kwargs).arguments
        check_options(type(given["self"]).__name__, model(), {name: given[name] for name in model().model_fields if name in given})
        init(*args, **kwargs)

    return checking


def check_options(what: str, model: type[BaseModel], options: Mapping[str, Any], more: tuple[str, ...] = ()) -> None:
    """Checks that a method or scheme can be made with these options.

    Args:
        what: the thing to be made, in words.
        model: of its options.
        options: as the user gave them.
        more: names of options that others check.

    Raises ValueError: names the option, what was given and what is allowed.
    """
    fields = model.model_fields
    there = f"it has {', '.join((*fields, *more)) or 'none'}"
    if unknown := [name for name in options if name not in fields]:
        raise ValueError(f"{what} has no option {unknown[0]!r}; {there}")
    if needed := [name for name, field in fields.items() if field.is_required() and name not in options]:
        raise ValueError(f"{what} needs the option {needed[0]!r}; {there}")
    try:
        model.model_validate({name: _plain(value) for name, value in options.items()})
    except ValidationError as error:
        wrong = [str(item["loc"][0]) for item in error.errors()]
        said = [f"{name}={options[name]!r}: must be {_allowed(model, name)}" for name in dict.fromkeys(wrong)]
        raise ValueError(f"{what}: {'; '.join(said)}") from None


def _plain(value: Any) -> Any:
    """A whole number of another library as one of Python's, which strict models insist on."""
    return value if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def _allowed(model: type[BaseModel], name: str) -> str:
    field = model.model_fields[name]
    kinds = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    otherwise = "a text" if field.annotation is str else "one of its names"
    kind = next((words for word, words in kinds.items() if word in str(field.annotation)), otherwise)
    return f"{kind} ({field.description})"
