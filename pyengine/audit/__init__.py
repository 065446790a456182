"""Comparison of ranks during training: checksums, gradient samples, and likely causes of differences."""
