"""Readers: from a recorded trace to operations, waits and transfers."""
