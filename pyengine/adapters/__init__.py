"""Other libraries' words for windows, one module a library; each needs its library (the extra `adapters`)."""
