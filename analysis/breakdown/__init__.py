"""Breakdowns of a step: waterfall, bubble, starved ranks, MFU, bandwidth, kinds of span."""
