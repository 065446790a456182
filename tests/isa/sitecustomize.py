"""Python runs this as it starts, where tests/conftest.py has put this folder on PYTHONPATH:
in every process of a test.
"""

import forced_isa

forced_isa.in_this_process()
