"""Deletion of runs, and expiry of their rows."""
