"""Noise, baselines, phases and significance."""
