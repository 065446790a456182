"""Cases of the ops in `<stem>.py`, and their timing in `measure.py`."""
