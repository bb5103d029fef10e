"""`rankscope control`: record more of some ranks of a running job for a few steps."""

import json
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.analysis.report.text import format_count, format_ranges

from ..errors import BadInputError, FailedError
from ..terminal.lines import printable, terminal_width, wrap_text
from .flags import AsJson, SpoolFolder, Store, open_existing_store, user_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.collector.spool.control import ControlAnswer, ControlRequest

MAX_LISTED = 16
"""Ranks whose answers are printed one by one; of more, they are counted."""

WHAT = {
    "full": "all spans",
    "profile": "a profile by torch.profiler",
    "stacks": "Python stacks",
}


def control(  # noqa: PLR0913  # one parameter a flag
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")],
    *,
    level: Annotated[
        str,
        typer.Option(
            metavar="LEVEL",
            help="full: record all spans, whatever the job's level and sampling; profile: capture"
            " with torch.profiler; stacks: the Python stacks of all threads, once a step.",
        ),
    ],
    ranks: Annotated[
        str | None, typer.Option(metavar="R,R-R", help="Ranks, such as 3,5 or 0-7. Default: all.")
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, max=100, help="Number of steps, from the next one on.")
    ] = 3,
    wait: Annotated[
        float, typer.Option(min=0, metavar="S", help="Seconds to wait for the ranks' answers.")
    ] = 60.0,
    spool: SpoolFolder = None,
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """Record more of some ranks of a running job for a few steps, without a restart.

    The ranks of this host get it through their spool; those of other hosts through the server and
    their agents, within some ten seconds.
    """
    from rankscope.collector.spool.control import ControlRequest

    from ..server.control import name_request, open_road, wait_for_answers

    request = ControlRequest(
        run_id=run, name=name_request(), level=level, steps=steps,
        ranks=parse_ranks(ranks), by=user_name(),
    )  # fmt: skip
    with ExitStack() as stack:
        road = open_road(
            run, spool=spool, open_store=lambda: stack.enter_context(open_existing_store(store))
        )
        asked = road.send(request)
        if not as_json:
            typer.echo(_format_request(request, asked))
        answers = []
        for answer in wait_for_answers(road, request, asked, wait_s=wait):
            answers.append(answer)
            if not as_json and len(asked) <= MAX_LISTED:
                typer.echo("\n".join(_format_answer(answer)))
    _conclude(request, asked, answers, as_json=as_json, waited_s=wait)


def parse_ranks(text: str | None) -> tuple[int, ...]:
    """Return the ranks of a text such as ``3,5-7``, ascending; none for None.

    Raises:
        BadInputError: It is something else.
    """
    ranks: set[int] = set()
    for part in () if text is None else text.split(","):
        first, to, last = part.strip().partition("-")
        if not first.isdecimal() or (to and not last.isdecimal()):
            raise BadInputError(f"--ranks {text!r}: give ranks such as 3,5 or 0-7")
        ranks.update(range(int(first), int(last if to else first) + 1))
    if text is not None and not ranks:
        raise BadInputError(f"--ranks {text!r} names no rank: give some such as 3,5 or 0-7")
    return tuple(sorted(ranks))


def _format_request(request: "ControlRequest", asked: "Sequence[int]") -> str:
    whom = f"{'rank' if len(asked) == 1 else 'ranks'} {format_ranges(asked, max_ranges=8)}"
    steps = format_count(request.steps, "step")
    text = f"requested of {whom} for {steps}: {WHAT[request.level]}"
    return "\n".join(wrap_text(text, terminal_width()))


def _format_answer(answer: "ControlAnswer") -> list[str]:
    from ..sources.frames import find_own_frame, read_frames

    text = printable(answer.text)
    frames = read_frames("stack", answer.data)
    if frames:
        text = f"{text}: {printable(find_own_frame(frames) or frames[0])}"
    lines = wrap_text(text, terminal_width(), first=f"rank {answer.rank}: ")
    path = answer.data.get("path")
    return [*lines, f"  {printable(str(path))}"] if path else lines


def _conclude(
    request: "ControlRequest",
    asked: "Sequence[int]",
    answers: "Sequence[ControlAnswer]",
    *,
    as_json: bool,
    waited_s: float,
) -> None:
    """Print the end of a request.

    Raises:
        FailedError: A rank refused, or did not answer in time.
    """
    from rankscope.collector.spool.control import ACCEPTED, REFUSED

    state = {answer.rank: answer.state for answer in answers}
    if as_json:
        typer.echo(json.dumps(_document(request, asked, answers)))
    elif len(asked) > MAX_LISTED:
        counts = Counter(state.get(rank, "no answer") for rank in asked)
        typer.echo(", ".join(f"{name}: {number:,}" for name, number in counts.items()))
    refused = [rank for rank in asked if state.get(rank) == REFUSED]
    silent = [rank for rank in asked if rank not in state]
    pending = [rank for rank in asked if state.get(rank) == ACCEPTED]
    if not waited_s:
        return
    if refused:
        raise FailedError(f"rank {format_ranges(refused, max_ranges=8)} refused")
    if silent:
        raise FailedError(
            f"rank {format_ranges(silent, max_ranges=8)} did not answer within {waited_s:g} s:"
            " is its process blocked, or older than this version? Through a server, the host needs"
            " `rankscope agent`, without --no-samples"
        )
    if pending:
        raise FailedError(
            f"rank {format_ranges(pending, max_ranges=8)} accepted, and has not begun within"
            f" {waited_s:g} s: its steps are long, or it has none. It goes on"
        )


def _document(
    request: "ControlRequest", asked: "Sequence[int]", answers: "Sequence[ControlAnswer]"
) -> dict[str, Any]:
    return {
        "run": request.run_id,
        "name": request.name,
        "level": request.level,
        "steps": request.steps,
        "ranks": list(asked),
        "answers": [
            {
                "rank": answer.rank,
                "state": answer.state,
                "text": answer.text,
                **{
                    key: answer.data[key] for key in ("steps", "step", "path") if key in answer.data
                },
            }
            for answer in answers
        ],
        "unanswered": sorted({*asked} - {answer.rank for answer in answers}),
    }
