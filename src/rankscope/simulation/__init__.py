"""Simulated runs, written to a store or to files."""
