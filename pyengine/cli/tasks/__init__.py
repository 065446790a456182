"""Small models with their data, for every command that trains."""
