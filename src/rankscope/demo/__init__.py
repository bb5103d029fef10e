"""The demo: train here with a planted fault, then diagnose it."""
