"""Results of checks as text: deviations in full, the rest counted by section."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rankscope.analysis.report.text import format_count

from ..terminal.lines import emphasize, printable, wrap_text
from .result import State, count_states

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .result import Result

COLOURS = {State.ERROR: "red", State.WARNING: "yellow", State.HEALTHY: "green"}
STATE_WIDTH = 9
MAX_LINE = 200
"""Letters of a line of `--before-job`: Slurm puts them into the reason of the drained host."""


def format_results(
    host: str, results: Sequence[Result], *, width: int, is_full: bool = False
) -> str:
    """Return the results as text.

    Args:
        host: Name of the host.
        results: In the order of their sections.
        width: Columns.
        is_full: Whether to list healthy and not applicable checks too.
    """
    lines = _wrapped(f"{host}: {_summary(results)}", width)
    for section, of_section in groupby(results, key=lambda result: result.section):
        group = [*of_section]
        shown = [result for result in group if is_full or result.is_deviation]
        rest = [result for result in group if result not in shown]
        title = section if not rest else f"{section}: {_summary(rest, has_deviations=False)}"
        lines += ["", title] if shown or is_full else [title]
        for result in shown:
            lines += _result_lines(result, width)
    return "\n".join(printable(line) if "\x1b" not in line else line for line in lines)


def error_lines(host: str, results: Sequence[Result]) -> list[str]:
    """Return one short line for each error."""
    return [
        printable(f"{host}: {_name(result)}: {result.reason}")[:MAX_LINE]
        for result in results
        if result.state is State.ERROR
    ]


def _summary(results: Sequence[Result], *, has_deviations: bool = True) -> str:
    counted = count_states(results)
    parts = [f"{number} {state}" for state, number in counted.items() if number]
    if has_deviations:
        errors, warnings = (counted[state] for state in (State.ERROR, State.WARNING))
        found = [
            format_count(number, noun)
            for number, noun in ((errors, "error"), (warnings, "warning"))
            if number
        ]
        parts = found or ["nothing is wrong"]
        parts += [
            f"{counted[state]} {state}"
            for state in (State.HEALTHY, State.NOT_APPLICABLE)
            if counted[state]
        ]
    return ", ".join(parts)


def _name(result: Result) -> str:
    return f"{result.check}, {result.part}" if result.part else result.check


def _result_lines(result: Result, width: int) -> list[str]:
    state = "n/a" if result.state is State.NOT_APPLICABLE else str(result.state)
    padded = state.ljust(STATE_WIDTH)
    colour = COLOURS.get(result.state)
    first = f"  {emphasize(padded, colour) if colour else padded}{printable(_name(result))}"
    text = printable(result.reason)
    lines = [f"{' ' * (STATE_WIDTH + 2)}{line}" for line in _wrapped(text, width - STATE_WIDTH - 2)]
    if not result.is_deviation:
        return wrap_text(text, width, first=f"  {padded}{_name(result)}: ")
    if result.remedy:
        indent = " " * (STATE_WIDTH + 2)
        lines += wrap_text(printable(result.remedy), width, first=f"{indent}-> ")
    return [first, *lines]


def _wrapped(text: str, width: int) -> list[str]:
    return wrap_text(printable(text), width)
