"""The strategies of :mod:`gemini_ft.lightning` for the package ``pytorch_lightning`` (and ``lightning_fabric``).

``lightning`` and ``pytorch_lightning`` share no classes: a ``pytorch_lightning.Trainer`` takes only these.
"""

from __future__ import annotations

from typing import Any

from gemini_ft.lightning import __all__ as __all__


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "Fabric" in name:
        from gemini_ft.lightning import fabric

        return fabric.by_class(name, "lightning_fabric")
    from gemini_ft.lightning import naming

    return naming.by_class(name, "pytorch_lightning")
