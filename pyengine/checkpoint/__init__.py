"""What a run has saved, as plain data and files: nothing of it needs an engine."""
