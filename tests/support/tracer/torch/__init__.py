"""Replacements of torch. An error from a folder of this name is treated as torch's own."""
