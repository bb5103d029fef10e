"""Readings, logs and stacks of hosts, for findings."""
