"""Plain arrays for drawing a step on a screen of any size."""
