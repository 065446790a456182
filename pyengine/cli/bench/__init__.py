"""`bench`: `variants.py` are the ways to train, which take turns in `measure.py`. benchmarks/ uses both."""
