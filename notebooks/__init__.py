"""Notebooks over stored runs; `rankscope notebooks DIR` copies them."""
