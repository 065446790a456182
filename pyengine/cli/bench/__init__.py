"""`bench`, and what the scripts of benchmarks/ measure with it: kernels one by one, and whole windows."""
