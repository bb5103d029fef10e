"""`rankscope compare`: two stored runs, or two ranges of steps of one, the settings first."""

import json
from dataclasses import asdict
from math import isfinite, nan
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.analysis.report.text import (
    FINDING_COLUMNS,
    format_change,
    format_count,
    format_finding,
    format_range,
    format_seconds,
)

from ..errors import BadInputError, FailedError
from ..terminal.lines import (
    Progress,
    format_table,
    printable,
    table_width,
    terminal_width,
    wrap_text,
)
from .analyze import parse_steps
from .flags import AsJson, Store, open_existing_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.report.report import Finding, RunReport
    from rankscope.dashboard.records.page_results import RunComparison


TOP_KERNELS = 20

MAX_HEAD = 20
"""Columns of a run's name above its numbers; longer ones would leave no room for them."""

NOISE = {True: ", beyond noise", False: ", within noise", None: ", noise unknown"}


def compare(  # noqa: PLR0913  # one parameter a flag
    first: Annotated[str, typer.Argument(metavar="RUN", help="Run to compare with.")],
    second: Annotated[str, typer.Argument(metavar="OTHER", help="Run that is compared.")],
    *,
    steps: Annotated[
        str, typer.Option(metavar="A:B", help="Steps A to B of RUN, both included. Default: all.")
    ] = ":",
    other_steps: Annotated[
        str, typer.Option(metavar="A:B", help="The same of OTHER. Default: all.")
    ] = ":",
    fail_above: Annotated[
        str | None,
        typer.Option(
            metavar="P%",
            help="End with status 1 if a step of OTHER is slower by more than P %, and by more"
            " than noise.",
        ),
    ] = None,
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """Compare two runs, or two ranges of steps of one: settings, numbers, findings."""
    ranges = parse_steps(steps), parse_steps(other_steps)
    limit = None if fail_above is None else parse_percent(fail_above)
    compared = compare_stored((first, second), ranges, store_url=store)
    typer.echo(format_comparison(compared, as_json=as_json))
    if limit is not None:
        check_regression(compared, limit)


def compare_stored(
    runs: tuple[str, str],
    ranges: "tuple[tuple[int | None, int | None], tuple[int | None, int | None]]",
    *,
    store_url: str | None,
) -> "RunComparison":
    """Return the differences of two runs.

    Raises:
        UnknownRunError: The store holds no run of one of these names.
        EmptyRunError: A run has no spans in its steps.
        StoreError: The store could not be opened or read.
    """
    from ..server.around_runs import compare_finished
    from ..server.run_answer import find_or_analyze
    from ..sources.store_source import StoreSource

    with open_existing_store(store_url) as store, Progress() as progress:
        source = StoreSource(store)
        infos = [source.run_info(run) for run in runs]
        first, second = (
            find_or_analyze(store, info, steps=steps, show=progress.show)
            for info, steps in zip(infos, ranges, strict=True)
        )
        return compare_finished(source, first, second)


def format_comparison(found: "RunComparison", *, as_json: bool) -> str:
    """Return a comparison as printable text, or as one JSON document."""
    return json.dumps(_document(found)) if as_json else "\n\n".join(_blocks(found))


def parse_percent(text: str) -> float:
    """Return a percentage such as ``5%`` as a ratio.

    Raises:
        BadInputError: It is no percentage.
    """
    try:
        ratio = float(text.removesuffix("%")) / 100
    except ValueError:
        ratio = nan
    if not isfinite(ratio) or ratio < 0:
        raise BadInputError(f"--fail-above {text!r} is no percentage: give 5%, for example")
    return ratio


def check_regression(found: "RunComparison", limit: float) -> None:
    """Check that the second run's steps are not slower.

    Args:
        limit: The ratio by which they may be slower.

    Raises:
        FailedError: They are, by more than that, and by more than noise.
        BadInputError: That is unknown.
    """
    from rankscope.analysis.statistics.step_change import MIN_STEPS

    change, names = found.step_change, _names(found)
    if change.ratio is None or change.is_significant is None:
        raise BadInputError(
            f"unknown whether {names[1]} is slower than {names[0]}: give runs of at least"
            f" {MIN_STEPS} steps each, besides start-up"
        )
    if change.ratio > 1 + limit and change.is_significant:
        raise FailedError(
            f"a step of {names[1]} is {format_change(change.ratio)} than one of {names[0]},"
            f" more than the {100 * limit:g} % of --fail-above"
        )


def _document(found: "RunComparison") -> dict[str, object]:
    from rankscope.analysis.report.document import finding_fields

    return {
        "first": {"run": found.first.run, "steps": list(found.first.steps)},
        "second": {"run": found.second.run, "steps": list(found.second.steps)},
        "step_change": asdict(found.step_change),
        "settings": [
            {"setting": name, "first": first, "second": second}
            for name, first, second in found.settings
        ],
        "numbers": [asdict(each) for each in (*found.numbers, *found.parts_s)],
        "appeared": [finding_fields(each) for each in found.appeared],
        "disappeared": [finding_fields(each) for each in found.disappeared],
        "remained": [finding_fields(each) for each in found.remained],
        "kernels": [asdict(each) for each in found.kernels],
    }


def _blocks(found: "RunComparison") -> list[str]:
    from ..terminal.device_time_text import kernel_change_lines
    from ..terminal.report_text import FINDING_ALIGNED

    names = _names(found)
    settings = [
        (printable(name), *("not set" if one is None else printable(one) for one in values))
        for name, *values in found.settings
    ]
    numbers = [(one.label, *one.cells) for one in (*found.numbers, *found.parts_s)]
    findings = [
        *_findings("new", found.second, found.appeared),
        *_findings("gone", found.first, found.disappeared),
        *_findings("in both", found.second, found.remained),
    ]
    times_s = [report.step_time_s.actual for report in (found.first, found.second)]
    sentence = (
        f"{names[1]} against {names[0]}: a step is {format_change(found.step_change.ratio)}"
        f" ({format_seconds(times_s[0])} to {format_seconds(times_s[1])}"
        f"{NOISE[found.step_change.is_significant]});"
        f" {format_count(len(settings), 'setting')} changed."
    )
    heads = names if max(map(len, names)) <= MAX_HEAD else ("first", "second")
    blocks = [
        "\n".join(wrap_text(sentence, terminal_width())),
        _table(("setting", *heads), settings) if settings else "no setting differs",
        _table(("", *heads, "change"), numbers, right="lrrr"),
    ]
    kernels = kernel_change_lines(found.kernels, top=TOP_KERNELS, width=table_width())
    if kernels:
        blocks.append("\n".join(kernels))
    if findings:
        blocks.append(_table(("", *FINDING_COLUMNS), findings, right=f"k{FINDING_ALIGNED}"))
    return blocks


def _names(found: "RunComparison") -> tuple[str, str]:
    return _name(found.first, found.second), _name(found.second, found.first)


def _name(report: "RunReport", other: "RunReport") -> str:
    """Return the run, or the steps if both are of one run."""
    if report.run != other.run or not report.steps:
        return report.run
    return f"steps {format_range((report.steps[0], report.steps[-1]))}"


def _findings(
    change: str, report: "RunReport", findings: "Sequence[Finding]"
) -> list[tuple[str, ...]]:
    return [(change, *format_finding(one, report.price(one))) for one in findings]


def _table(header: "Sequence[str]", rows: "Sequence[Sequence[str]]", *, right: str = "") -> str:
    return "\n".join(format_table(header, rows, right=right, width=table_width()))
