"""Align the clocks of hosts with the collector's."""
