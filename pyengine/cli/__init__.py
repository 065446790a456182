"""The command line: a folder a command, and what they share."""
