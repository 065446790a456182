"""FSDP2 support: the units of `fully_shard` and `replicate` reduce gradients once per window."""
