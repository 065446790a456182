"""`<stem>.py` has the cases of an op; `measure.py` times them."""
