"""What of an engine is saved, also in the middle of a window, and how a run goes on from it."""
