"""A second generator of labelled runs, written from docs/spool-format.md alone.

It shares no code with trainer/simulator, so that rules that only fit the simulator show as errors.
"""
