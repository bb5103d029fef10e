"""Loggers: steps and findings of a run, in the experiment trackers that people look at."""
