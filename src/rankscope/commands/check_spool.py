"""`rankscope check-spool`: what the analysis would misread in a spool."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rankscope.analysis.report.text import format_count

from ..errors import FAILED, BadInputError
from ..terminal.lines import Progress
from .flags import AsJson


def check_spool(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Spool of ended jobs.")],
    *,
    run: Annotated[str | None, typer.Option(metavar="NAME", help="The only run to check.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a spool: name each thing that the analysis would misread."""
    text, has_errors = check_text(folder, run_id=run, as_json=as_json)
    typer.echo(text)
    if has_errors:
        raise typer.Exit(FAILED)


def check_text(folder: Path, *, run_id: str | None, as_json: bool) -> tuple[str, bool]:
    """Return the problems of a spool, one on a line, and whether any is an error.

    Raises:
        BadInputError: The folder is no spool, or one of its processes still runs.
    """
    from ..spool_check import Level, check_spool, problem_lines

    if not folder.is_dir():
        raise BadInputError(f"{folder} is not a folder: give the spool, as in RANKSCOPE_TRACE")
    with Progress() as progress:
        problems = check_spool(folder, run_id=run_id, show=progress.show)
    num_errors = sum(problem.level == Level.ERROR for problem in problems)
    if as_json:
        document = {"spool": str(folder), "problems": [asdict(problem) for problem in problems]}
        return json.dumps(document), num_errors > 0
    lines = problem_lines(problems)
    if not lines:
        return f"{folder}: no problem found", False
    num_warnings = len(problems) - num_errors
    lines.append(
        f"{folder}: {format_count(num_errors, 'error')}, {format_count(num_warnings, 'warning')}"
    )
    return "\n".join(lines), num_errors > 0
