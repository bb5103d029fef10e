"""The causes of slowness: one module for each cause, named as its finding."""
