"""`bench`: `measure.py` times the training variants of `variants.py`; benchmarks/ uses both modules."""
