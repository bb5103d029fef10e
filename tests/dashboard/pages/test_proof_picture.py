from __future__ import annotations

from dataclasses import replace

from dash import html

from rankscope.analysis.report.proof_card import ProofCard, ProofFact
from rankscope.dashboard.pages.proof_picture import proof_picture
from tests.support.dashboard.builders import report
from tests.support.dashboard.page_text import words

LONG = "inside wait reduce_scatter_tensor 24, step 12; failed: DistBackendError, 1.32 s later " * 2
FACTS = (
    ProofFact(label="rank 5", text="inside forward\u202e, step 12", is_culprit=True),
    ProofFact(label="ranks 0 to 4", text=LONG, is_culprit=False),
)


def test_facts_alone_are_text_that_is_not_cut() -> None:
    found = report()
    finding = replace(found.findings[0], saved_s=None, card=ProofCard(facts=FACTS))

    shown = proof_picture("proof", replace(found, findings=(finding,)), finding)

    assert isinstance(shown, html.Dl)
    assert LONG.strip() in words(shown)
    assert "\u202e" not in words(shown)
    culprits = [
        line.children for line in shown.children if getattr(line, "className", "") == "culprit"
    ]
    assert culprits == ["rank 5"]


def test_facts_beside_a_price_are_in_the_figure() -> None:
    found = report()
    finding = replace(found.findings[0], card=ProofCard(facts=FACTS))

    shown = proof_picture("proof", replace(found, findings=(finding,)), finding)

    assert shown is not None
    assert not isinstance(shown, html.Dl)


def test_nothing_is_shown_without_a_quantity_and_a_price() -> None:
    found = report()
    finding = replace(found.findings[0], saved_s=None, card=None)

    assert proof_picture("proof", replace(found, findings=(finding,)), finding) is None
