"""`rankscope compare`: two stored runs, or two ranges of steps of one, the settings first."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.analysis.report.text import (
    FINDING_COLUMNS,
    MAX_NAMED,
    UNKNOWN,
    format_count,
    format_finding,
    format_range,
    format_ranges,
    format_slowdown,
)

from ..terminal.device_time_text import kernel_change_lines
from ..terminal.lines import Progress, format_table, printable, table_width
from .analyze import find_or_analyze, parse_steps
from .flags import AsJson, Store, open_existing_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.report.report import Finding, RunReport
    from rankscope.dashboard.records.page_results import RunComparison


TOP_KERNELS = 20


def compare(
    first: Annotated[
        str, typer.Argument(metavar="RUN", help="Run to compare with.", show_default=False)
    ],
    second: Annotated[
        str, typer.Argument(metavar="OTHER", help="Run that is compared.", show_default=False)
    ],
    *,
    steps: Annotated[
        str, typer.Option(metavar="A:B", help="Steps A to B of RUN, both included. Default: all.")
    ] = ":",
    other_steps: Annotated[
        str, typer.Option(metavar="A:B", help="The same of OTHER. Default: all.")
    ] = ":",
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """Compare two runs, or two ranges of steps of one: settings, numbers, findings."""
    ranges = parse_steps(steps), parse_steps(other_steps)
    typer.echo(compare_stored((first, second), ranges, as_json=as_json, store_url=store))


def compare_stored(
    runs: tuple[str, str],
    ranges: "tuple[tuple[int | None, int | None], tuple[int | None, int | None]]",
    *,
    as_json: bool,
    store_url: str | None,
) -> str:
    """Return the differences of two runs as printable text.

    Raises:
        UnknownRunError: The store holds no run of one of these names.
        EmptyRunError: A run has no spans in its steps.
        StoreError: The store could not be opened or read.
    """
    from ..server.around_runs import compare_finished
    from ..sources.store_source import StoreSource

    with open_existing_store(store_url) as store, Progress() as progress:
        source = StoreSource(store)
        infos = [source.run_info(run) for run in runs]
        first, second = (
            find_or_analyze(store, info, steps=steps, show=progress.show)
            for info, steps in zip(infos, ranges, strict=True)
        )
        found = compare_finished(source, first, second)
    return json.dumps(_document(found)) if as_json else "\n\n".join(_blocks(found))


def _document(found: "RunComparison") -> dict[str, object]:
    return {
        "first": {"run": found.first.run, "steps": list(found.first.steps)},
        "second": {"run": found.second.run, "steps": list(found.second.steps)},
        "settings": [
            {"setting": name, "first": first, "second": second}
            for name, first, second in found.settings
        ],
        "numbers": [asdict(each) for each in (*found.numbers, *found.parts_s)],
        "appeared": [asdict(each) for each in found.appeared],
        "disappeared": [asdict(each) for each in found.disappeared],
        "remained": [asdict(each) for each in found.remained],
        "kernels": [asdict(each) for each in found.kernels],
    }


def _blocks(found: "RunComparison") -> list[str]:
    names = _name(found.first, found.second), _name(found.second, found.first)
    ratio = next((one.ratio for one in found.numbers if one.name.startswith("step time")), None)
    settings = [
        (printable(name), *("not set" if one is None else printable(one) for one in values))
        for name, *values in found.settings
    ]
    numbers = [(one.label, *one.cells) for one in (*found.numbers, *found.parts_s)]
    findings = [
        *_findings("new", found.appeared),
        *_findings("gone", found.disappeared),
        *_findings("in both", found.remained),
    ]
    sentence = (
        f"{names[1]} against {names[0]}: a step takes {format_slowdown(ratio)} the time,"
        f" {format_count(len(settings), 'setting')} changed."
    )
    blocks = [
        sentence,
        _table(("setting", *names), settings) if settings else "no setting differs",
        _table(("", *names, "change"), numbers, right="lrrr"),
    ]
    kernels = kernel_change_lines(found.kernels, top=TOP_KERNELS, width=table_width())
    if kernels:
        blocks.append("\n".join(kernels))
    if findings:
        blocks.append(_table(("", *FINDING_COLUMNS), findings, right="klkllrrr"))
    return blocks


def _name(report: "RunReport", other: "RunReport") -> str:
    """Return the run, or the steps if both are of one run."""
    if report.run != other.run or not report.steps:
        return report.run
    return f"steps {format_range((report.steps[0], report.steps[-1]))}"


def _findings(change: str, findings: "Sequence[Finding]") -> list[tuple[str, ...]]:
    return [
        (
            change,
            one.cause,
            one.severity or UNKNOWN,
            format_ranges(one.ranks, max_ranges=MAX_NAMED),
            format_range(one.steps),
            *format_finding(one),
        )
        for one in findings
    ]


def _table(header: "Sequence[str]", rows: "Sequence[Sequence[str]]", *, right: str = "") -> str:
    return "\n".join(format_table(header, rows, right=right, width=table_width()))
