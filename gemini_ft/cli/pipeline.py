"""``gemini pipeline``: the rule of each parameter, and the cost of each rule, before anything is trained."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from gemini_ft.cli.units import rate


def command(arguments: Sequence[str]) -> int:
    """``gemini pipeline CONFIG --model module:function``."""
    parser = argparse.ArgumentParser(
        prog="gemini pipeline", description="Show how a gradient pipeline treats each parameter of a model, and what that costs."
    )
    parser.add_argument("config", help="YAML or JSON file with a gradient_pipeline (a DeepSpeed configuration, for example)")
    parser.add_argument("--model", required=True, metavar="MODULE:FUNCTION", help="called without arguments, it returns the nn.Module")
    parser.add_argument("--ranks", type=int, default=8, help="workers (default: 8)")
    parser.add_argument("--rate", type=rate, default="1gbit", help="of each worker's link, such as 200mbit or 25gbit (default: 1gbit)")
    parser.add_argument("--latency", type=float, default=50.0, help="of a message, in microseconds, for the dense patterns (default: 50)")
    parser.add_argument("--step", type=float, help="seconds that a step computes, to compare whole steps with other rules")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    from gemini_ft.cli.pipeline_costs import show  # torch comes with it, and takes seconds that --help does without

    show(options)
    return 0
