"""Removal of rows: expiry and deletion of runs."""
