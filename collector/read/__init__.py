"""Queries: runs, steps, findings, alerts, rollups and samples of the store."""
