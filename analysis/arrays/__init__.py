"""Sorting, grouping and intervals over long columns."""
