"""The command line: a folder for each command, and shared modules."""
