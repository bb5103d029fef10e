"""A training command of this host: run as it is, traced, and diagnosed at its end."""
