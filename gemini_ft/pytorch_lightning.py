"""The strategies of :mod:`gemini_ft.lightning` for the package ``pytorch_lightning`` (and ``lightning_fabric``).

``lightning`` and ``pytorch_lightning`` share no classes: a ``pytorch_lightning.Trainer`` takes only these.
"""

from __future__ import annotations

from typing import Any

from gemini_ft.lightning import __all__ as __all__
from gemini_ft.lightning import class_in


def __getattr__(name: str) -> Any:
    return class_in(__name__, name, "pytorch_lightning", "lightning_fabric")
