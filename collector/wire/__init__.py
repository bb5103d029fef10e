"""Cuts on the network: schema and encoding."""
