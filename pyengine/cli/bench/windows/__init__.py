"""`variants.py` are the ways to train; `measure.py` lets them take turns."""
