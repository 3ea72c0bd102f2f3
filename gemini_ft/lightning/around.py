"""Functions in place of single methods of Lightning's objects, which copy and pickle as if there were none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Around:
    """A function in place of a method of one object. What is copied or pickled with the object has the method itself.

    ``function``: is called in its place, with the method before the arguments.
    """

    def __init__(self, holder: Any, name: str, function: Callable[..., Any]) -> None:
        self._holder, self._name, self._function, self._inner = holder, name, function, getattr(holder, name)
        setattr(holder, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._inner, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._holder, self._name)  # of the copy, which has no attributes of its own yet

    def end(self) -> None:
        """Gives the object its method back."""
        vars(self._holder).pop(self._name, None)
