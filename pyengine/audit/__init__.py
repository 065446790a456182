"""Comparison of ranks while they train: checksums, a probe of the reduction, and the likely cause of a
difference.
"""
