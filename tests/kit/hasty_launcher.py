"""``gemini run`` that drains a host after half a second of slowness: ``hasty_launcher.py OPTION...``."""

import sys

from gemini_ft.cli.main import main
from gemini_ft.launch import health

health.SLOW_SECONDS = 0.5
sys.exit(main(["run", *sys.argv[1:]]))
