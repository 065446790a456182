"""What ranks must agree on, compared while they train: checksums, a probe of the reduction, and the likely
cause of what parts.
"""
