"""``gemini run`` that drains a host after two seconds of slowness: ``hasty_launcher.py OPTION...``."""

import sys

from gemini_ft.cli.main import main
from gemini_ft.launch import health

health.SLOW_SECONDS = 2.0
sys.exit(main(["run", *sys.argv[1:]]))
