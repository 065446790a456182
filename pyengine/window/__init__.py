"""Counts, checks and verdicts of a window."""
