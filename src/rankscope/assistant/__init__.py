"""Answers for an assistant that reads the store: bounded, and never a change of it."""
