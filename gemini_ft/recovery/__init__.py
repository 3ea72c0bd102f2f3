"""Reads a snapshot from wherever it is and fills the live state with it."""
