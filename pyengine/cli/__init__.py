"""The command-line interface: one subpackage per command, plus shared modules."""
