# The names that `from gemini_ft.deepspeed import initialize` finds: gemini_ft/public_names.py reads this file.
from .engine import attach as attach
from .engine import initialize as initialize
from .gradients import EngineGradients as EngineGradients
from .protection import Protection as Protection
