"""The list of causes: complete, and enough for all that other packages need of a cause."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import pytest

from rankscope.analysis import causes
from rankscope.analysis.causes.detector import Cause, Subject
from rankscope.analysis.causes.order import CAUSES, FROM_RECORDS, FROM_REPLAY

MODULES = [
    import_module(f"{causes.__name__}.{module.name}")
    for module in pkgutil.iter_modules(causes.__path__)
]
OF_A_CAUSE = [module for module in MODULES if hasattr(module, "CAUSE")]


def test_every_module_of_a_cause_is_in_the_list() -> None:
    assert {module.CAUSE.name for module in OF_A_CAUSE} == set(CAUSES)


def test_every_module_that_detects_is_asked() -> None:
    assert {*FROM_RECORDS, *FROM_REPLAY} == {
        module for module in MODULES if hasattr(module, "detect")
    }


def test_modules_are_named_as_their_findings() -> None:
    named = {module.__name__.rpartition(".")[2].replace("_", "-"): module for module in OF_A_CAUSE}

    # Of a finding's causes the one about tokens dealt unequally is that of experts, too.
    assert named.pop("expert-imbalance").CAUSE is CAUSES["sequence-imbalance"]
    assert {name: module.CAUSE.name for name, module in named.items()} == {
        name: name for name in named
    }


@pytest.mark.parametrize("cause", CAUSES.values(), ids=lambda cause: cause.name)
def test_a_verdict_has_words_for_every_cause(cause: Cause) -> None:
    if cause.subject is Subject.JOB:
        assert cause.sentence
    elif cause.subject is not Subject.STAGE:
        assert cause.one
        assert cause.several
