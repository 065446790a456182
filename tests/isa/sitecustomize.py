"""Python runs this file when it starts, in every process of a test: tests put this folder on PYTHONPATH."""

import forced_isa

forced_isa.in_this_process()
