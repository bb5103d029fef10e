"""Thresholds that several causes share. Those of one cause are in its module.

Whether an excess is due at all is decided by the thresholds of `analysis.statistics.phases`.
"""

ALL_RANKS_SHARE = 0.8
"""Share of a job's ranks that counts as all of them: ranks that pause in the same step, and ranks
that slow groups hold together."""

ONE_RANK_SHARE = 0.7
"""Share of a group's lateness, or of its pauses, that one rank must cause to be at fault alone;
below, its members take turns. In a group of four, chance gives one member four of five late steps
in 6 % of the cases."""

HOST_STALL_STEPS = 3
"""Steps in which a host must stall in the same place. Source: design.md section 5."""

MIN_CORRELATION = 0.9
"""Correlation from which compute follows the length of its micro-batch. Source: arXiv 2505.05713,
section 5.3: forward and backward of one micro-batch."""

MIN_ITEMS = 16
"""Micro-batches that a correlation needs."""
