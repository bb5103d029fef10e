"""Faults: their text form, and their effects on a rank of the trainer."""
