"""Failures on purpose: their language, and carrying them out."""
