"""Readers of other tools' traces."""
