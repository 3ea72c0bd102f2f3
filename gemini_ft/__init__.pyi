# The names that `from gemini_ft import Checkpointer` finds: gemini_ft/public_names.py reads this file.
from . import dcp as dcp
from . import errors as errors
from . import huggingface as huggingface
from . import lightning as lightning
from . import pytorch_lightning as pytorch_lightning
from .checkpointer import Checkpointer as Checkpointer
from .config import GeminiConfig as GeminiConfig
from .errors import GeminiError as GeminiError
from .loaders import resumable as resumable
from .pipeline import GradientSynchronizer as GradientSynchronizer
from .worker.in_place import run as run
from .worker.rendezvous import init_process_group as init_process_group

__version__: str
