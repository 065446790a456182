"""accumulate_ and accumulate_cast_ against torch: python benchmarks/bench_accumulate.py [--device cuda]
[--save].
"""

from _harness import report

if __name__ == "__main__":
    report("accumulate", __doc__)
