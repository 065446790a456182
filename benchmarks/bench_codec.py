"""Codec against casts and sums of torch: python benchmarks/bench_codec.py [--device cuda] [--save]."""

from _harness import report

if __name__ == "__main__":
    report("codec", __doc__)
