"""Gradients that DDP owns: its buckets, its hook, its reducer."""
