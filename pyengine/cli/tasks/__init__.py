"""Small real models with their data, for every command that trains."""
