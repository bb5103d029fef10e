"""Samples of a host and its devices, once a second, and heartbeats of its ranks."""
