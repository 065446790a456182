"""The command under test."""

import sys

TRAIN = (sys.executable, "-m", "pyengine", "train")
