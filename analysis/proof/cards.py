"""The card of each finding, by what its cause declares."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..causes.detector import Case, ProofForm, Record, ShownIn
from ..causes.order import CAUSES, shown_as
from .compute import compute_card, device_card, length_card, stage_card
from .host_time import host_card, recompile_card
from .records import hosts_card, memory_card, settings_card, states_card
from .transfers import transfer_card

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..report.proof_card import ProofCard
    from ..report.report import Finding

MAX_CARDS = 16
"""Findings that get a card, the first: each of many replicas can have a finding."""

FROM_RECORD: dict[ProofForm, Callable[[Finding, Record], ProofCard | None]] = {
    ProofForm.STATES: states_card,
    ProofForm.SETTINGS: settings_card,
    ProofForm.MEMORY: memory_card,
    ProofForm.HOSTS: hosts_card,
}
"""Cards that need no replay."""

FROM_REPLAY: dict[ProofForm, Callable[[Finding, Case, frozenset[int]], ProofCard | None]] = {
    ProofForm.COMPUTE: compute_card,
    ProofForm.DEVICES: device_card,
    ProofForm.STAGES: lambda finding, case, _: stage_card(finding, case),
    ProofForm.LENGTHS: lambda finding, case, blamed: (
        compute_card(finding, case, blamed) if finding.ranks else length_card(finding, case)
    ),
    ProofForm.LINKS: lambda finding, case, _: transfer_card(finding, case),
    ProofForm.HOST: lambda finding, case, _: host_card(finding, case),
    ProofForm.RECOMPILES: lambda finding, case, _: recompile_card(finding, case),
}
"""Cards that compare times; they also get the ranks that any finding of compute names."""


def with_cards(
    findings: Iterable[Finding], record: Record, case: Case | None
) -> tuple[Finding, ...]:
    """Return findings, each with the card that its cause declares, as far as it can be drawn.

    Args:
        findings: Those of the report, with their proofs.
        case: The same as it is replayed; None if no step can be.
    """
    findings = tuple(findings)
    blamed = frozenset(
        rank
        for finding in findings
        if finding.cause in CAUSES and CAUSES[finding.cause].shown_in is ShownIn.COMPUTE
        for rank in finding.ranks
    )
    first = None if case is None else case.reading.steps[0]
    carded = []
    for finding in findings[:MAX_CARDS]:
        form = None if (cause := shown_as(finding)) is None else cause.proof_form
        card = None
        if form in FROM_RECORD:
            card = FROM_RECORD[form](finding, record)
        elif form is not None and case is not None and finding.steps is not None:
            card = FROM_REPLAY[form](finding, case, blamed)
        if card is not None and finding.steps is not None and finding.steps[0] != first:
            card = replace(card, onset=finding.steps[0])
        carded.append(replace(finding, card=card))
    return (*carded, *findings[MAX_CARDS:])
