"""One engine and its doors: windows from their first micro-batch to their step."""
