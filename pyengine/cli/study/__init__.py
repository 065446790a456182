"""`study`: what more workers and larger batches buy, run by run."""
