"""The counts, checks and outcomes of a window."""
