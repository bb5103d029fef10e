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

COLOURS = {State.ERROR: "red", State.WARNING: "yellow"}
STATE_WIDTH = 9
MAX_LINE = 200
"""Letters of a line of `--before-job`: Slurm puts them into the reason of the drained host."""


def format_results(
    host: str, results: Sequence[Result], *, width: int, is_full: bool = False
) -> str:
    """Return the results as text: deviations, or with ``is_full`` all."""
    counts = _counts(results)
    if not any(result.is_deviation for result in results):
        counts = ["nothing is wrong", *counts]
    lines = wrap_text(printable(f"{host}: {', '.join(counts)}"), width)
    for section, of_section in groupby(results, key=lambda result: result.section):
        group = [*of_section]
        shown = [result for result in group if is_full or result.is_deviation]
        rest = _counts([result for result in group if result not in shown])
        title = f"{section}: {', '.join(rest)}" if rest else section
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


def _counts(results: Sequence[Result]) -> list[str]:
    return [
        format_count(number, state) if state in COLOURS else f"{number} {state}"
        for state, number in count_states(results).items()
        if number
    ]


def _name(result: Result) -> str:
    return f"{result.check}, {result.part}" if result.part else result.check


def _result_lines(result: Result, width: int) -> list[str]:
    state = "n/a" if result.state is State.NOT_APPLICABLE else str(result.state)
    padded, text = state.ljust(STATE_WIDTH), printable(result.reason)
    if not result.is_deviation:
        return wrap_text(text, width, first=f"  {padded}{_name(result)}: ")
    indent = " " * (STATE_WIDTH + 2)
    lines = [f"  {emphasize(padded, COLOURS[result.state])}{printable(_name(result))}"]
    lines += [f"{indent}{line}" for line in wrap_text(text, width - len(indent))]
    if result.remedy:
        lines += wrap_text(printable(result.remedy), width, first=f"{indent}-> ")
    return lines
