"""FSDP2 support: units of `fully_shard` and `replicate` reduce once per window."""
