"""Adapters from a store or a file to the analysis."""
