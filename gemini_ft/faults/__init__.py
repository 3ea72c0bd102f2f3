"""Failures on purpose: their language, and the deeds."""
