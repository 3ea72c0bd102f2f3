"""`gemini run`: starts workers, restarts them after failures, and brings hosts together."""
