"""`train`: small real models on local workers, compared with plain DDP."""
