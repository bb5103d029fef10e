"""The dependency graph between ranks, and its replay."""
