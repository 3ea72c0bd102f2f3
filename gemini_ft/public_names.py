"""Public names of packages, which load nothing before they are used: ``from gemini_ft.sync import Zen``.

Python asks a module's ``__getattr__`` for a name that it lacks, whoever has set it; here it reads the ``__init__.pyi`` of the package,
where type checkers look the same names up. `gemini_ft.sync` and `gemini_ft.compression` are namespace packages (CONTRIBUTING.md has the
reason), so no code of theirs runs when they are imported, and `gemini_ft` shows their names.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any


def show_names(package: str) -> None:
    """Makes a package show the names of its ``__init__.pyi``. ``package``: its full name; it is imported, which loads no module of it."""
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:  # Python finds no namespace package in a zip archive without entries for folders, such as a wheel
        if error.name != package:  # it is a package, and lacks something else
            raise
        parent, _, name = package.rpartition(".")
        module = sys.modules[package] = ModuleType(package)
        module.__path__ = [os.path.join(folder, name) for folder in sys.modules[parent].__path__]
        setattr(sys.modules[parent], name, module)
    vars(module).update(__getattr__=partial(_found, module), __dir__=partial(_names, module))


def _found(module: ModuleType, name: str) -> Any:
    if name == "__all__":
        return sorted({*_exports(module), *vars(module).keys() & {"__version__"}})
    if name.startswith("__"):  # the import system asks for such names
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
    known = _exports(module)
    if name not in known:
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}; it has {', '.join(sorted(known))}, and its modules")
    value: Any = importlib.import_module(f"{module.__name__}.{known[name] or name}")
    if known[name] is not None:
        value = getattr(value, name)
    setattr(module, name, value)  # the next access does not come here
    return value


def _names(module: ModuleType) -> list[str]:
    return sorted({*vars(module), *_exports(module)})


def _exports(module: ModuleType) -> dict[str, str | None]:
    """The public names, and the module of the package that each comes from; None: it is such a module itself."""
    found: dict[str, str | None] = {}
    for folder in module.__path__:
        for node in ast.parse(_stub(folder)).body:
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                found |= dict.fromkeys((each.name for each in node.names), node.module)
    return found


def _stub(folder: str) -> bytes:
    """The ``__init__.pyi`` of a folder, which may be inside a zip archive; nothing where it has none."""
    path, importer = os.path.join(folder, "__init__.pyi"), pkgutil.get_importer(folder)
    with contextlib.suppress(OSError):
        get_data: Callable[[str], bytes] | None = getattr(importer, "get_data", None)  # zipimporter's
        return Path(path).read_bytes() if get_data is None else get_data(path)
    return b""
