"""A second generator of labelled runs, written from docs/spool-format.md alone.

It shares nothing with trainer/simulator, so that rules which only fit that one are seen.
"""
