"""`<stem>.py` are the cases of an op; `processor.py` and `cuda.py` measure them."""
