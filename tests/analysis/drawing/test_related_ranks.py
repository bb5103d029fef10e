"""The ranks of a large job in which a finding shows."""

from __future__ import annotations

from dataclasses import replace

from rankscope.analysis.drawing.selection import MAX_PEERS, find_related
from rankscope.analysis.report.report import Proof
from rankscope.tracer.topology import Layout
from tests.support.dashboard.builders import report

PROOF = Proof(epoch=0, step=12, rank=5, begin_ns=0, end_ns=9, excess_ns=3)


def test_partners_are_on_other_axes_and_alike_ranks_in_other_replicas() -> None:
    # GIVEN rank = (pp * 64 + dp) * 2 + tp, and rank 5 at dp 2, tp 1 of stage 0
    found = report(layout=Layout(dp=64, pp=2, tp=2), slow_rank=5)
    finding = replace(found.findings[0], proof=PROOF)

    related = find_related(found, finding)

    assert related is not None
    assert related.culprits == (5,)
    assert related.partners == (4, 133)
    assert related.peers[:4] == (3, 7, 1, 9)
    assert len(related.peers) == MAX_PEERS
    assert all(rank % 2 == 1 and rank < 128 for rank in related.peers)
    assert len(set(related.all)) == len(related.all) <= 64
    assert set(related.waiting).isdisjoint({5, *related.partners, *related.peers})


def test_the_other_stages_follow_in_their_order() -> None:
    # GIVEN rank = (pp * 64 + dp) * 2 + tp, and rank 261 at dp 2, tp 1 of stage 2
    found = report(layout=Layout(dp=64, pp=4, tp=2), slow_rank=261)
    finding = replace(found.findings[0], proof=replace(PROOF, rank=261))

    related = find_related(found, finding)

    assert related is not None
    assert related.partners == (260, 5, 133, 389)
    assert list(related.sections)[:3] == ["at fault", "groups", "alike"]
    assert related.all[:5] == (261, *related.partners)


def test_a_finding_without_a_proof_has_no_related_ranks() -> None:
    found = report()

    assert find_related(found, found.findings[0]) is None
