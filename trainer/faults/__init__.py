"""Faults of the real trainer: their specification, and what they do to a rank."""
