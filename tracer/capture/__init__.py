"""Automatic capture: one source of spans a file."""
