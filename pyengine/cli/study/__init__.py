"""`study`: measure the speed-up from more workers and larger batches."""
