"""The ``gemini`` command."""
