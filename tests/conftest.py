from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# A deadline per example would be a timing assertion, which a busy machine breaks.
settings.register_profile("gemini", deadline=None, print_blob=True)
settings.load_profile("gemini")

# DeepSpeed compiles at first use, with the environment's own ninja: what another one has built, it would build again.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix, "torch_extensions")))

# Options of the developer's own shell must not reach the tests, nor the processes they start.
for _name in [name for name in os.environ if name.startswith("GEMINI_")]:
    del os.environ[_name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # only where it matters: the pure tests start without it

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
