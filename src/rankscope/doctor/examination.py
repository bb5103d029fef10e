"""The run of static checks: each in its own thread, within a deadline for all."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from .checks.table import CHECKS, HOST_CHECKS, Section
from .result import Outcome, Result, not_applicable, warning

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .checks.table import Check
    from .host import Host

DEADLINE_S = 3.6
"""Time for all checks of the host. A check that is not done by then is a warning."""

IDLE_DEADLINE_S = 130.0
"""The same for a host that has nothing else to do."""


def examine(host: Host) -> list[Result]:
    """Return the results of all static checks, in the order of the table.

    The checks of the installation run in this thread: the embedded store belongs to it.
    """
    running = _start(HOST_CHECKS, host)
    end_s = time.monotonic() + (IDLE_DEADLINE_S if host.is_idle else DEADLINE_S)
    own = [
        result
        for check in CHECKS
        if check.section is Section.INSTALLATION
        for result in _results(check, [*_outcomes(check, host)])
    ]
    return [*own, *_collect(running, end_s)]


def examine_host(
    host: Host, *, checks: Sequence[Check] = HOST_CHECKS, deadline_s: float = DEADLINE_S
) -> list[Result]:
    """Return the results of the checks that need no store, in the order of the table."""
    return _collect(_start(checks, host), time.monotonic() + deadline_s)


class _Running:
    """A check in a thread of its own, which a hanging file or tool may block forever."""

    def __init__(self, check: Check, host: Host) -> None:
        self.check = check
        self.outcomes: list[Outcome] | None = None
        self._host = host
        self.thread = threading.Thread(target=self._run, name=check.name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.outcomes = [*_outcomes(self.check, self._host)]


def _start(checks: Sequence[Check], host: Host) -> list[_Running]:
    return [_Running(check, host) for check in checks]


def _collect(running: list[_Running], end_s: float) -> list[Result]:
    results: list[Result] = []
    for each in running:
        each.thread.join(max(0.0, end_s - time.monotonic()))
        late = [warning("no answer in time: a tool or a file of the kernel hangs", "see dmesg")]
        results += _results(each.check, late if each.outcomes is None else each.outcomes)
    return results


def _outcomes(check: Check, host: Host) -> Iterator[Outcome]:
    """Yield the outcomes of a check; one that fails says so, and stops no other."""
    try:
        outcomes = [*check.run(host)]
    except Exception as problem:  # noqa: BLE001  # unknown outputs of tools
        text = f"the check failed: {type(problem).__name__}: {problem}"
        yield warning(text, "report it with the output of the tools that it reads")
        return
    yield from outcomes or [not_applicable("nothing to check")]


def _results(check: Check, outcomes: Sequence[Outcome]) -> list[Result]:
    return [Result.of(each, section=check.section, check=check.name) for each in outcomes]
