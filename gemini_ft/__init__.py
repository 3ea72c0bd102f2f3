"""Training state of every optimizer step, kept in the hosts' CPU memory and restored from there bit for bit.

Importing this package is cheap: neither torch nor Lightning nor DeepSpeed is loaded before a name that needs it
is used. It makes the strategy names (``"gemini"``, ...) known to Lightning, now or as soon as Lightning is imported.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini_ft.beside import show_names as _show_names
from gemini_ft.lightning.registration import install as _register_strategies

_here = Path(__file__).parent
if not (_here / "sync").is_dir():  # a checkout: sync/ and compression/ lie beside this folder, not in it
    __path__.append(str(_here.parent))

if TYPE_CHECKING:
    from gemini_ft import errors, huggingface, lightning, pytorch_lightning
    from gemini_ft.checkpointer import Checkpointer
    from gemini_ft.config import GeminiConfig
    from gemini_ft.errors import GeminiError
    from gemini_ft.loaders import resumable
    from gemini_ft.pipeline import GradientSynchronizer
    from gemini_ft.worker.in_place import run
    from gemini_ft.worker.rendezvous import init_process_group

__version__ = "0.2.0"

__all__ = [
    "Checkpointer",
    "GeminiConfig",
    "GeminiError",
    "GradientSynchronizer",
    "__version__",
    "errors",
    "huggingface",
    "init_process_group",
    "lightning",
    "pytorch_lightning",
    "resumable",
    "run",
]

# public name -> the module that defines it; a submodule stands for itself
_LAZY = {
    "Checkpointer": "gemini_ft.checkpointer",
    "GeminiConfig": "gemini_ft.config",
    "GeminiError": "gemini_ft.errors",
    "GradientSynchronizer": "gemini_ft.pipeline",
    "errors": "gemini_ft.errors",
    "huggingface": "gemini_ft.huggingface",
    "init_process_group": "gemini_ft.worker.rendezvous",
    "lightning": "gemini_ft.lightning",
    "pytorch_lightning": "gemini_ft.pytorch_lightning",
    "resumable": "gemini_ft.loaders",
    "run": "gemini_ft.worker.in_place",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    value = module if _LAZY[name] == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_register_strategies()
for _beside in ("sync", "compression"):
    _show_names(f"{__name__}.{_beside}")
