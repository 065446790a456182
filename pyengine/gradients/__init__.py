"""Owners of gradients: memory, sums over a window, reduction over ranks."""
