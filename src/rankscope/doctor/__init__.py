"""Checks of a host: its installation, its devices, its network, its settings."""
