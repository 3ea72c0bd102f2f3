"""Training state of every optimizer step, kept in the hosts' CPU memory and restored from there bit for bit.

Importing this package is cheap: neither torch nor Lightning nor DeepSpeed is loaded before a name that needs it
is used. It makes the strategy names (``"gemini"``, ...) known to Lightning, now or as soon as Lightning is imported.
"""

from __future__ import annotations

from pathlib import Path

from gemini_ft.lightning.registration import install as _register_strategies
from gemini_ft.public_names import show_names as _show_names

__version__ = "0.2.0"

_here = Path(__file__).parent
if not (_here / "sync").is_dir():  # a checkout: sync/ and compression/ lie beside this folder, not in it
    __path__.append(str(_here.parent))

_register_strategies()
for _package in (__name__, f"{__name__}.sync", f"{__name__}.compression"):
    _show_names(_package)
