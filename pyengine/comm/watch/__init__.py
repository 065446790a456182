"""Which ranks a collective waits for, where they are, and whether they have died."""
