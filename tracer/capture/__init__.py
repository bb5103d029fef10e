"""Automatic capture: one module for each kind of operation, turned on by `start`."""
