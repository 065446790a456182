"""Assignment of samples to micro-batches, the split of a global batch, and random streams."""
