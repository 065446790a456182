"""pack_ and unpack_ against the torch expression: python benchmarks/bench_pack.py [--device cuda]
[--save].
"""

from _harness import report

if __name__ == "__main__":
    report("pack", __doc__)
