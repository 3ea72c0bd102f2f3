# The names that `from gemini_ft.sync import Zen` finds. This folder has no __init__.py: gemini_ft/beside.py reads this file.
from .agsparse import AGsparse as AGsparse
from .auto import Auto as Auto
from .base import Scheme as Scheme
from .ddp_hook import HookState as HookState
from .ddp_hook import hook as hook
from .dense import Dense as Dense
from .hierarchical import Hierarchical as Hierarchical
from .omnireduce import OmniReduce as OmniReduce
from .parameter_server import SinglePS as SinglePS
from .parameter_server import SparsePS as SparsePS
from .rows import GradientError as GradientError
from .schemes import SCHEMES as SCHEMES
from .schemes import dimensions_table as dimensions_table
from .sparcml import DSARSplitAllgather as DSARSplitAllgather
from .sparcml import SSARRecursiveDoubling as SSARRecursiveDoubling
from .sparcml import SSARSplitAllgather as SSARSplitAllgather
from .zen import Zen as Zen
