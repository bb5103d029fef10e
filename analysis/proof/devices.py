"""Readings of a device beside those of the other ranks' devices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..report.proof_card import SampleStrip
from ..report.text import format_count
from .compute import compute_card
from .samples import group_samples, name_ranks, name_steps, shown_columns

if TYPE_CHECKING:
    from collections.abc import Collection

    from ..causes.detector import Case
    from ..report.proof_card import ProofCard
    from ..report.report import Finding

READINGS = {"gpu-clock-hz": ("clock of the GPU", "Hz"), "gpu-power-w": ("power of the GPU", "W")}
"""Quantity and unit of a reading, by its name in the samples."""


def device_card(finding: Finding, case: Case, blamed: Collection[int]) -> ProofCard | None:
    """Return the card of compute, with clock and power of the devices, as far as they were read."""
    card = compute_card(finding, case, blamed)
    if card is None:
        return None
    return replace(card, strips=(*card.strips, *_reading_strips(finding, case)))


def _reading_strips(finding: Finding, case: Case) -> tuple[SampleStrip, ...]:
    """Return clock and power of the named devices beside the others', as far as they were read."""
    samples, steps = case.context.samples, case.reading.steps
    shown = shown_columns(steps, finding.steps)
    bounds_ns = [case.step_ns[step] for step in np.array(steps)[shown].tolist()]
    if not bounds_ns:
        return ()
    within = (samples.at_ns >= bounds_ns[0][0]) & (samples.at_ns <= bounds_ns[-1][1])
    is_mine, is_other = (np.zeros(len(samples), dtype=np.bool_) for _ in range(2))
    for info in case.ranks.values():
        if info.host in samples.hosts:
            host = samples.hosts.index(info.host)
            of_rank = (samples.host == host) & (samples.device == info.local_rank)
            side = is_mine if info.rank in finding.ranks else is_other
            side |= of_rank
    others = format_count(len(case.ranks) - len(finding.ranks), "other rank")
    strips = []
    for code, name in enumerate(samples.names):
        rows = (samples.name == code) & within
        if name not in READINGS or not (rows & is_mine).any():
            continue
        quantity, unit = READINGS[name]
        mine = samples.value[rows & is_mine]
        strips.append(
            SampleStrip(
                quantity=quantity,
                unit=unit,
                steps=name_steps(steps, shown),
                groups=(
                    *group_samples(name_ranks(finding.ranks), mine, is_culprit=True),
                    *group_samples(others, samples.value[rows & is_other]),
                ),
            )
        )
    return tuple(strips)
