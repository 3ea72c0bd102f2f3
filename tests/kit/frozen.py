"""Imported last by a server that forks ranks: their collectors do not touch what is shared with it, which the kernel would copy."""

import gc
import os

from warm_python import use_huge_pages

os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)[2]  # without what `agent_kit.forked` has put before it
if not os.environ["PYTHONPATH"]:
    del os.environ["PYTHONPATH"]
gc.collect()
gc.freeze()
use_huge_pages()
