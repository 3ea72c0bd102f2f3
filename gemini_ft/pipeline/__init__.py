"""Gradient pipelines: rules for adding up, compressing and grouping gradients. The one place that knows sync and compression."""

from gemini_ft.pipeline.rules import Rule, Rules, load_rules
from gemini_ft.pipeline.synchronizer import GradientSynchronizer
from gemini_ft.pipeline.telemetry import RuleTraffic, Step

__all__ = ["GradientSynchronizer", "Rule", "RuleTraffic", "Rules", "Step", "load_rules"]
