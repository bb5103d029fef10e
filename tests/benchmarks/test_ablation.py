"""Rules that the ablation replaces are those of the analysis."""

from __future__ import annotations

import pytest

from benchmarks.ablation import MODULES, RULES, Rule, without
from rankscope.analysis import diagnose


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule.attribute], ids=lambda one: one.name
)
def test_a_rule_is_absent_in_every_module_that_has_it_and_comes_back(rule: Rule) -> None:
    def values() -> list[object]:
        return [vars(each)[rule.attribute] for each in MODULES if rule.attribute in vars(each)]

    before = values()

    with without(rule):
        assert all(now is not then for now, then in zip(values(), before, strict=True))
    assert all(now is then for now, then in zip(values(), before, strict=True))


def test_a_detector_is_left_out() -> None:
    rule = next(rule for rule in RULES if rule.name == "detector `hang`")

    with without(rule):
        assert rule.absent not in vars(diagnose)["FROM_RECORDS"]
    assert rule.absent in vars(diagnose)["FROM_RECORDS"]


def test_a_rule_that_the_analysis_does_not_have_is_an_error() -> None:
    with (
        pytest.raises(ValueError, match="no module of the analysis has gone"),
        without(Rule("a rule of last year", "gone", None)),
    ):
        pass
