"""The command line: one module a command, `train_*` its parts."""
