"""Benchmark cases of each op (`<stem>.py`), and the code that times them (`measure.py`)."""
