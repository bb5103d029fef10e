"""The clocks by which a page asks what changed, each once an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dash import dcc

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dash.development.base_component import Component

    from rankscope.analysis.trace.tables import RunSummary

SOON_MS = 1_500
"""From an answer to the next look at what is being made."""

LIVE_MS = 3_000
"""From an answer to the next look at a run that trains, or may come."""

QUIET_MS = 20_000
"""The same for a run that trains no more."""

RESCUE_MS = 30_000
"""Between two looks whether or not the one before was answered: where a server ended meanwhile, no
answer comes that would let a clock go on."""

RESCUE = "rescue"
_LIVE = "running"


def clock(part: str, *, pace_ms: int) -> Component:
    """Return a clock that stops at its first tick; an answer lets it go on, by `next_tick`.

    Dash drops the answer to what is asked again meanwhile: where answers take longer than the
    pace, a clock that just goes on would never show one.

    Args:
        part: Its id.
        pace_ms: From an answer to the next question.
    """
    return dcc.Interval(id=part, interval=pace_ms, n_intervals=0, max_intervals=next_tick(0))


def next_tick(num_ticks: int | None) -> int:
    """Return the ``max_intervals`` that let a clock go for one more tick after so many."""
    return (num_ticks or 0) + 1


def rescue() -> Component:
    """Return the clock that asks for every part of a page in any case, every `RESCUE_MS`."""
    return dcc.Interval(id=RESCUE, interval=RESCUE_MS, n_intervals=0)


def pace_of(runs: Iterable[RunSummary], run_id: str | None) -> int:
    """Return how long after an answer to ask again what is known of a run.

    Args:
        runs: Those of the store.
        run_id: The run; one that is not there may come. None: whichever comes first.
    """
    states = {run.run_id: run.state for run in runs}
    return LIVE_MS if states.get(run_id or "", _LIVE) == _LIVE else QUIET_MS
