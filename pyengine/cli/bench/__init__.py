"""`bench`: time kernels and whole windows; benchmarks/ uses the same cases and variants."""
