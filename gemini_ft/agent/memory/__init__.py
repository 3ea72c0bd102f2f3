"""The memory of slots: made, found, filled from storage, and freed."""
