"""Queries of the store's tables, by noun: runs, steps, spans, findings, rollups and others."""
