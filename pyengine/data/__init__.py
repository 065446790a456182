"""Which samples a micro-batch holds, how a batch is split, where randomness comes from."""
