"""The report of a run: made by its server, shown by the pages and by the command."""

from __future__ import annotations

from http import HTTPStatus
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from rankscope.analysis.report.exchange import read_report, write_report
from rankscope.analysis.trace.errors import AnalysisError
from rankscope.collector.spool.descriptions import RUNNING

from ..errors import FailedError
from .holder import ask_holder
from .reports import find_run

if TYPE_CHECKING:
    from fastapi import APIRouter

    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.trace.tables import SpanSource
    from rankscope.collector.store.location import ServerFile

    from .reports import Reports

PATH = "/v1/report"
MAX_REPORT_BYTES = 1 << 30
ANSWER_S = 600
"""Longest wait for a report, which the server may have to make first."""


def report_router(reports: Reports, source: SpanSource) -> APIRouter:
    """Return the route ``GET /v1/report?run_id=&version=``, for administrators.

    It answers 200 with the report that the pages show, as `write_report` writes it, of a running
    job that of its newest steps; 404 if there is none (the run is unknown, or has no spans); and
    409 to another version, whose reports may differ.
    """
    from fastapi import APIRouter, HTTPException, Response

    router = APIRouter()

    # Not async: the analysis blocks, so FastAPI runs it in a thread.
    def get_report(run_id: str, version: str) -> Response:
        if version != installed_version("rankscope"):
            raise HTTPException(409, "this server has another version")
        try:
            summary = find_run(source, run_id)
            is_live = summary.state == RUNNING
            report = reports.get(run_id) if is_live else reports.refresh(summary)
        except AnalysisError:
            report = None
        if report is None:
            raise HTTPException(404, f"run {run_id!r} has no report")
        return Response(write_report(report), media_type="application/json")

    # The annotation is a name of this function, which FastAPI cannot resolve.
    get_report.__annotations__["return"] = Response
    router.add_api_route(PATH, get_report, methods=["GET"], response_class=Response)
    return router


def fetch_report(server: ServerFile, run_id: str) -> RunReport | None:
    """Return the report of a run that its server shows.

    None if the server has none, is of another version, or does not answer.
    """
    query = urlencode({"run_id": run_id, "version": installed_version("rankscope")})
    try:
        answer = ask_holder(
            server,
            "GET",
            f"{PATH}?{query}",
            timeout_s=ANSWER_S,
            max_answer_bytes=MAX_REPORT_BYTES,
        )
        return read_report(answer.body.decode()) if answer.status == HTTPStatus.OK else None
    except (FailedError, ValueError):
        return None
