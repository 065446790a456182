"""Adapters to other libraries, one module per library; the extra `adapters` installs the libraries."""
