"""What `python -m pyengine bench` and the scripts of benchmarks/ measure, and how.

`<stem>.py` are the cases of an op, `kernels.py` measures them; `variants.py` are the ways to train, `windows.py` lets them
take turns.
"""
