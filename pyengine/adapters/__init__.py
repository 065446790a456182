"""Adapters to other libraries, one module per library; each requires its library (the extra `adapters`)."""
