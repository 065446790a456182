"""`bench`: `measure.py` times the training variants in `variants.py`; benchmarks/ uses both modules."""
