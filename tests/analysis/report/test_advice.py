"""Advice about a finding: the section of docs/findings.md, filled in for a run."""

from __future__ import annotations

import re

import pytest

from rankscope.analysis.causes.order import CAUSES
from rankscope.analysis.report.advice import HOST, RANK, RUN, advise


def test_commands_name_the_host_the_rank_and_the_run() -> None:
    advice = advise("host-stall", run="tuesday", ranks=(33, 40), hosts=("node-8",))

    assert advice is not None
    assert advice.commands[0] == "ssh node-8 top -b -n 1"
    assert advice.commands[-1] == "rankscope analyze tuesday --rank 33"
    assert advice.num_more_hosts == 0


def test_a_host_is_drained_only_if_the_finding_names_one() -> None:
    one = advise("slow-compute", run="tuesday", ranks=(33,), hosts=("node-8",))
    several = advise("slow-link", run="tuesday", ranks=(1, 9), hosts=("a", "b", "c"))

    assert one is not None
    assert several is not None
    assert any("node=node-8 state=drain" in command for command in one.commands)
    assert not any("drain" in command for command in several.commands)
    assert several.commands[:2] == ("ssh a ibstat", "ssh b ibstat")
    assert several.num_more_hosts == 1
    assert one.parts[0][0] == "Drain node-8?"
    assert several.parts[0][0] == "Drain a host?"


@pytest.mark.parametrize("cause", sorted(CAUSES))
def test_whether_to_drain_is_answered_first(cause: str) -> None:
    advice = advise(cause, run="tuesday", ranks=(1,), hosts=("node-8",))

    assert advice is not None
    assert re.match(r"(Yes|No|Only|Not at first)\b", advice.drain)
    can_drain = any(command.startswith("scontrol") for command in advice.commands)
    assert not (can_drain and advice.drain.startswith("No."))


def test_what_is_unknown_is_not_guessed() -> None:
    advice = advise("hang", run="tuesday", ranks=(), hosts=())

    assert advice is not None
    assert not any(RANK in command or "--rank" in command for command in advice.commands)
    assert any(f"ssh {HOST} " in command for command in advice.commands)


def test_a_name_from_outside_stays_one_word_of_the_shell() -> None:
    advice = advise("slow-compute", run="a b", ranks=(1,), hosts=("$(reboot)",))

    assert advice is not None
    assert advice.commands[0].startswith("ssh '$(reboot)' nvidia-smi")


@pytest.mark.parametrize("cause", sorted(CAUSES))
def test_each_cause_has_advice_without_markup(cause: str) -> None:
    advice = advise(cause, run="tuesday", ranks=(1,), hosts=("node-8",))

    assert advice is not None
    text = " ".join([*(part for parts in advice.parts for part in parts), *advice.commands])
    assert not re.search(rf"\*\*|\]\(|\b({HOST}|{RANK}|{RUN})\b", text)


def test_there_is_no_advice_about_a_healthy_run() -> None:
    assert advise("healthy", run="tuesday", ranks=(), hosts=()) is None
