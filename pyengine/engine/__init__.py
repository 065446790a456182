"""An engine and its public interfaces, from a window's first micro-batch to its optimizer step."""
