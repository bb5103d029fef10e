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
    if report.top_finding.severity is Severity.NONE:
        return ""
    return format_report_address(report, None if server is None else server.url)


def format_report_address(report: RunReport, address: str | None) -> str:
    """Return where a run is shown, at the place that proves its top finding if there is one.

    Args:
        report: The diagnosis.
        address: Address at which the pages are served; None: it is not known.
    """
    top, view = report.top_finding, View(run=report.run)
    if top.proof is not None and top.severity is not Severity.NONE:
        view = view_finding(view, top)
    return _format_place(view, address)


def format_incident(run: str, number: int | None, server: ServerFile | None) -> str:
    """Return where an incident is shown, likewise. "" if there is none.

    Args:
        run: The run.
        number: Number of the incident in it.
        server: The server of the store that runs now.
    """
    if number is None:
        return ""
    view = View(page=INCIDENT, run=run, show=str(number))
    return _format_place(view, None if server is None else server.url)


def _format_place(view: View, address: str | None) -> str:
    if address is not None:
        return write_address(view, base_path=f"{address.rstrip('/')}/")
    path = write_address(view, base_path="/")
    return f"rankscope serve, then {path} behind the address that it prints"
