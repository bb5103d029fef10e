"""Advice about a finding: the section of docs/findings.md, filled in for a run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.causes.order import CAUSES
from rankscope.analysis.report.advice import HOST, RANK, RUN, advise

if TYPE_CHECKING:
    from rankscope.analysis.report.advice import Advice


def advice_of(
    cause: str, ranks: tuple[int, ...], hosts: tuple[str, ...], *, run: str = "tuesday"
) -> Advice:
    advice = advise(cause, run=run, ranks=ranks, hosts=hosts)
    assert advice is not None
    return advice


def test_commands_name_the_host_the_rank_and_the_run() -> None:
    advice = advice_of("host-stall", (33, 40), ("node-8",))

    assert advice.commands[0] == "ssh node-8 top -b -n 1"
    assert advice.commands[-1] == "rankscope analyze tuesday --rank 33"
    assert advice.num_more_hosts == 0


def test_a_host_is_drained_only_if_the_finding_names_one() -> None:
    one = advice_of("slow-compute", (33,), ("node-8",))
    several = advice_of("slow-link", (1, 9), ("a", "b", "c"))

    assert any("node=node-8 state=drain" in command for command in one.commands)
    assert not any("drain" in command for command in several.commands)
    assert several.commands[:2] == ("ssh a ibstat", "ssh b ibstat")
    assert several.num_more_hosts == 1
    assert one.parts[0][0] == "Drain node-8?"
    assert several.parts[0][0] == "Drain a host?"


@pytest.mark.parametrize("cause", sorted(CAUSES))
def test_each_cause_has_advice_without_markup_that_first_says_whether_to_drain(cause: str) -> None:
    advice = advice_of(cause, (1,), ("node-8",))

    assert re.match(r"(Yes|No|Only|Not at first)\b", advice.drain)
    can_drain = any(command.startswith("scontrol") for command in advice.commands)
    assert not (can_drain and advice.drain.startswith("No."))
    text = " ".join([*(part for parts in advice.parts for part in parts), *advice.commands])
    assert not re.search(rf"\*\*|\]\(|\b({HOST}|{RANK}|{RUN})\b", text)


def test_what_is_unknown_is_not_guessed() -> None:
    advice = advice_of("hang", (), ())

    assert not any(RANK in command or "--rank" in command for command in advice.commands)
    assert any(f"ssh {HOST} " in command for command in advice.commands)


def test_a_name_from_outside_stays_one_word_of_the_shell() -> None:
    advice = advice_of("slow-compute", (1,), ("$(reboot)",), run="a b")

    assert advice.commands[0].startswith("ssh '$(reboot)' nvidia-smi")


def test_there_is_no_advice_about_a_healthy_run() -> None:
    assert advise("healthy", run="tuesday", ranks=(), hosts=()) is None
