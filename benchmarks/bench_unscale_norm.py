"""unscale_norm against GradScaler's unscale and clip's norm:
python benchmarks/bench_unscale_norm.py [--device cuda] [--save].
"""

from _harness import report

if __name__ == "__main__":
    report("unscale_norm", __doc__)
