"""Writes down all that a process can see of itself, before and after it imports torch, and what it draws at random without a seed.

The first attempt fails, so that a restarted process reports too.
"""

# ruff: noqa: E402, SIM115

import atexit
import ctypes
import gc
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import warnings
from typing import Any

GLOBALS, GIVEN = sorted(globals()), dict(globals())
STREAMS: list[Any] = [sys.stdin, sys.stdout, sys.stderr]
STORES = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCHELASTIC_USE_AGENT_STORE")
PAGES = "THP_MEM_ALLOC_ENABLE"


def signal_of_death() -> int:
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)  # PR_GET_PDEATHSIG
    return number.value


early = {
    "arguments": sys.argv,
    "interpreter's arguments": sys.orig_argv[1:],
    "path of modules": sys.path,
    "working directory": os.getcwd(),
    "globals": GLOBALS,
    "name, file, package": [__name__, __file__, __package__, __doc__[:10]],
    "spec, loader, cached": [str(__spec__), type(GIVEN["__loader__"]).__name__, GIVEN["__cached__"]],
    "__main__": sys.modules["__main__"].__dict__ is globals(),
    "__mp_main__": sys.modules["__mp_main__"].__dict__ is globals(),
    "start method": multiprocessing.get_start_method(True),
    "process in multiprocessing": [multiprocessing.parent_process(), multiprocessing.current_process().name],
    "threads": [thread.name for thread in threading.enumerate()],
    "native threads": len(os.listdir("/proc/self/task")),
    "signal handlers": [str(signal.getsignal(number)).partition(" at ")[0] for number in range(1, 32)],
    "blocked signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "wakeup descriptor": signal.set_wakeup_fd(-1),
    "flags": str(sys.flags),
    "warning filters": [str(item) for item in warnings.filters],
    "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.unraisablehook is sys.__unraisablehook__],
    "standard streams": [[s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty()] for s in STREAMS],
    "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
    "session and group": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "parent is the launcher": b"--nproc-per-node" in open(f"/proc/{os.getppid()}/cmdline", "rb").read(),
    "limits": [resource.getrlimit(kind) for kind in range(16)],
    "umask, priority, processors": [os.umask(0o22), os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0))],
    "recursion limit, switch interval": [sys.getrecursionlimit(), sys.getswitchinterval()],
    "collector": [gc.isenabled(), gc.get_threshold()],
    "tracing": [str(sys.gettrace()), str(sys.getprofile())],
    "standard modules at the start": "json" in sys.modules,
    "environment": {key: value for key, value in os.environ.items() if not key.startswith("GEMINI_") and key not in (*STORES, PAGES)},
    "settings of the rendezvous": [os.environ.get(key) for key in STORES],
    "pages of tensors": os.environ.get(PAGES),
    "variables of gemini": sorted(key for key in os.environ if key.startswith("GEMINI_")),
    "modules of others at the start": sorted({"torch", "numpy"} & sys.modules.keys()),
    "loggers at the start": any(name.startswith("torch") for name in logging.root.manager.loggerDict),
    "exit handlers at the start": atexit._ncallbacks() > 1,
    "frozen objects": gc.get_freeze_count() > 0,
    "command line in ps": b"gemini_ft.launch.forkserver" in open("/proc/self/cmdline", "rb").read(),
    "signal when the parent dies": signal_of_death(),
}
os.environ["OMP_NUM_THREADS"] = "3"
os.environ["TORCH_LOGS"] = "+dynamo"

import random
import secrets
import ssl
import tempfile
import uuid

import numpy
import torch

late = {
    "variables set before an import": [torch.get_num_threads(), logging.getLogger("torch._dynamo").level],
    "compiler's cache": os.environ.get("TORCHINDUCTOR_CACHE_DIR"),
    "torch's state": [
        torch.is_grad_enabled(),
        str(torch.get_default_dtype()),
        torch.get_num_interop_threads(),
        torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
    ],
    "warning filters after torch": sorted(
        {str(item) for item in warnings.filters if item[1] is None and item[2] is not DeprecationWarning}
    ),
    "temporary directory": tempfile.tempdir,
}
drawn = {
    "torch": torch.rand(1).item(),
    "torch's seed": torch.initial_seed(),
    "permutation": torch.randperm(99).tolist(),
    "numpy": numpy.random.random(),
    "numpy's new generators": numpy.random.default_rng().random(),
    "random": random.random(),
    "secrets": secrets.token_hex(),
    "uuid4": str(uuid.uuid4()),
    "uuid1": str(uuid.uuid1()),
    "temporary names": tempfile.mktemp(),
    "OpenSSL": ssl.RAND_bytes(9).hex(),
    "key of multiprocessing": multiprocessing.current_process().authkey.hex(),
    "hashes of text": hash("text"),
}
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
sys.stdout.write(json.dumps([rank, attempt, {**early, **late}, drawn], default=str) + "\n")
open(f"done.{attempt}.{rank}", "w").close()
while not all(os.path.exists(f"done.{attempt}.{other}") for other in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.01)
sys.exit(attempt == 0)
