"""Parallel training of a small GPT with faults on purpose, and a simulator of whole clusters."""
