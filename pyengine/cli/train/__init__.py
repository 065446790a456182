"""`train`: small models on local workers, compared with plain DDP."""
