"""Thresholds of the diagnosis, in one place: each with its unit, its meaning and its source.

A source is a formula, a paper, a requirement, a calibration, or "choice": a value that was set by
judgement. The ablation in docs/diagnosis.md says what some of them are worth. Shares and
ratios have no unit.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Limits of the detectors; `THRESHOLDS` has the values in use."""

    # Significance

    false_alarm_rate: float = 0.0003
    """Share of healthy runs in which one significance test may find something. Source: the
    requirement of no false alarm in 300 healthy runs; a run makes a few such tests."""

    min_excess_ratio: float = 0.09
    """Excess over the baseline, as a share of it, from which even a single step is a finding.
    Source: an excess of 10 % must be found, which may be measured a percentage point lower."""

    persistent_ratio: float = 0.05
    """Excess below which not even a persistent phase is a finding: healthy devices of one kind
    differ by a few percent. Source: choice, half of what arXiv 2402.15627 calls slow (about 10
    %)."""

    few_peers_persistent_ratio: float = 0.075
    """The same for a row with few peers. Source: choice, between the two above."""

    min_persistent_steps: int = 5
    """Steps that an excess below `min_excess_ratio` must last; `min_lasting_steps` if it also
    exceeds `peer_peak_factor` times what the other rows ever show. Source: choice."""

    min_lasting_steps: int = 3
    """Steps of a lasting phase, of a stall in the same place, and of a baseline; changes from step
    to step that an estimate of noise needs. Source: a verdict is due within 3 steps of the
    onset."""

    min_several: int = 2
    """Steps, ranks or hosts that confirm each other: one alone may be the exception, or the reason
    itself. Source: formula."""

    whole_share: float = 0.8
    """Share of the ranks of a job, a host or a stage that counts as all of them; ratio of two
    factors that count as equal. Source: choice."""

    majority_share: float = 0.5
    """Share that must be exceeded by those that agree. Source: formula."""

    min_loss_ratio: float = 0.01
    """Share of the time that a second fault, or pauses in turn, must cost: each may be short, but
    all ranks wait for every one of them. Source: choice."""

    peer_peak_factor: float = 1.5
    """Factor over what the others ever show that is more than that; pauses of one kind differ by
    less. Source: choice."""

    max_faulty_share: float = 0.005
    """Share of the rows that may be at fault at once, and of items at either end that a fit leaves
    out. Source: arXiv 2402.15627 saw as many slow machines."""

    max_exact_rows: int = 64
    """Rows up to which each one is left out of the deviation that it is judged by. Among more rows,
    one changes neither median. Source: formula."""

    min_peers: int = 3
    """Peers that a diagnosis of one rank needs; links that make a rank's connection, or a network,
    slow. Source: choice, two can be slow by chance."""

    common_share: float = 0.9
    """Share of a step's items that must all be longer than usual, or all shorter, for the step
    itself to be the reason, as in a first step that warms up. Sequence lengths differ between
    micro-batches, so they do not do that. Source: choice."""

    chance_of_turns: float = 0.01
    """Chance that the slow steps of one row would all be its own if alike rows had them at random.
    Source: choice; single steps that cost more than all others are reported too."""

    # Several causes

    one_rank_share: float = 0.7
    """Share of a group's lateness, or of its pauses, that one rank must cause to be at fault alone;
    below, its members take turns. Source: formula; in a group of four, chance gives one member four
    of five late steps in 6 % of the cases."""

    min_correlation: float = 0.9
    """Correlation from which compute follows the length of its micro-batch. Source: arXiv
    2505.05713, section 5.3: forward and backward of one micro-batch."""

    min_items: int = 16
    """Micro-batches that a correlation needs. Source: formula; 16 pairs that are independent reach
    0.9 in fewer than one of a million cases."""

    # host-stall, gc-pause, pauses

    min_pause_ns: int = 50_000_000
    """Shortest gap before a launch that may be garbage collection, ns. Source: choice."""

    pause_factor: float = 10.0
    """Least ratio of a pause to the usual gap before a forward. Source: choice."""

    # stage-imbalance, sequence-imbalance, clock-throttle

    far_deviations: float = 10.0
    """Standard deviations from which an evidence sentence says "far outside noise". Source: choice,
    of the text only."""

    # slow-link, network-degradation

    min_alike_transfers: int = 8
    """Alike instances that a finding on a link needs. Source: choice."""

    min_growth_factor: float = 2.0
    """Ratio of a counter's growth in a phase to that outside from which it has risen. Source:
    choice."""

    # Confidence of causes that have no threshold

    undecided_certainty: float = 0.5
    """Certainty of a cause if another one fits as well; confidence from which a finding without a
    price replaces `healthy`. Source: formula, one of two."""

    ended_confidence: float = 0.95
    """Confidence of a hang or crash if nothing contradicts it. Source: choice."""

    doubt_factor: float = 0.8
    """Factor of that confidence for each doubt: a process without an exit record, dropped
    records, failures that the clocks cannot order. Source: choice."""

    previous_confidence: float = 0.3
    """Confidence of a setting that changed since the previous run: probably it was changed on
    purpose. Source: choice."""

    # The verdict

    doubt_at_threshold: float = 0.1
    """Share of wrong findings among those that barely reach their threshold. Source: calibration on
    the labelled benchmark (docs/diagnosis.md)."""

    minor_share: float = 0.005
    """Share of the step time below which a finding is minor: it would read as 0 %. Source:
    formula."""

    critical_share: float = 0.10
    """Share of the step time from which a finding is critical. Source: an excess of
    10 % must be found."""


THRESHOLDS = Thresholds()
