"""ExactSum against adding in float32: python benchmarks/bench_exact.py [--device cuda] [--save]."""

from _harness import report

if __name__ == "__main__":
    report("exact", __doc__)
