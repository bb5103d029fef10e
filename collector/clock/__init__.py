"""Alignment of the hosts' clocks with the collector's."""
