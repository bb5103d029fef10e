"""Dependency graph, replay and diagnosis, in numpy."""
