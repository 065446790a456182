"""Owners of gradients: their memory, accumulation over a window, and reduction over ranks."""
