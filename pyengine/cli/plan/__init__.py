"""`plan`: a global batch on several numbers of workers."""
