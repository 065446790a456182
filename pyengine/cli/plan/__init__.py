"""`plan`: split a global batch over several numbers of workers."""
