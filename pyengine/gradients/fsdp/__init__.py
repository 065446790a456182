"""FSDP2's units under the engine: `fully_shard` and `replicate` reduce once a window."""
