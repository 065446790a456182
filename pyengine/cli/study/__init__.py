"""`study`: the speed-up of more workers and larger batches."""
