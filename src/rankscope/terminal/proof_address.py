"""The address at which a browser opens what a diagnosis says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.analysis.report.report import Severity
from rankscope.dashboard.address import INCIDENT, View, view_finding, write_address

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.store.location import ServerFile


def format_proof(report: RunReport, server: ServerFile | None) -> str:
    """Return where the top finding is shown: an address, or the command that leads to it.

    That is the place in the timeline that proves it, else the overview of the run. "" if nothing
    was found.

    Args:
        report: The diagnosis.
        server: The server of the store that runs now.
    """
    top = report.top_finding
    if top.severity is Severity.NONE:
        return ""
    view = View(run=report.run)
    if top.proof is not None:
        view = view_finding(view, top)
    return _format_place(view, server)


def format_incident(run: str, number: int | None, server: ServerFile | None) -> str:
    """Return where an incident is shown, likewise. "" if there is none.

    Args:
        run: The run.
        number: Number of the incident in it.
        server: The server of the store that runs now.
    """
    if number is None:
        return ""
    return _format_place(View(page=INCIDENT, run=run, show=str(number)), server)


def _format_place(view: View, server: ServerFile | None) -> str:
    if server is not None:
        return write_address(view, base_path=f"{server.url.rstrip('/')}/")
    path = write_address(view, base_path="/")
    return f"rankscope serve, then {path} behind the address that it prints"
